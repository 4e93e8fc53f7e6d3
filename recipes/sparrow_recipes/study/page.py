"""The report of a study: verdicts, tables and charts, as a Markdown page with figure files.

outcome.py and analysis.py compute the results, page.toml has the texts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from statistics import fmean

from sparrow.files import write_whole
from sparrow.reporting.calibration import LENGTH, everything, kept_points
from sparrow.reporting.markdown import markdown
from sparrow.reporting.page import (
    Axis,
    Chart,
    Item,
    Level,
    Line,
    Page,
    Point,
    Remarks,
    Section,
    Table,
    ramp,
)
from sparrow.reporting.render import write_figures
from sparrow.schema.run_folder import Outcomes
from sparrow.schema.schedule import DENSE
from sparrow_recipes.study import leading
from sparrow_recipes.study.files import StudyCell, StudyDesign, StudyFolder
from sparrow_recipes.study.judging import CellOutcome, mean
from sparrow_recipes.study.outcome import ArmOutcome, Drift, StudyResults
from sparrow_recipes.study.tables import (
    DASH,
    TEXTS,
    analysis_tables,
    number,
    numbers,
    survivors,
    text_table,
    with_interval,
)

PUBLISHED = 0.86  # the realised p05 that was published as sufficient
OTHERS = ("cut_off", "wrong")  # outcomes of an answer that is not right
STEP = Axis(name="step", form=".0f")
FIGURES = ("accuracy", "tails", "budgets")  # sections with a file of their own


def write_study(folder: Path, study: StudyFolder, results: StudyResults) -> Path:
    """Write report.md and the figures of a study, finished or not; return the path of report.md."""
    page = study_page(study, results)
    write_figures([section for section in page.sections if section.key in FIGURES], folder)
    write_whole(folder / "report.md", [markdown(page, FIGURES)])
    return folder / "report.md"


def study_page(study: StudyFolder, results: StudyResults) -> Page:
    """The page of a study: the verdicts, then a section for each kind of evidence."""
    design, common = results.design, results.common_variance
    borrowed = "none" if common is None else f"{common:.2g}"
    analysis = results.analysis
    items: dict[str, Sequence[Item]] = {
        **analysis_tables(results),
        **({"shares": [_shares(results)]} if analysis else {"arms": _arms_tables(results)}),
        "accuracy": _accuracy(study),
        "survivors": survivors(results),
        "fixed": [_fixed(results)] if results.schedule_against_fixed else [],
        "tails": _tails(study),
        "drift": [_drifts(results)],
        "rollout": [_costs(results)],
        "budgets": [_budgets(study)] if study.plans else [],
        "cells": [text_table("cells", map(_cell_row, _cells(results)))],
    }
    values = {"design": design, "borrowed": borrowed, "run": design.run, "leading": leading}
    values["analysis"] = design.analysis
    primary = (design.analysis and design.analysis.primary) or ("none",)
    values["primary"] = " less ".join(primary)
    sections = [Section.named(key, part, TEXTS, **values) for key, part in items.items() if part]
    if design.commands:
        code = Remarks(key="command", lines=design.commands, code=True)
        sections.append(Section(key="commands", title="Commands", say="", items=[code]))
    title = f"{design.name}: control study"
    return Page(title=title, lead=" ".join(results.verdicts), sections=sections)


def _cells(results: StudyResults) -> list[CellOutcome]:
    return [cell for arm in results.arms for cell in arm.cells]


# Tables.


def _shares(results: StudyResults) -> Table:
    """The arms of a study with an analysis, which compares them."""
    width = len(TEXTS["shares"]["head"].split("|"))
    return text_table("shares", (_arm_row(arm, results)[:width] for arm in results.arms))


def _arms_tables(results: StudyResults) -> tuple[Table, Table]:
    """A row per arm: p05, accuracy by seed, gap, verdict; and the gaps paired by seed."""
    pairs = [
        (
            arm.name,
            ", ".join(f"{seed}: {gap:+.3f}" for seed, gap in arm.gap.by_seed.items()),
            with_interval(arm.gap.paired, arm.gap.paired_interval),
        )
        for arm in results.arms
        if arm.gap is not None and arm.gap.by_seed and arm.role != "flat"
    ]
    rows = [_arm_row(arm, results) for arm in results.arms]
    arms = text_table("arms", rows, baseline=results.baseline.name)
    return arms, text_table("paired", pairs, TEXTS["paired"]["title"])


def _arm_row(arm: ArmOutcome, results: StudyResults) -> list[str]:
    gap = None if arm.role == "flat" else arm.gap
    planned, p05 = len(arm.cells), arm.p05
    spread = f" [{p05.low:.3f}, {p05.high:.3f}]" if p05 and p05.low < p05.high else ""
    return [
        arm.name,
        str(planned) if arm.runs == planned else f"{arm.runs} of {planned}",
        number(arm.target, ".2f"),
        f"{number(p05.mean if p05 else None)}{spread}",
        number(arm.start),
        " ".join(number(cell.final) for cell in arm.cells),
        *numbers(arm, "finals.mean"),
        " / ".join(number(mean(getattr(c, name) for c in arm.cells)) for name in OTHERS),
        " ".join(number(cell.last) for cell in arm.cells),
        with_interval(gap.value, gap.interval) if gap else DASH,
        *numbers({"gap": gap}, "gap.error gap.errors:.1f"),
        _verdict(arm, results),
    ]


def _verdict(arm: ArmOutcome, results: StudyResults) -> str:
    """Collapsed, lagging or level; for the negative control, whether it moved."""
    if not arm.runs:
        return "no finished run"
    states = [f"collapsed {len(arm.collapsed)} of {arm.runs}"] if arm.collapsed else []
    if arm.role == "flat":
        control = results.negative_control
        states.append("moved" if control is not None and control.moved else "flat")
    elif arm.role == "baseline" or arm.lags:
        states.append("baseline" if arm.role == "baseline" else "lags")
    return ", ".join(states) or "level"


def _fixed(results: StudyResults) -> Table:
    """Schedules minus the fixed budgets of equal cost."""
    paths = "accuracy.value:+.3f accuracy.error accuracy.paired:+.3f "
    paths += "less.p05:+.3f less.density:+.3f less.kept:+.0f less.seconds:+.2f"
    pairs = results.schedule_against_fixed
    rows = [[f"{pair.schedule} less {pair.fixed}", *numbers(pair, paths)] for pair in pairs]
    return text_table("fixed", rows)


def _drifts(results: StudyResults) -> Table:
    rows = [
        [arm.name, number(arm.same_bins, "+.3f"), *map(_moved, arm.start_against_end.values())]
        for arm in results.arms
    ]
    return text_table("drift", rows)


def _moved(drift: Drift) -> str:
    return DASH if drift == (None, None) else " → ".join(map(number, drift))


def _costs(results: StudyResults) -> Table:
    """Time and reads of the rollouts of every arm."""
    paths = "seconds:.2f median_seconds:.2f tokens_a_second:.0f density kept:.0f"
    return text_table("rollout", ([arm.name, *numbers(arm.rollout, paths)] for arm in results.arms))


def _cell_row(cell: CellOutcome) -> list[str]:
    rare = ", ".join(map(str, cell.worst.rare)) or "none" if cell.worst else DASH
    return [
        cell.name,
        cell.status + (f": {cell.message}" if cell.message else ""),
        *numbers(cell, "steps:d start final cut_off wrong last start_length:.0f final_length:.0f"),
        {None: DASH, True: "yes", False: "no"}[cell.short],
        ", ".join(cell.collapse) or "no",
        *numbers(cell, "worst.p05 worst.bin:d"),
        rare,
        *numbers(
            cell.measures,
            "lowest_window p05 p0_1 hard_misses:.1f p05_uncertain k3:.2g least_ess skipped:.0f",
        ),
    ]


# Figures.


def roles(design: StudyDesign) -> dict[str, str]:
    """The colour of each arm: by target, by its role in the study, or one of its own."""
    targets = sorted((arm.target, arm.name) for arm in design.arms if arm.target is not None)
    ramps = {name: ramp(rank, len(targets)) for rank, (_, name) in enumerate(targets)}
    by_role = {"baseline": "dense", "collapses": "run-1", "flat": "quiet"}
    others = [a.name for a in design.arms if a.role not in by_role and a.name not in ramps]
    own = dict(zip(others, cycle(f"run-{colour}" for colour in (4, 0, 2, 3, 5)), strict=False))
    return {a.name: by_role.get(a.role) or ramps.get(a.name) or own[a.name] for a in design.arms}


def _tracks(
    study: StudyFolder, arms: Iterable[str], track: Callable[[StudyCell], list[Point]]
) -> list[Line]:
    """A thin line per seed, and a thick one: the mean at every step that most seeds have."""
    lines = []
    for arm in arms:
        role = roles(study.design)[arm]
        tracks = [points for cell in study.cells[arm] if (points := track(cell))]
        if len(tracks) > 1:
            lines += [Line(name=arm, points=points, role=role, faint=True) for points in tracks]
        by_step: dict[float, list[float]] = defaultdict(list)
        for step, value in chain.from_iterable(tracks):
            by_step[step].append(value)
        frequent = {s: v for s, v in sorted(by_step.items()) if 2 * len(v) > len(tracks)}
        means = [(step, sum(values) / len(values)) for step, values in frequent.items()]
        lines += [Line(name=arm, points=means, role=role)] if means else []
    return lines


def _accuracy(study: StudyFolder) -> list[Item]:
    """Held-out accuracy by step, of arms and of controls; shares cut off and wrong."""
    items: list[Item] = []

    def add(key: str, title: str, y: str, lines: Sequence[Line]) -> None:
        axis = Axis(name=y, low=0, high=1, form=".2f")
        items.append(Chart(key=f"accuracy-{key}", title=title, x=STEP, y=axis, lines=lines))

    for key, beside in (("arms", {"arm"}), ("controls", {"collapses", "flat"})):
        names = [arm.name for arm in study.design.arms if arm.role in beside | {"baseline"}]
        if len(names) == 1 and items:  # no controls
            continue
        add(key, key.capitalize(), "accuracy", _tracks(study, names, _evaluated))
    rows = [row for arm in study.cells if (row := _outcome_row(study, arm))]
    if not rows:
        return items
    for outcome, title in (("cut_off", "Answers cut off"), ("wrong", "Answers wrong though ended")):
        lines = _tracks(study, study.cells, partial(_outcome, outcome=outcome))
        add(outcome, title, "share of answers", lines)
    items.append(text_table("outcomes", rows, TEXTS["outcomes"]["title"]))
    own = [row for arm in study.cells if (row := _actor_row(study, arm))]
    return [*items, text_table("actor", own, TEXTS["actor"]["title"])] if own else items


def _evaluated(cell: StudyCell) -> list[Point]:
    return [(e.step, e.accuracy) for e in cell.evaluations if e.accuracy is not None]


def _outcome(cell: StudyCell, outcome: str) -> list[Point]:
    return [(e.step, getattr(e.outcomes, outcome)) for e in cell.evaluations if e.outcomes]


def _outcome_row(study: StudyFolder, arm: str) -> list[str]:
    """Means over seeds at their first and last evaluations; empty if none were measured."""
    row = [arm]
    for place in (0, -1):
        for outcome in Outcomes._fields:
            tracks = [_outcome(cell, outcome) for cell in study.cells[arm]]
            shares = [points[place][1] for points in tracks if points]
            row += [f"{fmean(shares):.3f}"] if shares else []
    return row if len(row) > 1 else []


def _actor_row(study: StudyFolder, arm: str) -> list[str]:
    """Means over seeds of the sparse actor's outcomes; empty if none were measured."""
    row = [arm]
    for place in ("start", "tail"):
        tails = [tail for cell in study.cells[arm] if (tail := getattr(cell, place)) is not None]
        shares = [tail.outcomes for tail in tails if tail.outcomes is not None]
        row += [f"{fmean(values):.3f}" for values in zip(*shares, strict=True)]
    return row if len(row) > 1 else []


