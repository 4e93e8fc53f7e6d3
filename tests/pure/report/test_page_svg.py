"""Charts and bars as SVG: hand-computed places, words that fit, bad numbers refused by name."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from support.pages import HOSTILE, LONG, odd_bars, odd_charts, rich_page, six_runs, tail, times

from sparrow.report.page.bars import bars
from sparrow.report.page.frame import BOTTOM, GAP, TOP, WIDTH, framed
from sparrow.report.page.parts import (
    Axis,
    Bar,
    BarGroup,
    Bars,
    Chart,
    Level,
    Line,
    Point,
    Span,
)
from sparrow.report.page.scale import Scale, limits, rounded_out, tick_texts, ticks, written
from sparrow.report.page.svg import chart
from sparrow.report.page.words import distinct, pixels, shortened, width_of

UNIT = Axis(name="value", low=0, high=1, form=".1f")
ALL = [item for part in rich_page().sections for item in part.items]
CHARTS = [item for item in ALL if isinstance(item, Chart)]


def simple(*lines: Line, x: Axis = UNIT, y: Axis = UNIT, levels: tuple[Level, ...] = ()) -> Chart:
    return Chart(key="simple", title="Simple", x=x, y=y, lines=lines, levels=levels)


def line(
    *points: Point, name: str = "a", spans: tuple[Span, ...] = (), shape: str = "line"
) -> Line:
    return Line(name=name, points=points, role="run-0", spans=spans, shape=shape)  # type: ignore


def paths(svg: str, looks: str) -> list[str]:
    """What elements of a class draw."""
    found = ET.fromstring(svg).iter("path")
    return [path.get("d", "") for path in found if path.get("class") == looks]


@pytest.mark.parametrize(
    ("low", "high", "count", "form", "expected"),
    [
        (0, 1, 5, ".2f", [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.1, 0.35, 5, "g", [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (64, 576, 6, ".0f", [100, 200, 300, 400, 500]),
        (0, 2, 5, ".0f", [0, 1, 2]),  # halves would read 0 0 1 2 2
        (0, 0.04, 5, ".0%", [0, 0.01, 0.02, 0.03, 0.04]),
        (-12, 4, 5, "g", [-10, -5, 0]),
        (7, 8, 1, "g", [7, 8]),
    ],
)
def test_ticks_are_round(
    low: float, high: float, count: int, form: str, expected: list[float]
) -> None:
    assert ticks(low, high, count, form) == expected


def test_numbers_as_people_write_them() -> None:
    assert written(-0.5, ".1f") == "\N{MINUS SIGN}0.5"
    assert written(-0.001, ".1f") == "0.0"
    assert tick_texts([0, 5000, 10_000], ".0f") == ["0", "5K", "10K"]
    assert tick_texts([0, 12_500, 25_000], "g") == ["0", "12.5K", "25K"]
    assert tick_texts([1e6, 2e6], "g") == ["1M", "2M"]
    assert tick_texts([0.85, 0.9], ".3f") == ["0.85", "0.90"]
    assert tick_texts([0, 100], ".2f") == ["0", "100"]
    assert tick_texts([], ".2f") == []
    with pytest.raises(ValueError, match='"zz"'):
        written(1.0, "zz")


def test_limits_follow_the_data_where_they_are_open() -> None:
    axis = Axis(name="y")
    assert limits([2, 5], axis) == (2, 5)
    assert limits([2, 5], Axis(name="y", low=0)) == (0, 5)
    assert limits([], axis) == (0, 1)
    assert limits([0, 0], axis) == (0, 1)
    assert limits([10, 10], axis) == (9, 11)
    assert limits([1, 1], Axis(name="y", high=1)) == (0.9, 1)
    assert limits([0], Axis(name="y", low=0)) == (0, 1)
    assert limits([-3, -2], Axis(name="y", low=0)) == (0, 1)  # all of it lies below
    assert rounded_out(0.23, 0.78, axis, 5) == (0.2, 0.8)
    assert rounded_out(0.23, 0.78, Axis(name="y", low=0.23, high=0.78), 5) == (0.23, 0.78)
    with pytest.raises(ValueError, match='axis "y": low 2 has to be below high 1'):
        limits([], Axis(name="y", low=2, high=1))


def test_places_are_where_they_should_be() -> None:
    assert Scale(low=0, high=4, start=100, stop=0).at(1) == 75
    frame = framed(simple(line((0, 0), (0.5, 0.5), (1, 1))))
    left, right = frame.x.start, frame.x.stop
    a, b, c = (pixels(x) for x in (left, (left + right) / 2, right))
    assert paths(chart(frame.chart), "line") == [f"M{a} 236L{b} 135L{c} 34"]


def test_steps_hold_until_the_next_x() -> None:
    x, y = Axis(name="x", low=0, high=2), Axis(name="y", low=0, high=2)
    held = line((0, 0), (1, 1), (2, 2), shape="steps", spans=((0, 0, 1), (1, 1, 2)))
    frame = framed(simple(held, x=x, y=y))
    a, b, c = (pixels(frame.x.at(i)) for i in range(3))
    svg = chart(frame.chart)
    assert paths(svg, "line") == [f"M{a} 236H{b}V135H{c}V34"]
    assert paths(svg, "band") == [f"M{a} 135L{b} 135L{b} 34L{b} 135L{b} 236L{a} 236Z"]


def test_dots_have_bars_for_intervals() -> None:
    svg = chart(simple(line((0, 0.5), (1, 0.5), shape="dots", spans=((0, 0.25, 0.75),))))
    (whisker,) = paths(svg, "whisker")
    assert "84.5" in whisker
    assert whisker.endswith("V185.5m-4 0h8")
    assert svg.count("<circle") == 2


def test_one_point_is_a_mark_and_levels_run_across() -> None:
    svg = chart(simple(line((0.5, 0.5)), levels=(Level(y=0.5, name="target"),)))
    assert svg.count("<circle") == 1
    (level,) = paths(svg, "level target")
    assert " 135H" in level


@pytest.mark.parametrize("item", CHARTS, ids=lambda item: item.key)
def test_every_chart_is_sound(item: Chart) -> None:
    svg = chart(item)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.findtext("title") == item.title
    assert root.findtext("desc")
    assert "nan" not in svg
    assert "inf" not in svg
    assert "<script" not in svg
    assert chart(item) == svg


@pytest.mark.parametrize("item", CHARTS, ids=lambda item: item.key)
def test_labels_fit_and_keep_apart(item: Chart) -> None:
    frame = framed(item)
    places = sorted(end.place for end in frame.ends)
    assert all(TOP - 1e-6 <= place <= BOTTOM + 1e-6 for place in places)
    assert all(b - a >= GAP - 1e-6 for a, b in pairwise(places))
    assert all(frame.x.stop + 15 + width_of(end.text, 13) <= WIDTH for end in frame.ends)
    assert all(entry.x + 30 + width_of(entry.text, 13) <= WIDTH for entry in frame.legend)
    assert all(entry.y < frame.height for entry in frame.legend)


def test_few_lines_are_named_at_their_ends_and_many_in_a_legend() -> None:
    named = framed(tail())
    assert [end.text for end in named.ends][2:] == ["0 to 128", "128 to 256", "256 and more"]
    assert not named.legend
    many = framed(six_runs())
    assert not many.ends
    assert len({entry.text for entry in many.legend}) == 6
    assert many.legend[0].whole == LONG.format(0)
    assert f"<title>{LONG.format(5)}</title>" in chart(six_runs())


def test_a_line_without_points_is_named_as_such() -> None:
    svg = chart(simple(line((0, 0), (1, 1)), line(name="b")))
    assert "b (nothing measured)" in svg
    assert "b: nothing was measured." in svg


@pytest.mark.parametrize("lines", [(), (line(),)])
def test_an_empty_chart_says_so(lines: tuple[Line, ...]) -> None:
    assert "nothing was measured" in chart(simple(*lines))


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_what_is_no_number_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=r'chart "simple", line "mine": (nan|inf|None)'):
        chart(simple(line((0, 1), (1, bad), name="mine")))
    with pytest.raises(ValueError, match='line "mine"'):
        chart(simple(line((0, 1), name="mine", spans=((0, bad, 1),))))
    group = BarGroup(name="g", bars=(Bar(name="mine", value=bad, role="dense"),))
    with pytest.raises(ValueError, match='bars "b", "g", bar "mine"'):
        bars(Bars(key="b", title="B", unit="s", groups=(group,)))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match='line "a": x falls'):
        chart(simple(line((1, 0), (0, 1))))
    with pytest.raises(ValueError, match='no role "red"; there are dense, quiet, ramp-0'):
        chart(simple(Line(name="a", points=((0, 0),), role="red")))
    with pytest.raises(ValueError, match='level "t": nan'):
        chart(simple(line((0, 0)), levels=(Level(y=math.nan, name="t"),)))
    half = BarGroup(name="g", bars=(Bar(name="a", value=1, role="dense", low=0.5),))
    with pytest.raises(ValueError, match="needs low and high"):
        bars(Bars(key="b", title="B", unit="s", groups=(half,)))


def test_names_are_shortened_in_the_middle() -> None:
    assert shortened("short", 13, 100) == "short"
    cut = shortened(LONG.format(7), 13, 120)
    assert cut.startswith("runs/")
    assert cut.endswith("seed-7")
    assert "…" in cut
    assert width_of(cut, 13) <= 120
    assert shortened("wide", 13, 5) == "…"
    middle = [f"{'a' * 40}{i}{'b' * 40}" for i in range(3)]
    assert len(set(distinct(middle, 13, 150))) == 3
    assert all(width_of(name, 13) <= 150 for name in distinct(middle, 13, 150))


def test_bars_are_as_long_as_their_values() -> None:
    root = ET.fromstring(bars(times()))
    wide = [float(rect.get("width", "")) for rect in root.iter("rect")]
    assert wide[1] / wide[0] == pytest.approx(18.4 / 14.2, rel=0.01)
    assert wide[3] / wide[2] == pytest.approx(0.22 / 0.42, rel=0.01)
    said = [text.text for text in root.iter("text")]
    assert {"14.2 s", "0.22 s", "1.3x slower", "1.9x faster", "at 300 tokens"} <= set(said)


def test_odd_bars_are_sound() -> None:
    svg = bars(odd_bars())
    root = ET.fromstring(svg)
    rects = [(float(r.get("x", "")), float(r.get("width", ""))) for r in root.iter("rect")]
    zero = rects[1][0]
    assert rects[0][0] + rects[0][1] == pytest.approx(zero, abs=0.11)  # -4 ends where 9 starts
    assert rects[2][1] == 0
    assert "<script" not in svg
    assert HOSTILE in [title.text for title in root.iter("title")]
    empty = Bars(key="none", title="None", unit="s", groups=(BarGroup(name="g", bars=()),))
    assert "nothing was measured" in bars(empty)


def test_hostile_names_stay_words() -> None:
    hostile = odd_charts()[0]
    root = ET.fromstring(chart(hostile))
    assert HOSTILE in {text.text for text in root.iter("text")}
