"""A study's report: its verdicts in sentences, tables and figures, as one page and its files.

How they are computed is in recipes/sparrow_recipes/study/outcome.py.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

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
from sparrow_recipes.study.comparing import PUBLISHED, End, Interval, interval_text
from sparrow_recipes.study.files import StudyCell, StudyDesign, StudyFolder
from sparrow_recipes.study.outcome import ArmOutcome, CellOutcome, Drift, StudyResults

FEW = 40  # draws below which the outer quantiles are the extremes
DASH = "\N{EN DASH}"  # what was not measured
STEP = Axis(name="step", form=".0f")
FIGURES = ("accuracy", "gaps", "tails", "budgets")  # sections with a file of their own
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def write_study(folder: Path, study: StudyFolder, found: StudyResults) -> Path:
    """Write what a study says, finished or not, into its folder; returns the path of report.md."""
    page = study_page(study, found)
    drawn = [section for section in page.sections if section.key in FIGURES]
    write_figures(drawn, folder)
    write_whole(folder / "report.md", [markdown(page, [section.key for section in drawn])])
    return folder / "report.md"


def study_page(study: StudyFolder, found: StudyResults) -> Page:
    """What a study says: sentences first, then what they rest on."""
    design, common = found.design, found.common_variance
    borrowed = "none" if common is None else f"{common:.2g}"
    sections = [
        _section("arms", [*_arms_tables(found)], design=design, borrowed=borrowed),
        _section("accuracy", _accuracy(study), design=design),
        _section("gaps", [_gaps(found)], words=_threshold_words(found)),
        *([_section("fixed", [_fixed(found)])] if found.schedule_against_fixed else []),
        _section("tails", _tails(study)),
        _section("drift", [_drifts(found)]),
        _section("rollout", [_costs(found)]),
        *([_section("budgets", [_budgets(study)])] if study.plans else []),
        _section("cells", [_table("cells", map(_cell_row, _cells(found)))]),
    ]
    if design.commands:
        code = Remarks(key="command", lines=design.commands, code=True)
        sections.append(Section(key="commands", title="Commands", say="", items=[code]))
    title = f"{design.name}: control study"
    return Page(title=title, lead=" ".join(found.verdicts), sections=sections)


def _section(key: str, items: Sequence[Item], **values: object) -> Section:
    text = TEXTS[key]
    return Section(key=key, title=text["title"], say=text["say"].format(**values), items=items)


def _cells(found: StudyResults) -> list[CellOutcome]:
    return [cell for arm in found.arms for cell in arm.cells]


def _threshold_words(found: StudyResults) -> str:
    """How the interval was made, and which cells are in the fit."""
    text, at = TEXTS["gaps"], found.threshold
    if at is None:
        return str(text["none"])
    left = "; ".join(f"{cell}: {why}" for cell, why in found.left_out_of_fit.items())
    diverged = ", ".join(cell.name for cell in _cells(found) if "diverged" in cell.collapse)
    return str(
        text["fit"].format(
            at=at,
            few=text["few"] if at.draws < FEW else "",
            estimate=interval_text(at.value_low, at.value_high),
            points=len(found.points),
            own=sum(point.baseline for point in found.points),
            left=left or "none",
            diverged=diverged or "none",
        )
    )


# Tables.


def _table(key: str, rows: Iterable[Sequence[str]], title: str = "", **values: object) -> Table:
    columns = TEXTS[key]["head"].format(**values).split("|")
    return Table(key=f"{key}-table", title=title, columns=columns, rows=list(rows))


def _number(value: float | None, form: str = ".3f") -> str:
    return DASH if value is None else f"{value:{form}}"


def _numbers(item: Any, paths: str) -> Iterator[str]:
    """What is at dotted paths, "final rollout.kept:.0f", with three digits unless told otherwise.

    A dash where there is nothing.
    """
    for path in paths.split():
        names, _, form = path.partition(":")
        value = item
        for name in names.split("."):
            if value is not None:
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        yield _number(value, form or ".3f")


def _with_interval(value: float | None, ends: Interval | None) -> str:
    return _number(value, "+.3f") + ("" if ends is None else f" [{ends[0]:+.3f}, {ends[1]:+.3f}]")


def _arms_tables(found: StudyResults) -> tuple[Table, Table]:
    """One row an arm: tail, accuracy by seed, gap, verdict; and gaps between equal seeds."""
    pairs = [
        (
            arm.name,
            ", ".join(f"{seed}: {gap:+.3f}" for seed, gap in arm.gap.by_seed.items()),
            _with_interval(arm.gap.paired, arm.gap.paired_interval),
        )
        for arm in found.arms
        if arm.gap is not None and arm.gap.by_seed and arm.role != "flat"
    ]
    rows = [_arm_row(arm, found) for arm in found.arms]
    arms = _table("arms", rows, baseline=found.baseline.name)
    return arms, _table("paired", pairs, TEXTS["paired"]["title"])


def _arm_row(arm: ArmOutcome, found: StudyResults) -> list[str]:
    gap = None if arm.role == "flat" else arm.gap
    asked, p05 = len(arm.cells), arm.p05
    spread = f" [{p05.low:.3f}, {p05.high:.3f}]" if p05 and p05.low < p05.high else ""
    return [
        arm.name,
        str(asked) if arm.runs == asked else f"{arm.runs} of {asked}",
        _number(arm.target, ".2f"),
        f"{_number(p05.mean if p05 else None)}{spread}",
        _number(arm.start),
        " ".join(_number(cell.final) for cell in arm.cells),
        *_numbers(arm, "finals.mean"),
        " ".join(_number(cell.last) for cell in arm.cells),
        _with_interval(gap.value, gap.interval) if gap else DASH,
        *_numbers({"gap": gap}, "gap.error gap.errors:.1f"),
        _verdict(arm, found),
    ]


def _verdict(arm: ArmOutcome, found: StudyResults) -> str:
    """Collapsed, lagging, level; for controls whether they did what they had to."""
    if not arm.runs:
        return "no finished run"
    words = [f"collapsed {len(arm.collapsed)} of {arm.runs}"] if arm.collapsed else []
    if arm.role == "flat":
        control = found.negative_control
        words.append("moved" if control is not None and control.moved else "flat")
    elif arm.role == "baseline":
        words.append("baseline")
    elif arm.lags:
        words.append("lags")
    return ", ".join(words) or "level"


def _fixed(found: StudyResults) -> Table:
    """Schedules less the fixed budgets of their cost."""
    paths = "accuracy.value:+.3f accuracy.error accuracy.paired:+.3f "
    paths += "less.p05:+.3f less.density:+.3f less.kept:+.0f less.seconds:+.2f"
    pairs = found.schedule_against_fixed
    rows = [[f"{pair.schedule} less {pair.fixed}", *_numbers(pair, paths)] for pair in pairs]
    return _table("fixed", rows)


def _drifts(found: StudyResults) -> Table:
    rows = [
        [arm.name, _number(arm.same_bins, "+.3f"), *map(_moved, arm.start_against_end.values())]
        for arm in found.arms
    ]
    return _table("drift", rows)


def _moved(drift: Drift) -> str:
    return DASH if drift == (None, None) else " → ".join(map(_number, drift))


def _costs(found: StudyResults) -> Table:
    """What rollouts took."""
    paths = "seconds:.2f median_seconds:.2f tokens_a_second:.0f density kept:.0f"
    return _table("rollout", ([arm.name, *_numbers(arm.rollout, paths)] for arm in found.arms))


def _cell_row(cell: CellOutcome) -> list[str]:
    rare = ", ".join(map(str, cell.worst.rare)) or "none" if cell.worst else DASH
    return [
        cell.name,
        cell.status + (f": {cell.message}" if cell.message else ""),
        *_numbers(cell, "steps:d start final last start_length:.0f final_length:.0f"),
        {None: DASH, True: "yes", False: "no"}[cell.short],
        ", ".join(cell.collapse) or "no",
        *_numbers(cell, "worst.p05 worst.bin:d"),
        rare,
        *_numbers(cell.measures, "lowest_window p05 p05_uncertain k3:.2g least_ess skipped:.0f"),
    ]


# Figures.


def roles(design: StudyDesign) -> dict[str, str]:
    """The colour of each arm: targets by lightness, others by what they are."""
    targets = sorted((arm.target, arm.name) for arm in design.arms if arm.target is not None)
    found = {arm.name: "run-4" for arm in design.arms}
    found |= {name: ramp(rank, len(targets)) for rank, (_, name) in enumerate(targets)}
    known = {"baseline": "dense", "collapses": "run-1", "flat": "quiet"}
    return found | {arm.name: known[arm.role] for arm in design.arms if arm.role in known}


def _tracks(
    study: StudyFolder, arms: Iterable[str], track: Callable[[StudyCell], list[Point]]
) -> list[Line]:
    """A thin line a seed, a thick one the mean at every step that most of them have."""
    lines = []
    for arm in arms:
        role = roles(study.design)[arm]
        tracks = [points for cell in study.cells[arm] if (points := track(cell))]
        if len(tracks) > 1:
            lines += [Line(name=arm, points=points, role=role, faint=True) for points in tracks]
        by_step: dict[float, list[float]] = {}
        for step, value in (point for points in tracks for point in points):
            by_step.setdefault(step, []).append(value)
        kept = [step for step in sorted(by_step) if 2 * len(by_step[step]) > len(tracks)]
        means = [(step, sum(by_step[step]) / len(by_step[step])) for step in kept]
        lines += [Line(name=arm, points=means, role=role)] if means else []
    return lines


def _accuracy(study: StudyFolder) -> list[Item]:
    """Held-out accuracy by step, of arms and of controls; answers cut off and wrong apart."""
    y = Axis(name="accuracy", low=0, high=1, form=".2f")
    items: list[Item] = []
    for what, beside in (("arms", {"arm"}), ("controls", {"collapses", "flat"})):
        names = [arm.name for arm in study.design.arms if arm.role in beside | {"baseline"}]
        lines, title = _tracks(study, names, _evaluated), what.capitalize()
        items.append(Chart(key=f"accuracy-{what}", title=title, x=STEP, y=y, lines=lines))
    rows = [row for arm in study.cells if (row := _outcome_row(study, arm))]
    if not rows:
        return items
    for outcome, title in (("cut_off", "Answers cut off"), ("wrong", "Answers wrong though ended")):
        lines = _tracks(study, study.cells, partial(_outcome, outcome=outcome))
        share = Axis(name="share of answers", low=0, high=1, form=".2f")
        items.append(Chart(key=f"accuracy-{outcome}", title=title, x=STEP, y=share, lines=lines))
    return [*items, _table("outcomes", rows, TEXTS["outcomes"]["title"])]


def _evaluated(cell: StudyCell) -> list[Point]:
    return [(each.step, each.accuracy) for each in cell.evaluations if each.accuracy is not None]


def _outcome(cell: StudyCell, outcome: str) -> list[Point]:
    measured = [(each.step, each.outcomes) for each in cell.evaluations if each.outcomes]
    return [(step, getattr(outcomes, outcome)) for step, outcomes in measured]


def _outcome_row(study: StudyFolder, arm: str) -> list[str]:
    """Means over seeds at their first and last evaluations; nothing where none is known."""
    row = [arm]
    for place in (0, -1):
        for outcome in Outcomes._fields:
            tracks = [_outcome(cell, outcome) for cell in study.cells[arm]]
            shares = [points[place][1] for points in tracks if points]
            row += [f"{fmean(shares):.3f}"] if shares else []
    return row if len(row) > 1 else []


TAILS = {
    "sparse/accept_p05_min": Axis(name="p05 of acceptance, worst bin", form=".2f"),
    "sparse/step/p05_uncertain": Axis(name="p05 of uncertain tokens", form=".2f"),
    "actor/entropy": Axis(name="entropy of the policy", form=".2f"),
    "response_length/mean": Axis(name="mean tokens of an answer", form=".0f"),
}


def _tails(study: StudyFolder) -> list[Chart]:
    """Tail, entropy and length by step."""
    charts = []
    for rank, (metric, y) in enumerate(TAILS.items()):
        lines = _tracks(study, study.cells, partial(_logged, metric=metric))
        levels = [Level(y=PUBLISHED, name=f"{PUBLISHED:g}")] if "p05" in metric else []
        key = f"tails-{rank}"
        charts.append(Chart(key=key, title=y.name, x=STEP, y=y, lines=lines, levels=levels))
    return charts


def _logged(cell: StudyCell, metric: str) -> list[Point]:
    found = [(float(line.step), line.values.get(metric)) for line in cell.steps]
    return [(step, value) for step, value in found if value is not None]


def _gaps(found: StudyResults) -> Chart:
    """The gap to the baseline over realised p05: cells, the monotone fit, the threshold."""
    shown = found.points or found.points_beside
    left, right = _widened([*(point.p05 for point in shown), PUBLISHED])
    low, high = _widened([*(point.gap for point in shown), found.design.tolerance, 0.0])
    sides = [(PUBLISHED, low), (PUBLISHED, high)]
    lines = [Line(name=f"{PUBLISHED:g}, published", points=sides, role="target")]
    if found.threshold is not None:
        open_ends: dict[End, float] = {"open below": left, "open above": right}
        ends = [open_ends.get(end, end) for end in (found.threshold.low, found.threshold.high)]
        sides = [(min(max(float(end), left), right), low) for end in ends]
        band, over = [(x, low, high) for x, _ in sides], "threshold, over seeds"
        lines.append(Line(name=over, points=sides, spans=band, role="run-0"))
        fit = found.threshold.fit
        lines.append(Line(name="monotone fit", points=fit, role="run-0", shape="steps"))
    for points, what in ((found.points, ""), (found.points_beside, ", not fitted")):
        for arm in dict.fromkeys(point.arm for point in points):
            own = sorted((point.p05, point.gap) for point in points if point.arm == arm)
            kept = [(min(max(x, left), right), min(max(y, low), high)) for x, y in own]
            off = [f" (off: {x:.2f}, {y:+.2f})" for x, y in own if (x, y) not in kept]
            name, role = f"{arm}{what}{''.join(off)}", roles(found.design)[arm]
            lines.append(Line(name=name, points=kept, role=role, shape="marks"))
    tolerance = found.design.tolerance
    return Chart(
        key="gaps-chart",
        title="Final gap to the baseline against the tail that the run really had",
        x=Axis(name="realised p05 in the worst bin", low=left, high=right, form=".2f"),
        y=Axis(name="final accuracy below the baseline's", low=low, high=high, form=".2f"),
        lines=lines,
        levels=[
            Level(y=tolerance, name=f"tolerance {tolerance:g}"),
            Level(y=0.0, name="", role="quiet"),
        ],
        say="One point a cell, paired by seed.",
    )


def _widened(values: Sequence[float]) -> tuple[float, float]:
    """Ends that are a little off the outermost values."""
    off = 0.08 * max(0.02, max(values) - min(values))
    return min(values) - off, max(values) + off


def _budgets(study: StudyFolder) -> Chart:
    """Kept tokens by length of every arm that has a plan."""
    end = max(int(plan.lengths[-1]) for plan in study.plans.values()) + study.design.bin
    lines, known = [everything(end, "all kept")], []
    for name, plan in study.plans.items():
        kept = plan.budgets.tolist()
        known += [budget for budget in kept if budget < DENSE]
        points = kept_points(plan.lengths.tolist(), kept, end)
        lines.append(Line(name=name, points=points, role=roles(study.design)[name]))
    y = Axis(name="kept tokens", low=0, high=1.15 * max(known, default=end), form=".0f")
    title = "What each schedule keeps"
    return Chart(key="budgets-kept", title=title, x=LENGTH, y=y, lines=lines)
