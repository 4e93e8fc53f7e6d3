"""What a page shows of a calibration and its plan: the surface, and the schedule it led to."""

from collections.abc import Sequence

from sparrow.report.page.parts import Axis, Chart, Item, Level, Line, Remarks, Section, Table
from sparrow.report.page.runs import Plain, Run

EVERYTHING = 2**31 - 1  # a schedule's word for dense
NONE = "-"  # what was not measured
RAMP = 8  # colours that are told apart in one chart


def ramp(index: int, count: int) -> str:
    """The colour of one of several ordered lines."""
    return f"ramp-{round(index * (RAMP - 1) / max(1, count - 1))}"


def surface_section(runs: Sequence[Run]) -> Section | None:
    """p05 by length, a line a budget; a chart for every run that was calibrated."""
    charts = tuple(
        _surface(run, len(runs) > 1) for run in runs if run.surface and run.surface["cells"]
    )
    if not charts:
        return None
    say = (
        "Each line keeps a fixed number of earlier tokens. The longer the text, the smaller a "
        "share that is, and the further its worst tokens stray from the dense policy's."
    )
    return Section(
        key="surface", title="How far does sparse decoding stray?", say=say, items=charts
    )


def _surface(run: Run, named: bool) -> Chart:
    assert run.surface is not None
    surface, variant = run.surface, _variant(run)
    own = [cell for cell in surface["cells"] if cell["variant"] == variant]
    budgets = sorted({cell["budget"] for cell in own if cell["budget"] is not None})
    lines = [_budget_line(own, budget, ramp(i, len(budgets))) for i, budget in enumerate(budgets)]
    if surface["floor"]:
        lines.append(_cells_line(surface["floor"], "dense", "quiet"))
    whose = f"{run.name}: " if named else ""
    return Chart(
        key=f"surface-{run.number}",
        title=f"{whose}p05 of acceptance by length and tokens kept",
        x=Axis(name="total length, tokens", low=0, form=".0f"),
        y=Axis(name="p05 of acceptance", low=0, high=1, form=".2f"),
        lines=tuple(lines),
        levels=_target_level(run),
        say=_surface_words(surface, variant, own),
    )


def _variant(run: Run) -> str:
    """The variant that was planned with, else the first."""
    assert run.surface is not None
    names = [one["name"] for one in run.surface["variants"]]
    planned = str(run.plan["variant"]) if run.plan else ""
    return planned if planned in names else str(run.surface["cells"][0]["variant"])


def _budget_line(cells: Sequence[Plain], budget: int, role: str) -> Line:
    return _cells_line([c for c in cells if c["budget"] == budget], f"{budget} kept", role)


def _cells_line(cells: Sequence[Plain], name: str, role: str) -> Line:
    """Through the middles of bins; quiet lines have no interval."""
    ordered = sorted(cells, key=lambda cell: cell["start"] + cell["stop"])
    middles = [(cell["start"] + cell["stop"]) / 2 for cell in ordered]
    values = tuple(zip(middles, (cell["p05"] for cell in ordered), strict=True))
    spans = tuple((x, cell["low"], cell["high"]) for x, cell in zip(middles, ordered, strict=True))
    quiet = role == "quiet"
    return Line(
        name=name,
        points=values,
        role=role,
        shape="line" if quiet else "dots",
        spans=() if quiet else spans,
    )


def _target_level(run: Run) -> tuple[Level, ...]:
    target = run.target
    return () if target is None else (Level(y=target, name=f"target {target:g}"),)


def _surface_words(surface: Plain, variant: str, cells: Sequence[Plain]) -> str:
    prompts = max(cell["prompts"] for cell in cells)
    return (
        f"{surface['model']}, rule {variant}, {surface['prompts']}, at most {prompts} prompts; "
        f"{surface['dtype']} on {surface['device']}. 95 % of all tokens reach p05 or more; "
        "bars are 95 % intervals over prompts."
    )


def schedule_section(runs: Sequence[Run]) -> Section | None:
    """Tokens kept by length, of every run with a schedule."""
    scheduled = [run for run in runs if run.schedule is not None]
    if not scheduled:
        return None
    items: list[Item] = [_kept_chart(scheduled)]
    items += [plan_table(run, len(scheduled) > 1) for run in scheduled if run.plan]
    doubts = [(run, run.plan["notes"]) for run in scheduled if run.plan and run.plan["notes"]]
    for run, notes in doubts:
        title = f"To mind: {run.name}" if len(scheduled) > 1 else "To mind"
        items.append(Remarks(key=f"notes-{run.number}", title=title, lines=tuple(notes)))
    say = (
        "The planner takes, for every length, the cheapest budget whose tail stays above the "
        "target; budgets grow with the text, because longer texts need more of it."
    )
    if not any(run.plan for run in scheduled):
        say = (
            "A schedule says how many tokens a sparse layer keeps at every length of the text; "
            "how it was chosen is not among the files of these runs."
        )
    return Section(key="schedule", title="The schedule", say=say, items=tuple(items))


