"""Figures of what stands behind a surface: layers, the whole distribution, the cheap estimators."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparrow.report.labels import Label, beside, label_ends, lengths_text
from sparrow.report.length_plots import label_lines, line_of, lines_panel, shades, tall_enough
from sparrow.report.lengths import lengths_of
from sparrow.report.panels import (
    BELOW,
    LEFT,
    Box,
    Plain,
    acceptance_axis,
    boxes,
    heading,
    lowest,
    target_line,
)
from sparrow.report.style import INK, SOFT, Sheet, drawing, sheet
from sparrow.report.surface_words import (
    MOST_PANELS,
    budget_text,
    budgets_of,
    layers_text,
    subtitle,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP = 0.999
"""Acceptance above this counts as whole; Beta distributions are of the rest."""
FEW = 5
LOWER, UPPER, RATIO = "#6c6fc4", "#2fada6", "#b3214f"


@drawing()
def layers(surface: Plain) -> "Figure":
    """Loss of the tail where only some layers are sparse, a panel per variant and budget."""
    losses = surface["layers"]
    if not losses:
        raise ValueError("layers: the surface holds no losses by layer; calibrate with layers")
    keys = list(dict.fromkeys((loss["variant"], loss["budget"]) for loss in losses))[:MOST_PANELS]
    groups = [[x for x in losses if (x["variant"], x["budget"]) == key] for key in keys]
    width, body, places = boxes(len(keys), max(1.2, 0.27 * max(map(len, groups))), right=0.9)
    worst = max(losses, key=lambda loss: 1 - loss["p05"])
    where = layers_text(worst["layers"])
    title = f"The tail loses most in {where}: p05 {worst['p05']:.2f} with nothing else sparse"
    foot = (
        "Lines: 95 % intervals over prompts. One group of layers is sparse, all others are dense."
    )
    page = sheet(width, body, title, subtitle(surface, sorted({key[0] for key in keys})), foot)
    most = max(1 - loss["low"] for loss in losses)
    for (name, budget), group, box in zip(keys, groups, places, strict=True):
        axes = _layer_panel(page, box, group, worst, most)
        heading(axes, f"{name} · {budget} kept tokens")
    return page.figure


def _layer_panel(
    page: Sheet, box: Box, group: Sequence[Plain], worst: Plain, most: float
) -> "Axes":
    axes = page.axes((box.left + 0.35, box.bottom, box.width - 0.35, box.height))
    for row, loss in enumerate(group):
        lost, low, high = (1 - loss[key] for key in ("p05", "high", "low"))
        axes.barh(row, lost, 0.68, color="#b3214f" if loss is worst else "#c9a6bd")
        axes.plot([low, high], [row, row], color=INK, linewidth=1)
        axes.text(high + 0.015 * most, row, f"{lost:.3f}", size=7.5, va="center", color=SOFT)
    axes.set_yticks(range(len(group)), [layers_text(loss["layers"]) for loss in group])
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.12)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("loss of the tail, 1 - p05 of acceptance")
    return axes


@drawing()
def distribution(surface: Plain, variant: str | None = None) -> "Figure":
    """Share of tokens above 0.999 by length, and how the rest of the longest bin is spread."""
    name = variant or surface["cells"][0]["variant"]
    cells = [cell for cell in surface["cells"] if cell["variant"] == name]
    lowest_share = min(cell["above"] for cell in cells)
    width, body, (left, right) = boxes(2, tall_enough(surface, 3.2))
    title = (
        f"At least {100 * lowest_share:.0f} % of tokens are accepted whole; the rest makes the tail"
    )
    foot = (
        f"Whole: acceptance above {TOP}. Right: Beta distributions fitted to the other tokens, "
        "scaled to end at 0.999; KS is the largest distance between fit and tokens."
    )
    page = sheet(width, body, title, subtitle(surface, [name]), foot)
    axes = lines_panel(page, left, surface, name, "above")
    axes.set_ylim(math.floor(lowest_share * 20 - 0.2) / 20, 1.005)
    axes.set_ylabel("share of tokens above 0.999")
    heading(axes, "accepted whole")
    label_lines(axes, surface, name, "above")
    _densities(page, right, surface, cells)
    return page.figure


def _densities(page: Sheet, box: Box, surface: Plain, cells: Sequence[Plain]) -> None:
    """Fitted densities of a few budgets in the longest bin that has most of them."""
    axes = page.axes(box.place)
    fitted = [cell for cell in cells if cell["beta"]]
    counts = {cell["start"]: sum(c["start"] == cell["start"] for c in fitted) for cell in fitted}
    start = max(counts, key=lambda start: (counts[start], start), default=None)
    chosen = _few([cell for cell in fitted if cell["start"] == start])
    x = np.linspace(0.002, TOP - 0.002, 400)
    height = 1.0
    for rank, cell in enumerate(chosen):
        a, b, distance = cell["beta"]
        y, colour = beta_density(x, a, b), shades(surface)[cell["budget"]]
        axes.plot(x, y, color=colour, linewidth=1.5)
        height = max(height, float(y[x < 0.97].max()))
        text = f"{budget_text(cell['budget'])}  KS {distance:.3f}"
        beside(axes, 1.03, 0.95 - 0.17 / box.height * rank, text, size=7.5, color=colour)
    axes.set_ylim(0, 1.08 * height)
    axes.set_xlim(0, 1)
    axes.set_xlabel("acceptance of a token")
    axes.set_ylabel("density")
    if chosen:
        beside(axes, 1.03, 0.95 + 0.2 / box.height, "kept tokens", size=7, color=SOFT)
        edges = lengths_text([chosen[0]["start"], chosen[0]["stop"]])
        heading(axes, f"the rest, at lengths from {edges[0]} to {edges[1]}")


def _few(cells: Sequence[Plain]) -> list[Plain]:
    """At most FEW cells, evenly among the budgets, both ends included."""
    ordered = sorted(cells, key=lambda cell: (cell["budget"] is None, cell["budget"]))
    picks = np.linspace(0, len(ordered) - 1, min(FEW, len(ordered))).round().astype(int)
    return [ordered[pick] for pick in picks]


def beta_density(x: npt.NDArray[np.float64], a: float, b: float) -> npt.NDArray[np.float64]:
    """Density of a Beta distribution that is scaled to [0, TOP]."""
    share = x / TOP
    log_norm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_density = log_norm + (a - 1) * np.log(share) + (b - 1) * np.log1p(-share)
    return np.asarray(np.exp(log_density) / TOP)


@drawing()
def estimators(surface: Plain, variant: str | None = None, budget: int | None = None) -> "Figure":
    """Exact p05 beside its cheap estimates, for one budget; below, how wrong they are."""
    name = variant or surface["cells"][0]["variant"]
    line = telling_line(surface, name) if budget is None else _estimated(surface, name, budget)
    if not line:
        raise ValueError(f"estimators: the surface holds none for {name}, budget {budget}")
    top_k = line[0]["estimators"]["top_k"]
    gap = max(c["estimators"]["upper_p05"] - c["estimators"]["lower_p05"] for c in line)
    title = f"Bounds from the top {top_k} log-probs leave p05 open by up to {gap:.2f}"
    foot = (
        "Band: 95 % interval of the exact p05 over prompts. "
        "The sampled ratio min(1, p/q) has the mean of acceptance, not its quantiles."
    )
    kept = line[0]["budget"]
    whole = "under a schedule" if kept is None else f"{kept} kept tokens"
    words = f"{subtitle(surface, [name])} · {whole}"
    page = sheet(LEFT + 7.4 + 1.25, 5.1, title, words, foot)
    _estimates(page, Box(left=LEFT, bottom=2.2, width=7.4, height=2.6), surface, line)
    _errors(page, Box(left=LEFT, bottom=BELOW, width=7.4, height=1.35), surface, line)
    return page.figure


def telling_line(surface: Plain, name: str) -> list[Plain]:
    """Cells with estimators of the budget whose p05 is nearest to the first target, by length."""
    lines = [_estimated(surface, name, budget) for budget in budgets_of(surface)]

    def distance(line: Sequence[Plain]) -> float:
        return abs(float(np.median([cell["p05"] for cell in line])) - surface["targets"][0])

    return min((line for line in lines if line), key=distance, default=[])


def _estimated(surface: Plain, name: str, budget: int | None) -> list[Plain]:
    return [cell for cell in line_of(surface, name, budget) if cell["estimators"]]


def _estimates(page: Sheet, box: Box, surface: Plain, line: Sequence[Plain]) -> None:
    axes, lengths = page.axes(box.place), lengths_of(surface["cells"])
    x = [lengths.middle(cell) for cell in line]
    lower, upper, ratio = (_estimate(line, key) for key in ("lower", "upper", "ratio"))
    exact, low, high = ([cell[key] for cell in line] for key in ("p05", "low", "high"))
    axes.fill_between(x, low, high, color=INK, alpha=0.1, linewidth=0)
    axes.vlines(x, lower, upper, color=LOWER, alpha=0.28, linewidth=7)
    axes.plot(x, exact, color=INK, linewidth=1.5, marker="o", markersize=3)
    axes.plot(x, ratio, "x", color=RATIO, markersize=5)
    acceptance_axis(axes, lowest(v for v in [*lower, *ratio, *low] if not math.isnan(v)))
    top_k = line[-1]["estimators"]["top_k"]
    named = (
        (exact, "exact p05", INK),
        (upper, f"top-{top_k} upper", UPPER),
        (lower, f"top-{top_k} lower", LOWER),
        (ratio, "sampled ratio", RATIO),
    )
    labels = [
        Label(y=values[-1], text=text, colour=colour)
        for values, text, colour in named
        if not math.isnan(values[-1])
    ]
    labels += [target_line(axes, target) for target in surface["targets"]]
    lengths.dress(axes, box.width, label="")
    axes.tick_params(axis="x", labelbottom=False)
    axes.set_ylabel("p05")
    axes.yaxis.set_label_coords(-0.5 / box.width, 0.5)
    label_ends(axes, labels)


def _errors(page: Sheet, box: Box, surface: Plain, line: Sequence[Plain]) -> None:
    axes, lengths = page.axes(box.place), lengths_of(surface["cells"])
    exact = np.array([cell["p05"] for cell in line])
    shares = np.array([lengths.width(cell) for cell in line]) * 0.24
    x = np.array([lengths.middle(cell) for cell in line])
    for shift, (key, colour) in enumerate((("lower", LOWER), ("ratio", RATIO), ("upper", UPPER))):
        errors = np.array(_estimate(line, key)) - exact
        axes.bar(x + (shift - 1) * shares, errors, shares * 0.88, color=colour)
    axes.axhline(0, color=INK, linewidth=0.8)
    lengths.dress(axes, box.width)
    axes.set_ylabel("estimate - exact")
    axes.yaxis.set_label_coords(-0.5 / box.width, 0.5)


def _estimate(line: Sequence[Plain], key: str) -> list[float]:
    """p05 of an estimate by bin, NaN where there is none."""
    values = [cell["estimators"][f"{key}_p05"] for cell in line]
    return [math.nan if value is None else value for value in values]
