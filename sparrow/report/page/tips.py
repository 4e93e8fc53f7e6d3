"""What a page shows under the pointer: every point of a chart with its values in words."""

import json
from typing import Any

from sparrow.report.page.frame import BOTTOM, TOP, Frame
from sparrow.report.page.parts import Line
from sparrow.report.page.scale import between, written


def tips(frame: Frame) -> str:
    """The points of a frame as JSON that is safe inside a <script>: page.js reads it.

    Values are written here, so that they read as everywhere else on the page.
    """
    x = frame.x
    said = {
        "box": [round(end, 1) for end in (x.start, TOP, x.stop, BOTTOM)],
        "lines": [_line(frame, line) for line in frame.chart.lines if line.points],
    }
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _line(frame: Frame, line: Line) -> dict[str, Any]:
    """A line's points: place across, place down, x in words, y in words with its interval."""
    chart, form = frame.chart, frame.chart.y.form
    spans = {x: between(low, high, form) for x, low, high in line.spans}
    return {
        "name": line.name,
        "role": line.role,
        "holds": line.shape == "steps",
        "faint": line.faint,
        "points": [
            [
                round(frame.x.at(x), 1),
                round(min(max(frame.y.at(y), TOP), BOTTOM), 1),
                f"{chart.x.name} {written(x, chart.x.form)}",
                written(y, form) + spans.get(x, ""),
            ]
            for x, y in line.points
        ],
    }
