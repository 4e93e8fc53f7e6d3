"""Charts as inline SVG, by hand: no library, colours by class, the same bytes every time."""

from collections.abc import Sequence
from html import escape

from sparrow.report.page.frame import BOTTOM, SAMPLE, SIZE, TOP, WIDTH, Frame, framed
from sparrow.report.page.parts import Chart, Line, Span
from sparrow.report.page.scale import written
from sparrow.report.page.words import element, pixels, shortened, words

NOTHING = "nothing was measured"
DOT, LEAST_DOT, CROWD = 3.4, 2.2, 40  # radius of a mark; where a line has a crowd of them
OUTSIDE = 5.0  # how far marks at the edge may reach out of the plot


def chart(chart: Chart) -> str:
    """A chart as an <svg> element; a sentence in its place where it has no points."""
    frame = framed(chart)
    if not any(line.points for line in chart.lines):
        return nothing(chart.key, chart.title)
    behind = [line for line in chart.lines if line.faint]
    front = [line for line in chart.lines if not line.faint]
    drawn = [_spans(frame, line) for line in (*behind, *front)]
    drawn += [_line(frame, line) for line in behind] + [_levels(frame)]
    drawn += [_line(frame, line) for line in front]
    clip = f"{chart.key}-clip"
    body = [
        _clip(frame, clip),
        _grid(frame),
        element("g", "".join(drawn), clip_path=f"url(#{clip})"),
        _ends(frame),
        _legend(frame),
    ]
    return drawing(chart.key, chart.title, described(chart), frame.height, "".join(body))


def drawing(key: str, title: str, description: str, height: float, body: str) -> str:
    """The <svg> around a drawing, with its words for those who do not see it."""
    head = element("title", escape(title), id=f"{key}-title")
    head += element("desc", escape(description), id=f"{key}-desc")
    return element(
        "svg",
        head + body,
        viewBox=f"0 0 {pixels(WIDTH)} {pixels(height)}",
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-desc",
    )


def nothing(key: str, title: str) -> str:
    """What stands in the place of a figure without data."""
    middle = words(NOTHING, WIDTH / 2, 64.0, class_="none", text_anchor="middle")
    box = element("rect", x=0.5, y=0.5, width=WIDTH - 1, height=119.0, rx=6, class_="blank")
    return drawing(key, title, NOTHING, 120.0, box + middle)


def described(chart: Chart) -> str:
    """The chart in words: where each line starts and ends, and its levels."""
    said = [f"{chart.y.name} against {chart.x.name}."]
    for line in chart.lines:
        if not line.points:
            said.append(f"{line.name}: {NOTHING}.")
            continue
        (a, b), (c, d) = [
            (written(x, chart.x.form), written(y, chart.y.form))
            for x, y in (line.points[0], line.points[-1])
        ]
        said.append(f"{line.name}: {b} at {a}, {d} at {c}.")
    said += [f"{level.name}: {written(level.y, chart.y.form)}." for level in chart.levels]
    return " ".join(said)


def _clip(frame: Frame, name: str) -> str:
    box = element(
        "rect",
        x=frame.x.start - OUTSIDE,
        y=TOP - OUTSIDE,
        width=frame.x.stop - frame.x.start + 2 * OUTSIDE,
        height=BOTTOM - TOP + 2 * OUTSIDE,
    )
    return element("defs", element("clipPath", box, id=name))


def _grid(frame: Frame) -> str:
    """Hair lines at the ticks of y, ticks of both axes in words, the axes' names."""
    left, right, parts = frame.x.start, frame.x.stop, []
    for value, text in frame.y_ticks:
        y = frame.y.at(value)
        parts.append(element("path", d=f"M{pixels(left)} {pixels(y)}H{pixels(right)}"))
        parts.append(words(text, left - 8, y + 4.5, text_anchor="end"))
    for value, text in frame.x_ticks:
        x = frame.x.at(value)
        parts.append(element("path", d=f"M{pixels(x)} {pixels(BOTTOM)}v5", class_="tick"))
        parts.append(words(text, x, BOTTOM + 19, text_anchor="middle"))
    base = f"M{pixels(left)} {pixels(BOTTOM)}H{pixels(right)}"
    parts.append(element("path", d=base, class_="base"))
    down, across = frame.chart.y.name, frame.chart.x.name
    parts.append(words(shortened(down, SIZE, WIDTH), 0.0, 14.0, down, class_="axis"))
    place = {"class_": "axis", "text_anchor": "end"}
    parts.append(words(shortened(across, SIZE, right), right, BOTTOM + 38, across, **place))
    return element("g", "".join(parts), class_="grid")


