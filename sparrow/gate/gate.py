"""The tail gate: judges acceptance by length after every step, and changes budgets.

Judge. A bin is judged by the exact acceptances of its last `window` steps, once these are at least
`least` tokens of at least `prompts` prompts, and only at checks with new tokens for it. It is
*below* if p05 < target, *surely below* if the upper end of p05's interval is; it has *slack* if the
lower end is above target + slack. With `hard_misses` it is also below if it has more hard misses
per 1000 tokens, surely so if the lower end of their interval is more; slack then needs the upper
end within the bound.

Act, bins in order of length, when a bin is surely below, or below at `patience` checks in a row:
1. Raise its budget by `factor`, in whole pages, at most `raises` times.
2. Then run the bin dense: a budget that no length of it exceeds. A raise that gets there is that.
3. A bin that is dense already and still surely below stops the run: budgets cannot help. With a
   dense rollout that is the first answer. Below without being surely so is a warning there.
Budgets may not fall with the length, so later bins are lifted to at least the same.

Lower (with `lower`): a bin that has slack at `patience` checks in a row goes down by `factor`,
never below the pages that are always kept, never below the bin before it. A bin that was ever
raised is never lowered: it was found to need what it has, and would only go back and forth.

After a change the windows of all bins with another budget start anew, as their acceptances belong
to budgets that are gone. So do those of later dense bins: their tokens read keys and values that
the changed bin wrote, and a stop must not rest on what has just been changed.

Stop rules on the policy, both off by default, judge each step after its updates: KL(new || old)
above `max_kl`, or the entropy more than `entropy_factor` above or below the mean of the first
`window` steps. At `patience` steps in a row they stop the run.

In mode `warn` nothing changes and there is one warning per window and bin; in mode `off` nothing is
concluded. Everything follows from what was observed, in its order: bootstrap seeds come from step
and bin, and `state` holds the rest.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sparrow.gate import budgets
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.gate import (
    AcceptanceReading,
    Action,
    BinCheck,
    Figures,
    GateCheck,
    Kind,
    PolicyAction,
    RatioEstimate,
    State,
)
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.train import GateConfig
from sparrow.stats import FAR_TAIL, TAIL, hard_misses, quantile_interval, rate_interval

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

STORED = "<f4"  # float32, least byte first, whatever the machine
SEEDS = 2 * budgets.MOST_BINS  # bootstrap seeds of a step: all bins together, then each


# The window of one bin: the acceptances of its last steps, and what was concluded so far.


class BinSample(NamedTuple):
    """The tokens of one trajectory that were drawn in the bin."""

    step: int
    prompt: str
    alpha: Floats
    missed: Flags | None  # hard misses; None: the entropy was not measured


class RatioSum(NamedTuple):
    """The estimates of all tokens of a step in the bin."""

    step: int
    total: float
    tokens: int


@dataclass(slots=True, kw_only=True)
class BinWindow:
    """The window of one bin: recent acceptances and the gate's counters."""

    samples: list[BinSample] = field(default_factory=list)
    sums: list[RatioSum] = field(default_factory=list)
    below: int = 0  # checks in a row with p05 below target
    missing: int = 0  # checks in a row with more hard misses than the bound
    slack: int = 0  # checks in a row with p05 surely above target and slack
    ups: int = 0  # times the gate raised it or made it dense
    warned: int | None = None  # step of the last warning
    seen: bool = False  # whether a token was ever drawn in it

    def forget(self, until: int) -> None:
        """Drop samples of this step and earlier."""
        self.samples = [item for item in self.samples if item.step > until]
        self.sums = [item for item in self.sums if item.step > until]

    def fresh(self, step: int) -> bool:
        """Whether a step added exact acceptances."""
        return bool(self.samples) and self.samples[-1].step == step

    def clear(self) -> None:
        """Reset the window: its samples belong to other budgets."""
        self.samples, self.sums = [], []
        self.below = self.missing = self.slack = 0

    def state(self) -> dict[str, Any]:
        """Plain data that JSON keeps exactly; acceptances as base64 of float32."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        samples = [
            [step, prompt, _packed(alpha), missed if missed is None else _places(missed)]
            for step, prompt, alpha, missed in self.samples
        ]
        return values | {"samples": samples, "sums": [list(item) for item in self.sums]}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "BinWindow":
        """Inverse of `state`; samples of older versions have no hard misses."""
        samples = []
        for step, prompt, text, *missed in state["samples"]:
            alpha = _unpacked(text)
            places = missed[0] if missed else None
            flags = None if places is None else np.isin(np.arange(len(alpha)), places)
            samples.append(BinSample(step, prompt, alpha, flags))
        sums = [RatioSum(*item) for item in state["sums"]]
        return cls(**(state | {"samples": samples, "sums": sums}))


@dataclass(slots=True, kw_only=True)
class PolicyWindow:
    """Entropies of the first steps, and steps in a row beyond a stop rule."""

    first_step: int | None = None
    entropies: list[float] = field(default_factory=list)
    beyond: dict[str, int] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)  # step of the last warning


def figures(windows: Sequence[BinWindow], seed: int) -> Figures:
    """Statistics over the windows of some bins together, those of the tail with intervals."""
    by_prompt: dict[str, list[BinSample]] = {}  # of whichever steps, in order of appearance
    for sample in (sample for window in windows for sample in window.samples):
        by_prompt.setdefault(sample.prompt, []).append(sample)
    groups = [np.concatenate([s.alpha for s in part]) for part in by_prompt.values()]
    missed = [[s.missed for s in part if s.missed is not None] for part in by_prompt.values()]
    flagged = all(len(a) == len(b) for a, b in zip(missed, by_prompt.values(), strict=True))
    estimated = sum(part.tokens for window in windows for part in window.sums)
    total = sum(part.total for window in windows for part in window.sums)
    quantiles: dict[str, Any] = dict.fromkeys(("p01", "p05", "low", "high", "p50", "mean"))
    if groups:
        every = np.concatenate(groups)
        tail = quantile_interval(groups, TAIL, seed=seed)
        p01, p50 = np.quantile(every, [0.01, 0.5])
        quantiles = {"p01": p01, "p05": tail.value, "low": tail.low, "high": tail.high}
        quantiles |= {"p50": p50, "mean": every.mean(dtype=np.float64)}
        quantiles["p0_1"] = quantile_interval(groups, FAR_TAIL, seed=seed).estimate()
        if flagged:
            quantiles["hard_misses"] = rate_interval(list(map(np.concatenate, missed))).estimate()
    return Figures(
        tokens=sum(map(len, groups)),
        prompts=len(groups),
        estimated=estimated,
        estimate=total / estimated if estimated else None,
        **quantiles,
    )


def _packed(alpha: Floats) -> str:
    return base64.b64encode(alpha.astype(STORED).tobytes()).decode("ascii")


def _places(flags: Flags) -> list[int]:
    return [int(place) for place in np.flatnonzero(flags)]


def _unpacked(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), STORED).astype(np.float32)


# The gate.


class Gate:
    """Watches acceptance by length and holds the schedule of the next step. See the module.

    schedule: of the next step, in the gate's bins; None: dense.
    """

    def __init__(
        self, config: GateConfig, schedule: Schedule | None, *, longest: int, mass: bool = False
    ) -> None:
        """longest: tokens of the longest possible sequence.

        mass: whether the rollout's flow keeps pages by mass, where only DENSE is dense.
        """
        self.config = config
        self.schedule, self._bins = budgets.make_bins(
            schedule, width=config.bin, longest=longest, mass=mass
        )
        self._windows = [BinWindow() for _ in self._bins.starts]
        self._policy = PolicyWindow()
        self._step = -1

    def observe(
        self,
        step: int,
        readings: Sequence[AcceptanceReading],
        estimates: Sequence[RatioEstimate] = (),
    ) -> GateCheck:
        """Add the acceptances of a step, drawn under `schedule`; judge every bin, and act."""
        if step <= self._step:
            raise ValueError(f"Gate.observe: expected a step above {self._step}, got {step}")
        if self.config.hard_misses is not None and any(r.entropy is None for r in readings):
            raise ValueError("gate.hard_misses: a reading has no entropy, which hard misses need")
        read = [self._bins.places(part.lengths) for part in readings]
        estimated = [self._bins.places(part.lengths) for part in estimates]
        self._step = step
        for window in self._windows:
            window.forget(step - self.config.window)
        for reading, places in zip(readings, read, strict=True):
            entropy = reading.entropy
            missed = None if entropy is None else hard_misses(reading.alpha, entropy)
            for place in np.unique(places):
                inside = places == place
                flags = None if missed is None else missed[inside]
                sample = BinSample(step, reading.prompt, reading.alpha[inside], flags)
                self._windows[place].samples.append(sample)
        self._average(estimates, estimated)
        bins = tuple(self._judge(place) for place in range(len(self._windows)))
        return GateCheck(
            step=step,
            target=self.config.target,
            hard_misses=self.config.hard_misses,
            bins=bins,
            overall=figures(self._windows, step * SEEDS),
            budget=self._mean_budget(estimates or readings),
            actions=tuple(self._answers(bins)),  # last: it changes budgets and windows
        )

    def judge_policy(
        self, look: GateCheck, *, entropy: float | None, kl: float | None
    ) -> GateCheck:
        """Add the stop rules' actions to the check of a step; figures that are None are unknown."""
        policy, config = self._policy, self.config
        mean = sum(policy.entropies) / max(1, len(policy.entropies))
        begun = len(policy.entropies) >= config.window
        if entropy is not None and not begun:
            policy.first_step = self._step if policy.first_step is None else policy.first_step
            policy.entropies.append(entropy)
        actions = list[PolicyAction]()
        if config.max_kl is not None and kl is not None:
            text = f"KL(new || old) of the update is {kl:.4g} nats a token, above {config.max_kl:g}"
            actions += self._judge_rule("kl", kl, config.max_kl, kl <= config.max_kl, text)
        if config.entropy_factor is not None and entropy is not None and begun:
            factor, first = config.entropy_factor, policy.first_step
            text = (
                f"entropy is {entropy:.4g} nats, more than {factor:g} times above or below the "
                f"{mean:.4g} of the {len(policy.entropies)} steps from {first} on"
            )
            inside = mean / factor <= entropy <= mean * factor
            actions += self._judge_rule("entropy", entropy, factor, inside, text)
        return look.replace(actions=(*look.actions, *actions))

    def _judge_rule(
        self, metric: Literal["entropy", "kl"], value: float, bound: float, inside: bool, text: str
    ) -> list[PolicyAction]:
        """The action on a figure that is beyond its bound at enough steps in a row, or none."""
        policy, mode = self._policy, self.config.mode
        policy.beyond[metric] = 0 if inside or mode == "off" else policy.beyond.get(metric, 0) + 1
        if policy.beyond[metric] < self.config.patience:
            return []
        warned = policy.warned.get(metric)
        if mode == "warn" and warned is not None and self._step - warned < self.config.window:
            return []
        policy.warned[metric] = self._step
        done = "training stops" if mode == "act" else "the gate only warns"
        return [
            PolicyAction(
                step=self._step,
                kind="stop" if mode == "act" else "warn",
                metric=metric,
                value=value if math.isfinite(value) else None,
                bound=bound,
                reason=f"{text}, at {policy.beyond[metric]} steps in a row: {done}",
            )
        ]

    def state(self) -> dict[str, Any]:
        """All that later checks depend on, as plain data for JSON."""
        return {
            "step": self._step,
            "longest": self._bins.longest,
            "mass": self._bins.mass,
            "starts": list(self._bins.starts),
            "schedule": None if self.schedule is None else to_dict(self.schedule),
            "watches": [window.state() for window in self._windows],
            "policy": asdict(self._policy),
        }

    @classmethod
    def restore(cls, config: GateConfig, state: Mapping[str, Any]) -> "Gate":
        """The gate that `state` was taken of; `config` may differ in anything but bins."""
        schedule = None if state["schedule"] is None else from_dict(Schedule, state["schedule"])
        gate = cls(config, schedule, longest=state["longest"], mass=state["mass"])
        starts = list(gate._bins.starts)
        if starts != state["starts"]:
            raise ValueError(f"gate.bin: bins start at {starts}, saved ones at {state['starts']}")
        gate._windows = [BinWindow.restore(window) for window in state["watches"]]
        gate._policy = PolicyWindow(**state.get("policy", {}))  # older versions have none
        gate._step = state["step"]
        return gate

    # Judging bins.

    def _average(self, estimates: Sequence[RatioEstimate], placed: Sequence[budgets.Rows]) -> None:
        """Sums of this step's estimates to the windows of their bins. placed: bins of tokens."""
        totals = np.zeros(len(self._windows))
        counts = np.zeros(len(self._windows), np.int64)
        for estimate, places in zip(estimates, placed, strict=True):
            totals += np.bincount(places, estimate.ratio, len(totals))
            counts += np.bincount(places, minlength=len(counts))
        for window, total, count in zip(self._windows, totals, counts, strict=True):
            window.sums += [RatioSum(self._step, float(total), int(count))] if count else []
            window.seen |= bool(count) or window.fresh(self._step)

    def _judge(self, place: int) -> BinCheck:
        summary = figures([self._windows[place]], self._step * SEEDS + 1 + place)
        enough = summary.tokens >= self.config.least and summary.prompts >= self.config.prompts
        now: State = "dense" if self._dense(place) else "sparse"
        return BinCheck(
            **to_dict(summary),
            start=self._bins.starts[place],
            stop=self._bins.stops[place],
            budget=self._budget(place),
            state=now if enough else "unjudged",
        )

    def _dense(self, place: int) -> bool:
        return self.schedule is None or budgets.is_dense(self.schedule, place, self._bins)

    def _budget(self, place: int) -> int | None:
        return None if self.schedule is None else int(self.schedule.budgets[place])

    def _mean_budget(self, tokens: Sequence[AcceptanceReading | RatioEstimate]) -> float | None:
        """Over tokens, of what the common budget lets them read: never more than their length."""
        lengths = np.concatenate([np.zeros(0, np.int32), *(part.lengths for part in tokens)])
        if not len(lengths):
            return None
        if self.schedule is None:
            return float(lengths.mean())
        budget = self.schedule.budgets[self._bins.places(lengths)]
        return float(np.minimum(budget, lengths).mean())

    # Actions.

    def _answers(self, bins: Sequence[BinCheck]) -> list[Action]:
        """Actions by the policy, in order of length; each may change what later bins have."""
        actions: list[Action] = []
        for place, (bin, window) in enumerate(zip(bins, self._windows, strict=True)):
            if self.config.mode == "off" or not bin.judged or not window.fresh(self._step):
                continue  # a bin whose window an earlier action has cleared is not fresh either
            action = self._answer(place, bin, window)
            actions += [action] if action else []
        return actions

    def _answer(self, place: int, bin: BinCheck, window: BinWindow) -> Action | None:
        """Update the counters of a bin, and act if they say so."""
        config = self.config
        p05, low, high = bin.tail
        fewest, misses, most = _misses(bin, config)
        window.below = window.below + 1 if p05 < config.target else 0
        window.missing = window.missing + 1 if misses > 0 else 0
        has_slack = low > config.target + config.slack and most <= 0
        window.slack = window.slack + 1 if has_slack else 0
        sure = high < config.target or fewest > 0
        if sure or max(window.below, window.missing) >= config.patience:
            if config.mode == "warn":
                return self._warn(place, bin, "nothing was changed, as the gate only warns")
            return self._guard(place, bin, sure=sure)
        may_lower = config.lower and config.mode == "act" and window.ups == 0
        if may_lower and window.slack >= config.patience and self.schedule is not None:
            return self._lower(place, bin, self.schedule)
        return None

    def _warn(self, place: int, bin: BinCheck, why: str) -> Action | None:
        """Warn, at most once in a window."""
        window = self._windows[place]
        if window.warned is not None and self._step - window.warned < self.config.window:
            return None
        window.warned = self._step
        return self._action("warn", place, bin, why)

    def _guard(self, place: int, bin: BinCheck, *, sure: bool) -> Action | None:
        """Raise the budget, then run the bin dense, then stop the run."""
        if self.schedule is not None and not self._dense(place):
            return self._raise(place, bin, self.schedule)
        why = "the bin is dense already, so no budget of it can help"
        if self.schedule is None:
            why = "the rollout is dense, so the engine and the trainer differ"
        if not sure:
            return self._warn(place, bin, f"{why}; it stops once it is surely below")
        return self._action("stop", place, bin, f"{why}: training stops")

    def _raise(self, place: int, bin: BinCheck, before: Schedule) -> Action:
        """More budget for a bin that is not dense: a raise while there are any left."""
        window, most = self._windows[place], self.config.raises
        window.ups += 1
        if window.ups <= most:
            after = budgets.raised(before, place, self.config.factor, self._bins)
            why = f"raise {window.ups} of {most}"
        else:
            after = budgets.made_dense(before, place, self._bins)
            why = f"dense after {most} raises"
        kind: Kind = "dense" if budgets.is_dense(after, place, self._bins) else "raise"
        if kind == "dense" and window.ups <= most:
            why += ", which makes the bin dense"
        if any(other > place for other in budgets.changed(before, after)):
            why += "; later bins are lifted to at least that, as budgets may not fall"
        return self._change(kind, place, bin, before, after, why)

    def _lower(self, place: int, bin: BinCheck, before: Schedule) -> Action | None:
        """Less budget for a bin with slack; None where nothing holds less."""
        seen = [window.seen for window in self._windows]
        after = budgets.lowered(before, place, self.config.factor, self._bins, seen)
        different = budgets.changed(before, after)
        if place not in different:
            return None
        why = f"slack at {self._windows[place].slack} checks in a row"
        if different[0] < place:
            why += "; bins before it, in which no token was ever drawn, go down with it"
        return self._change("lower", place, bin, before, after, why)

    def _change(
        self, kind: Kind, place: int, bin: BinCheck, before: Schedule, after: Schedule, why: str
    ) -> Action:
        """Apply other budgets; windows of the old ones are reset."""
        new = int(after.budgets[place])
        both = ("all" if b == DENSE else str(b) for b in (int(before.budgets[place]), new))
        moved = f"{' -> '.join(both)} tokens"
        action = self._action(kind, place, bin, f"budget {moved} ({why})", after=new)
        where = describe_bin(bin.start, bin.stop)
        self.schedule = budgets.renamed(after, f"step {self._step}: {kind} at {where}, {moved}")
        different = budgets.changed(before, after)
        for other, window in enumerate(self._windows):
            if other in different or (other > place and self._dense(other)):
                window.clear()
        return action

    def _action(
        self, kind: Kind, place: int, bin: BinCheck, done: str, after: int | None = None
    ) -> Action:
        before = self._budget(place)
        return Action(
            step=self._step,
            kind=kind,
            start=bin.start,
            stop=bin.stop,
            before=before,
            after=before if after is None else after,
            **dict(zip(("p05", "low", "high"), bin.tail, strict=True)),
            target=self.config.target,
            hard_misses=bin.hard_misses,
            reason=f"{describe_figures(bin, self._windows[place], self.config)}: {done}",
        )


