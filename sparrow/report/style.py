"""How every figure looks: paper, words, colours, files.

matplotlib is imported where it is used, and only in this room, so importing sparrow needs none.
Figures are drawn without pyplot: nothing is shown, and no figure outlives its caller. Whatever
draws runs inside `drawing`, which starts from matplotlib's own defaults: a user's matplotlibrc
changes nothing, and a figure drawn twice gives the same bytes.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, FAINT, GRID = "#1f2328", "#5b6470", "#7d8691", "#e9ecef"
TARGET, FLOOR, ACCENT = "#1f2328", "#7d8691", "#2b6cb0"
FEW_TO_MANY = ("#7a0c22", "#b3214f", "#a04a9c", "#6c6fc4", "#3c92c8", "#2fada6")
"""Budgets, from few kept tokens to many; lightness only grows, so the order needs no hue."""
SHORT_TO_LONG = ("#a9a23f", "#6f9a4b", "#3b8864", "#27706f", "#2a5273", "#33305f")
"""Lengths, from short to long, in other hues than budgets have."""
SIDE = 0.3  # inches of white left and right of the words
RULES: dict[Any, Any] = {
    "font.family": "sans-serif",  # its first name, DejaVu Sans, comes with matplotlib
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.edgecolor": "#c3c9d0",
    "axes.labelcolor": SOFT,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#c3c9d0",
    "ytick.color": "#c3c9d0",
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # words stay words: they can be searched and copied
    "svg.hashsalt": "sparrow",
}


@contextmanager
def drawing() -> Iterator[None]:
    """The look of all figures, for a block or (as `@drawing()`) a function."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots: this needs the package matplotlib: pip install it", name="matplotlib"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        with matplotlib.rc_context(RULES):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A figure with a heading and a foot; panels are placed between them, in inches."""

    figure: "Figure"
    width: float
    height: float
    foot: float

    def axes(self, box: tuple[float, float, float, float], **settings: Any) -> "Axes":
        """A panel at (left, bottom, width, height), counted from the lower left of the body."""
        left, bottom, width, height = box
        place = (
            left / self.width,
            (bottom + self.foot) / self.height,
            width / self.width,
            height / self.height,
        )
        return self.figure.add_axes(place, **settings)


def sheet(width: float, body: float, title: str, subtitle: str, note: str = "") -> Sheet:
    """White paper: what is seen, of what, a body of that many inches, and how to read it."""
    from matplotlib.figure import Figure

    room = width - 2 * SIDE
    head = [(line, 13.0, INK, "bold") for line in wrapped(title, 13.0, room, "bold")]
    head += [(line, 9.0, SOFT, "normal") for line in wrapped(subtitle, 9.0, room)]
    foot = [(line, 7.5, FAINT, "normal") for line in wrapped(note, 7.5, room)]
    above = 0.22 + sum(_leading(size) for _, size, _, _ in head) + 0.16
    below = 0.12 + sum(_leading(size) for _, size, _, _ in foot) + 0.06
    height = above + body + below
    figure = Figure(figsize=(width, height), facecolor="white")
    for lines, start in ((head, height - 0.22), (foot, below - 0.06)):
        for line, size, colour, weight in lines:
            place = (SIDE / width, start / height)
            figure.text(*place, line, size=size, color=colour, weight=weight, va="top")
            start -= _leading(size)
    return Sheet(figure=figure, width=width, height=height, foot=below)


def _leading(size: float) -> float:
    return size * 1.45 / 72


def wrapped(text: str, size: float, inches: float, weight: str = "normal") -> list[str]:
    """Lines that fit; a word that is too long for a line keeps its end, where names differ."""
    lines: list[str] = []
    for word in text.split():
        while width_of(word, size, weight) > inches:
            word = "…" + word[max(2, len(word) // 12) :]
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(joined, size, weight) <= inches:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def width_of(text: str, size: float, weight: str = "normal") -> float:
    """Inches that a line of text takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family="sans-serif", size=size, weight=weight)
    return TextToPath().get_text_width_height_descent(text, font, False)[0] / 72


def ramp(count: int, anchors: Sequence[str] = FEW_TO_MANY) -> list[str]:
    """That many colours, evenly along the anchors."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    colours = LinearSegmentedColormap.from_list("ramp", list(anchors))
    return [to_hex(colours(i / max(1, count - 1))) for i in range(count)]


WRITERS: dict[str, dict[str, Any]] = {
    "svg": {"metadata": {"Date": None, "Creator": "sparrow"}},
    "png": {"metadata": {"Software": "sparrow"}, "dpi": 160},
}


def save(figure: "Figure", path: str | Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write path.svg and path.png, the same bytes for the same figure."""
    stem = Path(path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.parent / f"{stem.name}.{name}" for name in formats]
    with drawing():
        for name, target in zip(formats, written, strict=True):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=name, **WRITERS[name])
            write_whole(target, [drawn.getvalue()])
    return written
