"""Horizontal bars in groups as inline SVG, from zero, each with its value at its end."""

from dataclasses import dataclass

from sparrow.report.page.frame import SIZE, WIDTH, check_numbers, check_role
from sparrow.report.page.parts import Bar, BarGroup, Bars
from sparrow.report.page.scale import Scale, written
from sparrow.report.page.svg import drawing, nothing
from sparrow.report.page.words import distinct, element, pixels, shortened, width_of, words

THICK, PITCH, HEADING, APART = 20.0, 28.0, 26.0, 16.0
NAME_ROOM = 150.0  # at most, for the bars' names


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What all groups of a figure share: names from 0, bars from left to right, values behind."""

    left: float
    right: float


def bars(bars: Bars) -> str:
    """Bars as an <svg> element; a sentence in their place where there are none."""
    check_bars(bars)
    if not any(group.bars for group in bars.groups):
        return nothing(bars.key, bars.title)
    columns = _columns(bars)
    y, parts = 0.0, []
    for group in bars.groups:
        drawn, below = _group(bars, group, columns, y)
        parts.append(drawn)
        y = below + APART
    return drawing(bars.key, bars.title, described(bars), y - APART + 2, "".join(parts))


def described(bars: Bars) -> str:
    """All bars in words."""
    said = []
    for group in bars.groups:
        each = ", ".join(f"{bar.name} {valued(bars, bar)}" for bar in group.bars)
        said.append(f"{group.name}: {each or 'nothing'}." + (f" {group.say}." if group.say else ""))
    return " ".join(said)


def valued(bars: Bars, bar: Bar) -> str:
    """A bar's value with its unit."""
    return f"{written(bar.value, bars.form)} {bars.unit}".strip()


def check_bars(bars: Bars) -> None:
    """Raise ValueError where a number is none or an interval is half or upside down."""
    for group in bars.groups:
        for bar in group.bars:
            where = f'bars "{bars.key}", "{group.name}", bar "{bar.name}"'
            ends = [end for end in (bar.low, bar.high) if end is not None]
            check_numbers(where, [bar.value, *ends])
            check_role(where, bar.role)
            if len(ends) == 1 or ends != sorted(ends):
                raise ValueError(f"{where}: an interval needs low and high, in this order")


def _columns(bars: Bars) -> Columns:
    every = [bar for group in bars.groups for bar in group.bars]
    names = max(min(width_of(bar.name, SIZE), NAME_ROOM) for bar in every)
    values = max(width_of(valued(bars, bar), SIZE, bold=True) for bar in every)
    return Columns(left=names + 12, right=max(WIDTH - values - 10, names + 60))


def _group(bars: Bars, group: BarGroup, columns: Columns, y: float) -> tuple[str, float]:
    """A group's heading, what it says, and its bars; and where it ends."""
    parts = []
    if group.name or group.say:
        say = shortened(group.say, SIZE, WIDTH * 0.55, bold=True)
        room = WIDTH - width_of(say, SIZE, bold=True) - 14
        name = shortened(group.name, SIZE, room, bold=True)
        parts.append(words(name, 0.0, y + 14, group.name, class_="group"))
        parts.append(words(say, WIDTH, y + 14, group.say, class_="say", text_anchor="end"))
        y += HEADING
    scale = _scale(group, columns)
    names = distinct([bar.name for bar in group.bars], SIZE, NAME_ROOM)
    for bar, name in zip(group.bars, names, strict=True):
        parts.append(words(name, columns.left - 10, y + 15, bar.name, text_anchor="end"))
        parts.append(_bar(bars, bar, scale, y))
        y += PITCH
    y -= PITCH - THICK if group.bars else 0
    zero = pixels(scale.at(0.0))
    top = y - len(group.bars) * PITCH + (PITCH - THICK) - 3
    if group.bars:
        parts.append(element("path", d=f"M{zero} {pixels(top)}V{pixels(y + 3)}", class_="base"))
    return element("g", "".join(parts), class_="bars"), y


def _scale(group: BarGroup, columns: Columns) -> Scale:
    """From zero, or from the least value below it, to the group's greatest."""
    ends = [end for bar in group.bars for end in (bar.value, bar.low, bar.high) if end is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    return Scale(
        low=low, high=high if high > low else low + 1, start=columns.left, stop=columns.right
    )


def _bar(bars: Bars, bar: Bar, scale: Scale, y: float) -> str:
    """A bar, its interval as a whisker, and its value behind both."""
    zero, end = scale.at(0.0), scale.at(bar.value)
    body = element(
        "rect", x=min(zero, end), y=y, width=abs(end - zero), height=THICK, rx=2, class_="bar"
    )
    reach = max(zero, end)
    if bar.low is not None and bar.high is not None:
        low, high, middle = scale.at(bar.low), scale.at(bar.high), y + THICK / 2
        cap = f"M{pixels(low)} {pixels(middle - 4)}v8m0-4H{pixels(high)}m0-4v8"
        body += element("path", d=cap, class_="halo") + element("path", d=cap, class_="whisker")
        reach = max(reach, high)
    body += words(valued(bars, bar), reach + 8, y + 15, class_="value")
    return element("g", body, class_=bar.role)
