"""Charts of the page as one SVG file: for a README, which shows pictures and runs no page.

The colours are those of the page, light and dark; a viewer that prefers dark gets dark.
"""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from sparrow.report.page.bars import bars
from sparrow.report.page.frame import WIDTH
from sparrow.report.page.parts import Bars, Chart
from sparrow.report.page.svg import chart
from sparrow.report.page.words import element, pixels, words

GAP, EDGE, HEAD = 56.0, 24.0, 40.0
PAIR = re.compile(r"(--[a-z0-9-]+): light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\);")
ROLE = re.compile(r"^\.(?:dense|sparse|target|quiet|run-\d|ramp-\d) \{.*\}$", re.MULTILINE)
DRAWING = re.compile(r"^svg text \{.*?^svg \.none \{[^\n]*$", re.MULTILINE | re.DOTALL)
SIZE = re.compile(r'viewBox="0 0 [\d.]+ ([\d.]+)"')
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def sheet(figures: Sequence[Chart | Bars]) -> str:
    """The figures side by side, each under its title, as an SVG document."""
    drawn = [chart(one) if isinstance(one, Chart) else bars(one) for one in figures]
    heights = [float(_height(text)) for text in drawn]
    width = 2 * EDGE + len(figures) * WIDTH + (len(figures) - 1) * GAP
    height = 2 * EDGE + HEAD + max(heights)
    body = element("rect", width=width, height=height, rx=10, class_="paper")
    for number, (one, text, tall) in enumerate(zip(figures, drawn, heights, strict=True)):
        left = EDGE + number * (WIDTH + GAP)
        body += words(one.title, left, EDGE + 14, one.title, class_="title")
        place = f'<svg x="{pixels(left)}" y="{pixels(EDGE + HEAD)}" width="{pixels(WIDTH)}" '
        body += text.replace("<svg ", f'{place}height="{pixels(tall)}" ', 1)
    size = f"{pixels(width)} {pixels(height)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">'
    return f"{head}<style>{escape(style(), quote=False)}</style>{body}</svg>\n"


def style() -> str:
    """What the drawings need of the page's style, with both sets of colours."""
    text = files("sparrow.report.page").joinpath("page.css").read_text(encoding="utf-8")
    pairs, drawing = PAIR.findall(text), DRAWING.search(text)
    assert pairs, "page.css has a table of colours"
    assert drawing is not None, "page.css has rules for drawings"
    light = "".join(f"{name}:{value};" for name, value, _ in pairs)
    dark = "".join(f"{name}:{value};" for name, _, value in pairs)
    own = ".paper{fill:var(--paper)} svg .title{fill:var(--ink);font-weight:640;font-size:15px}"
    return "\n".join(
        [
            f"svg{{{light}font-family:{FONT}}}",
            f"@media (prefers-color-scheme: dark){{svg{{{dark}}}}}",
            *ROLE.findall(text),
            drawing.group(),
            own,
        ]
    )


def _height(drawn: str) -> str:
    found = SIZE.search(drawn)
    assert found is not None, "a drawing has a viewBox"
    return found[1]
