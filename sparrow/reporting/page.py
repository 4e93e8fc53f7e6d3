"""Types of a report: pages, sections, charts, bars, tables and remarks, as validated data.

Functions of results give these types; render.py and markdown.py decide how they look. Colours are
roles, so that light, dark and paper have colours of their own. Numbers are finite: what was not
measured is left out.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

RUNS = 6  # colours of runs, and of policies
RAMP = 8  # distinguishable colours of one chart
MOST_POINTS = 500  # per line: enough for a screen, small enough for a file
NOT_MEASURED = "-"
_TEXTS = Path(__file__).parent / "templates" / "texts.toml"
TEXTS: Mapping[str, Any] = tomllib.loads(_TEXTS.read_text(encoding="utf-8"))

Point = tuple[float, float]
Span = tuple[float, float, float]  # x, low, high
Key = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]  # an id on the page
Role = Annotated[str, Field(pattern=r"^(run-[0-5]|ramp-[0-7]|dense|sparse|target|quiet)$")]
"""A colour: run-0 .. run-5 (runs in the order given), ramp-0 .. ramp-7 (ordered: few to many,
short to long), dense, sparse, target, quiet."""


class PagePart(BaseModel):
    """Base class of everything on a page: strict and frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Axis(PagePart):
    """An axis of a chart. Limits of None follow the data; `form` formats values."""

    name: str
    low: float | None = None
    high: float | None = None
    form: str = "g"  # a format specification: ".2f", ".0%"


class Line(PagePart):
    """A curve, labelled at its end or in the legend; points are in the order of x.

    shape   "line" joins points, "steps" holds a value until the next x, "dots" joins and marks
            them, "marks" marks them alone
    spans   an interval at some x: a bar at each point of "dots" and "marks", else a band
    """

    name: str
    points: Sequence[Point]
    role: Role
    shape: Literal["line", "steps", "dots", "marks"] = "line"
    spans: Sequence[Span] = ()
    faint: bool = False  # thin and behind: the raw values of a smoothed line


class Level(PagePart):
    """A horizontal line across a chart, such as a target."""

    y: float
    name: str
    role: Role = "target"


class Chart(PagePart):
    """Lines over a common axis. `say`: its caption."""

    key: Key
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    say: str = ""


class Bar(PagePart):
    """A value, with its interval where it is known."""

    name: str
    value: float
    role: Role
    interval: tuple[float, float] | None = None


class BarGroup(PagePart):
    """Bars to be compared, on a scale of their own that includes zero."""

    name: str
    bars: Sequence[Bar]
    say: str = ""  # such as "1.9x faster"


class Bars(PagePart):
    """Horizontal bars in groups. Values are formatted by `form` and followed by `unit`."""

    key: Key
    title: str
    unit: str
    groups: Sequence[BarGroup]
    form: str = ".1f"
    say: str = ""


class Table(PagePart):
    """Rows of text under headings: names in the first column, figures in the others."""

    key: Key
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    say: str = ""


class Remarks(PagePart):
    """A list of sentences (actions of the gate, warnings), or lines of code."""

    key: Key
    lines: Sequence[str]
    title: str = ""
    say: str = ""
    code: bool = False


Figure = Chart | Bars
Item = Chart | Bars | Table | Remarks


class Section(PagePart):
    """A part of a page, or a file of figures: a heading, a sentence, and its items."""

    key: Key
    title: str
    say: str
    items: Sequence[Item]

    @classmethod
    def named(
        cls, key: str, items: Sequence[Item], texts: Mapping[str, Any] = TEXTS, **values: object
    ) -> "Section":
        """The section whose title and sentence are in a file of texts."""
        say = texts[key]["say"].format(**values)
        return cls(key=key, title=texts[key]["title"], say=say, items=items)

    @property
    def figures(self) -> list[Figure]:
        return [item for item in self.items if isinstance(item, Chart | Bars)]


class Number(PagePart):
    """A key figure at the top of a page."""

    value: str
    name: str
    say: str = ""


class Page(PagePart):
    """A page. `foot`: its provenance."""

    title: str
    lead: str
    numbers: Sequence[Number] = ()
    sections: Sequence[Section] = ()
    foot: Sequence[str] = ()


def ramp(index: int, count: int) -> str:
    """The colour of a line among several ordered ones."""
    return f"ramp-{round(index * (RAMP - 1) / max(1, count - 1))}"


def target_levels(targets: Sequence[float]) -> list[Level]:
    """Levels of distinct targets of p05."""
    return [Level(y=target, name=f"target {target:g}") for target in sorted(set(targets))]


def thin_points(chart: Chart, *, lowest: bool = False) -> Chart:
    """Thin out a chart to MOST_POINTS per line: means of neighbours, or the lowest of them.

    The caption then says what a point stands for.
    """
    longest = max((len(line.points) for line in chart.lines), default=0)
    count = -(-longest // MOST_POINTS)
    if count <= 1:
        return chart
    lines = []
    for line in chart.lines:
        size = max(1, -(-len(line.points) // MOST_POINTS))
        parts = [line.points[i : i + size] for i in range(0, len(line.points), size)]
        points = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
        if lowest:
            points = [min(part, key=lambda point: point[1]) for part in parts]
        kept = {x for x, _ in points}
        spans = [span for span in line.spans if span[0] in kept or not lowest]
        lines.append(line.model_copy(update={"points": points, "spans": spans}))
    what = "the lowest" if lowest else "the mean"
    say = f"{chart.say} In long runs a point is {what} of up to {count} steps.".strip()
    return chart.model_copy(update={"lines": lines, "say": say})