# Descriptions.


def describe_bin(start: int, stop: int | None) -> str:
    """Describe the lengths of a bin."""
    return f"lengths {start} on" if stop is None else f"lengths {start} to {stop - 1}"


def describe_figures(bin: BinCheck, window: BinWindow, config: GateConfig) -> str:
    """Describe the figures of a judged bin that an action is for, and how they compare."""
    p05, low, high = bin.tail
    place = describe_bin(bin.start, bin.stop)
    sample = f"{bin.tokens} tokens of {bin.prompts} prompts"
    parts = []
    if window.below or not window.missing:
        verdict = f"more than {config.slack:g} above the target {config.target:g}"
        if window.below:
            verdict = _verdict(
                "below the target", config.target, window.below, high < config.target
            )
        figures = f"is {p05:.4f} ({low:.4f} to {high:.4f}; {sample})"
        parts.append(f"p05 of acceptance at {place} {figures}, {verdict}")
    if window.missing and bin.hard_misses is not None and config.hard_misses is not None:
        rate, few, many = bin.hard_misses.value, bin.hard_misses.low, bin.hard_misses.high
        sure = few is not None and few > config.hard_misses
        verdict = _verdict("above the bound", config.hard_misses, window.missing, sure)
        figures = f"are {rate:.2f} per 1000 tokens ({few:.2f} to {many:.2f}; {sample})"
        parts.append(f"hard misses at {place} {figures}, {verdict}")
    return "; ".join(parts)


def _verdict(violation: str, bound: float, checks: int, sure: bool) -> str:
    if sure:
        return f"surely {violation} {bound:g}"
    return f"{violation} {bound:g} at {checks} check{'s' if checks > 1 else ''} in a row"


def _misses(bin: BinCheck, config: GateConfig) -> tuple[float, float, float]:
    """Low, value and high of the hard misses beyond the bound; unknown ones may be any number."""
    misses, bound = bin.hard_misses, config.hard_misses
    if bound is None:
        return 0.0, 0.0, 0.0
    if misses is None or misses.low is None or misses.high is None:
        return 0.0, 0.0, math.inf
    return misses.low - bound, misses.value - bound, misses.high - bound
