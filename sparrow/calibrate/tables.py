"""Surfaces, plans and flows for a terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from sparrow.schema.flow import FlowCheck, FlowScore, FlowScores, FlowTest
from sparrow.schema.plan import ComparedBin, PlanBin, PlanFile
from sparrow.schema.surface import Cell, LayerLoss, Surface, reach

GOOD, DOUBTFUL, BAD = "green", "yellow", "red"

Show = Callable[[Any], str | Text] | tuple[str, str]
"""What a column shows of a row: a function of it, or a field and its format."""


def figures(
    title: str | Text,
    columns: Mapping[str, Show],
    rows: Iterable[Any],
    *,
    left: int = 1,
    caption: str | None = None,
    group: Callable[[Any], object] | None = None,
) -> Table:
    """A row of figures for each of `rows`; the first `left` columns are texts.

    group: rows for which it differs are set apart.
    """
    made = Table(title=title, caption=caption)
    for rank, heading in enumerate(columns):
        made.add_column(heading, justify="left" if rank < left else "right")
    before: object = None
    for row in rows:
        now = group(row) if group else None
        if before not in (None, now):
            made.add_section()
        before = now
        made.add_row(*(_shown(row, show) for show in columns.values()))
    return made


def _shown(row: Any, show: Show) -> str | Text:
    if not isinstance(show, tuple):
        return show(row)
    value = row[show[0]] if isinstance(row, Mapping) else getattr(row, show[0])
    return "-" if value is None else format(value, show[1])


def _lengths(row: Cell | PlanBin) -> str:
    return f"{row.start} to {row.stop}"


def _interval(row: Any) -> str:
    return "-" if row.low is None else f"{row.low:.3f} {row.high:.3f}"


def _kept(budget: int | None) -> str:
    return "all" if budget is None else str(budget)


# Surfaces.


def tails_table(surface: Surface, variant: str) -> Table:
    """p05 and its interval by budget and length; green: surely at the target, red: surely not."""
    target = surface.targets[0]
    stops = {cell.start: cell.stop for cell in surface.cells if cell.variant == variant}
    rows: list[tuple[str, Sequence[Cell], float | None]] = [
        (str(budget), surface.of(variant, budget), target) for budget in surface.kept(variant)
    ]
    rows.append(("dense (floor)", surface.floor, None))
    columns: dict[str, Show] = {"tokens kept": lambda row: row[0]}
    for start in sorted(stops):
        columns[f"{start} to {stops[start]}"] = partial(_tail, start)
    return figures(
        f"{variant}: p05 of acceptance by total length",
        columns,
        rows,
        caption=f"{surface.model}, {surface.dtype} on {surface.device}; {surface.prompts}; 95 % "
        f"intervals over prompts; target {target}",
    )


def _tail(start: int, row: tuple[str, Sequence[Cell], float | None]) -> Text:
    _, cells, target = row
    cell = next((cell for cell in cells if cell.start == start), None)
    if cell is None:
        return Text("-")
    text = Text(f"{cell.p05:.3f}\n", style="dim" if target is None else verdict(cell, target)[1])
    return text.append(_interval(cell), style="dim")


def details_table(surface: Surface, variant: str) -> Table:
    """Of every budget, what the cheap estimators would have said, at the longest lengths known."""
    known = [[c for c in surface.of(variant, b) if c.prompts > 1] for b in surface.kept(variant)]
    columns: dict[str, Show] = {
        "tokens kept": ("budget", ""),
        "lengths": _lengths,
        "mean": ("mean", ".4f"),
        "p05": ("p05", ".3f"),
        "top-K says": lambda c: f"{c.estimators.lower_p05:.3f} {c.estimators.upper_p05:.3f}",
        "sampled: mean": _sampled,
        "its p05": lambda c: _shown(c.estimators, ("ratio_p05", ".3f")),
        "over 0.999": ("above", ".1%"),
        "Beta: KS": lambda c: f"{c.beta[2]:.3f}" if c.beta else "-",
        "p05, uncertain tokens": ("uncertain_p05", ".3f"),
    }
    return figures(
        f"{variant}: exact and cheap, at the longest lengths",
        columns,
        [cells[-1] for cells in known if cells],
        caption="top-K: bounds of p05 from the most likely tokens of both sides; sampled: min(1, "
        "p/q) of the token drawn, whose mean is that of acceptance and whose p05 is not; "
        "uncertain: dense entropy over 0.1 nats",
    )


def _sampled(cell: Cell) -> str:
    cheap = cell.estimators
    assert cheap is not None
    error = "" if cheap.ratio_error is None else f" ± {cheap.ratio_error:.4f}"
    return "-" if cheap.ratio_mean is None else f"{cheap.ratio_mean:.4f}{error}"


def verdict(cell: Cell, target: float) -> tuple[str, str]:
    """What a cell says about a target, and in which colour."""
    if cell.low >= target:
        return "holds", GOOD
    if cell.high >= target:
        return "within the interval", DOUBTFUL
    return "below", BAD


def layers_table(losses: Sequence[LayerLoss], shares: Sequence[float] = ()) -> Table:
    """What each group of layers loses where it alone is sparse."""

    def name(loss: LayerLoss) -> str:
        first, last = loss.layers[0], loss.layers[-1]
        return f"layer {first}" if len(loss.layers) == 1 else f"layers {first} to {last}"

    columns: dict[str, Show] = {
        "sparse alone": name,
        "p05": ("p05", ".3f"),
        "95 % interval": _interval,
        "mean": ("mean", ".4f"),
        "share of the budget": lambda loss: f"{shares[loss.layers[0]]:.2f}" if shares else "-",
    }
    return figures(f"layers, {losses[0].budget} tokens kept", columns, losses)


def check_table(surface: Surface, target: float) -> Table:
    """A check run: what a schedule reaches, bin by bin."""
    floor = {cell.start: f"{cell.p05:.3f}" for cell in surface.floor}
    own, dense = reach(surface.cells), reach(surface.floor)
    columns: dict[str, Show] = {
        "total length": _lengths,
        "p05": ("p05", ".3f"),
        "95 % interval": _interval,
        "mean": ("mean", ".4f"),
        "prompts": ("prompts", ""),
        "reach it": lambda cell: f"{own[cell.start]:.0%}",
        "dense": lambda cell: f"{dense[cell.start]:.0%}" if cell.start in dense else "-",
        "floor": lambda cell: floor.get(cell.start, "-"),
        "verdict": lambda cell: Text(*verdict(cell, target)),
    }
    title = f"{surface.variants[0].name}: check at target {target}"
    return figures(title, columns, surface.cells)


# Plans.


def plan_tables(plan: PlanFile) -> list[Table]:
    beside = [] if plan.compare is None else [_compare_table(plan)]
    return [_bins_table(plan), _summary(plan), *beside]


def _bins_table(plan: PlanFile) -> Table:
    columns: dict[str, Show] = {
        "total length": _lengths,
        "tokens kept": lambda one: _kept(one.budget),
        "p05": ("p05", ".3f"),
        "95 % interval": _interval,
        "KV read": ("kept_share", ".0%"),
        "seconds": ("seconds", ".2f"),
        "dense": ("dense_seconds", ".2f"),
    }
    if plan.check:
        checked = {one.start: f"{one.p05:.3f}" for one in plan.check}
        columns["check: p05"] = lambda one: checked.get(one.start, "-")
    return figures(f"{plan.schedule.name}: {plan.variant}", columns, plan.bins)


def _summary(plan: PlanFile) -> Table:
    """What the plan promises, and how firmly."""
    rows = {
        "predicted speed-up": f"{plan.speed_up:.2f}x",
        "that bytes alone would allow": f"{plan.limit:.2f}x",
        "in eFLOPs (ours, as printed)": f"{plan.eflops:.2f}x, {plan.eflops_printed:.2f}x",
        "a step": f"{plan.ms_step:.2f} ms, dense {plan.dense_ms_step:.2f} ms",
        "the rollout": f"{plan.seconds:.1f} s, dense {plan.dense_seconds:.1f} s",
    }
    for aside in plan.sensitivity:
        kept = f"{aside.speed_up:.2f}x, keeps {', '.join(map(_kept, aside.budgets))}"
        missed = "not reached" + ("" if aside.nearest is None else f", nearest {aside.nearest:.3f}")
        rows[f"at target {aside.target:g}"] = kept if aside.reached else missed
    for other in plan.variants[1:]:
        rows[f"instead: {other.name}"] = f"{other.speed_up:.2f}x"
    columns: dict[str, Show] = {"": lambda row: row[0], "rollout": lambda row: row[1]}
    return figures(f"{plan.workload}, {plan.hardware}", columns, rows.items(), left=2)


def _compare_table(plan: PlanFile) -> Table:
    """The plan beside another schedule."""
    other = plan.compare
    assert other is not None
    own = {one.start: one.budget for one in plan.bins}
    differs = f"; made for {', '.join(other.differs)}" if other.differs else ""

    def measured(one: ComparedBin) -> str:
        return "-" if one.measured is None else str(one.measured)

    columns: dict[str, Show] = {
        "from length": ("start", ""),
        "plan keeps": lambda one: _kept(own[one.start]),
        f"{other.name} keeps": lambda one: _kept(one.budget),
        "p05 there, at least": ("p05", ".3f"),
        "measured with": measured,
    }
    speeds = f"speed-up {plan.speed_up:.2f}x and {other.speed_up:.2f}x"
    title = f"the plan beside {other.name}"
    return figures(title, columns, other.bins, caption=speeds + differs)


# Flows.


def flow_check_tables(check: FlowCheck) -> list[Table | str]:
    """A program, and how its test went."""
    return [_fields(check), _lines(check), *([_tests(check)] if check.tests else [])]


def _fields(check: FlowCheck) -> Table:
    sizes = f"page {check.page}, head size {check.head_size}, group {check.group}"
    whole = max(1, check.bytes)
    columns: dict[str, Show] = {
        "field": lambda row: row[0],
        "kept as": lambda row: row[1],
        "shape": lambda row: row[2],
        "bytes a page": lambda row: str(row[3]),
        "of one 16-bit mean": lambda row: f"{row[3] * check.of_mean / whole:.2f}x",
        "of K and V": lambda row: f"{row[3] * check.of_kv / whole:.2%}",
    }
    rows = [
        (each.name, each.kind, " x ".join(map(str, each.shape)) or "one number", each.bytes)
        for each in check.fields
    ]
    rows.append(("all", "", "", check.bytes))
    title = f"{check.flow} ({check.digest}): {sizes}"
    return figures(title, columns, rows, left=3, group=lambda row: row[1] == "")


def _lines(check: FlowCheck) -> str:
    state = ", ".join(f"{name} (starts at {at:g})" for name, at in check.state.items())
    over = ", ".join(f"{op} x {count}" for op, count in check.over_pages.items())
    compiled = "; ".join(f"{key}: {value}" for key, value in check.kernels.items())
    lines = [
        f"state of a request: {state or 'none'}",
        f"operations of the score: {check.operations}, over pages: {over or 'none'}",
    ]
    if check.mass is not None:
        lines.append(f"keeps the best pages up to a mass of {check.mass:g}")
    lines.append(f"kernels generated for a GPU (compiled when they run) - {compiled}")
    if not check.tests:
        lines.append("it has no score and keeps every page: nothing to compare")
    if check.unordered:
        lines.append(f"{check.unordered} scores on random pages are no numbers: kept last")
    return "\n".join(lines)


def _tests(check: FlowCheck) -> Table:
    """A row for each sequence, a column for each comparison, the first difference below."""
    said = ("same pages", "") if check.passed else ("other pages", "bold red")
    kinds = list(dict.fromkeys(test.compared for test in check.tests))
    rows = [
        [test for test in check.tests if test.sequence == name]
        for name in dict.fromkeys(test.sequence for test in check.tests)
    ]
    columns: dict[str, Show] = {
        "sequence": lambda tests: tests[0].sequence,
        "choices": lambda tests: str(tests[0].choices),
    }
    for place, kind in enumerate(kinds):
        columns[kind] = partial(_test_verdict, place)
    wrong = next((test for test in check.tests if test.first), None)
    caption = None if wrong is None else f"{wrong.sequence}, {wrong.first}"
    title = Text.assemble(f"On random pages ({check.device}): ", said)
    return figures(title, columns, rows, caption=caption)


def _test_verdict(place: int, tests: Sequence[FlowTest]) -> str:
    test = tests[place]
    parts = [f"{test.different} differ"] if test.different else []
    parts += [f"{test.near_ties} near ties"] if test.near_ties else []
    return ", ".join(parts) or "same"


def flow_score_table(scores: FlowScores) -> Table:
    """The result for a terminal, by budget; the best flow first."""
    own = scores.configuration
    where = f"{scores.model} ({scores.dtype}), {len(scores.texts)} texts of {scores.tokens} tokens"
    shown = [row for row in scores.rows if all(getattr(row, key) == value for key, value in own)]
    dense = ", ".join(map(str, own.dense_layers)) or "none"

    def gain(row: FlowScore) -> str:
        ends = "" if row.gain_low is None else f" [{row.gain_low:+.4f}, {row.gain_high:+.4f}]"
        return f"{row.gain:+.4f}{ends}"

    columns: dict[str, Show] = {
        "flow": lambda row: Text(row.flow, style="bold" if row.submitted else ""),
        "page": ("page", ""),
        "bytes": lambda row: f"{row.of_mean:.2f}x",
        "budget": ("budget", ""),
        "p05": ("p05", ".4f"),
        "above block-mean": gain,
        **{name: (name, ".3f") for name in ("recall", "mass", "error")},
    }
    return figures(
        f"Flows on {where}",
        columns,
        sorted(shown, key=lambda row: (row.budget, -row.p05)),
        group=lambda row: row.budget,
        caption=f"first {own.first} and last {own.last} pages kept, dense layers: {dense}; bytes "
        "of landmarks against one 16-bit mean; recall, mass, error on the dense stream",
    )
