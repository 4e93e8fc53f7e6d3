"""Figures of a surface's cells: the tail by length and by budget, beside the mean that hides it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.labels import Label, label_ends
from sparrow.report.lengths import Lengths, lengths_of, strip
from sparrow.report.panels import (
    Box,
    Plain,
    acceptance_axis,
    boxes,
    heading,
    length_scale,
    lowest,
    target_line,
)
from sparrow.report.style import FLOOR, SHORT_TO_LONG, Sheet, drawing, ramp, sheet, width_of
from sparrow.report.surface_words import (
    budget_text,
    budgets_of,
    describe,
    means_title,
    note,
    subtitle,
    tails_title,
    variants_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 8
"""More lines than this are drawn thin."""


@drawing()
def tails(surface: Plain) -> "Figure":
    """p05 against length, a line per budget with its interval, a panel per variant."""
    names, cells = variants_of(surface), surface["cells"]
    width, body, places = boxes(len(names), tall_enough(surface, 3.4))
    page = sheet(width, body, tails_title(cells), subtitle(surface, names), note(surface))
    for name, box in zip(names, places, strict=True):
        axes = lines_panel(page, box, surface, name, "p05")
        acceptance_axis(axes, _bottom(surface))
        axes.set_ylabel("p05 of acceptance")
        if len(names) > 1:
            heading(axes, describe(surface, name))
        label_lines(axes, surface, name, "p05")
    return page.figure


@drawing()
def means(surface: Plain) -> "Figure":
    """The mean beside p05 on one axis, a row per variant: the mean hides what the tail shows."""
    names, cells = variants_of(surface), surface["cells"]
    width, body, places = boxes(2 * len(names), tall_enough(surface, 3.0))
    page = sheet(width, body, means_title(cells), subtitle(surface, names), note(surface))
    panels = [(name, key) for name in names for key in ("mean", "p05")]
    for (name, key), box in zip(panels, places, strict=True):
        axes = lines_panel(page, box, surface, name, key)
        acceptance_axis(axes, _bottom(surface))
        axes.set_ylabel(f"{key} of acceptance")
        words = "the mean" if key == "mean" else "the 5th percentile"
        heading(axes, f"{words} · {name}" if len(names) > 1 else words)
        label_lines(axes, surface, name, key, ends_only=key == "mean")
    return page.figure


@drawing()
def budgets(surface: Plain) -> "Figure":
    """p05 against the budget, a line per bin of lengths: the needed budget is where it crosses."""
    if not sizes_of(surface):
        raise ValueError("budgets: the surface holds whole schedules only, no single budgets")
    names = variants_of(surface)
    width, body, places = boxes(len(names), 3.8, right=1.75)
    title = "Where a line crosses the target is the budget that its lengths need"
    ringed = f"Ringed: the smallest measured budget with p05 of {surface['targets'][0]:g} or more."
    foot = f"{ringed} {note(surface, bars=False)}"
    page = sheet(width, body, title, subtitle(surface, names), foot)
    for name, box in zip(names, places, strict=True):
        axes = _budget_panel(page, box, surface, name)
        if len(names) > 1:
            heading(axes, describe(surface, name))
    return page.figure


def sizes_of(surface: Plain) -> list[int]:
    """Budgets that are numbers."""
    return [budget for budget in budgets_of(surface) if budget is not None]


def tall_enough(surface: Plain, least: float) -> float:
    """Inches of a panel with room for a label per budget, targets and the floor."""
    return max(least, 0.4 + 0.145 * (len(budgets_of(surface)) + len(surface["targets"]) + 1))


def _bottom(surface: Plain) -> float:
    return lowest([*(cell["low"] for cell in surface["cells"]), *surface["targets"]])


def lines_panel(page: Sheet, box: Box, surface: Plain, name: str, key: str) -> "Axes":
    """One value against length, a line per budget, the floor dotted, and token counts below."""
    lengths = lengths_of(surface["cells"])
    axes = page.axes((box.left, box.bottom + 0.34, box.width, box.height - 0.34))
    floor = surface["floor"]
    x, y = [lengths.middle(cell) for cell in floor], [cell[key] for cell in floor]
    point = "o" if len(floor) == 1 else "none"
    axes.plot(x, y, color=FLOOR, linewidth=1.2, linestyle=(0, (1, 2)), marker=point, markersize=3)
    thin = len(budgets_of(surface)) > MANY
    for budget, colour in shades(surface).items():
        _line(axes, line_of(surface, name, budget), lengths, key, colour, thin)
    lengths.dress(axes, box.width, label="")
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    _counts(page, box, surface, name)
    return axes


def label_lines(
    axes: "Axes", surface: Plain, name: str, key: str, *, ends_only: bool = False
) -> None:
    """Budgets at the ends of their lines; targets and the floor at theirs."""
    lengths = lengths_of(surface["cells"])
    labels = []
    for budget, colour in shades(surface).items():
        for last in line_of(surface, name, budget)[-1:]:
            x, text = lengths.middle(last), budget_text(budget)
            labels.append(Label(y=last[key], text=text, colour=colour, x=x))
    if ends_only:
        labels = labels[:: max(1, len(labels) - 1)]
    if surface["floor"]:
        labels.append(Label(y=surface["floor"][-1][key], text="dense floor", colour=FLOOR))
    if key == "p05":
        labels += [target_line(axes, target) for target in surface["targets"]]
    label_ends(axes, labels, "kept tokens")


def shades(surface: Plain) -> dict[int | None, str]:
    """A colour for each budget, the same in all figures of a surface."""
    found = budgets_of(surface)
    return dict(zip(found, ramp(len(found)), strict=True))


def line_of(surface: Plain, name: str, budget: int | None) -> list[Plain]:
    """Cells of a variant and budget, by length."""
    found = [c for c in surface["cells"] if (c["variant"], c["budget"]) == (name, budget)]
    return sorted(found, key=lambda cell: cell["start"])


def _line(
    axes: "Axes", cells: Sequence[Plain], lengths: Lengths, key: str, colour: str, thin: bool
) -> None:
    """A line over neighbouring bins, broken where one is missing, with its interval."""
    rows: list[tuple[float, float, float, float]] = []
    for index, cell in enumerate(cells):
        if index and cells[index - 1]["stop"] != cell["start"]:
            rows.append((np.nan,) * 4)
        rows.append((lengths.middle(cell), cell[key], cell["low"], cell["high"]))
    x, y, low, high = np.array(rows).reshape(-1, 4).T
    if key == "p05":
        axes.fill_between(x, low, high, color=colour, alpha=0.07 if thin else 0.13, linewidth=0)
    size, width = (1.8, 1.1) if thin else (3.2, 1.6)
    axes.plot(x, y, color=colour, linewidth=width, marker="o", markersize=size)


def _counts(page: Sheet, box: Box, surface: Plain, name: str) -> None:
    """Median tokens of a cell, by bin, between the panel and its axis of lengths."""
    lengths = lengths_of(surface["cells"])
    below = page.axes((box.left, box.bottom, box.width, 0.3))
    by_bin: dict[int, list[Plain]] = {}
    for cell in surface["cells"]:
        if cell["variant"] == name:
            by_bin.setdefault(cell["start"], []).append(cell)
    bins = [by_bin[start] for start in sorted(by_bin)]
    medians = [float(np.median([cell["tokens"] for cell in bin])) for bin in bins]
    strip(below, lengths, [bin[0] for bin in bins], medians, "tokens")
    lengths.dress(below, box.width)


def _budget_panel(page: Sheet, box: Box, surface: Plain, name: str) -> "Axes":
    axes = page.axes(box.place)
    acceptance_axis(axes, _bottom(surface))
    axes.set_xscale("log", base=2)
    lengths = lengths_of(surface["cells"])
    colours = ramp(lengths.bins, SHORT_TO_LONG)
    for start, colour in zip(lengths.edges, colours, strict=False):
        found = [c for c in surface["cells"] if (c["variant"], c["start"]) == (name, start)]
        sized = [cell for cell in found if cell["budget"] is not None]
        line = sorted(sized, key=lambda cell: cell["budget"])
        _bin_line(axes, line, colour, surface["targets"][0], thin=lengths.bins > MANY)
    label_ends(axes, [target_line(axes, target) for target in surface["targets"]])
    length_scale(page, box, lengths, colours)
    ticks = _apart(sizes_of(surface), box.width)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("budget, kept tokens")
    axes.set_ylabel("p05 of acceptance")
    return axes


def _bin_line(axes: "Axes", line: Sequence[Plain], colour: str, target: float, thin: bool) -> None:
    """p05 of one bin against the budget, with a ring where it first reaches the target."""
    x, y, low, high = ([cell[key] for cell in line] for key in ("budget", "p05", "low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.05 if thin else 0.12, linewidth=0)
    size, width = (1.8, 1.1) if thin else (3.2, 1.6)
    axes.plot(x, y, color=colour, linewidth=width, marker="o", markersize=size)
    reached = [cell for cell in line if cell["p05"] >= target][:1]
    rings: dict[str, Any] = {
        "markerfacecolor": "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.5,
    }
    x, y = [cell["budget"] for cell in reached], [cell["p05"] for cell in reached]
    axes.plot(x, y, "o", markersize=5.5 if thin else 6.5, zorder=4, **rings)


def _apart(budgets: Sequence[int], inches: float) -> list[int]:
    """Budgets whose numbers do not touch on a logarithmic axis: the ends, and what fits between."""
    places = np.log2(budgets) * inches / max(1e-9, np.log2(budgets[-1] / budgets[0])) / 1.1
    halves = [width_of(str(budget), 8) / 2 + 0.06 for budget in budgets]
    kept = [0]
    last = len(budgets) - 1
    for i in range(1, len(budgets)):
        clear = places[i] - places[kept[-1]] >= halves[i] + halves[kept[-1]]
        before_last = i == last or places[last] - places[i] >= halves[i] + halves[last]
        if clear and before_last:
            kept.append(i)
    return [budgets[i] for i in kept]
