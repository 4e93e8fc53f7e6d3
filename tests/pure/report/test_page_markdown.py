"""The page as Markdown: the same numbers, tables that GitHub reads, names that stay names."""

import re

import pytest
from support.pages import HOSTILE, rich_page

from sparrow.report.page.markdown import markdown, name, prose, sparkline
from sparrow.report.page.parts import (
    Axis,
    Bar,
    BarGroup,
    Bars,
    Chart,
    Item,
    Level,
    Line,
    Number,
    Page,
    Section,
    Table,
)

TEXT = markdown(rich_page())
SAFE = '&lt;script&gt;alert("x")&lt;/script&gt; &amp; "quoted" \\| pipe'


def of(*items: Item) -> str:
    section = Section(key="s", title="S", say="", items=items)
    return markdown(Page(title="t", lead="", sections=(section,)))


def test_the_frame_of_a_page() -> None:
    page = Page(
        title="A run",
        lead="It ran.",
        numbers=(Number(value="2x", name="faster", say="at 8K"), Number(value="3", name="steps")),
        sections=(Section(key="s", title="Part", say="One sentence.", items=()),),
        foot=("Made by `sparrow report a`.", "On a CPU."),
    )
    assert markdown(page) == (
        "# A run\n\nIt ran.\n\n- **2x** faster (at 8K)\n- **3** steps\n\n## Part\n\n"
        "One sentence.\n\n---\n\nMade by `sparrow report a`.  \nOn a CPU.\n"
    )


def test_a_chart_is_a_table_of_its_lines() -> None:
    chart = Chart(
        key="c",
        title="Reward",
        say="It rises.",
        x=Axis(name="step", form=".0f"),
        y=Axis(name="reward", form=".2f"),
        lines=(
            Line(name="each", points=((0, 0.9),), role="dense", faint=True),
            Line(
                name="dense",
                points=((0, 0.25), (1, 0.1), (2, 0.75)),
                spans=((2, 0.7, 0.8),),
                role="dense",
            ),
            Line(name="none", points=(), role="sparse"),
        ),
        levels=(Level(y=0.5, name="target"),),
    )
    assert of(chart).split("\n\n", 2)[2] == (
        "**Reward.** It rises.\n\n"
        "| reward by step | first | last | min | max |  |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| dense | 0.25 at 0 | 0.75 (0.70 to 0.80) at 2 | 0.10 | 0.75 | ▃▁█ |\n"
        "| none | nothing was measured |  |  |  |  |\n"
        "| target |  | 0.50 |  |  | level |\n"
    )


def test_bars_are_a_table() -> None:
    pair = (
        Bar(name="dense", value=2, role="dense", low=1.5, high=2.5),
        Bar(name="sparse", value=1, role="sparse"),
    )
    groups = (BarGroup(name="8K", bars=pair, say="2x faster"),)
    assert of(Bars(key="b", title="Time", unit="s", groups=groups)).endswith(
        "|  | Time |  |\n| --- | ---: | ---: |\n"
        "| 8K: dense | 2.0 s (1.5 to 2.5) | 2x faster |\n| 8K: sparse | 1.0 s |  |\n"
    )
    assert "*nothing was measured*" in of(Bars(key="b", title="Time", unit="s", groups=()))


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3]) == "▄▄"
    assert sparkline([1]) == "▄"
    long = sparkline([float(i) for i in range(1000)])
    assert len(long) == 24
    assert (long[0], long[-1]) == ("▁", "█")


def test_names_are_inert() -> None:
    assert name(HOSTILE) == SAFE
    assert name("a_b*c[d]`e`") == "a\\_b\\*c\\[d\\]\\`e\\`"
    assert name("two\nlines") == "two lines"
    assert prose("see `a_b|c`, not a_b") == "see `a_b|c`, not a\\_b"
    assert prose("# no heading") == "\\# no heading"
    assert prose("- no list") == "\\- no list"
    assert prose("12. no list") == "12\\. no list"
    assert prose("0.86 is a number") == "0.86 is a number"


def test_every_table_is_whole() -> None:
    tables = re.findall(r"(?:^\|.*\n?)+", TEXT, flags=re.MULTILINE)
    assert len(tables) > 9
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.strip().split("\n")}
        assert len(widths) == 1, table


def test_the_rich_page_is_all_there_and_safe() -> None:
    assert markdown(rich_page()) == TEXT
    assert "<script" not in TEXT
    assert SAFE in TEXT
    assert TEXT.count("*nothing was measured*") == 1
    for section in rich_page().sections:
        assert f"## {section.title}\n" in TEXT


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match='table "t", row 0'):
        of(Table(key="t", columns=("a", "b"), rows=(("1",),)))
    bad = Line(name="mine", points=((0, float("nan")),), role="dense")
    axis = Axis(name="x")
    with pytest.raises(ValueError, match='chart "c", line "mine": nan'):
        of(Chart(key="c", title="C", x=axis, y=axis, lines=(bad,)))
