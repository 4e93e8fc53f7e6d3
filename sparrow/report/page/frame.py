"""Where everything of a chart goes: scales, ticks, labels at the lines' ends or in a legend."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparrow.report.labels import spread
from sparrow.report.page.parts import Axis, Chart, Level, Line
from sparrow.report.page.scale import Scale, limits, rounded_out, tick_texts, ticks
from sparrow.report.page.words import distinct, width_of

WIDTH, TOP, BOTTOM, UNDER = 460.0, 34.0, 236.0, 46.0  # UNDER: ticks and name of the x axis
SIZE, ROW, GAP = 13.0, 20.0, 16.0  # of words, of legend rows, between labels
SAMPLE, BETWEEN = 30.0, 18.0  # a legend's piece of line, and the room between two entries
END_ROOM = 112.0  # at most, for labels at the ends of lines
MOVED = {4: 30.0, 8: 12.0}  # so many lines or fewer may have labels moved so far from their ends
ROLES = {f"run-{i}" for i in range(6)} | {f"ramp-{i}" for i in range(8)}
ROLES |= {"dense", "sparse", "target", "quiet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A label right of the plot, and the place where what it names ends."""

    text: str
    whole: str
    role: str
    x: float
    y: float
    place: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line's name in the legend, at a place under the plot."""

    line: Line
    text: str
    whole: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A chart with its places in pixels."""

    chart: Chart
    x: Scale
    y: Scale
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    ends: tuple[End, ...]
    legend: tuple[Entry, ...]
    height: float


def framed(chart: Chart) -> Frame:
    """Lay a chart out; labels stand at the ends of lines where few lines have short names."""
    check(chart)
    y = _down(chart)
    y_ticks = _labelled(ticks(y.low, y.high, 5, chart.y.form), chart.y)
    left = 12 + max((width_of(text, SIZE) for _, text in y_ticks), default=0.0)
    shown = _named(chart.lines)
    direct = _fit_at_ends(shown, chart.levels, y)
    names = [level.name for level in chart.levels] + [line.name for line in shown if direct]
    wide = max((min(width_of(name, SIZE), END_ROOM) for name in names if name), default=-8.0)
    x = _across(chart, max(left, 34.0), WIDTH - wide - 22)
    legend = () if direct else _legend(shown)
    rows = max((entry.y for entry in legend), default=BOTTOM + UNDER - 6) + 6
    return Frame(
        chart=chart,
        x=x,
        y=y,
        x_ticks=_x_ticks(x, chart.x),
        y_ticks=y_ticks,
        ends=_ends(chart.levels, shown if direct else [], x, y),
        legend=legend,
        height=rows,
    )


def check(chart: Chart) -> None:
    """Raise ValueError where a number is none, x falls, or a colour's role is unknown."""
    for line in chart.lines:
        where = f'chart "{chart.key}", line "{line.name}"'
        check_numbers(where, (value for point in line.points for value in point))
        check_numbers(where, (value for span in line.spans for value in span))
        check_role(where, line.role)
        xs = [x for x, _ in line.points]
        if any(later < x for x, later in pairwise(xs)):
            raise ValueError(f"{where}: x falls; give the points in the order of x")
    for level in chart.levels:
        check_numbers(f'chart "{chart.key}", level "{level.name}"', [level.y])
        check_role(f'chart "{chart.key}", level "{level.name}"', level.role)
    given = [chart.x.low, chart.x.high, chart.y.low, chart.y.high]
    check_numbers(f'chart "{chart.key}", limits', [end for end in given if end is not None])


def check_numbers(where: str, values: Iterable[float]) -> None:
    """Raise ValueError for what is no finite number."""
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a finite number; leave such points out")


def check_role(where: str, role: str) -> None:
    if role not in ROLES:
        raise ValueError(f'{where}: no role "{role}"; there are {", ".join(sorted(ROLES))}')


def _named(lines: Sequence[Line]) -> list[Line]:
    """The lines whose names a reader needs: each once, and none that stands behind its smooth."""
    firm = {line.role for line in lines if not line.faint}
    named: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.name and not (line.faint and line.role in firm):
            named.setdefault((line.name, line.role), line)
    return list(named.values())


