"""Pages as HTML and figures as SVG, from the templates beside this file.

A page needs nothing else: no request leaves it, no font, no image. Its content security policy
allows its own style and script, by their hashes, and nothing besides: a name that got past escaping
could still not run or fetch. A file of figures has its style inside, light, and dark where a viewer
prefers that. The same data give the same bytes.
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
from sparrow.reporting.layout import BOTTOM, TOP, WIDTH, BarFrame, Frame, between, written
from sparrow.reporting.markdown import NOTHING, as_table
from sparrow.reporting.page import Chart, Figure, Item, Line, Page, Remarks, Section, Table

EMPTY_HEIGHT = 120.0
GAP, EDGE, LEADING = 56.0, 24.0, 1.45  # between panels, around them, of lines of text
Texts = list[tuple[str, float, float, str]]  # kind, x, y, a line
SIZES = {"title": 18.0, "panel": 15.0, "note": 12.0}
PAIR = re.compile(r"(--[a-z0-9-]+): light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\);")
ROLE = re.compile(r"^\.(?:dense|sparse|target|quiet|run-\d|ramp-\d) \{.*\}$", re.MULTILINE)
DRAWING = re.compile(r"^svg text \{.*?^svg \.none \{[^\n]*$", re.MULTILINE | re.DOTALL)


def html(page: Page) -> str:
    """The page as one document that opens offline."""
    texts = {"style": _data("page.css"), "script": _data("page.js")}
    return _environment().get_template("page.html").render(page=page, **texts) + "\n"


def svg(figure: Figure, at: tuple[float, float] | None = None) -> str:
    """A chart or bars as an <svg> element; a sentence in its place where nothing was measured.

    at: where it stands in a file of several.
    """
    frame = _frame(figure)
    rows = () if frame is None else as_table(figure).rows
    said = [f"{name}: {', '.join(filter(None, values[:2]))}." for name, *values in rows]
    about = {"description": " ".join(said) or NOTHING, "height": _height(frame), "at": at}
    return _environment().get_template("figure.svg").render(about, figure=figure, frame=frame)


def _frame(figure: Figure) -> Frame | BarFrame | None:
    if isinstance(figure, Chart):
        return layout.framed(figure) if any(line.points for line in figure.lines) else None
    return layout.placed_bars(figure) if any(group.bars for group in figure.groups) else None


def _height(frame: Frame | BarFrame | None) -> float:
    return EMPTY_HEIGHT if frame is None else frame.height


def svg_file(section: Section, columns: int = 2) -> str:
    """The figures of a section as an SVG document: its title, panels in rows, its sentence."""
    figures = section.figures
    columns = min(columns, len(figures))
    room = columns * WIDTH + (columns - 1) * GAP
    texts: Texts = []
    panels: list[Markup] = []
    y = _put(texts, "title", section.title, EDGE, EDGE, room)
    for start in range(0, len(figures), columns):
        row = [(EDGE + i * (WIDTH + GAP), f) for i, f in enumerate(figures[start:][:columns])]
        top = 8 + max(_put(texts, "panel", f.title, x, y + EDGE / 2, WIDTH) for x, f in row)
        panels += [Markup(svg(figure, (x, top))) for x, figure in row]
        y = top + max(_height(_frame(figure)) for _, figure in row)
    y = _put(texts, "note", section.say, EDGE, y + EDGE / 2, room)
    values = {"width": room + 2 * EDGE, "height": y + EDGE, "texts": texts, "panels": panels}
    style = Markup(figure_style().replace("<", "&lt;"))
    return _environment().get_template("figures.svg").render(values, style=style) + "\n"


def write_figures(sections: Iterable[Section], folder: str | Path) -> list[Path]:
    """A file for every section, named by its key; the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for section in sections:
        paths.append(folder / f"{section.key}.svg")
        write_whole(paths[-1], [svg_file(section)])
    return paths


def _put(texts: Texts, kind: str, text: str, x: float, y: float, room: float) -> float:
    """Add lines of text from y downwards; where they end."""
    for line in layout.wrapped(text, SIZES[kind], room, bold=kind != "note"):
        y += SIZES[kind] * LEADING
        texts.append((kind, x, y - SIZES[kind] * (LEADING - 1), line))
    return y


def figure_style() -> str:
    """What drawings need of the page's style, with both sets of colours."""
    text = _data("page.css")
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
        looks = "" if kind == "note" else ";fill:var(--ink);font-weight:640"
        rules.append(f"svg .{kind}{{font-size:{size:g}px{looks}}}")
    return "\n".join(rules)


def placed(items: Sequence[Item]) -> Iterator[tuple[Item, str]]:
    """Items with the class that places them in two columns, so that no row is half empty.

    Tables take a whole row. A chart that would stand alone in its row gets its words beside it.
    Remarks fill the row of a chart, or take one.
    """
    beside = False  # whether the item before waits for one on its right
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


def tips(figure: Figure) -> dict[str, Any] | None:
    """What page.js shows under the pointer: every point of a chart, its values as they read."""
    if not isinstance(figure, Chart) or not any(line.points for line in figure.lines):
        return None
    frame = layout.framed(figure)
    ends = (frame.x.start, TOP, frame.x.stop, BOTTOM)
    lines = [_tips_of(frame, line) for line in figure.lines if line.points]
    return {"box": [round(end, 1) for end in ends], "lines": lines}


def _tips_of(frame: Frame, line: Line) -> dict[str, Any]:
    """A line's points: place across, place down, x in words, y in words with its interval."""
    x_axis, form = frame.chart.x, frame.chart.y.form
    spans = {x: between(low, high, form) for x, low, high in line.spans}
    points = [
        [
            round(frame.x.at(x), 1),
            round(min(max(frame.y.at(y), TOP), BOTTOM), 1),
            f"{x_axis.name} {written(x, x_axis.form)}",
            written(y, form) + spans.get(x, ""),
        ]
        for x, y in line.points
    ]
    holds = line.shape == "steps"
    looks = {"name": line.name, "role": line.role, "holds": holds, "faint": line.faint}
    return {**looks, "points": points}


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
        "placed": placed,
        "prose": _prose,
        "sha256": _sha256,
        "shortened": layout.shortened,
        "tips": tips,
        "valued": lambda bar, bars: layout.valued(bars, bar),
    }
    return environment


def _prose(text: str) -> Markup:
    """Sentences, escaped, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sha256(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")


def _data(name: str) -> str:
    return files("sparrow.reporting").joinpath("templates", name).read_text(encoding="utf-8")
