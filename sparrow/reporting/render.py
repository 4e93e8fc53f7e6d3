"""Pages as HTML and figures as SVG, from the templates beside this file.

A page is self-contained: no requests, fonts or images. Its content security policy allows its own
style and script, by their hashes, and nothing else: a name that got past escaping could neither run
nor fetch anything. A file of figures contains its style, light and dark. The same data give the
same bytes.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from sparrow.files import write_whole
from sparrow.reporting import layout
from sparrow.reporting.layout import (
    BOTTOM,
    TOP,
    WIDTH,
    BarLayout,
    ChartLayout,
    format_interval,
    format_value,
)
from sparrow.reporting.markdown import NOTHING, figure_table
from sparrow.reporting.page import Chart, Figure, Item, Line, Page, Remarks, Section, Table

EMPTY_HEIGHT = 120.0
GAP, EDGE, LEADING = 56.0, 24.0, 1.45  # between panels, margin, line height
Texts = list[tuple[str, float, float, str]]  # kind, x, y, a line
SIZES = {"title": 18.0, "panel": 15.0, "note": 12.0}
PAIR = re.compile(r"(--[a-z0-9-]+): light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\);")
ROLE = re.compile(r"^\.(?:dense|sparse|target|quiet|run-\d|ramp-\d) \{.*\}$", re.MULTILINE)
DRAWING = re.compile(r"^svg text \{.*?^svg \.none \{[^\n]*$", re.MULTILINE | re.DOTALL)


def html(page: Page) -> str:
    """Render a page as one HTML document that opens offline."""
    texts = {"style": _template("page.css"), "script": _template("page.js")}
    return _environment().get_template("page.html").render(page=page, **texts) + "\n"


def svg(figure: Figure, at: tuple[float, float] | None = None) -> str:
    """Render a chart or bars as an <svg> element; without data, as a sentence.

    at: its position in a file of several.
    """
    frame = _layout(figure)
    rows = () if frame is None else figure_table(figure).rows
    sentences = [f"{name}: {', '.join(filter(None, values[:2]))}." for name, *values in rows]
    about = {"description": " ".join(sentences) or NOTHING, "height": _height(frame), "at": at}
    return _environment().get_template("figure.svg").render(about, figure=figure, frame=frame)


def _layout(figure: Figure) -> ChartLayout | BarLayout | None:
    if isinstance(figure, Chart):
        return layout.layout_chart(figure) if any(line.points for line in figure.lines) else None
    return layout.layout_bars(figure) if any(group.bars for group in figure.groups) else None


def _height(frame: ChartLayout | BarLayout | None) -> float:
    return EMPTY_HEIGHT if frame is None else frame.height


def svg_file(section: Section, columns: int = 2) -> str:
    """Render the figures of a section as an SVG document: title, panels in rows, sentence."""
    figures = section.figures
    columns = min(columns, len(figures))
    room = columns * WIDTH + (columns - 1) * GAP
    texts: Texts = []
    panels: list[Markup] = []
    y = _add_text(texts, "title", section.title, EDGE, EDGE, room)
    for start in range(0, len(figures), columns):
        row = [(EDGE + i * (WIDTH + GAP), f) for i, f in enumerate(figures[start:][:columns])]
        top = 8 + max(_add_text(texts, "panel", f.title, x, y + EDGE / 2, WIDTH) for x, f in row)
        panels += [Markup(svg(figure, (x, top))) for x, figure in row]
        y = top + max(_height(_layout(figure)) for _, figure in row)
    y = _add_text(texts, "note", section.say, EDGE, y + EDGE / 2, room)
    values = {"width": room + 2 * EDGE, "height": y + EDGE, "texts": texts, "panels": panels}
    style = Markup(figure_style().replace("<", "&lt;"))
    return _environment().get_template("figures.svg").render(values, style=style) + "\n"


def write_figures(sections: Iterable[Section], folder: str | Path) -> list[Path]:
    """Write a file for every section, named by its key; returns the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for section in sections:
        paths.append(folder / f"{section.key}.svg")
        write_whole(paths[-1], [svg_file(section)])
    return paths


