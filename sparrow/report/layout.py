"""Where everything of a chart or of bars goes, in pixels; templates/figure.svg draws it there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparrow.report.page import Axis, Bar, BarGroup, Bars, Chart, Level, Line, Point, Span
from sparrow.report.scale import Scale, limits, rounded_out, tick_texts, ticks, written
from sparrow.report.text import distinct, shortened, spread, width_of

WIDTH, TOP, BOTTOM, UNDER = 460.0, 34.0, 236.0, 46.0  # UNDER: ticks and name of the x axis
SIZE, ROW, GAP = 13.0, 20.0, 16.0  # of words, of legend rows, between labels
SAMPLE, BETWEEN = 30.0, 18.0  # a legend's piece of line, and the room between two entries
END_ROOM = 112.0  # at most, for labels at the ends of lines
MOVED = {4: 30.0, 8: 12.0}  # so many lines or fewer may have labels moved so far from their ends
DOT, SMALL_DOT, CROWD = 3.4, 2.2, 40  # radius of a mark; where a line has a crowd of them
THICK, PITCH, HEADING, APART = 20.0, 28.0, 26.0, 16.0  # of bars and their groups
NAME_ROOM = 150.0  # at most, for the bars' names


def pixels(value: float) -> str:
    """A place in an SVG, to a tenth."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A name with its place, and the piece of line that says what it names."""

    text: str
    whole: str
    looks: str  # role, and faint
    x: float
    y: float
    path: str
    dot: Point | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """A path with marks: a line, a band, whiskers or a level."""

    kind: str
    looks: str
    path: str
    dots: Sequence[Point] = ()
    radius: float = DOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A chart with its places in pixels; ticks are places with their texts."""

    chart: Chart
    x: Scale
    y: Scale
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    ends: Sequence[Label]
    legend: Sequence[Label]
    height: float

    def strokes(self) -> list[Stroke]:
        """What is drawn, from back to front."""
        behind = [line for line in self.chart.lines if line.faint]
        front = [line for line in self.chart.lines if not line.faint]
        drawn = [_spans(self, line) for line in (*behind, *front) if line.spans]
        drawn += [_line(self, line) for line in behind]
        drawn += [_level(self, level) for level in self.chart.levels]
        return drawn + [_line(self, line) for line in front if line.points]


def framed(chart: Chart) -> Frame:
    """Lay a chart out; labels stand at the ends of lines where few lines have short names."""
    y = _vertical(chart)
    y_ticks = _labelled(ticks(y.low, y.high, 5, chart.y), y, chart.y)
    left = 12 + max((width_of(text, SIZE) for _, text in y_ticks), default=0.0)
    shown = named_lines(chart.lines)
    direct = _fit_at_ends(shown, chart.levels, y)
    names = [level.name for level in chart.levels] + [line.name for line in shown if direct]
    wide = max((min(width_of(name, SIZE), END_ROOM) for name in names if name), default=-8.0)
    x = _horizontal(chart, max(left, 34.0), WIDTH - wide - 22)
    legend = [] if direct else _legend(shown)
    return Frame(
        chart=chart,
        x=x,
        y=y,
        x_ticks=_x_ticks(x, chart.x),
        y_ticks=y_ticks,
        ends=_ends(chart.levels, shown if direct else [], x, y),
        legend=legend,
        height=max((label.y for label in legend), default=BOTTOM + UNDER - 6) + 6,
    )


def named_lines(lines: Sequence[Line]) -> list[Line]:
    """The lines whose names a reader needs: each once, and none that stands behind its smooth."""
    firm = {line.role for line in lines if not line.faint}
    named: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.name and not (line.faint and line.role in firm):
            named.setdefault((line.name, line.role), line)
    return list(named.values())


def _fit_at_ends(lines: Sequence[Line], levels: Sequence[Level], y: Scale) -> bool:
    """Whether lines can be named where they end: few, short names, not far from their ends."""
    fits = all(
        line.points and line.shape != "marks" and width_of(line.name, SIZE) <= END_ROOM
        for line in lines
    )
    if not fits:
        return False
    far = next((move for count, move in MOVED.items() if len(lines) <= count), -1.0)
    true = [_clamped(y.at(line.points[-1][1])) for line in lines]
    true += [_clamped(y.at(level.y)) for level in levels]
    places = spread(true, [1.0] * len(true), GAP, TOP, BOTTOM)
    return all(abs(place - start) <= far for start, place in zip(true, places, strict=True))


def _ends(levels: Sequence[Level], lines: Sequence[Line], x: Scale, y: Scale) -> list[Label]:
    """Labels right of the plot, each led to by a hair line; levels hold to their places."""
    named = [(level.name, level.role, x.stop, y.at(level.y)) for level in levels if level.name]
    holds = [4.0] * len(named) + [1.0] * len(lines)
    for line in lines:
        named.append((line.name, line.role, x.at(line.points[-1][0]), y.at(line.points[-1][1])))
    true = [_clamped(height) for *_, height in named]
    places = spread(true, holds, GAP, TOP, BOTTOM)
    texts = distinct([name for name, *_ in named], SIZE, END_ROOM)
    labels = []
    for text, (whole, role, at, _), start, place in zip(texts, named, true, places, strict=True):
        hair = pixels(start)
        lead = "" if at > x.stop - 2 else f"M{pixels(at + 5)} {hair}H{pixels(x.stop)}"
        lead += f"M{pixels(x.stop + 2)} {hair}L{pixels(x.stop + 11)} {pixels(place)}"
        labels.append(
            Label(text=text, whole=whole, looks=role, x=x.stop + 15, y=place + 4.5, path=lead)
        )
    return labels


def _legend(lines: Sequence[Line]) -> list[Label]:
    """Names under the plot with pieces of their lines, in rows, as many as fit into each."""
    wholes = [line.name + ("" if line.points else " (nothing measured)") for line in lines]
    texts = distinct(wholes, SIZE, WIDTH - SAMPLE)
    labels, x, y = [], 0.0, BOTTOM + UNDER + 18
    for line, whole, text in zip(lines, wholes, texts, strict=True):
        wide = SAMPLE + width_of(text, SIZE)
        if x and x + wide > WIDTH:
            x, y = 0.0, y + ROW
        piece = "" if line.shape == "marks" else f"M{pixels(x)} {pixels(y - 4.5)}h22"
        dot = (x + 11, y - 4.5) if line.shape in ("dots", "marks") else None
        labels.append(
            Label(
                text=text, whole=whole, looks=_looks(line), x=x + SAMPLE, y=y, path=piece, dot=dot
            )
        )
        x += wide + BETWEEN
    return labels


def _clamped(y: float) -> float:
    return min(max(y, TOP), BOTTOM)


def _vertical(chart: Chart) -> Scale:
    """The scale of y, from tick to tick; a level that is outermost keeps off the edge."""
    values = [y for line in chart.lines for _, y in line.points]
    values += [y for line in chart.lines for span in line.spans for y in span[1:]]
    levels = [level.y for level in chart.levels]
    low, high = limits(values + levels, chart.y)
    off = 0.03 * (high - low)
    low, high = limits([*values, *(y + side for y in levels for side in (-off, off))], chart.y)
    low, high = rounded_out(low, high, chart.y, 5)
    return Scale(low=low, high=high, start=BOTTOM, stop=TOP)


def _horizontal(chart: Chart, left: float, right: float) -> Scale:
    values = [x for line in chart.lines for x, _ in line.points]
    values += [span[0] for line in chart.lines for span in line.spans]
    low, high = limits(values, chart.x)
    return Scale(low=low, high=high, start=left, stop=right, log=chart.x.log)


def _labelled(values: Sequence[float], scale: Scale, axis: Axis) -> list[tuple[float, str]]:
    texts = tick_texts(values, axis.form)
    return [(scale.at(value), text) for value, text in zip(values, texts, strict=True)]


def _x_ticks(x: Scale, axis: Axis) -> list[tuple[float, str]]:
    """As many ticks as have room for their labels."""
    for count in (6, 5, 4, 3, 2, 1):
        made = _labelled(ticks(x.low, x.high, count, axis), x, axis)
        spans = [(place, width_of(text, SIZE) / 2) for place, text in made]
        free = all(b - v - a - u > 10 for (a, u), (b, v) in pairwise(spans))
        if free and all(u <= a and a + u <= WIDTH for a, u in spans):
            return made
    return []


def _looks(line: Line) -> str:
    return f"{line.role} faint" if line.faint else line.role


def _line(frame: Frame, line: Line) -> Stroke:
    """A line's path and its marks; a single point is always a mark."""
    places = [(frame.x.at(x), frame.y.at(y)) for x, y in line.points]
    marks = places if line.shape in ("dots", "marks") or len(places) == 1 else []
    small = len(marks) > CROWD or line.faint
    path = ""
    if len(places) > 1 and line.shape != "marks":
        path = _joined(_corners(places) if line.shape == "steps" else places)
    return Stroke(
        kind="line",
        looks=_looks(line),
        path=path,
        dots=marks,
        radius=SMALL_DOT if small else DOT,
    )


