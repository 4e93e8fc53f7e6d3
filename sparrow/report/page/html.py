"""A page as one HTML document that needs nothing else: no request leaves it, no font, no image.

Its content security policy allows the style and the script that are written here, by their hashes,
and nothing besides: a name that got past escaping could still not run or fetch.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest

from sparrow.report.page.bars import bars
from sparrow.report.page.frame import framed
from sparrow.report.page.parts import Bars, Chart, Item, Number, Page, Remarks, Section, Table
from sparrow.report.page.svg import chart
from sparrow.report.page.tips import tips

KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M1 13C5 13 5 4 8 4s3 5 7 5' fill='none' stroke='%23c2410c' stroke-width='2.5' "
    "stroke-linecap='round'/%3E%3C/svg%3E"
)
HALF = '<svg viewBox="0 0 14 14" aria-hidden="true"><path d="M7 0a7 7 0 1 0 0 14A7 7 0 0 0 7 0Zm0 \
1.6v10.8A5.4 5.4 0 0 1 7 1.6Z"/></svg>'


def html(page: Page) -> str:
    """The page as a document; the same page gives the same bytes."""
    check_keys(page)
    style, script = _data("page.css"), _data("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<link rel="icon" href="{ICON}">',
        f"<title>{escape(page.title)}</title>\n<style>{style}</style>\n</head>",
    ]
    body = ['<body>\n<div class="page">', _top(page), "<main>", _lead(page)]
    body += [_section(section) for section in page.sections]
    body += ["</main>", _foot(page.foot), f"</div>\n<script>{script}</script>\n</body>\n</html>"]
    return "\n".join([*head, *body]) + "\n"


def check_keys(page: Page) -> None:
    """Raise ValueError where a key cannot be an id, or two are the same."""
    items = [item.key for section in page.sections for item in section.items]
    for kind, keys in (("item", items), ("section", [part.key for part in page.sections])):
        for key in keys:
            if not KEY.fullmatch(key):
                raise ValueError(
                    f'{kind} key "{key}": it has to start with a letter; then letters, digits, _.-'
                )
            if keys.count(key) > 1:
                raise ValueError(f'{kind} key "{key}" is used {keys.count(key)} times on the page')


def _data(name: str) -> str:
    return files("sparrow.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def prose(text: str) -> str:
    """Sentences, escaped, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _top(page: Page) -> str:
    """Ways to the sections, and the button for light and dark, which needs the script."""
    links = "".join(
        f'<a href="#part-{part.key}">{escape(part.title)}</a>' for part in page.sections
    )
    button = f'<button class="toggle" type="button" hidden>{HALF}<span>Dark</span></button>'
    return f'<div class="bar-top"><nav aria-label="Sections">{links}</nav>{button}</div>'


def _lead(page: Page) -> str:
    said = f"<p>{prose(page.lead)}</p>" if page.lead else ""
    numbers = "".join(map(_number, page.numbers))
    cards = f'\n<dl class="numbers">{numbers}</dl>' if numbers else ""
    return f'<header class="lead"><h1>{escape(page.title)}</h1>{said}</header>{cards}'


def _number(number: Number) -> str:
    say = f'<dd class="say">{prose(number.say)}</dd>' if number.say else ""
    value = f'<dd class="value">{escape(number.value)}</dd>'
    return f'<div class="number"><dt>{escape(number.name)}</dt>{value}{say}</div>'


def _section(section: Section) -> str:
    items = "\n".join(_item(item, looks) for item, looks in placed(section.items))
    grid = f'\n<div class="figures">\n{items}\n</div>' if items else ""
    say = f"<p>{prose(section.say)}</p>" if section.say else ""
    head = f'<section class="part" id="part-{section.key}"><h2>{escape(section.title)}</h2>{say}'
    return f"{head}{grid}\n</section>"


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


def _item(item: Item, looks: str) -> str:
    """A figure: its words, then what shows it."""
    say = "" if isinstance(item, Remarks) or not item.say else f"<p>{prose(item.say)}</p>"
    title = f"<h3>{escape(item.title)}</h3>" if item.title else ""
    caption = f"<figcaption>{title}{say}</figcaption>" if title or say else ""
    place = f' class="{looks}"' if looks else ""
    return f'<figure id="{item.key}"{place}>{caption}{_shown(item)}</figure>'


def _shown(item: Item) -> str:
    if isinstance(item, Chart):
        return f'<div class="plot">{chart(item)}{_tips(item)}</div>'
    if isinstance(item, Bars):
        return f'<div class="plot">{bars(item)}</div>'
    if isinstance(item, Table):
        return _table(item)
    lines = "".join(f"<li>{prose(line)}</li>" for line in item.lines)
    return f'<ul class="remarks">{lines}</ul>'


def _tips(item: Chart) -> str:
    if not any(line.points for line in item.lines):
        return ""
    return f'<script type="application/json">{tips(framed(item))}</script>'


def _table(table: Table) -> str:
    """Rows under headings, in a box of their own that scrolls sideways where it has to."""
    check_rows(table)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for name, *values in table.rows
    )
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>'


def check_rows(table: Table) -> None:
    """Raise ValueError where a row has more or fewer cells than there are columns."""
    for rank, row in enumerate(table.rows):
        if len(row) != len(table.columns):
            raise ValueError(
                f'table "{table.key}", row {rank}: {len(row)} cells under {len(table.columns)} '
                "columns"
            )


def _foot(lines: Sequence[str]) -> str:
    return "<footer>" + "".join(f"<p>{prose(line)}</p>" for line in lines) + "</footer>"
