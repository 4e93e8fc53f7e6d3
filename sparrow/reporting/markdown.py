"""Pages as Markdown for a pull request, every chart as a small table; tables for a terminal."""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from rich.table import Table as RichTable
from rich.text import Text

from sparrow.files import printable
from sparrow.reporting.layout import bar_label, format_interval, format_value, labelled_lines
from sparrow.reporting.page import Bars, Chart, Figure, Item, Line, Number, Page, Section, Table

NOTHING = "nothing was measured"
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 24  # characters of a sparkline
MARKS = re.compile(r"([\\`*_\[\]|~$])")
# What starts a heading, a list or a rule; and what GitHub turns into links.
STARTS = re.compile(r"^([#+-]*|\d+)([#+-]|[.)])(?=\s|$)")
LINKS = re.compile(r"(?<=[a-z])(:)(?=//)|(?<=www)(\.)", re.IGNORECASE)


def markdown(page: Page, files: Collection[str] = ()) -> str:
    """Render a page as GitHub Markdown; the same page gives the same text.

    files: keys of sections whose figures are files (KEY.svg) beside the text.
    """
    blocks = [f"# {name(page.title)}", prose(page.lead)]
    blocks.append("\n".join(map(_number, page.numbers)))
    for section in page.sections:
        blocks += _section(section, section.key in files)
    blocks += ["---" if page.foot else "", "  \n".join(map(prose, page.foot))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def name(text: str) -> str:
    """Escape a text for one line, so that neither Markdown nor HTML acts on it."""
    return STARTS.sub(r"\1\\\2", _inert(" ".join(printable(text).split())))


def prose(text: str) -> str:
    """Escape sentences; text between backticks stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(printable(text).split()))
    inert = "".join(part if rank % 2 else _inert(part) for rank, part in enumerate(parts))
    return STARTS.sub(r"\1\\\2", inert)


def _inert(text: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = safe.replace("@", "&#64;")  # no mentions
    safe = MARKS.sub(r"\\\1", safe)
    return LINKS.sub(lambda match: f"&#{ord(match[0])};", safe)


def code_block(lines: Sequence[str]) -> str:
    """A code block whose fence is longer than any in its lines."""
    text = "\n".join(" ".join(printable(line).split("\n")) for line in lines)
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _number(number: Number) -> str:
    say = f" ({prose(number.say)})" if number.say else ""
    return f"- **{name(number.value)}** {name(number.name)}{say}"


def _section(section: Section, from_file: bool) -> list[str]:
    blocks = [f"## {name(section.title)}", prose(section.say)]
    if from_file:
        blocks.append(f"![{name(section.title)}]({section.key}.svg)")
    for item in section.items:
        if not (from_file and isinstance(item, Chart | Bars)):
            title = f"**{name(item.title)}.** " if item.title else ""
            blocks += [(title + prose(item.say)).strip(), _item(item)]
    return blocks


def _item(item: Item) -> str:
    if isinstance(item, Chart | Bars):
        values = figure_table(item)
        return markdown_table(values) if values.rows else f"*{NOTHING}*"
    if isinstance(item, Table):
        return markdown_table(item)
    if item.code:
        return code_block(item.lines)
    return "\n".join(f"- {prose(line)}" for line in item.lines)


def markdown_table(table: Table) -> str:
    """A Markdown table: names to the left, figures to the right."""
    rule = ["---", *["---:"] * (len(table.columns) - 1)]
    rows = [[name(cell) for cell in row] for row in (table.columns, *table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def figure_table(figure: Figure) -> Table:
    """The data of a figure as a table: a row per line, level or bar; no rows without data."""
    if isinstance(figure, Bars):
        columns, rows = ["", figure.title, ""], _bar_rows(figure)
    else:
        columns = [f"{figure.y.name} by {figure.x.name}", "first", "last", "min", "max", ""]
        rows = [_line_row(figure, line) for line in labelled_lines(figure.lines)]
        for level in figure.levels:
            rows.append([level.name, "", format_value(level.y, figure.y.form), "", "", "level"])
        if not any(line.points for line in figure.lines):
            rows = []
    return Table(key=figure.key, columns=columns, rows=rows)


def _line_row(chart: Chart, line: Line) -> list[str]:
    if not line.points:
        return [line.name, NOTHING, "", "", "", ""]
    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    values, form = [y for _, y in line.points], chart.y.form
    spans = {x: format_interval(low, high, form) for x, low, high in line.spans}
    least, most = format_value(min(values), form), format_value(max(values), form)
    last_value = format_value(last, form) + spans.get(last_x, "")
    return [
        line.name,
        f"{format_value(first, form)} at {format_value(first_x, chart.x.form)}",
        f"{last_value} at {format_value(last_x, chart.x.form)}",
        least,
        most,
        sparkline(values) if least != most else "flat",
    ]


def sparkline(values: Sequence[float]) -> str:
    """A sparkline of blocks, each the mean of its share of the values."""
    count = min(SPARKS, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * 7)] for mean in means)


def _bar_rows(bars: Bars) -> list[list[str]]:
    """A row for every bar; the sentence of a group stands in its first row."""
    rows = []
    for group in bars.groups:
        for rank, bar in enumerate(group.bars):
            interval = format_interval(*bar.interval, bars.form) if bar.interval else ""
            heading = f"{group.name}: " if group.name else ""
            says = group.say if rank == 0 else ""
            rows.append([f"{heading}{bar.name}", bar_label(bars, bar) + interval, says])
    return rows


def rich_table(table: Table) -> RichTable:
    """A table for rich: names to the left, figures to the right; no text is read as markup."""
    rendered = RichTable(title=Text(table.title) if table.title else None)
    for rank, column in enumerate(table.columns):
        rendered.add_column(Text(column), justify="right" if rank else "left")
    for row in table.rows:
        rendered.add_row(*map(Text, row))
    return rendered