def _add_text(texts: Texts, kind: str, text: str, x: float, y: float, room: float) -> float:
    """Add lines of text from y downwards; returns where they end."""
    for line in layout.wrap_text(text, SIZES[kind], room, bold=kind != "note"):
        y += SIZES[kind] * LEADING
        texts.append((kind, x, y - SIZES[kind] * (LEADING - 1), line))
    return y


def figure_style() -> str:
    """The part of page.css that drawings need, with light and dark colours."""
    text = _template("page.css")
    pairs, drawing = PAIR.findall(text), DRAWING.search(text)
    assert pairs, "page.css has a table of colours"
    assert drawing is not None, "page.css has rules for drawings"
    light = "".join(f"{name}:{value};" for name, value, _ in pairs)
    dark = "".join(f"{name}:{value};" for name, _, value in pairs)
    font = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
    rules = [f"svg{{{light}font-family:{font}}}"]
    rules += [f"@media (prefers-color-scheme: dark){{svg{{{dark}}}}}"]
    rules += [*ROLE.findall(text), drawing.group(), ".paper{fill:var(--paper)}"]
    for kind, size in SIZES.items():
        weight = "" if kind == "note" else ";fill:var(--ink);font-weight:640"
        rules.append(f"svg .{kind}{{font-size:{size:g}px{weight}}}")
    return "\n".join(rules)


def arrange_items(items: Sequence[Item]) -> Iterator[tuple[Item, str]]:
    """Items with the CSS class that arranges them in two columns without half-empty rows.

    Tables take a whole row. A chart that would be alone in its row has its caption beside it.
    Remarks fill the row of a chart, or take one.
    """
    beside = False  # whether the place to the right of the previous item is free
    for item, after in zip_longest(items, items[1:]):
        if isinstance(item, Table) or (isinstance(item, Remarks) and not beside):
            beside = False
            yield item, "full"
        elif beside:
            beside = False
            yield item, ""
        else:
            beside = after is not None and not isinstance(after, Table)
            yield item, "" if beside else "full alone"


def tooltips(figure: Figure) -> dict[str, Any] | None:
    """Data of the tooltips of page.js: every point of a chart with its formatted values."""
    if not isinstance(figure, Chart) or not any(line.points for line in figure.lines):
        return None
    frame = layout.layout_chart(figure)
    ends = (frame.x.start, TOP, frame.x.stop, BOTTOM)
    lines = [_line_tooltips(frame, line) for line in figure.lines if line.points]
    return {"box": [round(end, 1) for end in ends], "lines": lines}


def _line_tooltips(frame: ChartLayout, line: Line) -> dict[str, Any]:
    """A line's points: x and y in pixels, x as text, y as text with its interval."""
    x_axis, form = frame.chart.x, frame.chart.y.form
    spans = {x: format_interval(low, high, form) for x, low, high in line.spans}
    points = [
        [
            round(frame.x.at(x), 1),
            round(min(max(frame.y.at(y), TOP), BOTTOM), 1),
            f"{x_axis.name} {format_value(x, x_axis.form)}",
            format_value(y, form) + spans.get(x, ""),
        ]
        for x, y in line.points
    ]
    holds = line.shape == "steps"
    style = {"name": line.name, "role": line.role, "holds": holds, "faint": line.faint}
    return {**style, "points": points}


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("sparrow.reporting"), autoescape=True)
    environment.globals |= {"width": WIDTH, "top": TOP, "bottom": BOTTOM, "nothing": NOTHING}
    environment.globals |= {"size": layout.SIZE, "thick": layout.THICK, "dot": layout.DOT}
    environment.globals |= {"pitch": layout.PITCH, "name_room": layout.NAME_ROOM}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters |= {
        "drawing": lambda figure: Markup(svg(figure)),
        "pixels": layout.pixels,
        "arranged": arrange_items,
        "prose": _prose,
        "sha256": _sha256,
        "shorten": layout.shorten_text,
        "tooltips": tooltips,
        "bar_label": lambda bar, bars: layout.bar_label(bars, bar),
    }
    return environment


def _prose(text: str) -> Markup:
    """Escape sentences; text between backticks becomes code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sha256(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")


def _template(name: str) -> str:
    return files("sparrow.reporting").joinpath("templates", name).read_text(encoding="utf-8")
