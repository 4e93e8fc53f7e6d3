"""Layout of charts and bars in pixels; templates/figure.svg draws them.

Axes have limits that follow the data, round ticks, and numbers as people write them. The reader's
font is unknown, so text is measured in a wide one (DejaVu Sans): what fits there fits in every
common system font.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.optimize import isotonic_regression

from sparrow.reporting.page import Axis, Bar, BarGroup, Bars, Chart, Level, Line, Point

WIDTH, TOP, BOTTOM, UNDER = 460.0, 34.0, 236.0, 46.0  # UNDER: for ticks and name of the x axis
SIZE, ROW, GAP = 13.0, 20.0, 16.0  # font size, height of legend rows, distance of labels
SAMPLE, BETWEEN = 30.0, 18.0  # a legend's piece of line, and the distance of two entries
END_ROOM = 112.0  # maximum width of labels at the ends of lines
MOVED = {4: 30.0, 8: 12.0}  # up to so many lines: how far labels may be from the ends of lines
DOT, SMALL_DOT, CROWD = 3.4, 2.2, 40  # radius of a mark, and of more than CROWD marks
THICK, PITCH, HEADING, APART = 20.0, 28.0, 26.0, 16.0  # bars; headings and distance of groups
NAME_ROOM = 150.0  # maximum width of the bars' names
STEPS = (1.0, 2.0, 5.0, 10.0)
BRIEF = ("g", ".0f")  # formats without decimals: large ticks become 20K, 3M
MINUS = "\N{MINUS SIGN}"
FINEST = 1e-9  # relative difference below which limits count as equal
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
WIDTHS = {  # shares of the font's size
    **dict.fromkeys("ijlI'|!", 0.3),
    **dict.fromkeys(" .,:;/\\()[]-ftrJ", 0.41),
    **dict.fromkeys('ceksvxyz_"*?{}^~`', 0.6),
    **dict.fromkeys("mMwW%@&#+=<>", 0.98),
}
LOWER, UPPER, OTHER, WIDE, BOLD = 0.65, 0.8, 0.9, 1.25, 1.12

# Axes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A linear map of values from low to high to pixels from start to stop (flipped or not)."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def format_value(value: float, form: str) -> str:
    """Format a value, with a true minus sign and no minus zero."""
    text = format(value, form)
    if not any(digit in text for digit in "123456789"):
        text = text.removeprefix("-")
    return text.replace("-", MINUS)


def format_interval(low: float, high: float, form: str) -> str:
    """Format an interval to stand behind its value."""
    return f" ({format_value(low, form)} to {format_value(high, form)})"


def tick_labels(values: Sequence[float], form: str) -> list[str]:
    """Labels of ticks, in thousands or millions where they are large."""
    most = max((abs(value) for value in values), default=0.0)
    if form not in BRIEF or most < 1e4:
        texts = [format_value(value, form) for value in values]
        while all("." in text and text[-1] in "0." for text in texts) and texts:
            texts = [text[:-1] for text in texts]  # 0.90 and 0.80 as 0.9 and 0.8
        return texts
    unit, name = (1e6, "M") if most >= 1e6 else (1e3, "K")
    return [format_value(value / unit, "g") + name if value else "0" for value in values]


def limits(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """Limits of an axis; open ones follow the values, and low is below high always."""
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if high - low > FINEST * max(abs(low), abs(high)):
        return low, high
    room = 0.1 * abs(low) or 1.0
    if axis.low is not None:
        return low, low + room
    if axis.high is not None:
        return high - room, high
    return (low - room, low + room) if low else (0.0, 1.0)


def tick_step(low: float, high: float, count: int, form: str) -> float:
    """The smallest round step with at most `count` intervals whose ticks the format can show."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    for scale in range(20):
        for step in STEPS:
            size = step * power * 10.0**scale
            if (high - low) / size <= count * (1 + FINEST) and _representable(size, form):
                return size
    return high - low  # no round step can be shown: the ends alone


def _representable(step: float, form: str) -> bool:
    """Whether a format shows a step without rounding: ".0f" would show 0.5 as 0 and 2.5 as 2."""
    text = format(step, form)
    shown = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return math.isclose(shown, step, rel_tol=1e-6)


def ticks(low: float, high: float, count: int, axis: Axis) -> list[float]:
    """Round values from low to high, about `count` of them."""
    step = tick_step(low, high, count, axis.form)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [_clean(rank * step) for rank in range(first, last + 1)]