TAILS = {
    "sparse/accept_p05_min": Axis(name="p05 of acceptance, worst bin", form=".2f"),
    "sparse/step/p05_uncertain": Axis(name="p05 of uncertain tokens", form=".2f"),
    "sparse/step/hard_misses": Axis(name="hard misses per 1000 tokens", form=".1f"),
    leading.INDICATORS["KL"][0]: Axis(name="KL(new || old) of an update", form=".3g"),
    "actor/entropy": Axis(name="entropy of the policy", form=".2f"),
    "response_length/mean": Axis(name="mean tokens of an answer", form=".0f"),
}


def _tails(study: StudyFolder) -> list[Chart]:
    """p05, entropy and length by step."""
    charts = []
    for rank, (metric, y) in enumerate(TAILS.items()):
        lines = _tracks(study, study.cells, partial(_logged, metric=metric))
        if not lines:
            continue
        levels = [Level(y=PUBLISHED, name=f"{PUBLISHED:g}")] if "p05" in metric else []
        key = f"tails-{rank}"
        charts.append(Chart(key=key, title=y.name, x=STEP, y=y, lines=lines, levels=levels))
    return charts


def _logged(cell: StudyCell, metric: str) -> list[Point]:
    values = [(float(line.step), line.values.get(metric)) for line in cell.steps]
    return [(step, value) for step, value in values if value is not None]


def _budgets(study: StudyFolder) -> Chart:
    """Kept tokens by length of every arm with a plan."""
    end = max(int(plan.lengths[-1]) for plan in study.plans.values()) + study.design.bin
    lines, finite = [everything(end, "all kept")], []
    for name, plan in study.plans.items():
        budgets = plan.budgets.tolist()
        finite += [budget for budget in budgets if budget < DENSE]
        points = kept_points(plan.lengths.tolist(), budgets, end)
        lines.append(Line(name=name, points=points, role=roles(study.design)[name]))
    y = Axis(name="kept tokens", low=0, high=1.15 * max(finite, default=end), form=".0f")
    title = "What each schedule keeps"
    return Chart(key="budgets-kept", title=title, x=LENGTH, y=y, lines=lines)
