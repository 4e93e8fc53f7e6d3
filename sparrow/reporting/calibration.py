"""Figures of a calibration and its plan: the surface, and the schedule.

Sections of a run's page, and figure files of calibrate and plan: a section whose charts are the
panels.
"""

import re
from collections.abc import Callable, Sequence
from statistics import median

from sparrow.reporting import page
from sparrow.schema.evaluation import Estimate
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import RunFolder
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface

LENGTH = page.Axis(name="total length, tokens", low=0, form=".0f")
ACCEPTANCE = page.Axis(name="p05 of acceptance", high=1, form=".2f")
HARD_MISSES = page.Axis(name="hard misses per 1000 tokens", low=0, form=".1f")
Figure = Callable[[Cell], Estimate | None]
MOST_PANELS, MOST_LETTERS = 4, 100


def run_role(run: RunFolder) -> str:
    """The colour of a run in all charts of a page."""
    return f"run-{run.number % page.RUNS}"


# Lines.


def p05_estimate(cell: Cell) -> Estimate:
    return Estimate(value=cell.p05, low=cell.low, high=cell.high)


def surface_lines(surface: Surface, variant: str, figure: Figure = p05_estimate) -> list[page.Line]:
    """A figure (p05) of a variant by length, a line per budget; and of dense against dense."""
    cells = [cell for cell in surface.cells if cell.variant == variant]
    budgets, lines = sorted_budgets(cells), []
    for rank, budget in enumerate(budgets):
        name = "schedule" if budget is None else f"{budget} kept"
        row = [cell for cell in cells if cell.budget == budget]
        lines.append(cells_line(row, name, page.ramp(rank, len(budgets)), figure))
    floor = surface.floor if cells else ()
    dense = [cells_line(floor, "dense", "quiet", figure)] if floor else []
    return lines + dense


def sorted_budgets(cells: Sequence[Cell]) -> list[int | None]:
    """Distinct budgets in ascending order; None (a schedule) is last."""
    return sorted({cell.budget for cell in cells}, key=lambda budget: (budget is None, budget or 0))


def bin_centre(cell: Cell) -> float:
    """The centre of a bin of lengths."""
    return (cell.start + cell.stop) / 2


def cells_line(
    cells: Sequence[Cell], name: str, role: str, figure: Figure = p05_estimate
) -> page.Line:
    """A figure (p05) over the centres of bins, with its interval except on quiet lines."""
    ordered, quiet = sorted(cells, key=bin_centre), role == "quiet"
    measured = [(bin_centre(cell), found) for cell in ordered if (found := figure(cell))]
    return page.Line(
        name=name,
        points=[(x, found.value) for x, found in measured],
        role=role,
        shape="line" if quiet else "dots",
        spans=[] if quiet else [(x, found.low or 0, found.high or 0) for x, found in measured],
    )


def everything(end: float, name: str) -> page.Line:
    """The diagonal: all tokens are kept."""
    return page.Line(name=name, points=[(0, 0), (end, end)], role="quiet")


def kept_points(starts: Sequence[int], budgets: Sequence[int | None], end: int) -> list[page.Point]:
    """Kept tokens by length, up to an end; never more than there are."""
    points: list[page.Point] = []
    for start, stop, budget in zip(starts, [*starts[1:], end], budgets, strict=True):
        kept = DENSE if budget is None else budget
        if stop > start:
            full = min(max(kept, start), stop)  # up to here all tokens are kept
            points += [(length, min(kept, length)) for length in (start, full, stop)]
    return points


# Sections of a run's page.


def surface_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """p05 and hard misses by length, a line per budget, of every run that was calibrated."""
    pairs = [_surface(run, run.surface, len(runs) > 1) for run in runs if run.surface]
    charts = [chart for pair in pairs for chart in pair if any(line.points for line in chart.lines)]
    return page.Section.named("surface", charts) if charts else None


def _surface(run: RunFolder, surface: Surface, several: bool) -> list[page.Chart]:
    """The surface of the planned variant, else of the first: p05, and hard misses."""
    names = [variant.name for variant in surface.variants]
    variant = run.plan.variant if run.plan and run.plan.variant in names else names[0]
    prompts = max((cell.prompts for cell in surface.cells if cell.variant == variant), default=0)
    bound = None if run.plan is None else run.plan.hard_misses
    misses = page.Chart(
        key=f"surface-misses-{run.number}",
        title=f"{run.name}: " * several + "Hard misses by length and tokens kept",
        x=LENGTH,
        y=HARD_MISSES,
        lines=surface_lines(surface, variant, lambda cell: cell.hard_misses),
        levels=[] if bound is None else [page.Level(y=bound, name=f"bound {bound:g}")],
        say=page.TEXTS["tail"]["misses"],
    )
    p05 = page.Chart(
        key=f"surface-{run.number}",
        title=f"{run.name}: " * several + "p05 of acceptance by length and tokens kept",
        x=LENGTH,
        y=ACCEPTANCE.model_copy(update={"low": 0}),
        lines=surface_lines(surface, variant),
        levels=[] if run.target is None else page.target_levels([run.target]),
        say=f"{surface.model}, rule {variant}, {surface.prompts}, at most {prompts} prompts; "
        f"{surface.dtype} on {surface.device}. 95 % of all tokens reach p05 or more; bars are "
        "95 % intervals over prompts.",
    )
    return [p05, misses]