def _fit_at_ends(lines: Sequence[Line], levels: Sequence[Level], y: Scale) -> bool:
    """Whether lines can be named where they end: few, short names, not far from their ends."""
    if not all(line.points and width_of(line.name, SIZE) <= END_ROOM for line in lines):
        return False
    far = next((move for count, move in MOVED.items() if len(lines) <= count), -1.0)
    true = [_clamped(y.at(line.points[-1][1])) for line in lines]
    true += [_clamped(y.at(level.y)) for level in levels]
    places = spread(true, [1.0] * len(true), GAP, TOP, BOTTOM)
    return all(abs(place - start) <= far for start, place in zip(true, places, strict=True))


def _ends(levels: Sequence[Level], lines: Sequence[Line], x: Scale, y: Scale) -> tuple[End, ...]:
    """Labels right of the plot: levels, and lines where they are named at their ends."""
    named = [(level.name, level.role, x.stop, y.at(level.y)) for level in levels if level.name]
    for line in lines:
        named.append((line.name, line.role, x.at(line.points[-1][0]), y.at(line.points[-1][1])))
    true = [_clamped(height) for *_, height in named]
    holds = [4.0] * (len(named) - len(lines)) + [1.0] * len(lines)
    places = spread(true, holds, GAP, TOP, BOTTOM)
    return tuple(
        End(text=text, whole=whole, role=role, x=min(at, x.stop), y=start, place=place)
        for text, (whole, role, at, _), start, place in zip(
            distinct([name for name, *_ in named], SIZE, END_ROOM), named, true, places, strict=True
        )
    )


def _clamped(y: float) -> float:
    return min(max(y, TOP), BOTTOM)


def _down(chart: Chart) -> Scale:
    """The scale of y, from tick to tick; a level that is outermost keeps off the edge."""
    values = [y for line in chart.lines for _, y in line.points]
    values += [y for line in chart.lines for span in line.spans for y in span[1:]]
    levels = [level.y for level in chart.levels]
    low, high = limits(values + levels, chart.y)
    off = 0.03 * (high - low)
    low, high = limits([*values, *(y + side for y in levels for side in (-off, off))], chart.y)
    low, high = rounded_out(low, high, chart.y, 5)
    return Scale(low=low, high=high, start=BOTTOM, stop=TOP)


def _across(chart: Chart, left: float, right: float) -> Scale:
    values = [x for line in chart.lines for x, _ in line.points]
    values += [span[0] for line in chart.lines for span in line.spans]
    low, high = limits(values, chart.x)
    return Scale(low=low, high=high, start=left, stop=right)


def _labelled(values: Sequence[float], axis: Axis) -> tuple[tuple[float, str], ...]:
    return tuple(zip(values, tick_texts(values, axis.form), strict=True))


def _x_ticks(x: Scale, axis: Axis) -> tuple[tuple[float, str], ...]:
    """As many ticks as have room for their labels."""
    for count in (6, 5, 4, 3, 2, 1):
        made = _labelled(ticks(x.low, x.high, count, axis.form), axis)
        spans = [(x.at(value), width_of(text, SIZE) / 2) for value, text in made]
        free = all(b - v - a - u > 10 for (a, u), (b, v) in pairwise(spans))
        if free and all(u <= a and a + u <= WIDTH for a, u in spans):
            return made
    return ()


def _legend(lines: Sequence[Line]) -> tuple[Entry, ...]:
    """Names under the plot, in rows, as many as fit into each."""
    empty = " (nothing measured)"
    whole = [line.name + ("" if line.points else empty) for line in lines]
    placed, x, y = [], 0.0, BOTTOM + UNDER + 18
    for line, name, text in zip(lines, whole, distinct(whole, SIZE, WIDTH - SAMPLE), strict=True):
        wide = SAMPLE + width_of(text, SIZE)
        if x and x + wide > WIDTH:
            x, y = 0.0, y + ROW
        placed.append(Entry(line=line, text=text, whole=name, x=x, y=y))
        x += wide + BETWEEN
    return tuple(placed)
