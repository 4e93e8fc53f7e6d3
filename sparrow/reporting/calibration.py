"""What is shown of a calibration and its plan: the surface, and the schedule it led to.

Sections of a run's page; and figures as files of their own, which calibrate and plan draw. Such a
figure is a section too: its charts are the panels, its title and sentence the words around them.
"""

import re
from collections.abc import Sequence
from statistics import median

from sparrow.reporting.page import (
    NOT_MEASURED,
    Axis,
    Bar,
    BarGroup,
    Bars,
    Chart,
    Item,
    Line,
    Point,
    Remarks,
    Section,
    Table,
    named_levels,
    ramp,
)
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import RunFolder
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface

LENGTH = Axis(name="total length, tokens", low=0, form=".0f")
ACCEPTANCE = Axis(name="p05 of acceptance", high=1, form=".2f")
MOST_PANELS, MOST_LETTERS = 4, 100


def role_of(run: RunFolder) -> str:
    """The colour that a run has in all charts of a page."""
    return f"run-{run.number}"


# Lines.


def surface_lines(surface: Surface, variant: str) -> list[Line]:
    """p05 of a variant's cells by length, a line a budget; dense against dense beside them."""
    own = [cell for cell in surface.cells if cell.variant == variant]
    lines = []
    for rank, budget in enumerate(kept := budgets_of(own)):
        name = "schedule" if budget is None else f"{budget} kept"
        cells = [cell for cell in own if cell.budget == budget]
        lines.append(cells_line(cells, name, ramp(rank, len(kept))))
    floor = surface.floor if own else ()
    dense = [cells_line(floor, "dense", "quiet")] if floor else []
    return lines + dense


def budgets_of(cells: Sequence[Cell]) -> list[int | None]:
    """From few tokens to many; None, a whole schedule, at the end."""
    return sorted({cell.budget for cell in cells}, key=lambda kept: (kept is None, kept or 0))


def middle(cell: Cell) -> float:
    """Of a bin of lengths."""
    return (cell.start + cell.stop) / 2


def cells_line(cells: Sequence[Cell], name: str, role: str) -> Line:
    """p05 through the middles of bins, with its interval except on quiet lines."""
    ordered, quiet = sorted(cells, key=middle), role == "quiet"
    return Line(
        name=name,
        points=[(middle(cell), cell.p05) for cell in ordered],
        role=role,
        shape="line" if quiet else "dots",
        spans=[] if quiet else [(middle(cell), cell.low, cell.high) for cell in ordered],
    )


def everything(end: float, name: str) -> Line:
    """Where as much is kept as there is."""
    return Line(name=name, points=[(0, 0), (end, end)], role="quiet")


def kept_points(starts: Sequence[int], budgets: Sequence[int | None], end: int) -> list[Point]:
    """Kept tokens by length, up to an end. Never more than there is: a larger budget keeps all."""
    points: list[Point] = []
    for start, stop, budget in zip(starts, [*starts[1:], end], budgets, strict=True):
        kept = DENSE if budget is None else budget
        if stop > start:
            full = min(max(kept, start), stop)  # up to here all of the text is kept
            points += [(length, min(kept, length)) for length in (start, full, stop)]
    return points


# Sections of a run's page.


def surface_section(runs: Sequence[RunFolder]) -> Section | None:
    """p05 by length, a line a budget; a chart for every run that was calibrated."""
    charts = [_surface(run, run.surface, len(runs) > 1) for run in runs if run.surface]
    charts = [chart for chart in charts if chart.lines]
    say = (
        "Each line keeps a fixed number of earlier tokens. The longer the text, the smaller a "
        "share that is, and the further its worst tokens stray from the dense policy's."
    )
    title = "How far does sparse decoding stray?"
    return Section(key="surface", title=title, say=say, items=charts) if charts else None


def _surface(run: RunFolder, surface: Surface, several: bool) -> Chart:
    """Of the variant that was planned with, else of the first."""
    names = [variant.name for variant in surface.variants]
    variant = run.plan.variant if run.plan and run.plan.variant in names else names[0]
    prompts = max((cell.prompts for cell in surface.cells if cell.variant == variant), default=0)
    return Chart(
        key=f"surface-{run.number}",
        title=f"{run.name}: " * several + "p05 of acceptance by length and tokens kept",
        x=LENGTH,
        y=ACCEPTANCE.model_copy(update={"low": 0}),
        lines=surface_lines(surface, variant),
        levels=[] if run.target is None else named_levels([run.target]),
        say=f"{surface.model}, rule {variant}, {surface.prompts}, at most {prompts} prompts; "
        f"{surface.dtype} on {surface.device}. 95 % of all tokens reach p05 or more; bars are "
        "95 % intervals over prompts.",
    )


