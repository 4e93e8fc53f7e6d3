"""What a page is made of: numbers, sections, charts and tables, with their words and nothing else.

Whoever builds a page (story.py) decides what is said; whoever writes it (html.py, markdown.py)
decides how it looks. Colours are roles, so that light, dark and paper can each have their own.
"""

from dataclasses import dataclass, field
from typing import Literal

Point = tuple[float, float]
Span = tuple[float, float, float]  # x, low, high
Role = str
"""Which colour: "run-0" .. "run-5" (runs in the order given), "ramp-0" .. "ramp-7" (ordered: few
to many, short to long), "dense", "sparse", "target", "quiet"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One side of a chart. Limits that are None follow the data; `form` writes a value."""

    name: str
    low: float | None = None
    high: float | None = None
    form: str = "g"  # a format specification: ".2f", ".0f", ".0%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve with its name at its end or in the legend; x does not fall.

    shape   "line" joins points, "steps" holds a value until the next x, "dots" joins and marks them
    spans   an interval at some x: a band for "line" and "steps", a bar at each point for "dots"
    """

    name: str
    points: tuple[Point, ...]
    role: Role
    shape: Literal["line", "steps", "dots"] = "line"
    spans: tuple[Span, ...] = ()
    faint: bool = False  # drawn behind, thin: what another line is the smooth of


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line across a chart, such as a target."""

    y: float
    name: str
    role: Role = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one axis. `key` is its id on the page; `say` is what a reader should see in it."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    say: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A value with its interval, where it has one."""

    name: str
    value: float
    role: Role
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars that are compared with one another, from zero, on a scale of their own."""

    name: str
    bars: tuple[Bar, ...]
    say: str = ""  # such as "1.9x faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars in groups. `unit` stands behind every value, written by `form`."""

    key: str
    title: str
    unit: str
    groups: tuple[BarGroup, ...]
    form: str = ".1f"
    say: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings. The first column names, the others are figures."""

    key: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    say: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """Sentences in a list: what the gate did, what to mind."""

    key: str
    lines: tuple[str, ...]
    title: str = ""


Item = Chart | Bars | Table | Remarks


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page: a heading, one sentence for newcomers, and what shows it."""

    key: str
    title: str
    say: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One of the few figures at the top."""

    value: str
    name: str
    say: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole page. `foot` says how it was made."""

    title: str
    lead: str
    numbers: tuple[Number, ...] = ()
    sections: tuple[Section, ...] = ()
    foot: tuple[str, ...] = field(default=())