def expand_to_ticks(low: float, high: float, axis: Axis, count: int) -> tuple[float, float]:
    """Move the open limits of an axis outwards to the next ticks."""
    step = tick_step(low, high, count, axis.form)
    if axis.low is None:
        low = _clean(math.floor(low / step + 1e-6) * step)
    if axis.high is None:
        high = _clean(math.ceil(high / step - 1e-6) * step)
    return low, high


def _clean(value: float) -> float:
    """Drop rounding errors: 0.30000000000000004 becomes 0.3."""
    return float(f"{value:.12g}")


# Text.


def text_width(text: str, size: float, bold: bool = False) -> float:
    """The width of a line of text in pixels, in a wide font."""
    return sum(map(_share, text)) * size * (BOLD if bold else 1.0)


def _share(character: str) -> float:
    if character in WIDTHS:
        return WIDTHS[character]
    if unicodedata.east_asian_width(character) in "WF":
        return WIDE
    if not character.isascii() and not character.isalpha():
        return OTHER if unicodedata.category(character) != "Mn" else 0.0
    return UPPER if character.isupper() else LOWER


def shorten_text(text: str, size: float, room: float, bold: bool = False) -> str:
    """Shorten a text in its middle where it is wider than the room.

    Names of runs share their beginnings or their ends, so both are kept.
    """
    if text_width(text, size, bold) <= room:
        return text
    for kept in range(len(text) - 1, 1, -1):
        cut = text[: (kept + 1) // 2].rstrip() + ELLIPSIS + text[-(kept // 2) :].lstrip()
        if text_width(cut, size, bold) <= room:
            return cut
    return ELLIPSIS


def wrap_text(text: str, size: float, room: float, bold: bool = False) -> list[str]:
    """Wrap a text into lines that fit; a word that is too long for a line loses its middle."""
    lines: list[str] = []
    for word in text.split():
        word = shorten_text(word, size, room, bold)
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(joined, size, bold) <= room:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def spread_labels(
    targets: Sequence[float], weights: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Positions nearest to the targets (weighted least squares) that are at least a gap apart.

    All lie between low and high. Labels that would touch move together, around the mean of their
    targets. Where there is no room for the gaps, they shrink.
    """
    gap = min(gap, (high - low) / max(1, len(targets) - 1))
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    level = [targets[i] - rank * gap for rank, i in enumerate(order)]
    if level:
        level = isotonic_regression(level, weights=[weights[i] for i in order]).x.tolist()
    highest = high - (len(targets) - 1) * gap
    places = [0.0] * len(targets)
    for rank, i in enumerate(order):
        places[i] = max(min(level[rank], highest), low) + rank * gap
    return places


# Charts.


def pixels(value: float) -> str:
    """Format a coordinate, to a tenth of a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class Label:
    """A name with its position, and the piece of line that it names."""

    text: str
    full_text: str
    css_class: str  # role, and faint
    x: float
    y: float
    path: str
    dot: Point | None = None


@dataclass(frozen=True, slots=True)
class Stroke:
    """A path with its marks: a line, a band, whiskers or a level."""

    kind: str
    css_class: str
    path: str
    dots: Sequence[Point] = ()
    radius: float = DOT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLayout:
    """A chart in pixels; ticks are positions with their labels."""

    chart: Chart
    x: Scale
    y: Scale
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    ends: Sequence[Label]
    legend: Sequence[Label]
    height: float

    def strokes(self) -> list[Stroke]:
        """All strokes, from back to front."""
        behind = [line for line in self.chart.lines if line.faint]
        front = [line for line in self.chart.lines if not line.faint]
        drawn = [_spans(self, line) for line in (*behind, *front) if line.spans]
        drawn += [_line(self, line) for line in behind]
        drawn += [_level(self, level) for level in self.chart.levels]
        return drawn + [_line(self, line) for line in front if line.points]


def layout_chart(chart: Chart) -> ChartLayout:
    """Lay out a chart; labels stand at the ends of lines where few lines have short names."""
    y = _y_scale(chart)
    y_ticks = _place_ticks(ticks(y.low, y.high, 5, chart.y), y, chart.y)
    left = 12 + max((text_width(text, SIZE) for _, text in y_ticks), default=0.0)
    shown = labelled_lines(chart.lines)
    direct = _fit_at_ends(shown, chart.levels, y)
    names = [level.name for level in chart.levels] + [line.name for line in shown if direct]
    wide = max((min(text_width(name, SIZE), END_ROOM) for name in names if name), default=-8.0)
    low, high = limits(
        [x for line in chart.lines for x, *_ in (*line.points, *line.spans)], chart.x
    )
    x = Scale(low=low, high=high, start=max(left, 34.0), stop=WIDTH - wide - 22)
    legend = [] if direct else _legend(shown)
    return ChartLayout(
        chart=chart,
        x=x,
        y=y,
        x_ticks=_x_ticks(x, chart.x),
        y_ticks=y_ticks,
        ends=_end_labels(chart.levels, shown if direct else [], x, y),
        legend=legend,
        height=max((label.y for label in legend), default=BOTTOM + UNDER - 6) + 6,
    )


def labelled_lines(lines: Sequence[Line]) -> list[Line]:
    """Lines to be named: every name once, and no raw line behind its smoothed one."""
    smoothed = {line.role for line in lines if not line.faint}
    labelled: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.name and not (line.faint and line.role in smoothed):
            labelled.setdefault((line.name, line.role), line)
    return list(labelled.values())


def _fit_at_ends(lines: Sequence[Line], levels: Sequence[Level], y: Scale) -> bool:
    """Whether labels fit at the ends of lines: few, short, and not far from the ends."""
    for line in lines:
        wide = text_width(line.name, SIZE) > END_ROOM
        if not line.points or line.shape == "marks" or wide:
            return False
    far = next((move for count, move in MOVED.items() if len(lines) <= count), -1.0)
    true = [_clamped(y.at(line.points[-1][1])) for line in lines]
    true += [_clamped(y.at(level.y)) for level in levels]
    places = spread_labels(true, [1.0] * len(true), GAP, TOP, BOTTOM)
    return all(abs(place - start) <= far for start, place in zip(true, places, strict=True))


def _end_labels(levels: Sequence[Level], lines: Sequence[Line], x: Scale, y: Scale) -> list[Label]:
    """Labels right of the plot with leader lines; levels keep their positions."""
    named = [(level.name, level.role, x.stop, level.y, 4.0) for level in levels if level.name]
    named += [
        (line.name, line.role, x.at(line.points[-1][0]), line.points[-1][1], 1.0) for line in lines
    ]
    true = [_clamped(y.at(value)) for *_, value, _ in named]
    places = spread_labels(true, [hold for *_, hold in named], GAP, TOP, BOTTOM)
    labels = []
    for (name, role, at, *_), start, place in zip(named, true, places, strict=True):
        hair = pixels(start)
        lead = "" if at > x.stop - 2 else f"M{pixels(at + 5)} {hair}H{pixels(x.stop)}"
        lead += f"M{pixels(x.stop + 2)} {hair}L{pixels(x.stop + 11)} {pixels(place)}"
        text = shorten_text(name, SIZE, END_ROOM)
        labels.append(Label(text, name, role, x.stop + 15, place + 4.5, lead))
    return labels


def _legend(lines: Sequence[Line]) -> list[Label]:
    """The legend under the plot: names with pieces of their lines, in rows."""
    labels, x, y = [], 0.0, BOTTOM + UNDER + 18
    for line in lines:
        full_text = line.name + ("" if line.points else " (nothing measured)")
        text = shorten_text(full_text, SIZE, WIDTH - SAMPLE)
        wide = SAMPLE + text_width(text, SIZE)
        if x and x + wide > WIDTH:
            x, y = 0.0, y + ROW
        piece = "" if line.shape == "marks" else f"M{pixels(x)} {pixels(y - 4.5)}h22"
        dot = (x + 11, y - 4.5) if line.shape in ("dots", "marks") else None
        labels.append(Label(text, full_text, _css_class(line), x + SAMPLE, y, piece, dot))
        x += wide + BETWEEN
    return labels


def _clamped(y: float) -> float:
    return min(max(y, TOP), BOTTOM)


def _y_scale(chart: Chart) -> Scale:
    """The scale of y, from tick to tick; levels keep a distance from the edges."""
    values = [y for line in chart.lines for _, y in line.points]
    values += [y for line in chart.lines for span in line.spans for y in span[1:]]
    levels = [level.y for level in chart.levels]
    low, high = limits(values + levels, chart.y)
    off = 0.03 * (high - low)
    low, high = limits([*values, *(y + side for y in levels for side in (-off, off))], chart.y)
    low, high = expand_to_ticks(low, high, chart.y, 5)
    return Scale(low=low, high=high, start=BOTTOM, stop=TOP)


def _place_ticks(values: Sequence[float], scale: Scale, axis: Axis) -> list[tuple[float, str]]:
    texts = tick_labels(values, axis.form)
    return [(scale.at(value), text) for value, text in zip(values, texts, strict=True)]


def _x_ticks(x: Scale, axis: Axis) -> list[tuple[float, str]]:
    """As many ticks as have room for their labels."""
    for count in (6, 5, 4, 3, 2, 1):
        placed = _place_ticks(ticks(x.low, x.high, count, axis), x, axis)
        spans = [(place, text_width(text, SIZE) / 2) for place, text in placed]
        free = all(b - v - a - u > 10 for (a, u), (b, v) in pairwise(spans))
        if free and all(u <= a and a + u <= WIDTH for a, u in spans):
            return placed
    return []


def _css_class(line: Line) -> str:
    return f"{line.role} faint" if line.faint else line.role


def _line(frame: ChartLayout, line: Line) -> Stroke:
    """A line's path and its marks; a single point is always a mark."""
    places = [(frame.x.at(x), frame.y.at(y)) for x, y in line.points]
    marks = places if line.shape in ("dots", "marks") or len(places) == 1 else []
    small = len(marks) > CROWD or line.faint
    path = ""
    if len(places) > 1 and line.shape != "marks":
        path = _joined(_corners(places) if line.shape == "steps" else places)
    return Stroke("line", _css_class(line), path, marks, SMALL_DOT if small else DOT)


def _level(frame: ChartLayout, level: Level) -> Stroke:
    y, ends = frame.y.at(level.y), (frame.x.start, frame.x.stop)
    return Stroke("level", level.role, _joined([(x, y) for x in ends]))


def _spans(frame: ChartLayout, line: Line) -> Stroke:
    """A line's intervals: bars with caps for dots, a band for all other shapes."""
    placed = [(frame.x.at(x), frame.y.at(low), frame.y.at(high)) for x, low, high in line.spans]
    if line.shape in ("dots", "marks") or len(placed) == 1:
        bars = [
            f"M{pixels(x - 4)} {pixels(high)}h8m-4 0V{pixels(low)}m-4 0h8"
            for x, low, high in placed
        ]
        return Stroke("whisker", line.role, "".join(bars))
    upper, lower = [(x, high) for x, _, high in placed], [(x, low) for x, low, _ in placed]
    if line.shape == "steps":
        upper, lower = _corners(upper), _corners(lower)
    return Stroke("band", line.role, _joined([*upper, *reversed(lower)]) + "Z")


def _joined(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{pixels(x)} {pixels(y)}" for x, y in places)


def _corners(places: Sequence[Point]) -> list[Point]:
    """Corners of a step function: a value holds until the next x."""
    corners = [places[0]]
    for x, y in places[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A group of bars in pixels: its heading from y on, its bars from `top` on, and their scale."""

    group: BarGroup
    y: float
    top: float
    scale: Scale

    @property
    def room(self) -> float:
        """Width for its name beside its sentence."""
        say = shorten_text(self.group.say, SIZE, WIDTH * 0.55, bold=True)
        return WIDTH - text_width(say, SIZE, bold=True) - 14


@dataclass(frozen=True, slots=True)
class BarLayout:
    """Bars in pixels: names up to `left`, then bars, then values."""

    left: float
    groups: Sequence[GroupLayout]
    height: float


def layout_bars(bars: Bars) -> BarLayout:
    """Lay out bars, group under group; the scale of a group includes zero."""
    all_bars = [bar for group in bars.groups for bar in group.bars]
    names = max(min(text_width(bar.name, SIZE), NAME_ROOM) for bar in all_bars)
    values = max(text_width(bar_label(bars, bar), SIZE, bold=True) for bar in all_bars)
    left, right = names + 12, max(WIDTH - values - 10, names + 60)
    y, groups = 0.0, []
    for group in bars.groups:
        top = y + (HEADING if group.name or group.say else 0.0)
        ends = [0.0, *(end for bar in group.bars for end in (bar.value, *(bar.interval or ())))]
        low, high = min(ends), max(ends)
        scale = Scale(low=low, high=high if high > low else low + 1, start=left, stop=right)
        groups.append(GroupLayout(group, y, top, scale))
        y = max(y + HEADING, top + PITCH * len(group.bars) - PITCH + THICK) + APART
    return BarLayout(left, groups, y - APART + 2)


def bar_label(bars: Bars, bar: Bar) -> str:
    """A bar's value with its unit."""
    return f"{format_value(bar.value, bars.form)} {bars.unit}".strip()