def schedule_section(runs: Sequence[RunFolder]) -> Section | None:
    """Tokens kept by length, of every run with a schedule; and how it was planned."""
    scheduled = [(run, run.schedule) for run in runs if run.schedule is not None]
    if not scheduled:
        return None
    several = len(scheduled) > 1
    items: list[Item] = [_kept_chart(scheduled)]
    planned = [(run, run.plan) for run, _ in scheduled if run.plan]
    for run, plan in planned:
        title = f"The plan{f' of {run.name}' * several}, bin by bin"
        check = run.check.cells if run.check else ()
        items.append(plan_table(plan, check, key=f"plan-{run.number}", title=title))
    for run, plan in planned:
        title = "To mind" + f": {run.name}" * several
        notes = [Remarks(key=f"notes-{run.number}", title=title, lines=plan.notes)]
        items += notes if plan.notes else []
    say = (
        "A schedule says how many tokens a sparse layer keeps at every length of the text. The "
        "planner takes, for every length, the cheapest budget whose tail stays above the target; "
        "budgets grow with the text, because longer texts need more of it."
    )
    return Section(key="schedule", title="The schedule", say=say, items=items)


def _kept_chart(scheduled: Sequence[tuple[RunFolder, Schedule]]) -> Chart:
    lines, words, longest = [], [], 0
    for run, schedule in scheduled:
        end = _reach(run, schedule)
        points = kept_points(schedule.lengths.tolist(), schedule.budgets.tolist(), end)
        lines.append(Line(name=run.name, points=points, role=role_of(run)))
        dense = ", ".join(map(str, schedule.dense_layers)) or "none"
        shared = "; budgets differ by layer, drawn is their base" if schedule.layers else ""
        words.append(f"{schedule.name}, flow {schedule.flow}; dense layers: {dense}{shared}.")
        longest = max(longest, end)
    return Chart(
        key="kept-tokens",
        title="Tokens kept by length",
        x=LENGTH,
        y=Axis(name="tokens kept in a sparse layer", low=0, form=".0f"),
        lines=[*lines, everything(longest, "everything")],
        say=" ".join(dict.fromkeys(words)),
    )