def _levels(frame: Frame) -> str:
    across = f"H{pixels(frame.x.stop)}"
    return "".join(
        element(
            "path",
            d=f"M{pixels(frame.x.start)} {pixels(frame.y.at(level.y))}{across}",
            class_=f"level {level.role}",
        )
        for level in frame.chart.levels
    )


def _line(frame: Frame, line: Line) -> str:
    """A line's path and its marks; a single point is always a mark."""
    places = [(frame.x.at(x), frame.y.at(y)) for x, y in line.points]
    marks = places if line.shape == "dots" or len(places) == 1 else []
    radius = DOT if len(marks) <= CROWD and not line.faint else LEAST_DOT
    path = ""
    if len(places) > 1:
        d = _stairs(places) if line.shape == "steps" else _joined(places)
        path = element("path", d=d, class_="line")
    path += "".join(element("circle", cx=x, cy=y, r=radius) for x, y in marks)
    return element("g", path, class_=_looks(line)) if path else ""


def _looks(line: Line) -> str:
    return f"{line.role} faint" if line.faint else line.role


def _joined(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{pixels(x)} {pixels(y)}" for x, y in places)


def _stairs(places: Sequence[tuple[float, float]]) -> str:
    """Each value is held until the next x."""
    (x, y), *rest = places
    return f"M{pixels(x)} {pixels(y)}" + "".join(f"H{pixels(x)}V{pixels(y)}" for x, y in rest)


def _spans(frame: Frame, line: Line) -> str:
    """A line's intervals: bars with caps for dots, one band for everything else."""
    placed = [(frame.x.at(x), frame.y.at(low), frame.y.at(high)) for x, low, high in line.spans]
    if not placed:
        return ""
    if line.shape == "dots" or len(placed) == 1:
        bars = [
            f"M{pixels(x - 4)} {pixels(high)}h8m-4 0V{pixels(low)}m-4 0h8"
            for x, low, high in placed
        ]
        return element("g", element("path", d="".join(bars), class_="whisker"), class_=line.role)
    band = element("path", d=_band(placed, line.shape == "steps"), class_="band")
    return element("g", band, class_=line.role)


def _band(placed: Sequence[Span], steps: bool) -> str:
    """Along the upper ends and back along the lower ones."""
    upper = [(x, high) for x, _, high in placed]
    lower = [(x, low) for x, low, _ in placed]
    if steps:
        upper, lower = _corners(upper), _corners(lower)
    return _joined([*upper, *reversed(lower)]) + "Z"


def _corners(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    made = [places[0]]
    for x, y in places[1:]:
        made += [(x, made[-1][1]), (x, y)]
    return made


def _ends(frame: Frame) -> str:
    """Names right of the plot, each led to by a hair line."""
    right, parts = frame.x.stop, []
    for end in frame.ends:
        lead = "" if end.x > right - 2 else f"M{pixels(end.x + 5)} {pixels(end.y)}H{pixels(right)}"
        lead += f"M{pixels(right + 2)} {pixels(end.y)}L{pixels(right + 11)} {pixels(end.place)}"
        label = words(end.text, right + 15, end.place + 4.5, end.whole, class_="end")
        parts.append(
            element("g", element("path", d=lead, class_="lead-line") + label, class_=end.role)
        )
    return "".join(parts)


def _legend(frame: Frame) -> str:
    """Pieces of line with their names, under the plot."""
    parts = []
    for entry in frame.legend:
        y = entry.y - 4.5
        piece = element("path", d=f"M{pixels(entry.x)} {pixels(y)}h22", class_="line")
        if entry.line.shape == "dots":
            piece += element("circle", cx=entry.x + 11, cy=y, r=DOT)
        name = words(entry.text, entry.x + SAMPLE, entry.y, entry.whole, class_="name")
        parts.append(element("g", piece + name, class_=_looks(entry.line)))
    return element("g", "".join(parts), class_="legend") if parts else ""
