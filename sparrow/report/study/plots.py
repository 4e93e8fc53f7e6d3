"""Figures of a study: accuracy by arm, gap over realised tail, tail and entropy, budgets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.labels import Label, label_ends, thousands
from sparrow.report.panels import boxes, heading
from sparrow.report.study.cells import WINDOW_MIN
from sparrow.report.study.outcome import PUBLISHED, StudyOutcome
from sparrow.report.study.reading import Arm, Cell, Design, Study
from sparrow.report.study.threshold import Point, Threshold
from sparrow.report.style import ACCENT, FAINT, INK, SOFT, drawing, ramp, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOLID: Any = "solid"
DASHED, DOTTED = (0, (4, 2)), (0, (1, 1.6))
FIXED, COLLAPSES, FLAT = "#8a5a00", "#b3214f", "#7d8691"
MARKERS = "osD^vP"
Track = Sequence[tuple[float, float]]


def looks(design: Design) -> dict[str, dict[str, Any]]:
    """Colour and line of each arm: targets by lightness, others by hue and dashes."""
    targets = sorted(
        (arm for arm in design.arms if arm.kind == "target"), key=lambda arm: arm.target or 0.0
    )
    shades = dict(zip((arm.name for arm in targets), ramp(len(targets)), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for arm in design.arms:
        colour, dashes = shades.get(arm.name, FIXED), SOLID
        if arm.role == "baseline":
            colour = INK
        elif arm.role == "collapses":
            colour, dashes = COLLAPSES, DASHED
        elif arm.role == "flat":
            colour, dashes = FLAT, DOTTED
        elif arm.kind != "target":
            dashes = DASHED
        found[arm.name] = {"color": colour, "linestyle": dashes}
    return found


@drawing()
def accuracy(study: Study) -> "Figure":
    """Held-out accuracy by step; a thin line a seed, a thick one their mean; controls apart."""
    design = study.design
    width, body, places = boxes(2, 3.0)
    page = sheet(
        width,
        body,
        "Held-out accuracy, dense, by arm",
        f"{design.name} · {design.problems} problems every {design.every} steps",
        "Thin: one seed. Thick: mean of the seeds that were evaluated there. "
        "The baseline stands in both panels.",
    )
    arms = [arm for arm in design.arms if arm.role in ("baseline", "arm")]
    controls = [arm for arm in design.arms if arm.role != "arm"]
    for box, chosen, text in zip(places, (arms, controls), ("arms", "controls"), strict=True):
        axes = page.axes(box.place)
        labels = _tracks(axes, study, chosen, _evaluated)
        axes.set_ylim(0, 1.02)
        _finish(axes, text, labels)
    return page.figure


@drawing()
def tails(study: Study) -> "Figure":
    """Tail, entropy and length by step."""
    width, body, places = boxes(4, 2.3)
    page = sheet(
        width,
        body,
        "The tail of acceptance while the policy learns",
        f"{study.design.name} · mean over seeds, thin lines are seeds",
        "Worst bin: over the gate's window of steps. Uncertain tokens: entropy of the policy above "
        "0.1, this step's alone.",
    )
    panels = (
        (WINDOW_MIN, "p05 of acceptance, worst bin", True),
        ("sparse/step/p05_uncertain", "p05 of uncertain tokens", True),
        ("actor/entropy", "entropy of the policy", False),
        ("response_length/mean", "mean tokens of an answer", False),
    )
    for box, (key, text, marked) in zip(places, panels, strict=True):
        axes = page.axes(box.place)
        labels = _tracks(axes, study, study.design.arms, _logged(key), 1.4)
        if marked:
            axes.axhline(PUBLISHED, color=INK, linewidth=0.9, linestyle=(0, (6, 3)))
            labels.append(Label(y=PUBLISHED, text=f"{PUBLISHED:g}", colour=INK, bold=True, hold=50))
        _finish(axes, text, labels)
    return page.figure


def _tracks(
    axes: "Axes",
    study: Study,
    arms: Sequence[Arm],
    track: Callable[[Cell], Track],
    width: float = 2.0,
) -> list[Label]:
    """Lines of cells and means of arms, and labels for their ends."""
    labels, style = [], looks(study.design)
    for arm in arms:
        lines = [line for cell in study.of(arm) if (line := track(cell))]
        for line in lines if len(lines) > 1 else ():
            axes.plot(*zip(*line, strict=True), linewidth=0.6, alpha=0.45, **style[arm.name])
        if lines:
            x, y = _mean_line(lines)
            axes.plot(x, y, linewidth=width, **style[arm.name])
            colour = style[arm.name]["color"]
            labels.append(Label(x=x[-1], y=y[-1], text=arm.name, colour=colour))
    return labels


def _mean_line(lines: Sequence[Track]) -> tuple[list[float], list[float]]:
    """The mean at every step that most of the lines have."""
    by_step: dict[float, list[float]] = {}
    for line in lines:
        for step, value in line:
            by_step.setdefault(step, []).append(value)
    kept = [step for step in sorted(by_step) if 2 * len(by_step[step]) > len(lines)]
    return kept, [float(np.mean(by_step[step])) for step in kept]


def _evaluated(cell: Cell) -> Track:
    return [(each.step, each.accuracy) for each in cell.evaluations if each.accuracy is not None]


def _logged(key: str) -> Callable[[Cell], Track]:
    return lambda cell: [(x["step"], x[key]) for x in cell.steps if x.get(key) is not None]


def _finish(axes: "Axes", text: str, labels: Sequence[Label]) -> None:
    heading(axes, text)
    axes.set_xlabel("step")
    axes.set_xlim(axes.get_xlim())  # the lines to labels shall not widen it
    if labels:
        label_ends(axes, labels)


@drawing()
def gaps(found: StudyOutcome) -> "Figure":
    """The gap to the baseline over realised p05: cells, the monotone fit, the threshold."""
    width, body, (box,) = boxes(1, 3.6, right=1.75)
    page = sheet(
        width,
        body,
        "Final gap to the baseline against the tail that the run really had",
        f"{found.design.name} · one point a cell, paired by seed",
        "Line: monotone fit. Thin blue: between these the gap comes within the tolerance "
        f"({found.design.tolerance:g}, dashed). Shaded: the same over seeds drawn again. Hollow: "
        "another correction, not in the fit.",
    )
    axes = page.axes(box.place)
    shown = found.points or found.aside
    if shown:
        _limits(axes, shown, found.design.tolerance)
    if found.threshold is not None:
        _shade(axes, found.threshold)
    labels = _scatter(axes, found)
    axes.axhline(found.design.tolerance, color=SOFT, linewidth=0.9, linestyle=(0, (6, 3)))
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.axvline(PUBLISHED, color=INK, linewidth=0.9, linestyle=DOTTED)
    top = axes.get_ylim()[1]
    words: dict[str, Any] = {"size": 7.5, "color": INK, "va": "bottom", "ha": "center"}
    axes.text(PUBLISHED, top, f"{PUBLISHED:g}, published", **words)
    axes.set_xlabel("realised p05 of acceptance in the worst bin")
    axes.set_ylabel("final accuracy below the baseline's")
    _legend(axes, labels)
    return page.figure


def _limits(axes: "Axes", points: Sequence[Point], tolerance: float) -> None:
    x = [*(point.p05 for point in points), PUBLISHED]
    y = [*(point.gap for point in points), tolerance, 0.0]
    wide, tall = max(0.02, max(x) - min(x)), max(y) - min(y)
    axes.set_xlim(min(x) - 0.06 * wide, max(x) + 0.06 * wide)
    axes.set_ylim(min(y) - 0.08 * tall, max(y) + 0.12 * tall)


def _shade(axes: "Axes", threshold: Threshold) -> None:
    """The interval, up to the edge where it is open, and the fit over it."""
    left, right = axes.get_xlim()
    low, high = (min(max(end, left), right) for end in (threshold.low, threshold.high))
    if low < high:
        axes.axvspan(low, high, color=ACCENT, alpha=0.13, linewidth=0)
    else:
        axes.axvline(low, color=ACCENT, alpha=0.3, linewidth=4)
    for end in (threshold.at.lower, threshold.at.upper):
        if math.isfinite(end):
            axes.axvline(end, color=ACCENT, linewidth=0.9)
    fit = threshold.fit
    axes.plot(fit.p05, fit.gap, color=ACCENT, linewidth=1.8, drawstyle="steps-post")


def _scatter(axes: "Axes", found: StudyOutcome) -> list[tuple[str, Any]]:
    """A marker an arm, hollow where it is not in the fit; one off the axes stands at their edge."""
    handles = []
    style, fitted = looks(found.design), {point.arm for point in found.points}
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    names = list(dict.fromkeys(point.arm for point in (*found.points, *found.aside)))
    for rank, name in enumerate(names):
        own = [point for point in (*found.points, *found.aside) if point.arm == name]
        colour = style[name]["color"]
        (handle,) = axes.plot(
            [min(max(point.p05, left), right) for point in own],
            [min(max(point.gap, bottom), top) for point in own],
            linestyle="none",
            marker=MARKERS[rank % len(MARKERS)],
            markersize=6,
            color=colour,
            markerfacecolor=colour if name in fitted else "none",
            alpha=0.9,
            zorder=4,
            clip_on=False,
        )
        off = [p for p in own if not (left <= p.p05 <= right and bottom <= p.gap <= top)]
        notes = [f"\noff the axes: {point.p05:.2f}, {point.gap:+.2f}" for point in off]
        handles.append((name + "".join(notes), handle))
    return handles


def _legend(axes: "Axes", handles: Sequence[tuple[str, Any]]) -> None:
    if handles:
        names, marks = zip(*handles, strict=True)
        axes.legend(
            marks, names, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8
        )


@drawing()
def budgets(study: Study) -> "Figure":
    """Kept tokens by length of every arm that has a plan; a line ends where it keeps everything."""
    width, body, (box,) = boxes(1, 3.0)
    page = sheet(
        width,
        body,
        "What each schedule keeps",
        f"{study.design.name} · kept tokens by length",
        "Grey: everything is kept. A line goes up to it where a schedule reads densely.",
    )
    axes, last = page.axes(box.place), _longest(study)
    axes.plot([0, last], [0, last], color=FAINT, linewidth=0.9)
    known = [b for plan in study.plans.values() for b in plan.budgets if b is not None]
    axes.set_ylim(0, 1.15 * max(known, default=last))
    labels, style = [], looks(study.design)
    for name, plan in study.plans.items():
        x, y = _stairs(plan.starts, plan.budgets, last)
        axes.plot(x, y, linewidth=1.8, **style[name])
        labels.append(Label(x=x[-1], y=y[-1], text=name, colour=style[name]["color"]))
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("kept tokens")
    axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
    axes.set_xlim(0, last)
    label_ends(axes, labels)
    return page.figure


def _longest(study: Study) -> int:
    """Where the axis of lengths ends: a bin after the last that a plan names."""
    return max(plan.starts[-1] for plan in study.plans.values()) + study.design.bin


def _stairs(
    starts: Sequence[int], budgets: Sequence[int | None], last: int
) -> tuple[list[float], list[float]]:
    """Flat within a bin; never above the length, which is where everything is kept."""
    x: list[float] = []
    y: list[float] = []
    for start, stop, budget in zip(starts, [*starts[1:], last], budgets, strict=True):
        most = math.inf if budget is None else budget
        turn = [most] if start < most < stop else []
        for length in (start, *turn, stop):
            x.append(float(length))
            y.append(float(min(length, most)))
    return x, y


def figures(study: Study, found: StudyOutcome) -> Mapping[str, "Figure"]:
    """Every figure by the stem of its file."""
    drawn = {"accuracy": accuracy(study), "gaps": gaps(found), "tails": tails(study)}
    return {**drawn, "budgets": budgets(study)} if study.plans else drawn