def schedule_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Kept tokens by length of every run with a schedule, and its plan."""
    scheduled = [(run, run.schedule) for run in runs if run.schedule is not None]
    if not scheduled:
        return None
    several = len(scheduled) > 1
    items: list[page.Item] = [_kept_chart(scheduled)]
    planned = [(run, run.plan) for run, _ in scheduled if run.plan]
    for run, plan in planned:
        title = f"The plan{f' of {run.name}' * several}, bin by bin"
        check = run.check.cells if run.check else ()
        items.append(plan_table(plan, check, key=f"plan-{run.number}", title=title))
    for run, plan in planned:
        if plan.notes:
            title = "Notes" + f": {run.name}" * several
            items.append(page.Remarks(key=f"notes-{run.number}", title=title, lines=plan.notes))
    return page.Section.named("schedule", items)


def _kept_chart(scheduled: Sequence[tuple[RunFolder, Schedule]]) -> page.Chart:
    lines, captions, longest = [], [], 0
    for run, schedule in scheduled:
        end = _longest_length(run, schedule)
        points = kept_points(schedule.lengths.tolist(), schedule.budgets.tolist(), end)
        lines.append(page.Line(name=run.name, points=points, role=run_role(run)))
        dense = ", ".join(map(str, schedule.dense_layers)) or "none"
        layered = "; budgets differ by layer, the line is their base" if schedule.layers else ""
        captions.append(f"{schedule.name}, flow {schedule.flow}; dense layers: {dense}{layered}.")
        longest = max(longest, end)
    return page.Chart(
        key="kept-tokens",
        title="Tokens kept by length",
        x=LENGTH,
        y=page.Axis(name="tokens kept in a sparse layer", low=0, form=".0f"),
        lines=[*lines, everything(longest, "everything")],
        say=" ".join(dict.fromkeys(captions)),
    )


def _longest_length(run: RunFolder, schedule: Schedule) -> int:
    """The longest length: of the plan or the training, else a little after the last edge."""
    last = int(max(schedule.lengths))
    ends = [bin.stop for bin in run.plan.bins if bin.stop] if run.plan else []
    ends += [run.longest] if run.longest else []
    return max([*ends, last]) if ends else max(last * 5 // 4, 1024)


def plan_table(
    plan: PlanFile, check: Sequence[Cell] = (), key: str = "plan", title: str = ""
) -> page.Table:
    """Budgets by length with planned p05 and, where it was checked, measured p05."""
    checks = {bin.start: format_p05(bin.p05, bin.low, bin.high) for bin in plan.check or check}
    measured = any(bin.hard_misses for bin in plan.bins)
    columns = ["length", "kept", "p05 planned on"]
    columns += ["hard misses per 1000"] * measured + ["KV read"]
    columns += ["p05 on new prompts"] if checks else []
    rows = []
    for bin in plan.bins:
        row = [
            f"{bin.start} {'on' if bin.stop is None else f'to {bin.stop}'}",
            "all" if bin.budget is None or bin.budget >= DENSE else str(bin.budget),
            format_p05(bin.p05, bin.low, bin.high),
            *[format_rate(bin.hard_misses)] * measured,
            f"{min(1.0, bin.kept_share):.0%}",  # whole pages can be a little more than all
        ]
        rows.append(row + ([checks.get(bin.start, page.NOT_MEASURED)] if checks else []))
    say = f"Planned for p05 at {plan.target:g}, by {_bound_name(plan)}."
    if plan.hard_misses is not None:
        end = "the upper end of their interval" if plan.by == "low" else "the estimate itself"
        say += f" Hard misses at most {plan.hard_misses:g} per 1000 tokens, by {end}."
    return page.Table(key=key, title=title, columns=columns, rows=rows, say=say)


def _bound_name(plan: PlanFile) -> str:
    return "the lower end of its interval" if plan.by == "low" else "the estimate itself"


def format_p05(p05: float | None, low: float | None, high: float | None) -> str:
    """Format p05, with its interval where it is known."""
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return page.NOT_MEASURED if p05 is None else f"{p05:.3f}{interval}"


def format_rate(rate: Estimate | None) -> str:
    """Format a rate per 1000 tokens, with its interval."""
    if rate is None:
        return page.NOT_MEASURED
    return f"{rate.value:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


# Figures of a surface.


def surface_figures(surface: Surface) -> list[page.Section]:
    """Every figure that the data allow; figures of one variant have its name."""
    if not surface.cells:
        raise ValueError("the surface has no cells, so there is nothing to draw")
    names = list(dict.fromkeys(cell.variant for cell in surface.cells))[:MOST_PANELS]
    figures = [tail_figure(surface, names)]
    figures += [layer_figure(surface)] if surface.layers else []
    for name in names:
        end = f"-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}" if len(names) > 1 else ""
        cells = cells_near_target(surface, name)
        figures += [estimator_figure(surface, cells, f"estimators{end}")] if cells else []
    return figures


def _about(surface: Surface) -> str:
    """The caption: what was measured, and how."""
    prompts = max(cell.prompts for cell in surface.cells)
    how = "generated from" if surface.mode == "generated" else "given tokens of"
    source = surface.prompts[:MOST_LETTERS] + "…" * (len(surface.prompts) > MOST_LETTERS)
    warning = f" Fewer than {LEAST_PROMPTS} prompts: the true intervals are wider."
    return (
        f"{surface.model}, {surface.dtype} on {surface.device}, {how} {source}, {prompts} prompts. "
        "Bars are 95 % intervals over prompts."
    ) + warning * (prompts < LEAST_PROMPTS)


def tail_figure(surface: Surface, names: Sequence[str]) -> page.Section:
    """p05 by length: a line per budget with its interval, a panel per variant."""
    levels = page.target_levels(surface.targets)
    panels = [
        page.Chart(
            key=f"tails-{rank}",
            title=f"{name}: {ACCEPTANCE.name}",
            x=LENGTH,
            y=ACCEPTANCE,
            lines=surface_lines(surface, name),
            levels=levels,
        )
        for rank, name in enumerate(names)
    ]
    title = "p05 of acceptance by length and tokens kept"
    return page.Section(key="tails", title=title, say=_about(surface), items=panels)


def layer_figure(surface: Surface) -> page.Section:
    """Loss of p05 where only some layers are sparse: a group per variant and budget."""
    worst = min(surface.layers, key=lambda loss: loss.p05)
    groups: dict[str, list[page.Bar]] = {}
    for loss in surface.layers:
        name, role = format_layers(loss.layers), "sparse" if loss is worst else "quiet"
        bar = page.Bar(
            name=name, value=1 - loss.p05, role=role, interval=(1 - loss.high, 1 - loss.low)
        )
        groups.setdefault(f"{loss.variant}, {loss.budget} kept tokens", []).append(bar)
    shown = [page.BarGroup(name=name, bars=bars) for name, bars in groups.items()][:MOST_PANELS]
    title = "Loss of the tail, 1 - p05 of acceptance"
    bars = page.Bars(key="layers-loss", title=title, unit="", groups=shown, form=".3f")
    title = f"The tail loses most in {format_layers(worst.layers)}: p05 {worst.p05:.2f}"
    say = f"One group of layers is sparse, all others are dense. {_about(surface)}"
    return page.Section(key="layers", title=title, say=say, items=[bars])


def format_layers(layers: Sequence[int]) -> str:
    """Format layers: "layer 3", "layers 4-7", "layers 0, 5, 9"."""
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def cells_near_target(surface: Surface, variant: str) -> list[Cell]:
    """Cells with estimators of the budget whose p05 is nearest to the first target, by length."""
    cells = [c for c in surface.cells if c.variant == variant and c.estimators is not None]
    rows = [[cell for cell in cells if cell.budget == budget] for budget in sorted_budgets(cells)]
    distances = [abs(median(cell.p05 for cell in row) - surface.targets[0]) for row in rows]
    return sorted(rows[distances.index(min(distances))], key=bin_centre) if rows else []


def estimator_figure(surface: Surface, cells: Sequence[Cell], key: str) -> page.Section:
    """Exact p05 and its cheap estimates for one budget, and their errors."""
    pairs = [(cell, cell.estimators) for cell in cells if cell.estimators is not None]
    top_k = pairs[0][1].top_k
    estimates, errors = [cells_line(cells, "exact p05", "dense")], []
    for name, field, role in (
        (f"top-{top_k} upper", "upper_p05", "run-2"),
        (f"top-{top_k} lower", "lower_p05", "run-0"),
        ("sampled ratio", "ratio_p05", "sparse"),
    ):
        values = [(cell, getattr(estimate, field)) for cell, estimate in pairs]
        measured = [(cell, value) for cell, value in values if value is not None]
        points = [(bin_centre(cell), value) for cell, value in measured]
        apart = [(bin_centre(cell), value - cell.p05) for cell, value in measured]
        if measured:
            estimates.append(page.Line(name=name, points=points, role=role, shape="dots"))
            errors.append(page.Line(name=name, points=apart, role=role, shape="dots"))
    gap = max(estimate.upper_p05 - estimate.lower_p05 for _, estimate in pairs)
    title = f"Bounds from the top {top_k} log-probs leave p05 open by up to {gap:.2f}"
    kept = "a schedule" if cells[0].budget is None else f"{cells[0].budget} kept tokens"
    say = (
        f"{cells[0].variant}, {kept}. The sampled ratio min(1, p/q) has the mean of acceptance, "
        f"not its quantiles. {_about(surface)}"
    )
    levels = page.target_levels(surface.targets)
    y = page.Axis(name="estimate less exact p05", form=".2f")
    exact = page.Chart(
        key=f"{key}-p05", title="p05", x=LENGTH, y=ACCEPTANCE, lines=estimates, levels=levels
    )
    off = page.Chart(
        key=f"{key}-errors", title="Errors of the estimates", x=LENGTH, y=y, lines=errors
    )
    return page.Section(key=key, title=title, say=say, items=[exact, off])


# The figure of a plan.


def plan_figures(plan: PlanFile) -> list[page.Section]:
    """Budgets by length, with other targets and a preset; and the expected p05."""
    if not plan.bins:
        raise ValueError("the plan has no bins, so there is nothing to draw")
    sparse = [bin.budget for bin in plan.bins if bin.budget is not None]
    title = f"No measured budget keeps p05 at {plan.target:g}: every length stays dense"
    if sparse:
        kept = f"{min(sparse)} to {max(sparse)}" if len(set(sparse)) > 1 else str(sparse[0])
        below = sum(bin.p05 is not None and bin.p05 < plan.target for bin in plan.bins)
        holds = f"; p05 is below it in {below} of {len(plan.bins)} bins" if below else ""
        title = f"{kept} kept tokens for p05 at {plan.target:g} or above{holds}"
    source = ", ".join(filter(None, (plan.model, plan.variant, plan.hardware, plan.workload)))
    say = f"{source}. Budgets are the smallest with p05 at the target, by {_bound_name(plan)}."
    starts = [bin.start for bin in plan.bins]
    # A last bin without an end is as wide as the previous one.
    wide = starts[-1] - starts[-2] if len(starts) > 1 else max(1000, starts[-1])
    stops = {bin.start: bin.stop or bin.start + wide for bin in plan.bins}
    panels = [_kept(plan, max(stops.values())), _expected(plan, stops)]
    return [page.Section(key="schedule", title=title, say=say, items=panels)]


def _kept(plan: PlanFile, end: int) -> page.Chart:
    starts = [bin.start for bin in plan.bins]
    budgets: Sequence[int | None] = [bin.budget for bin in plan.bins]
    curves = [(f"target {plan.target:g}", "run-0", starts, budgets)]
    for other in plan.sensitivity:
        if other.reached and other.target != plan.target:
            role = "run-2" if other.target > plan.target else "run-1"
            variant = f", {other.variant}" if other.variant not in (None, plan.variant) else ""
            curves.append((f"target {other.target:g}{variant}", role, starts, other.budgets))
    if plan.compare is not None:
        begins = [start for start in plan.compare.starts if start < end]
        curves.append((plan.compare.name, "run-4", begins, plan.compare.budgets[: len(begins)]))
    lines = [
        page.Line(name=name, points=kept_points(begins, kept, end), role=role)
        for name, role, begins, kept in curves
    ]
    finite = [budget for *_, kept in curves for budget in kept if budget is not None]
    y = page.Axis(name="kept tokens", low=0, high=1.15 * max(finite, default=end), form=".0f")
    lines.append(everything(end, "all kept"))
    return page.Chart(key="schedule-kept", title="Budget by length", x=LENGTH, y=y, lines=lines)


def _expected(plan: PlanFile, stops: dict[int, int]) -> page.Chart:
    """p05 that the plan expects in every bin, and what a check run measured."""
    lines = []
    for name, bins, role in (("expected", plan.bins, "run-0"), ("check run", plan.check, "sparse")):
        measured = [
            ((bin.start + stops.get(bin.start, bin.start)) / 2, bin.p05, bin.low, bin.high)
            for bin in bins or ()
            if bin.p05 is not None and bin.low is not None and bin.high is not None
        ]
        points, spans = [(x, y) for x, y, *_ in measured], [(x, a, b) for x, _, a, b in measured]
        if measured:
            lines.append(page.Line(name=name, points=points, spans=spans, role=role, shape="dots"))
    key, title, levels = "schedule-p05", "Expected p05", page.target_levels([plan.target])
    return page.Chart(key=key, title=title, x=LENGTH, y=ACCEPTANCE, lines=lines, levels=levels)
