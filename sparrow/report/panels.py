"""Where panels stand on a sheet, and what several figures put into them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.labels import Label, lengths_text
from sparrow.report.lengths import Lengths
from sparrow.report.style import INK, SOFT, TARGET, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Plain = Mapping[str, Any]
LEFT, BELOW, ABOVE = 0.78, 0.6, 0.36  # inches around a panel: numbers, axis label, heading


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a panel stands in the body of a sheet, in inches; labels fit right of it."""

    left: float
    bottom: float
    width: float
    height: float

    @property
    def place(self) -> tuple[float, float, float, float]:
        return self.left, self.bottom, self.width, self.height


def boxes(count: int, height: float, right: float = 1.05) -> tuple[float, float, list[Box]]:
    """Width of the sheet, height of its body, and a box for each panel, two in a row."""
    columns = min(count, 2)
    rows = -(-count // columns)
    wide = 7.4 if columns == 1 else 4.6
    across, down = LEFT + wide + right, BELOW + height + ABOVE
    places = [divmod(index, columns) for index in range(count)]
    found = [
        Box(
            left=LEFT + column * across,
            bottom=BELOW + (rows - 1 - row) * down,
            width=wide,
            height=height,
        )
        for row, column in places
    ]
    return columns * across + 0.15, rows * down, found


def heading(axes: "Axes", text: str) -> None:
    """What one of several panels shows."""
    axes.set_title(text, loc="left", size=9.5, color=INK, pad=7)


def target_line(axes: "Axes", target: float) -> Label:
    """A dashed line across the panel, and the label that says its value."""
    axes.axhline(target, color=TARGET, linewidth=0.9, linestyle=(0, (6, 3)), zorder=3)
    return Label(y=target, text=f"target {target:g}", colour=TARGET, bold=True, hold=50)


def acceptance_axis(axes: "Axes", bottom: float) -> None:
    """An axis of acceptance up to 1."""
    axes.set_ylim(bottom, 1 + 0.02 * (1 - bottom))


def lowest(values: Iterable[float]) -> float:
    """Where an axis of acceptance begins: a multiple of 0.05 below all values."""
    return float(max(0.0, np.floor((min(values) - 0.01) * 20) / 20))


def length_scale(page: Sheet, box: Box, lengths: Lengths, colours: Sequence[str]) -> None:
    """A strip of colours right of a panel: which length a line is for."""
    axes = page.axes((box.left + box.width + 1.0, box.bottom, 0.16, box.height))
    axes.bar([0] * len(colours), [1] * len(colours), 1, np.arange(len(colours)), color=colours)
    texts = lengths_text(lengths.edges)
    step = max(1, int(np.ceil(len(texts) * 0.17 / box.height)))
    axes.set_yticks(np.arange(len(texts))[::step], texts[::step])
    axes.set_ylim(0, len(colours))
    axes.set_xlim(-0.5, 0.5)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.yaxis.tick_right()
    axes.tick_params(axis="y", labelsize=7.5, length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(-0.5, len(colours) * (1 + 0.1 / box.height), "length", size=7, color=SOFT)
