"""Curves of very many steps, by means of a few: what is drawn fits a screen and a file."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar, cast

from sparrow.report.page.parts import Chart, Line

Row = TypeVar("Row", bound=tuple[float, ...])
MOST = 500  # points of a line


def thinned(chart: Chart) -> Chart:
    """The chart with at most MOST points a line; its words say where points are means."""
    longest = max((len(line.points) for line in chart.lines), default=0)
    count = -(-longest // MOST)
    if count <= 1:
        return chart
    say = f"{chart.say} Each point is the mean of {count} steps.".strip()
    return replace(chart, lines=tuple(_thin(line, count) for line in chart.lines), say=say)


def _thin(line: Line, count: int) -> Line:
    return replace(line, points=_means(line.points, count), spans=_means(line.spans, count))


def _means(rows: Sequence[Row], count: int) -> tuple[Row, ...]:
    """Of so many neighbours each, column by column; the last may have fewer."""
    parts = (rows[start : start + count] for start in range(0, len(rows), count))
    return tuple(cast(Row, tuple(map(fmean, zip(*part, strict=True)))) for part in parts)