def _kept_chart(runs: Sequence[Run]) -> Chart:
    ends = [_reach(run) for run in runs]
    lines = [_schedule_line(run, end) for run, end in zip(runs, ends, strict=True)]
    longest = max(ends)
    everything = Line(
        name="everything", points=((0, 0), (longest, longest)), role="quiet", shape="line"
    )
    return Chart(
        key="kept-tokens",
        title="Tokens kept by length",
        x=Axis(name="total length, tokens", low=0, form=".0f"),
        y=Axis(name="tokens kept in a sparse layer", low=0, form=".0f"),
        lines=(*lines, everything),
        say=" ".join(_dense_words(run, len(runs) > 1) for run in runs),
    )


def _reach(run: Run) -> int:
    """Where lengths end: of the plan, of the training, else a little after the last bin begins."""
    assert run.schedule is not None
    last = max(run.schedule["lengths"])
    planned = [bin["stop"] for bin in run.plan["bins"] if bin["stop"]] if run.plan else []
    ends = [*planned, *([run.longest] if run.longest else [])]
    return int(max([*ends, last])) if ends else int(max(last * 5 // 4, 1024))


def _schedule_line(run: Run, end: int) -> Line:
    """Never more than there is: a budget above the length keeps all of it."""
    assert run.schedule is not None
    starts, budgets = run.schedule["lengths"], run.schedule["budgets"]
    points: list[tuple[float, float]] = []
    for start, stop, budget in zip(starts, [*starts[1:], end], budgets, strict=True):
        if stop <= start:
            continue
        full = min(max(budget, start), stop)  # up to here all of the text is kept
        points += [
            (start, min(budget, start)),
            (full, min(budget, full)),
            (stop, min(budget, stop)),
        ]
    return Line(name=run.name, points=tuple(points), role=run.role)


def _dense_words(run: Run, named: bool) -> str:
    assert run.schedule is not None
    layers = run.schedule["dense_layers"]
    dense = "all layers are sparse"
    if layers:
        which = ", ".join(map(str, layers))
        dense = f"layers {which} read" if len(layers) > 1 else f"layer {which} reads"
        dense += " everything"
    shared = "; budgets differ by layer, drawn is their base" if run.schedule["layers"] else ""
    whose = f"{run.name}: " if named else ""
    return f"{whose}{run.schedule['name']}, flow {run.schedule['flow']}; {dense}{shared}."


def plan_table(run: Run, named: bool = False) -> Table:
    """Budgets by length, with what they were planned on and, where it was checked, what holds."""
    assert run.plan is not None
    checks = {bin["start"]: bin for bin in run.plan["check"] or ()}
    if not checks and run.check is not None:
        checks = {cell["start"]: cell for cell in run.check["cells"]}
    columns = ["length", "kept", "p05 planned on", "KV read"] + (
        ["p05 on new prompts"] if checks else []
    )
    rows = []
    for bin in run.plan["bins"]:
        stop = "on" if bin["stop"] is None else f"to {bin['stop']}"
        row = [f"{bin['start']} {stop}", _budget(bin["budget"]), _tail(bin), f"{_least(bin):.0%}"]
        rows.append(tuple(row + ([_tail(checks.get(bin["start"]))] if checks else [])))
    whose = f" of {run.name}" if named else ""
    return Table(
        key=f"plan-{run.number}",
        title=f"The plan{whose}, bin by bin",
        columns=tuple(columns),
        rows=tuple(rows),
        say=f"Planned for p05 at {run.plan['target']:g}, by the "
        + ("lower end of its interval." if run.plan["by"] == "low" else "estimate itself."),
    )


def _least(bin: Plain) -> float:
    """Share of keys and values that is read; whole pages can be a little more than all."""
    return min(1.0, float(bin["kept_share"]))


def _budget(budget: int | None) -> str:
    return "all" if budget is None or budget >= EVERYTHING else str(budget)


def _tail(cell: Plain | None) -> str:
    if cell is None or None in (cell["p05"], cell["low"], cell["high"]):
        return NONE
    return f"{cell['p05']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
