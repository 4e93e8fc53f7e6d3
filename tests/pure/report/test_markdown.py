"""The page as Markdown: the same numbers, tables that GitHub reads, names that stay names."""

import io
import re

from rich.console import Console
from support.pages import chart, line, rich_page

from sparrow.reporting import page as report
from sparrow.reporting.markdown import markdown, rich_table, sparkline

TEXT = markdown(rich_page())
SAFE = '&lt;script&gt;alert("x")&lt;/script&gt; &amp; "quoted" \\| pipe'


def of(*items: report.Item) -> str:
    section = report.Section(key="s", title="S", say="", items=items)
    return markdown(report.Page(title="t", lead="", sections=(section,)))


def test_the_frame_of_a_page() -> None:
    page = report.Page(
        title="A run",
        lead="It ran.",
        numbers=(
            report.Number(value="2x", name="faster", say="at 8K"),
            report.Number(value="3", name="steps"),
        ),
        sections=(report.Section(key="s", title="Part", say="One sentence.", items=()),),
        foot=("Made by `sparrow report a`.", "On a CPU."),
    )
    assert markdown(page) == (
        "# A run\n\nIt ran.\n\n- **2x** faster (at 8K)\n- **3** steps\n\n## Part\n\n"
        "One sentence.\n\n---\n\nMade by `sparrow report a`.  \nOn a CPU.\n"
    )


def test_a_chart_is_a_table_of_its_lines() -> None:
    points, spans = ((0, 0.25), (1, 0.1), (2, 0.75)), ((2, 0.7, 0.8),)
    shown = chart(
        "c",
        "Reward",
        line("each", ((0, 0.9),), "dense", faint=True),
        line("dense", points, "dense", spans=spans),
        line("none", (), "sparse"),
        say="It rises.",
        y=report.Axis(name="reward", form=".2f"),
        levels=(report.Level(y=0.5, name="target"),),
    )
    assert of(shown).split("\n\n", 2)[2] == (
        "**Reward.** It rises.\n\n"
        "| reward by step | first | last | min | max |  |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| dense | 0.25 at 0 | 0.75 (0.70 to 0.80) at 2 | 0.10 | 0.75 | ▃▁█ |\n"
        "| none | nothing was measured |  |  |  |  |\n"
        "| target |  | 0.50 |  |  | level |\n"
    )


def test_bars_are_a_table() -> None:
    pair = (
        report.Bar(name="dense", value=2, role="dense", interval=(1.5, 2.5)),
        report.Bar(name="sparse", value=1, role="sparse"),
    )
    groups = (report.BarGroup(name="8K", bars=pair, say="2x faster"),)
    assert of(report.Bars(key="b", title="Time", unit="s", groups=groups)).endswith(
        "|  | Time |  |\n| --- | ---: | ---: |\n"
        "| 8K: dense | 2.0 s (1.5 to 2.5) | 2x faster |\n| 8K: sparse | 1.0 s |  |\n"
    )
    assert "*nothing was measured*" in of(report.Bars(key="b", title="Time", unit="s", groups=()))


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3]) == "▄▄"
    assert sparkline([1]) == "▄"
    long = sparkline([float(i) for i in range(1000)])
    assert len(long) == 24
    assert (long[0], long[-1]) == ("▁", "█")


def test_the_rich_page_is_all_there_and_safe() -> None:
    assert "<script" not in TEXT
    assert SAFE in TEXT
    assert TEXT.count("*nothing was measured*") == 1
    tables = re.findall(r"(?:^\|.*\n?)+", TEXT, flags=re.MULTILINE)
    assert len(tables) > 9
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.strip().split("\n")}
        assert len(widths) == 1, table
    for section in rich_page().sections:
        assert f"## {section.title}\n" in TEXT


def test_figures_of_a_section_may_be_files_beside_it() -> None:
    code = report.Remarks(key="r", lines=["a *b*"], code=True)
    part = report.Section(key="part", title="Part", say="", items=(chart("c", "C"), code))
    text = markdown(report.Page(title="t", lead="", sections=(part,)), files=["part"])
    assert text == "# t\n\n## Part\n\n![Part](part.svg)\n\n```\na *b*\n```\n"


def test_the_same_table_on_a_terminal() -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    table = report.Table(key="t", title="T [b]", columns=("a", "b"), rows=(("[red]x[/]", "1"),))
    console.print(rich_table(table))
    text_shown = console.export_text()
    assert "T [b]" in text_shown
    assert "[red]x[/]" in text_shown  # names are shown, not read as markup
