"""Curves of very many steps, by a few: what is drawn fits a screen and a file.

Most curves are drawn by means of neighbouring steps; where the worst is what counts, by the lowest.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from sparrow.report.page.parts import Chart, Line, Point

MOST = 500  # points of a line


def thinned(chart: Chart, *, lowest: bool = False) -> Chart:
    """The chart with at most MOST points a line; its words say what a point then stands for."""
    longest = max((len(line.points) for line in chart.lines), default=0)
    count = -(-longest // MOST)
    if count <= 1:
        return chart
    what = "the lowest" if lowest else "the mean"
    say = f"{chart.say} In long runs a point is {what} of up to {count} steps.".strip()
    lines = tuple(_lowest(line) if lowest else _means(line) for line in chart.lines)
    return replace(chart, lines=lines, say=say)


def _means(line: Line) -> Line:
    points = tuple(
        (fmean(x for x, _ in part), fmean(y for _, y in part)) for part in _parts(line.points)
    )
    return replace(line, points=points)


def _lowest(line: Line) -> Line:
    """Points as they are, each with its own interval."""
    points = tuple(min(part, key=lambda point: point[1]) for part in _parts(line.points))
    kept = {x for x, _ in points}
    return replace(line, points=points, spans=tuple(span for span in line.spans if span[0] in kept))


def _parts(points: Sequence[Point]) -> list[Sequence[Point]]:
    count = max(1, -(-len(points) // MOST))
    return [points[start : start + count] for start in range(0, len(points), count)]
