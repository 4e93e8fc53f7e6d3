"""A page as Markdown for a pull request: the same words, and every chart as a small table."""

import re
from collections.abc import Sequence
from itertools import pairwise

from sparrow.files import printable
from sparrow.report.page.bars import check_bars, valued
from sparrow.report.page.frame import check
from sparrow.report.page.html import check_rows
from sparrow.report.page.parts import Bars, Chart, Item, Line, Number, Page, Section, Table
from sparrow.report.page.scale import between, written
from sparrow.report.page.svg import NOTHING

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 24  # characters of a sparkline
MARKS = re.compile(r"([\\`*_\[\]|~$])")
# What makes a heading, a list or a rule of a line; and what GitHub makes links of.
STARTS = re.compile(r"^([#+-]*|\d+)([#+-]|[.)])(?=\s|$)")
LINKS = re.compile(r"(?<=[a-z])(:)(?=//)|(?<=www)(\.)", re.IGNORECASE)


def markdown(page: Page) -> str:
    """The page as GitHub reads it; the same page gives the same text."""
    blocks = [f"# {name(page.title)}", prose(page.lead)]
    blocks.append("\n".join(map(_number, page.numbers)))
    for section in page.sections:
        blocks += _section(section)
    blocks += ["---" if page.foot else "", "  \n".join(map(prose, page.foot))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def name(text: str) -> str:
    """A name on one line, with nothing in it that Markdown or HTML would act on."""
    return STARTS.sub(r"\1\\\2", _inert(" ".join(printable(text).split())))


def prose(text: str) -> str:
    """Sentences: as names, but what stands between backticks stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(printable(text).split()))
    inert = "".join(part if rank % 2 else _inert(part) for rank, part in enumerate(parts))
    return STARTS.sub(r"\1\\\2", inert)


def _inert(text: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = safe.replace("@", "&#64;")  # nobody is called
    safe = MARKS.sub(r"\\\1", safe)
    return LINKS.sub(lambda match: f"&#{ord(match[0])};", safe)


def code_block(lines: Sequence[str]) -> str:
    """Lines as they are, in a fence that none of them can close."""
    text = "\n".join(" ".join(printable(line).split("\n")) for line in lines)
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _number(number: Number) -> str:
    say = f" ({prose(number.say)})" if number.say else ""
    return f"- **{name(number.value)}** {name(number.name)}{say}"


def _section(section: Section) -> list[str]:
    blocks = [f"## {name(section.title)}", prose(section.say)]
    for item in section.items:
        title = f"**{name(item.title)}.** " if item.title else ""
        if isinstance(item, Chart | Bars | Table):
            blocks.append((title + prose(item.say)).strip())
        else:
            blocks.append(title.strip())
        blocks.append(_item(item))
    return blocks


def _item(item: Item) -> str:
    if isinstance(item, Chart):
        return _chart(item)
    if isinstance(item, Bars):
        return _bars(item)
    if isinstance(item, Table):
        check_rows(item)
        rows = [[name(cell) for cell in row] for row in item.rows]
        return table([name(column) for column in item.columns], rows)
    return "\n".join(f"- {prose(line)}" for line in item.lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells that are Markdown already: the first column to the left, figures to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))


def _chart(chart: Chart) -> str:
    """A row for every line that is not smoothed by another, and one for every level."""
    check(chart)
    if not any(line.points for line in chart.lines):
        return f"*{NOTHING}*"
    firm = {line.role for line in chart.lines if not line.faint}
    shown = [line for line in chart.lines if not (line.faint and line.role in firm)]
    columns = [f"{name(chart.y.name)} by {name(chart.x.name)}", "first", "last", "min", "max", ""]
    rows = [_line(chart, line) for line in shown]
    rows += [
        [name(level.name), "", written(level.y, chart.y.form), "", "", "level"]
        for level in chart.levels
    ]
    return table(columns, rows)


def _line(chart: Chart, line: Line) -> list[str]:
    if not line.points:
        return [name(line.name), NOTHING, "", "", "", ""]
    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    values, form = [y for _, y in line.points], chart.y.form
    spans = {x: between(low, high, form) for x, low, high in line.spans}
    return [
        name(line.name),
        f"{written(first, form)} at {written(first_x, chart.x.form)}",
        f"{written(last, form)}{spans.get(last_x, '')} at {written(last_x, chart.x.form)}",
        written(min(values), form),
        written(max(values), form),
        sparkline(values) if written(min(values), form) != written(max(values), form) else "flat",
    ]


def sparkline(values: Sequence[float]) -> str:
    """Values as blocks from the lowest to the highest, each the mean of its share of them."""
    count = min(SPARKS, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * 7)] for mean in means)


def _bars(bars: Bars) -> str:
    """A row for every bar; what its group says stands in the group's first."""
    check_bars(bars)
    if not any(group.bars for group in bars.groups):
        return f"*{NOTHING}*"
    rows = []
    for group in bars.groups:
        for rank, bar in enumerate(group.bars):
            says = name(group.say) if rank == 0 else ""
            value = name(valued(bars, bar))
            if bar.low is not None and bar.high is not None:
                value += between(bar.low, bar.high, bars.form)
            rows.append([f"{name(group.name)}: {name(bar.name)}", value, says])
    return table(["", name(bars.title), ""], rows)
