"""Words and numbers on figures: places that do not overlap, numbers as people write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.style import SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Text right of a panel that belongs to the value y; a line of the panel ends at (x, y).

    Where labels would touch they move; one with a high `hold` stays.
    """

    y: float
    text: str
    colour: str
    x: float | None = None
    bold: bool = False
    hold: float = 1.0


def spread(
    wanted: Sequence[float], holds: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """The places nearest to the wanted ones that are at least a gap apart, between low and high.

    Least squares, weighted by how much each holds to its place: labels that would touch move
    together, around the mean of what they want. Where there is no room for the gaps, they shrink.
    """
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = [int(i) for i in np.argsort(wanted, kind="stable")]
    blocks: list[tuple[float, float, int]] = []  # labels that touch: mean place, hold, how many
    for rank, i in enumerate(order):
        blocks.append((wanted[i] - rank * gap, holds[i], 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, v, m), (b, w, n) = blocks[-2:]
            blocks[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    level = [place for place, _, count in blocks for _ in range(count)]
    highest = high - (len(wanted) - 1) * gap
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = max(min(level[rank], highest), low) + rank * gap
    return places


def label_ends(axes: "Axes", labels: Sequence[Label], heading: str = "", size: float = 7.5) -> None:
    """Labels right of a panel at the height of their values, with hair lines that lead to them."""
    low, high = axes.get_ylim()
    wide, tall = inches_of(axes)
    true = [(min(max(label.y, low), high) - low) / (high - low) for label in labels]
    places = spread(true, [label.hold for label in labels], size * 1.22 / 72 / tall, 0.0, 1.0)
    hair: dict[str, Any] = {
        "linewidth": 0.6,
        "alpha": 0.7,
        "clip_on": False,
        "solid_capstyle": "butt",
    }
    for label, start, place in zip(labels, true, places, strict=True):
        colour, weight = label.colour, "bold" if label.bold else "normal"
        if label.x is not None:
            axes.plot([label.x, axes.get_xlim()[1]], [label.y] * 2, color=colour, **hair)
        x, y = [1.0, 1 + 0.04 / wide, 1 + 0.17 / wide], [start, start, place]
        axes.plot(x, y, transform=axes.transAxes, color=colour, **hair)
        beside(axes, 1 + 0.21 / wide, place, label.text, size=size, color=colour, weight=weight)
    if heading:
        top = max([*places, 1.0]) + 0.18 / tall
        beside(axes, 1 + 0.21 / wide, top, heading, size=7, color=SOFT)


def beside(axes: "Axes", x: float, y: float, text: str, **looks: Any) -> None:
    """Text in shares of the panel, which may lie outside of it."""
    axes.text(x, y, text, transform=axes.transAxes, va="center", **looks)


def inches_of(axes: "Axes") -> tuple[float, float]:
    """Width and height of a panel."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "a panel stands on a sheet"
    place, (width, height) = axes.get_position(), figure.get_size_inches()
    return place.width * width, place.height * height


def every(count: int, inches: float, each: float) -> int:
    """Label every n-th of so many places along some inches, so that each gets its room."""
    return max(1, int(np.ceil(count * each / inches)))


def thousands(value: float) -> str:
    """At most three digits: 950, 1.2K, 12K, 3.4M."""
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * unit:
            scaled = value / unit
            return (
                f"{scaled:.1f}".removesuffix(".0") + name
                if scaled < 9.95
                else f"{scaled:.0f}{name}"
            )
    return f"{value:.0f}"


def lengths_text(lengths: Sequence[int]) -> list[str]:
    """Lengths in thousands (2K) where all of them are whole thousands, else in full."""
    if all(length % 1000 == 0 for length in lengths):
        return [f"{length // 1000}K" if length else "0" for length in lengths]
    return [str(length) for length in lengths]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
