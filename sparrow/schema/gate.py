"""What the gate is told, what it sees, and what it does about it: records, for logs and files.

Lengths are total lengths at which tokens were drawn, the variable that a schedule looks up: a token
that is number i of its sequence, from 0, prompt included, was drawn at length i.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from sparrow.schema.base import Float32Array, Int32Array, Record

State = Literal["sparse", "dense", "unjudged"]
Kind = Literal["raise", "dense", "lower", "stop", "warn"]

ROUNDING = 1e-3  # by which sums of probabilities may leave 0 to 1


class Reading(Record):
    """Exact acceptance of the sampled tokens of one trajectory."""

    prompt: str  # intervals draw whole prompts anew, so the same text has the same name
    lengths: Int32Array
    alpha: Float32Array  # sum_v min(p(v), q(v))
    entropy: Float32Array | None = None  # of the policy where each was drawn, nats

    def _check(self) -> None:
        self._require_aligned("lengths", "alpha", "entropy")
        self._refuse("lengths", self.lengths < 0, "lengths >= 0")
        self._refuse("alpha", _outside(self.alpha), "0 to 1")


class RatioEstimate(Record):
    """min(1, p(x) / q(x)) of the sampled tokens of one trajectory.

    Its mean is that of alpha without bias; its quantiles are not alpha's and are never taken.
    """

    lengths: Int32Array
    ratio: Float32Array

    def _check(self) -> None:
        self._require_aligned("lengths", "ratio")
        self._refuse("lengths", self.lengths < 0, "lengths >= 0")
        self._refuse("ratio", _outside(self.ratio), "0 to 1")


class Figures(Record):
    """Acceptance over tokens of a window; None where there are no tokens to tell."""

    tokens: int  # measured exactly
    prompts: int  # that they are of
    p01: float | None
    p05: float | None
    low: float | None  # 95 % interval of p05, over prompts
    high: float | None
    p50: float | None
    mean: float | None
    estimated: int  # tokens with an estimate
    estimate: float | None  # their mean of min(1, p / q)

    @property
    def tail(self) -> tuple[float, float, float]:
        """p05, and the ends of its interval."""
        if self.p05 is None or self.low is None or self.high is None:
            raise ValueError("Figures.tail: got no tokens, allowed: at least one")
        return self.p05, self.low, self.high


class BinLook(Figures):
    """One bin of lengths as it was when these tokens were drawn: before actions of this look."""

    start: int
    stop: int | None  # None: open
    budget: int | None  # in common, tokens; None: dense rollout
    state: State

    @property
    def judged(self) -> bool:
        """Whether there are tokens and prompts enough to act on."""
        return self.state != "unjudged"


class Action(Record):
    """What the gate did in one bin, and why. Budgets are the schedule's common ones."""

    step: int
    kind: Kind
    start: int
    stop: int | None
    before: int | None  # budgets; None: dense rollout
    after: int | None
    p05: float
    low: float
    high: float
    target: float
    reason: str  # one sentence, with the figures


class Look(Record):
    """What the gate sees after a step, and what it does."""

    step: int
    target: float
    bins: tuple[BinLook, ...]
    overall: Figures  # of all bins' windows together
    budget: float | None  # mean of min(budget, length) over this step's tokens; None: no tokens
    actions: tuple[Action, ...]


def metrics(look: Look) -> dict[str, float]:
    """The look as named numbers. What is unknown (no tokens, no judged bin) is left out.

    accept_* are over the exact tokens of all windows together (the last steps, as many as the gate
    looks at; less after an action), accept_estimate over all their tokens. accept_*/bin_START are
    of one judged bin, and accept_p05_min is p05 of the worst of them: what the target is about.
    kv_budget is the mean over this step's tokens of what the common budget lets them read, never
    more than their length. gate_violation_frac is the share of judged bins with p05 below target.
    """
    judged = [each for each in look.bins if each.judged]
    named = {f"accept_{name}": value for name, value in _figures(look.overall).items()}
    named["kv_budget"] = look.budget
    if judged:
        tails = [each.tail[0] for each in judged]
        named["accept_p05_min"] = min(tails)
        named["gate_violation_frac"] = sum(p05 < look.target for p05 in tails) / len(tails)
    for each in judged:
        figures = _figures(each).items()
        named |= {f"accept_{name}/bin_{each.start}": value for name, value in figures}
    return {f"sparse/{name}": value for name, value in named.items() if value is not None}


def _figures(found: Figures) -> dict[str, float | None]:
    fields = ("p01", "p05", "low", "high", "p50", "mean", "estimate")
    named = {"low": "p05_low", "high": "p05_high"}
    return {named.get(field, field): getattr(found, field) for field in fields}


def _outside(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    return (values < -ROUNDING) | (values > 1 + ROUNDING)