def _level(frame: Frame, level: Level) -> Stroke:
    y, ends = frame.y.at(level.y), (frame.x.start, frame.x.stop)
    return Stroke(kind="level", looks=level.role, path=_joined([(x, y) for x in ends]))


def _spans(frame: Frame, line: Line) -> Stroke:
    """A line's intervals: bars with caps for dots, one band for everything else."""
    placed = [(frame.x.at(x), frame.y.at(low), frame.y.at(high)) for x, low, high in line.spans]
    if line.shape in ("dots", "marks") or len(placed) == 1:
        bars = [
            f"M{pixels(x - 4)} {pixels(high)}h8m-4 0V{pixels(low)}m-4 0h8"
            for x, low, high in placed
        ]
        return Stroke(kind="whisker", looks=line.role, path="".join(bars))
    return Stroke(kind="band", looks=line.role, path=_band(placed, line.shape == "steps"))


def _band(placed: Sequence[Span], steps: bool) -> str:
    """Along the upper ends and back along the lower ones."""
    upper = [(x, high) for x, _, high in placed]
    lower = [(x, low) for x, low, _ in placed]
    if steps:
        upper, lower = _corners(upper), _corners(lower)
    return _joined([*upper, *reversed(lower)]) + "Z"


def _joined(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{pixels(x)} {pixels(y)}" for x, y in places)


def _corners(places: Sequence[Point]) -> list[Point]:
    """Each value held until the next x."""
    made = [places[0]]
    for x, y in places[1:]:
        made += [(x, made[-1][1]), (x, y)]
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """A group of bars: its heading from y on, a bar from each of `rows` on, and their scale."""

    group: BarGroup
    name: str
    say: str
    names: Sequence[str]
    y: float
    rows: Sequence[float]
    scale: Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class BarFrame:
    """Bars with their places in pixels: names up to `left`, then bars, then values."""

    left: float
    groups: Sequence[PlacedGroup]
    height: float


def placed_bars(bars: Bars) -> BarFrame:
    """Lay bars out, group under group."""
    every = [bar for group in bars.groups for bar in group.bars]
    names = max(min(width_of(bar.name, SIZE), NAME_ROOM) for bar in every)
    values = max(width_of(valued(bars, bar), SIZE, bold=True) for bar in every)
    left, right = names + 12, max(WIDTH - values - 10, names + 60)
    y, groups = 0.0, []
    for group in bars.groups:
        groups.append(_group(group, left, right, y))
        y = max([y + HEADING, *(row + THICK for row in groups[-1].rows)]) + APART
    return BarFrame(left=left, groups=groups, height=y - APART + 2)


def valued(bars: Bars, bar: Bar) -> str:
    """A bar's value with its unit."""
    return f"{written(bar.value, bars.form)} {bars.unit}".strip()


def _group(group: BarGroup, left: float, right: float, y: float) -> PlacedGroup:
    """On a scale from zero, or from the least value below it, to the group's greatest."""
    say = shortened(group.say, SIZE, WIDTH * 0.55, bold=True)
    room = WIDTH - width_of(say, SIZE, bold=True) - 14
    top = y + (HEADING if group.name or group.say else 0.0)
    ends = [0.0, *(end for bar in group.bars for end in (bar.value, *(bar.interval or ())))]
    low, high = min(ends), max(ends)
    return PlacedGroup(
        group=group,
        name=shortened(group.name, SIZE, room, bold=True),
        say=say,
        names=distinct([bar.name for bar in group.bars], SIZE, NAME_ROOM),
        y=y,
        rows=[top + rank * PITCH for rank in range(len(group.bars))],
        scale=Scale(low=low, high=high if high > low else low + 1, start=left, stop=right),
    )
