"""Charts and bars as SVG: hand-computed places, words that fit, bad numbers refused by name."""

import math
import random
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import pytest
from support import pages

from sparrow.reporting import layout
from sparrow.reporting.page import Axis, Bar, BarGroup, Bars, Chart, Level, Line, Point, Section
from sparrow.reporting.render import figure_style, svg, svg_file

UNIT = Axis(name="value", low=0, high=1, form=".1f")


def simple(*lines: Line, axis: Axis = UNIT, levels: tuple[Level, ...] = ()) -> Chart:
    return Chart(key="simple", title="Simple", x=axis, y=axis, lines=lines, levels=levels)


def line(*points: Point, name: str = "a", **more: Any) -> Line:
    return Line(name=name, points=points, role="run-0", **more)


def paths(drawn: str, css_class: str) -> list[str]:
    """What elements of a class draw."""
    path_elements = ET.fromstring(drawn).iter("path")
    return [path.get("d", "") for path in path_elements if path.get("class") == css_class]


def test_axes_are_round_and_follow_the_data() -> None:
    for low, high, count, form, expected in (
        (0, 1, 5, ".2f", [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.1, 0.35, 5, "g", [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (64, 576, 6, ".0f", [100, 200, 300, 400, 500]),
        (0, 2, 5, ".0f", [0, 1, 2]),  # halves would read 0 0 1 2 2
        (0, 0.04, 5, ".0%", [0, 0.01, 0.02, 0.03, 0.04]),
        (-12, 4, 5, "g", [-10, -5, 0]),
    ):
        assert layout.ticks(low, high, count, Axis(name="x", form=form)) == expected
    assert layout.format_value(-0.5, ".1f") == "\N{MINUS SIGN}0.5"
    assert layout.format_value(-0.001, ".1f") == "0.0"
    assert layout.tick_labels([0, 5000, 10_000], ".0f") == ["0", "5K", "10K"]
    assert layout.tick_labels([1e6, 2e6], "g") == ["1M", "2M"]
    assert layout.tick_labels([0.85, 0.9], ".3f") == ["0.85", "0.90"]
    assert layout.tick_labels([], ".2f") == []
    axis = Axis(name="y")
    for values, ends, options in (
        ([2, 5], (2, 5), axis),
        ([2, 5], (0, 5), Axis(name="y", low=0)),
        ([], (0, 1), axis),
        ([10, 10], (9, 11), axis),
        ([1, 1], (0.9, 1), Axis(name="y", high=1)),
        ([-3, -2], (0, 1), Axis(name="y", low=0)),  # all of it lies below
    ):
        assert layout.limits(values, options) == ends
    assert layout.expand_to_ticks(0.23, 0.78, axis, 5) == (0.2, 0.8)
    assert layout.expand_to_ticks(0.23, 0.78, Axis(name="y", low=0.23, high=0.78), 5) == (
        0.23,
        0.78,
    )


def test_places_are_where_they_should_be() -> None:
    assert layout.Scale(low=0, high=4, start=100, stop=0).at(1) == 75
    frame = layout.layout_chart(
        simple(line((0, 0), (0.5, 0.5), (1, 1)), levels=(Level(y=0.5, name="target"),))
    )
    left, right = frame.x.start, frame.x.stop
    a, b, c = (layout.pixels(x) for x in (left, (left + right) / 2, right))
    assert paths(svg(frame.chart), "line") == [f"M{a} 236L{b} 135L{c} 34"]
    assert paths(svg(frame.chart), "level") == [f"M{a} 135L{c} 135"]


def test_shapes_of_lines() -> None:
    """Steps hold until the next x, dots have bars for intervals, marks are not joined."""
    held = line((0, 0), (1, 1), (2, 2), shape="steps", spans=((0, 0, 1), (1, 1, 2)))
    frame = layout.layout_chart(simple(held, axis=Axis(name="x", low=0, high=2)))
    a, b, c = (layout.pixels(frame.x.at(i)) for i in range(3))
    drawn = svg(frame.chart)
    assert paths(drawn, "line") == [f"M{a} 236L{b} 236L{b} 135L{c} 135L{c} 34"]
    assert paths(drawn, "band") == [f"M{a} 135L{b} 135L{b} 34L{b} 135L{b} 236L{a} 236Z"]
    drawn = svg(simple(line((0, 0.5), (1, 0.5), shape="dots", spans=((0, 0.25, 0.75),))))
    (whisker,) = paths(drawn, "whisker")
    assert "84.5" in whisker
    assert whisker.endswith("V185.5m-4 0h8")
    assert drawn.count("<circle") == 2
    drawn = svg(simple(line((0, 0), (1, 1), shape="marks")))
    assert drawn.count("<circle") == 3  # two, and one in the legend
    assert not paths(drawn, "line")
    assert svg(simple(line((0.5, 0.5)))).count("<circle") == 1  # one point is a mark


def test_every_chart_is_sound_and_its_labels_keep_apart() -> None:
    for item in [item for part in pages.rich_page().sections for item in part.items]:
        if not isinstance(item, Chart):
            continue
        drawn = svg(item)
        root = ET.fromstring(drawn)
        assert root.get("role") == "img"
        assert root.findtext("title") == item.title
        assert root.findtext("desc")
        assert not [word for word in ("nan", "inf", "<script") if word in drawn]
        assert svg(item) == drawn
        frame = layout.layout_chart(item)
        places = sorted(end.y - 4.5 for end in frame.ends)
        assert all(layout.TOP - 1e-6 <= place <= layout.BOTTOM + 1e-6 for place in places)
        assert all(b - a >= layout.GAP - 1e-6 for a, b in pairwise(places))
        labels = (*frame.ends, *frame.legend)
        assert all(label.x + layout.text_width(label.text, 13) <= layout.WIDTH for label in labels)
        assert all(label.y < frame.height for label in frame.legend)
        if item.key == "hostile":
            assert pages.HOSTILE in {text.text for text in root.iter("text")}


def test_few_lines_are_named_at_their_ends_and_many_in_a_legend() -> None:
    named = layout.layout_chart(pages.tail())
    assert [end.text for end in named.ends][2:] == ["0 to 128", "128 to 256", "256 and more"]
    assert not named.legend
    many = layout.layout_chart(pages.six_runs())
    assert not many.ends
    assert len({entry.text for entry in many.legend}) == 6
    assert many.legend[0].full_text == pages.LONG.format(0)
    assert f"<title>{pages.LONG.format(5)}</title>" in svg(pages.six_runs())


def test_what_was_not_measured_is_said() -> None:
    drawn = svg(simple(line((0, 0), (1, 1)), line(name="b")))
    assert "b (nothing measured)" in drawn
    assert "b: nothing was measured." in drawn
    empty = Bars(key="none", title="None", unit="s", groups=[BarGroup(name="g", bars=[])])
    for figure in (simple(), simple(line()), empty):
        assert "nothing was measured" in svg(figure)


def test_what_is_no_number_or_no_role_is_refused_by_field() -> None:
    for bad in (math.nan, math.inf, None):
        for field, value in (("points", ((0, bad),)), ("spans", ((0, bad, 1),))):
            options: dict[str, Any] = {"points": (), field: value}
            with pytest.raises(ValueError, match=field):
                Line(name="a", role="run-0", **options)
        with pytest.raises(ValueError, match="value"):
            Bar(name="mine", value=bad, role="dense")
    with pytest.raises(ValueError, match="role"):
        Line(name="a", points=((0, 0),), role="red")


def test_text_fits_its_room() -> None:
    assert layout.shorten_text("short", 13, 100) == "short"
    cut = layout.shorten_text(pages.LONG.format(7), 13, 120)
    assert cut.startswith("runs/")
    assert cut.endswith("seed-7")
    assert "…" in cut
    assert layout.text_width(cut, 13) <= 120
    assert layout.shorten_text("wide", 13, 5) == "…"
    lines = layout.wrap_text("word " * 40, 13, 300)
    assert len(lines) > 1
    assert max(layout.text_width(line, 13) for line in lines) <= 300
    (cut,) = layout.wrap_text("/a/very/long/folder" * 12 + "/model", 9, 200)
    assert cut.startswith("/a")
    assert cut.endswith("/model")


def test_bars_are_as_long_as_their_values() -> None:
    root = ET.fromstring(svg(pages.times()))
    wide = [float(rect.get("width", "")) for rect in root.iter("rect")]
    assert wide[1] / wide[0] == pytest.approx(18.4 / 14.2, rel=0.01)
    assert wide[3] / wide[2] == pytest.approx(0.22 / 0.42, rel=0.01)
    labels = [text.text for text in root.iter("text")]
    assert {"14.2 s", "0.22 s", "1.3x slower", "1.9x faster", "at 300 tokens"} <= set(labels)
    drawn = svg(pages.odd_bars())
    root = ET.fromstring(drawn)
    rects = [(float(r.get("x", "")), float(r.get("width", ""))) for r in root.iter("rect")]
    zero = rects[1][0]
    assert rects[0][0] + rects[0][1] == pytest.approx(zero, abs=0.11)  # -4 ends where 9 starts
    assert rects[2][1] == 0
    assert "<script" not in drawn
    assert pages.HOSTILE in [title.text for title in root.iter("title")]


def test_labels_that_touch_move_apart() -> None:
    for targets, weights, gap, expected in (
        ([0.9, 0.1, 0.5], [1, 1, 1], 0.1, [0.9, 0.1, 0.5]),
        ([0.5, 0.5, 0.8], [1, 1, 1], 0.1, [0.45, 0.55, 0.8]),
        ([0.5, 0.5], [1, 99], 0.1, [0.401, 0.501]),  # one holds
        ([1, 1, 0.99], [1, 1, 1], 0.1, [0.9, 1.0, 0.8]),
        ([0.5] * 5, [1] * 5, 0.4, [0, 0.25, 0.5, 0.75, 1]),
        ([], [], 0.1, []),
    ):
        assert layout.spread_labels(targets, weights, gap, 0, 1) == pytest.approx(expected)
    draw = random.Random(0)
    heights = [draw.random() for _ in range(15)]
    places = layout.spread_labels(heights, [draw.choice([1.0, 50.0]) for _ in heights], 0.06, 0, 1)
    ordered = [place for _, place in sorted(zip(heights, places, strict=True))]
    assert min(b - a for a, b in pairwise(ordered)) >= 0.06 - 1e-9
    assert ordered[0] >= -1e-9
    assert ordered[-1] <= 1 + 1e-9


def test_a_file_is_xml_with_every_figure_and_complete_by_itself() -> None:
    shown: list[Chart | Bars] = [pages.reward(), pages.times(), pages.tail()]
    section = Section(key="s", title="costs $5", say=f"A note, {pages.HOSTILE}.", items=shown)
    root = ET.fromstring(svg_file(section))
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 3
    text = "".join(root.itertext())
    assert all(figure.title in text for figure in shown)
    assert "costs $5" in text
    rules = figure_style()
    assert "light-dark(" not in rules
    assert "prefers-color-scheme: dark" in rules
    used = {name.split(")")[0].split(",")[0] for name in rules.split("var(")[1:]}
    defined = {part.split(":")[0].strip() for part in rules.replace("{", ";").split(";")}
    assert used <= defined | {"--dash"}
