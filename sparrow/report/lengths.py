"""The axis of lengths: bins side by side, each with its own width or all equally wide.

Bins that differ much in width (0, 128, 256, 512, 1024 ...) are drawn equally wide, with their edges
written at the ticks; otherwise the axis is a plain one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.labels import every, inches_of, lengths_text, thousands
from sparrow.report.style import FAINT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNEVEN = 3.0
"""Bins whose widths differ by more than this are drawn equally wide."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Edges of bins of total length, and where lengths stand on paper (0 to the number of bins)."""

    edges: tuple[int, ...]
    open_end: bool = False  # the last bin has no end; its last edge is only drawn

    @property
    def bins(self) -> int:
        return len(self.edges) - 1

    def place(self, length: float) -> float:
        """Where a length stands; beyond the ends, at the end."""
        length = min(max(length, self.edges[0]), self.edges[-1])
        if self._even():
            whole = self.edges[-1] - self.edges[0]
            return (length - self.edges[0]) / whole * self.bins
        return float(np.interp(length, self.edges, np.arange(len(self.edges))))

    def middle(self, bin: Mapping[str, Any]) -> float:
        return (self.place(bin["start"]) + self.place(self.stop(bin))) / 2

    def width(self, bin: Mapping[str, Any]) -> float:
        return self.place(self.stop(bin)) - self.place(bin["start"])

    def stop(self, bin: Mapping[str, Any]) -> int:
        """The end of a bin, drawn where it has none."""
        return self.edges[-1] if bin["stop"] is None else bin["stop"]

    def _even(self) -> bool:
        widths = np.diff(self.edges)
        return bool(widths.max() <= UNEVEN * widths.min())

    def dress(self, axes: "Axes", inches: float, label: str = "total length, tokens") -> None:
        """Limits, ticks at the edges (every n-th where they are many), and the label."""
        texts = lengths_text(self.edges)
        if self.open_end:
            texts[-1] = "…"
        step = every(len(texts), inches, 0.1 + 0.075 * max(map(len, texts)))
        axes.set_xlim(-0.02 * self.bins, self.bins * 1.02)
        axes.set_xticks([self.place(edge) for edge in self.edges[::step]], texts[::step])
        axes.grid(visible=False, axis="x")
        if label:
            axes.set_xlabel(label)


def lengths_of(bins: Iterable[Mapping[str, Any]]) -> Lengths:
    """The axis for some bins; a last bin without an end is drawn as wide as the one before."""
    every_bin = list(bins)
    edges = {bin["start"] for bin in every_bin}
    edges |= {bin["stop"] for bin in every_bin if bin["stop"] is not None}
    open_end = any(bin["stop"] is None for bin in every_bin)
    ordered = sorted(edges)
    if open_end:
        last = ordered[-1] - ordered[-2] if len(ordered) > 1 else max(1000, ordered[-1])
        ordered.append(ordered[-1] + last)
    return Lengths(tuple(ordered), open_end)


def strip(
    axes: "Axes",
    lengths: Lengths,
    bins: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    name: str,
) -> None:
    """Faint bars with their numbers, under a panel: how much there is in each bin."""
    top = max([*values, 1e-9])
    places = [lengths.middle(bin) for bin in bins]
    axes.bar(places, values, [0.86 * lengths.width(bin) for bin in bins], color="#dfe3e8")
    axes.set_ylim(0, top * 2)
    step = every(lengths.bins, inches_of(axes)[0], 0.3)
    for place, value in list(zip(places, values, strict=True))[::step]:
        text = thousands(value)
        axes.text(place, value + 0.1 * top, text, size=6, color=FAINT, ha="center", va="bottom")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylabel(name, size=6.5, color=FAINT, rotation=0, ha="right", va="center")
