"""Runs side by side in one table, with intervals; and in which settings they differ."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

from sparrow.report.page.calibration import NONE
from sparrow.report.page.parts import Section, Table
from sparrow.report.page.runs import Plain, Point, Run
from sparrow.report.page.tail import gate_actions, looks
from sparrow.report.page.training import CUT_OFF, DENSITY, LENGTH, REWARD

ENDS = 5  # steps that a beginning or an end is the mean of
HELD_OUT = ("data.task", "data.length", "data.file", "data.reward", "rollout.max_tokens")
PLACES = ("run.dir", "run.name")  # settings that say where, not what


def final_section(runs: Sequence[Run]) -> Section | None:
    """The table, and the settings."""
    if not runs:
        return None
    items = [_final(runs)]
    if len(runs) > 1:
        items.append(_differences(runs))
    say = "What it all comes down to; brackets are 95 % intervals."
    return Section(key="final", title="In numbers", say=say, items=tuple(items))


def _final(runs: Sequence[Run]) -> Table:
    """A figure a row, a run a column."""
    figures: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda run: str(len(run.steps))),
        ("reward, first and last steps", _rewards),
        ("accuracy on held-out rows, before", lambda run: _accuracies(run)[0]),
        ("and after", lambda run: _accuracies(run)[1]),
        ("p05 of the worst length, lowest", lambda run: _tail(run)[0]),
        ("and at the last step", lambda run: _tail(run)[1]),
        ("keys and values read", _kept),
        ("tokens an answer, first and last step", _length),
        ("answers cut off at the limit", _cut_off),
        ("seconds a step", _seconds),
        ("gate", _gate),
    ]
    if len(runs) > 1:
        figures.insert(4, (f"after, against {runs[0].name}", lambda run: _against(run, runs[0])))
    return Table(
        key="final-table",
        columns=("", *(run.name for run in runs)),
        rows=tuple((name, *(tell(run) for run in runs)) for name, tell in figures),
        say=f"Rewards are means of the first and the last {ENDS} steps (fewer in a run of under "
        f"{2 * ENDS})." + (_DIFFERENCE if len(runs) > 1 else ""),
    )


_DIFFERENCE = (
    " Differences of accuracy join the intervals of both runs as if their rows were independent "
    "(by root of summed squares); on equal rows the true interval is usually narrower. Intervals "
    "are over the rows of one run each: another seed may differ by more."
)


def _rewards(run: Run) -> str:
    values = [value for _, value in run.values(REWARD)]
    if not values:
        return NONE
    count = max(1, min(ENDS, len(values) // 2))
    return f"{fmean(values[:count]):.2f} → {fmean(values[-count:]):.2f}"


def _accuracies(run: Run) -> tuple[str, str]:
    known = run.held_out()
    if not known:
        return NONE, NONE
    before = _point(known[0]) if known[0].step == 0 else NONE
    return before, _point(known[-1]) if known[-1].step > 0 else NONE


def _point(point: Point) -> str:
    return f"{point.value:.2f} [{point.low:.2f}, {point.high:.2f}]"


def _against(run: Run, other: Run) -> str:
    """The difference of the last accuracies, where both were measured after equal steps."""
    mine, theirs = ({p.step: p for p in one.held_out() if p.step > 0} for one in (run, other))
    common = sorted(mine.keys() & theirs.keys())
    if run is other or not common:
        return NONE
    if not run.settings or not other.settings:
        return NONE  # nobody knows whether they were measured alike
    if _measured_by(run) != _measured_by(other):
        return "measured otherwise"
    low, value, high = difference(mine[common[-1]], theirs[common[-1]])
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}] at {common[-1]}"


def _measured_by(run: Run) -> dict[str, Any]:
    """The settings that accuracy on held-out rows depends on, beside the weights."""
    flat = flattened(run.settings)
    names = [name for name in flat if name.startswith("validation.")] + list(HELD_OUT)
    return {name: flat.get(name) for name in names if name != "validation.every"}


def difference(a: Point, b: Point) -> tuple[float, float, float]:
    """Low, value and high of a - b, by Newcombe's joining of two intervals."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return low, value, high


def _tail(run: Run) -> tuple[str, str]:
    seen = looks(run)
    return (str(min(seen, key=lambda look: look.p05)), str(seen[-1])) if seen else (NONE, NONE)


def _kept(run: Run) -> str:
    values = [value for _, value in run.values(DENSITY)]
    if values:
        return f"{min(1.0, fmean(values)):.0%}"
    return "100%" if run.dense and run.steps else NONE


def _length(run: Run) -> str:
    values = [value for _, value in run.values(LENGTH)]
    return f"{values[0]:.0f} → {values[-1]:.0f}" if values else NONE


def _cut_off(run: Run) -> str:
    values = [value for _, value in run.values(CUT_OFF)]
    return f"{values[0]:.0%} → {values[-1]:.0%}" if values else NONE


def _seconds(run: Run) -> str:
    values = [value for _, value in run.values("timing_s/step")]
    return f"{median(values):.1f}" if values else NONE


def _gate(run: Run) -> str:
    if not run.settings:
        return NONE
    if run.settings.get("gate", {}).get("mode") == "off":
        return "off"
    if not looks(run):
        return "nothing judged"
    count = len(gate_actions(run))
    return "silent" if not count else f"{count} action{'s' if count > 1 else ''}"


def _differences(runs: Sequence[Run]) -> Table:
    """Settings in which the runs differ, one a row."""
    flat = [flattened(run.settings) for run in runs]
    names = sorted(set(chain.from_iterable(flat)) - set(PLACES))
    differing = [n for n in names if len({repr(each.get(n)) for each in flat}) > 1]
    rows = [(name, *(_text(each.get(name)) for each in flat)) for name in differing]
    return Table(
        key="settings",
        title="Settings that differ",
        columns=("setting", *(run.name for run in runs)),
        rows=tuple(rows) or (("none", *("" for _ in runs)),),
    )


def flattened(values: Plain, above: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        deeper = isinstance(value, Mapping)
        found |= flattened(value, f"{above}{name}.") if deeper else {f"{above}{name}": value}
    return found


def _text(value: object) -> str:
    return NONE if value is None else str(value)
