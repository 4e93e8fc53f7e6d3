"""What a page shows of the gate: p05 by bin of length against the target, and what was done."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparrow.report.page.calibration import ramp
from sparrow.report.page.parts import Axis, Chart, Item, Level, Line, Remarks, Section
from sparrow.report.page.runs import Run
from sparrow.report.page.thinning import thinned

P05 = "sparse/accept_p05"
BIN = re.compile(r"sparse/accept_p05/bin_(\d+)$")
MOST_BINS = 8
NOTHING_JUDGED = (
    "No length had tokens and prompts enough to be judged yet (gate.least, gate.prompts), so there "
    "was nothing to act on."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """p05 of the worst judged bin after a step, with its interval where that is known."""

    step: int
    p05: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.p05:.3f}"
        return f"{self.p05:.3f} [{self.low:.3f}, {self.high:.3f}]"


def looks(run: Run) -> list[Look]:
    """What the gate saw at every step at which it judged a bin."""
    starts = bins_of(run)
    found = []
    for line in run.steps:
        seen = {start: line.get(f"{P05}/bin_{start}") for start in starts}
        known = {start: value for start, value in seen.items() if value is not None}
        if known:
            worst = min(known, key=lambda start: known[start])
            low, high = (line.get(f"{P05}_{end}/bin_{worst}") for end in ("low", "high"))
            low, high = (None, None) if low is None or high is None else (low, high)
            found.append(Look(step=line["step"], p05=known[worst], low=low, high=high))
    return found


def bins_of(run: Run) -> list[int]:
    """Starts of the bins of length that were ever judged."""
    keys = {key for line in run.steps for key in line}
    return sorted(int(found[1]) for key in keys if (found := BIN.match(key)))


def tail_section(runs: Sequence[Run]) -> Section | None:
    """p05 by bin against the target, step by step, and what the gate did."""
    watched = [run for run in runs if run.values(P05) or looks(run)]
    if not watched:
        return None
    items: list[Item] = []
    for run in watched:
        items += [_bins_chart(run, len(runs) > 1), _remarks(run, len(runs) > 1)]
    if len([run for run in watched if looks(run)]) > 1:
        items.append(_worst_chart(watched))
    say = (
        "At every step a few answers are read again by the dense policy, token by token. The gate "
        "acts where a length is surely below the target, or below it at several looks in a row: "
        "the actor then reads more there, in the end everything; a single dip may be chance."
    )
    if all(run.dense for run in watched):
        say = (
            "These rollouts were dense, so the lines show what rounding alone makes of the same "
            "model in the engine and in the trainer."
        )
    return Section(
        key="tail", title="Is the tail kept while training?", say=say, items=tuple(items)
    )


def _bins_chart(run: Run, named: bool) -> Chart:
    starts = bins_of(run)
    shown = starts[:: -(-len(starts) // MOST_BINS)] if starts else []
    lines = [_bin_line(run, start, ramp(i, len(shown))) for i, start in enumerate(shown)]
    words = ["A line for each bin of lengths,", _over(run), "with 95 % intervals over prompts."]
    if not shown:
        lines = [_line(run, P05, "all lengths", run.role)]
        words = ["Over all lengths,", f"{_over(run)}; no single length was judged yet."]
    if len(shown) < len(starts):
        words.append(f"{len(starts) - len(shown)} bins between are not drawn.")
    title = "p05 by length while training"
    chart = Chart(
        key=f"tail-{run.number}",
        title=f"{run.name}: {title}" if named else title,
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="p05 of acceptance", high=1, form=".2f"),
        lines=tuple(lines),
        levels=levels([run]),
        say=" ".join(words),
    )
    return thinned(chart, lowest=True)


def _over(run: Run) -> str:
    window = run.settings.get("gate", {}).get("window")
    return f"over the last {window} steps" if window else "over a window of steps"


def _bin_line(run: Run, start: int, role: str) -> Line:
    """Named by where the bin ends: at the schedule's next edge, as the gate's bins do."""
    edges = [] if run.schedule is None else run.schedule["lengths"]
    later = [edge for edge in sorted({*edges, *bins_of(run)}) if edge > start]
    name = f"{start} to {later[0]} tokens" if later else f"from {start} tokens"
    return _line(run, f"{P05}/bin_{start}", name, role, interval=f"bin_{start}")


def _line(run: Run, metric: str, name: str, role: str, interval: str = "") -> Line:
    points = tuple((step + 1.0, value) for step, value in run.values(metric))
    spans: list[tuple[float, float, float]] = []
    if interval:
        low, high = (dict(run.values(f"{P05}_{end}/{interval}")) for end in ("low", "high"))
        spans = [(step + 1.0, low[step], high[step]) for step in low if step in high]
    return Line(name=name, points=points, role=role, spans=tuple(spans))


def _worst_chart(runs: Sequence[Run]) -> Chart:
    lines = [
        Line(
            name=run.name,
            points=tuple((look.step + 1.0, look.p05) for look in looks(run)),
            role=run.role,
        )
        for run in runs
        if looks(run)
    ]
    chart = Chart(
        key="tail-worst",
        title="p05 of the worst length",
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="p05 of acceptance", high=1, form=".2f"),
        lines=tuple(lines),
        levels=levels(runs),
        say="The lowest of all bins of lengths that had enough tokens to be judged.",
    )
    return thinned(chart, lowest=True)


def levels(runs: Sequence[Run]) -> tuple[Level, ...]:
    """The targets of some runs, each once."""
    found = sorted({run.target for run in runs if run.target is not None})
    return tuple(Level(y=target, name=f"target {target:g}") for target in found)


def gate_actions(run: Run) -> list[str]:
    """What the gate did, in its own words; changed settings are not its doing."""
    return [
        f"Step {action['step']}: {action.get('kind')}: {action.get('reason', '')}"
        for action in run.actions
        if action.get("kind") != "changed"
    ]


def _remarks(run: Run, named: bool) -> Remarks:
    title = f"What the gate did: {run.name}" if named else "What the gate did"
    lines = gate_actions(run) or [_silence(run)]
    return Remarks(key=f"gate-{run.number}", title=title, lines=tuple(lines))


def _silence(run: Run) -> str:
    """Why a gate has done nothing."""
    gate, seen = run.settings.get("gate", {}), looks(run)
    if not gate:
        return "What it was told to do is not among the files of this run."
    if gate.get("mode") == "off":
        return "It was switched off."
    if not seen:
        return NOTHING_JUDGED
    below = [look for look in seen if run.target is not None and look.p05 < run.target]
    if not below:
        return "It watched and had no reason to act."
    return (
        f"It watched and did not act: at {len(below)} of {len(seen)} looks p05 of the worst length "
        "was below the target, but never surely (by its interval), nor in one bin at "
        f"{gate.get('patience', 'several')} looks in a row."
    )
