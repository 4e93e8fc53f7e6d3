"""What a page shows of a calibration and its plan: the surface, and the schedule it led to."""

from collections.abc import Sequence

from sparrow.report.page import (
    NOT_MEASURED,
    Axis,
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
from sparrow.schema.surface import Cell, Surface

LENGTH = Axis(name="total length, tokens", low=0, form=".0f")
ACCEPTANCE = Axis(name="p05 of acceptance", high=1, form=".2f")


def role_of(run: RunFolder) -> str:
    """The colour that a run has in all charts of a page."""
    return f"run-{run.number}"


def surface_section(runs: Sequence[RunFolder]) -> Section | None:
    """p05 by length, a line a budget; a chart for every run that was calibrated."""
    several = len(runs) > 1
    charts = [_surface(run, run.surface, several) for run in runs if run.surface]
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
        lines=variant_lines(surface, variant),
        levels=[] if run.target is None else named_levels([run.target]),
        say=f"{surface.model}, rule {variant}, {surface.prompts}, at most {prompts} prompts; "
        f"{surface.dtype} on {surface.device}. 95 % of all tokens reach p05 or more; bars are "
        "95 % intervals over prompts.",
    )


def variant_lines(surface: Surface, variant: str, field: str = "p05") -> list[Line]:
    """A field of a variant's cells by length, a line a budget; dense against dense beside them."""
    own = [cell for cell in surface.cells if cell.variant == variant]
    lines = []
    for rank, budget in enumerate(kept := budgets_of(own)):
        name = "schedule" if budget is None else f"{budget} kept"
        cells = [cell for cell in own if cell.budget == budget]
        lines.append(cells_line(cells, field, name, ramp(rank, len(kept))))
    dense = [cells_line(surface.floor, field, "dense", "quiet")] if surface.floor and own else []
    return lines + dense


def budgets_of(cells: Sequence[Cell]) -> list[int | None]:
    """From few tokens to many; None, a whole schedule, at the end."""
    return sorted({cell.budget for cell in cells}, key=lambda kept: (kept is None, kept or 0))


def middle(cell: Cell) -> float:
    """Of a bin of lengths."""
    return (cell.start + cell.stop) / 2


def cells_line(cells: Sequence[Cell], field: str, name: str, role: str) -> Line:
    """Through the middles of bins; p05 has its interval, except on quiet lines."""
    ordered = sorted(cells, key=middle)
    bars = role != "quiet" and field == "p05"
    return Line(
        name=name,
        points=[(middle(cell), getattr(cell, field)) for cell in ordered],
        role=role,
        shape="line" if role == "quiet" else "dots",
        spans=[(middle(cell), cell.low, cell.high) for cell in ordered] if bars else [],
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
        "The planner takes, for every length, the cheapest budget whose tail stays above the "
        "target; budgets grow with the text, because longer texts need more of it."
    )
    if not planned:
        say = (
            "A schedule says how many tokens a sparse layer keeps at every length of the text; "
            "how it was chosen is not among the files of these runs."
        )
    return Section(key="schedule", title="The schedule", say=say, items=items)


def _kept_chart(scheduled: Sequence[tuple[RunFolder, Schedule]]) -> Chart:
    lines, words, longest = [], [], 0
    for run, schedule in scheduled:
        end = _reach(run, schedule)
        points = kept_points(schedule.lengths.tolist(), schedule.budgets.tolist(), end)
        lines.append(Line(name=run.name, points=points, role=role_of(run)))
        words.append(f"{run.name}: " * (len(scheduled) > 1) + _dense_words(schedule))
        longest = max(longest, end)
    return Chart(
        key="kept-tokens",
        title="Tokens kept by length",
        x=LENGTH,
        y=Axis(name="tokens kept in a sparse layer", low=0, form=".0f"),
        lines=[*lines, everything(longest, "everything")],
        say=" ".join(words),
    )


def everything(end: float, name: str) -> Line:
    """Where as much is kept as there is."""
    return Line(name=name, points=[(0, 0), (end, end)], role="quiet")


def _reach(run: RunFolder, schedule: Schedule) -> int:
    """Where lengths end: of the plan, of the training, else a little after the last bin begins."""
    last = int(max(schedule.lengths))
    ends = [bin.stop for bin in run.plan.bins if bin.stop] if run.plan else []
    ends += [run.longest] if run.longest else []
    return max([*ends, last]) if ends else max(last * 5 // 4, 1024)


def kept_points(starts: Sequence[int], budgets: Sequence[int | None], end: int) -> list[Point]:
    """Kept tokens by length, up to an end. Never more than there is: a larger budget keeps all."""
    points: list[Point] = []
    for start, stop, budget in zip(starts, [*starts[1:], end], budgets, strict=True):
        kept = DENSE if budget is None else budget
        if stop > start:
            full = min(max(kept, start), stop)  # up to here all of the text is kept
            points += [(length, min(kept, length)) for length in (start, full, stop)]
    return points


def _dense_words(schedule: Schedule) -> str:
    which = ", ".join(map(str, schedule.dense_layers))
    dense = f"layers {which} read everything" if which else "all layers are sparse"
    if len(schedule.dense_layers) == 1:
        dense = f"layer {which} reads everything"
    shared = "; budgets differ by layer, drawn is their base" if schedule.layers else ""
    return f"{schedule.name}, flow {schedule.flow}; {dense}{shared}."


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
    by = "lower end of its interval" if plan.by == "low" else "estimate itself"
    say = f"Planned for p05 at {plan.target:g}, by the {by}."
    return Table(key=key, title=title, columns=columns, rows=rows, say=say)


def tail_text(p05: float | None, low: float | None, high: float | None) -> str:
    """p05 with its interval, where that is known."""
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return NOT_MEASURED if p05 is None else f"{p05:.3f}{interval}"