def _reach(run: RunFolder, schedule: Schedule) -> int:
    """Where lengths end: of the plan, of the training, else a little after the last bin begins."""
    last = int(max(schedule.lengths))
    ends = [bin.stop for bin in run.plan.bins if bin.stop] if run.plan else []
    ends += [run.longest] if run.longest else []
    return max([*ends, last]) if ends else max(last * 5 // 4, 1024)


def plan_table(
    plan: PlanFile, check: Sequence[Cell] = (), key: str = "plan", title: str = ""
) -> Table:
    """Budgets by length, with what they were planned on and, where it was checked, what holds."""
    checks = {bin.start: tail_text(bin.p05, bin.low, bin.high) for bin in plan.check or check}
    columns = ["length", "kept", "p05 planned on", "KV read"]
    columns += ["p05 on new prompts"] if checks else []
    rows = []
    for bin in plan.bins:
        row = [
            f"{bin.start} {'on' if bin.stop is None else f'to {bin.stop}'}",
            "all" if bin.budget is None or bin.budget >= DENSE else str(bin.budget),
            tail_text(bin.p05, bin.low, bin.high),
            f"{min(1.0, bin.kept_share):.0%}",  # whole pages can be a little more than all
        ]
        rows.append(row + ([checks.get(bin.start, NOT_MEASURED)] if checks else []))
    say = f"Planned for p05 at {plan.target:g}, by {_by(plan)}."
    return Table(key=key, title=title, columns=columns, rows=rows, say=say)


def _by(plan: PlanFile) -> str:
    return "the lower end of its interval" if plan.by == "low" else "the estimate itself"


def tail_text(p05: float | None, low: float | None, high: float | None) -> str:
    """p05 with its interval, where that is known."""
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return NOT_MEASURED if p05 is None else f"{p05:.3f}{interval}"


# Figures of a surface.


def surface_figures(surface: Surface) -> list[Section]:
    """Every figure that the data allow; those of one variant are named after it."""
    if not surface.cells:
        raise ValueError("the surface has no cells: nothing to draw")
    names = list(dict.fromkeys(cell.variant for cell in surface.cells))[:MOST_PANELS]
    found = [tails(surface, names), *([layers(surface)] if surface.layers else [])]
    for name in names:
        end = f"-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}" if len(names) > 1 else ""
        line = telling_line(surface, name)
        found += [estimators(surface, line, f"estimators{end}")] if line else []
    return found


def _about(surface: Surface) -> str:
    """What was measured and how to read it."""
    prompts = max(cell.prompts for cell in surface.cells)
    how = "generated from" if surface.mode == "generated" else "given tokens of"
    source = surface.prompts[:MOST_LETTERS] + "…" * (len(surface.prompts) > MOST_LETTERS)
    few = f" Fewer than {LEAST_PROMPTS} prompts: the true intervals are wider."
    return (
        f"{surface.model}, {surface.dtype} on {surface.device}, {how} {source}, {prompts} prompts. "
        "Bars are 95 % intervals over prompts."
    ) + few * (prompts < LEAST_PROMPTS)


def tails(surface: Surface, names: Sequence[str]) -> Section:
    """p05 against length, a line per budget with its interval, a panel per variant."""
    levels = named_levels(surface.targets)
    panels = [
        Chart(
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
    return Section(key="tails", title=title, say=_about(surface), items=panels)


def layers(surface: Surface) -> Section:
    """Loss of the tail where only some layers are sparse, a group per variant and budget."""
    worst = min(surface.layers, key=lambda loss: loss.p05)
    groups: dict[str, list[Bar]] = {}
    for loss in surface.layers:
        name, role = layers_text(loss.layers), "sparse" if loss is worst else "quiet"
        bar = Bar(name=name, value=1 - loss.p05, role=role, interval=(1 - loss.high, 1 - loss.low))
        groups.setdefault(f"{loss.variant}, {loss.budget} kept tokens", []).append(bar)
    shown = [BarGroup(name=name, bars=bars) for name, bars in groups.items()][:MOST_PANELS]
    title = "Loss of the tail, 1 - p05 of acceptance"
    bars = Bars(key="layers-loss", title=title, unit="", groups=shown, form=".3f")
    title = f"The tail loses most in {layers_text(worst.layers)}: p05 {worst.p05:.2f}"
    say = f"One group of layers is sparse, all others are dense. {_about(surface)}"
    return Section(key="layers", title=title, say=say, items=[bars])


def layers_text(layers: Sequence[int]) -> str:
    """layer 3, layers 4-7, layers 0, 5, 9."""
    if len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def telling_line(surface: Surface, variant: str) -> list[Cell]:
    """Cells with estimators of the budget whose p05 is nearest to the first target, by length."""
    own = [c for c in surface.cells if c.variant == variant and c.estimators is not None]
    lines = [[cell for cell in own if cell.budget == budget] for budget in budgets_of(own)]
    near = [abs(median(cell.p05 for cell in line) - surface.targets[0]) for line in lines]
    return sorted(lines[near.index(min(near))], key=middle) if lines else []


def estimators(surface: Surface, line: Sequence[Cell], key: str) -> Section:
    """Exact p05 beside its cheap estimates, for one budget; and how wrong they are."""
    known = [(cell, cell.estimators) for cell in line if cell.estimators is not None]
    top_k = known[0][1].top_k
    named = (
        (f"top-{top_k} upper", "upper_p05", "run-2"),
        (f"top-{top_k} lower", "lower_p05", "run-0"),
        ("sampled ratio", "ratio_p05", "sparse"),
    )
    estimates, errors = [cells_line(line, "exact p05", "dense")], []
    for name, field, role in named:
        found = [(cell, getattr(cheap, field)) for cell, cheap in known]
        points = [(middle(cell), value) for cell, value in found if value is not None]
        wrong = [(middle(cell), value - cell.p05) for cell, value in found if value is not None]
        if points:
            estimates.append(Line(name=name, points=points, role=role, shape="dots"))
            errors.append(Line(name=name, points=wrong, role=role, shape="dots"))
    gap = max(cheap.upper_p05 - cheap.lower_p05 for _, cheap in known)
    title = f"Bounds from the top {top_k} log-probs leave p05 open by up to {gap:.2f}"
    kept = "a schedule" if line[0].budget is None else f"{line[0].budget} kept tokens"
    say = (
        f"{line[0].variant}, {kept}. The sampled ratio min(1, p/q) has the mean of acceptance, "
        f"not its quantiles. {_about(surface)}"
    )
    levels, y = named_levels(surface.targets), Axis(name="estimate less exact p05", form=".2f")
    panels = [
        Chart(
            key=f"{key}-p05", title="p05", x=LENGTH, y=ACCEPTANCE, lines=estimates, levels=levels
        ),
        Chart(key=f"{key}-errors", title="How wrong estimates are", x=LENGTH, y=y, lines=errors),
    ]
    return Section(key=key, title=title, say=say, items=panels)


# The figure of a plan.


def plan_figures(plan: PlanFile) -> list[Section]:
    """Budgets over length, with other targets and a preset; beside them, the tail they keep."""
    if not plan.bins:
        raise ValueError("the plan has no bins: nothing to draw")
    sparse = [bin.budget for bin in plan.bins if bin.budget is not None]
    title = f"No measured budget keeps p05 at {plan.target:g}: every length stays dense"
    if sparse:
        kept = f"{min(sparse)} to {max(sparse)}" if len(set(sparse)) > 1 else str(sparse[0])
        below = sum(bin.p05 is not None and bin.p05 < plan.target for bin in plan.bins)
        holds = f"; p05 is below it in {below} of {len(plan.bins)} bins" if below else ""
        title = f"{kept} kept tokens for p05 at {plan.target:g} or above{holds}"
    whose = ", ".join(filter(None, (plan.model, plan.variant, plan.hardware, plan.workload)))
    say = f"{whose}. Budgets are the smallest with p05 at the target, by {_by(plan)}."
    starts = [bin.start for bin in plan.bins]
    # A last bin without an end is as wide as the one before.
    wide = starts[-1] - starts[-2] if len(starts) > 1 else max(1000, starts[-1])
    stops = {bin.start: bin.stop or bin.start + wide for bin in plan.bins}
    panels = [_kept(plan, max(stops.values())), _expected(plan, stops)]
    return [Section(key="schedule", title=title, say=say, items=panels)]


def _kept(plan: PlanFile, end: int) -> Chart:
    starts = [bin.start for bin in plan.bins]
    own: Sequence[int | None] = [bin.budget for bin in plan.bins]
    drawn = [(f"target {plan.target:g}", "run-0", starts, own)]
    for other in plan.sensitivity:
        if other.reached and other.target != plan.target:
            role = "run-2" if other.target > plan.target else "run-1"
            variant = f", {other.variant}" if other.variant not in (None, plan.variant) else ""
            drawn.append((f"target {other.target:g}{variant}", role, starts, other.budgets))
    if plan.compare is not None:
        begins = [start for start in plan.compare.starts if start < end]
        drawn.append((plan.compare.name, "run-4", begins, plan.compare.budgets[: len(begins)]))
    lines = [
        Line(name=name, points=kept_points(begins, kept, end), role=role)
        for name, role, begins, kept in drawn
    ]
    known = [budget for *_, kept in drawn for budget in kept if budget is not None]
    y = Axis(name="kept tokens", low=0, high=1.15 * max(known, default=end), form=".0f")
    lines.append(everything(end, "all kept"))
    return Chart(key="schedule-kept", title="Budget by length", x=LENGTH, y=y, lines=lines)


def _expected(plan: PlanFile, stops: dict[int, int]) -> Chart:
    """p05 that the plan expects in each bin, and what a check run measured."""
    lines = []
    for name, bins, role in (("expected", plan.bins, "run-0"), ("check run", plan.check, "sparse")):
        known = [
            ((bin.start + stops.get(bin.start, bin.start)) / 2, bin.p05, bin.low, bin.high)
            for bin in bins or ()
            if bin.p05 is not None and bin.low is not None and bin.high is not None
        ]
        points, spans = [(x, p05) for x, p05, *_ in known], [(x, a, b) for x, _, a, b in known]
        if known:
            lines.append(Line(name=name, points=points, spans=spans, role=role, shape="dots"))
    key, title, levels = "schedule-p05", "p05 that it keeps", named_levels([plan.target])
    return Chart(key=key, title=title, x=LENGTH, y=ACCEPTANCE, lines=lines, levels=levels)
