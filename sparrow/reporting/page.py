"""What reports are made of: pages, sections, charts, bars, tables and remarks, as checked data.

Figures and sections are functions from results to these types; render.py and markdown.py decide how
they look. Colours are roles, so that light, dark and paper can each have
their own. Numbers are finite: what was not measured is left out.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

RAMP = 8  # colours that are told apart in one chart
MOST_POINTS = 500  # of a line: what is drawn fits a screen and a file
NOT_MEASURED = "-"

Point = tuple[float, float]
Span = tuple[float, float, float]  # x, low, high
Key = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]  # an id on the page
Role = Annotated[str, Field(pattern=r"^(run-[0-5]|ramp-[0-7]|dense|sparse|target|quiet)$")]
"""Which colour: run-0 .. run-5 (runs in the order given), ramp-0 .. ramp-7 (ordered: few to many,
short to long), dense, sparse, target, quiet."""


class PagePart(BaseModel):
    """Base of everything on a page: fields of their declared types, which do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Axis(PagePart):
    """One side of a chart. Limits that are None follow the data; `form` writes a value."""

    name: str
    low: float | None = None
    high: float | None = None
    form: str = "g"  # a format specification: ".2f", ".0%"


class Line(PagePart):
    """A curve with its name at its end or in the legend; points are in the order of x.

    shape   "line" joins points, "steps" holds a value until the next x, "dots" joins and marks
            them, "marks" marks them alone
    spans   an interval at some x: a bar at each point of "dots" and "marks", else a band
    """

    name: str
    points: Sequence[Point]
    role: Role
    shape: Literal["line", "steps", "dots", "marks"] = "line"
    spans: Sequence[Span] = ()
    faint: bool = False  # drawn behind, thin: what another line is the smooth of


class Level(PagePart):
    """A horizontal line across a chart, such as a target."""

    y: float
    name: str
    role: Role = "target"


class Chart(PagePart):
    """Lines over one axis. `say` is what a reader should see in it."""

    key: Key
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    say: str = ""


class Bar(PagePart):
    """A value with its interval, where it has one."""

    name: str
    value: float
    role: Role
    interval: tuple[float, float] | None = None


class BarGroup(PagePart):
    """Bars that are compared with one another, from zero, on a scale of their own."""

    name: str
    bars: Sequence[Bar]
    say: str = ""  # such as "1.9x faster"


class Bars(PagePart):
    """Horizontal bars in groups. `unit` stands behind every value, written by `form`."""

    key: Key
    title: str
    unit: str
    groups: Sequence[BarGroup]
    form: str = ".1f"
    say: str = ""


class Table(PagePart):
    """Rows of text under headings. The first column names, the others are figures."""

    key: Key
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    say: str = ""


class Remarks(PagePart):
    """Sentences in a list (what the gate did, what to mind), or lines of code as they are."""

    key: Key
    lines: Sequence[str]
    title: str = ""
    say: str = ""
    code: bool = False


Figure = Chart | Bars
Item = Chart | Bars | Table | Remarks


class Section(PagePart):
    """A part of a page, or a file of figures: a heading, a sentence, and what shows it."""

    key: Key
    title: str
    say: str
    items: Sequence[Item]

    @property
    def figures(self) -> list[Figure]:
        return [item for item in self.items if isinstance(item, Chart | Bars)]


class Number(PagePart):
    """One of the few figures at the top."""

    value: str
    name: str
    say: str = ""


class Page(PagePart):
    """The whole page. `foot` says how it was made."""

    title: str
    lead: str
    numbers: Sequence[Number] = ()
    sections: Sequence[Section] = ()
    foot: Sequence[str] = ()


def ramp(index: int, count: int) -> str:
    """The role of one of several ordered lines."""
    return f"ramp-{round(index * (RAMP - 1) / max(1, count - 1))}"


def named_levels(targets: Sequence[float]) -> list[Level]:
    """Targets of p05, each once."""
    return [Level(y=target, name=f"target {target:g}") for target in sorted(set(targets))]


def thinned(chart: Chart, *, lowest: bool = False) -> Chart:
    """The chart with at most MOST_POINTS a line: means of neighbours, or the lowest of them.

    Its words say what a point then stands for.
    """
    longest = max((len(line.points) for line in chart.lines), default=0)
    count = -(-longest // MOST_POINTS)
    if count <= 1:
        return chart
    lines = []
    for line in chart.lines:
        own = max(1, -(-len(line.points) // MOST_POINTS))
        parts = [line.points[i : i + own] for i in range(0, len(line.points), own)]
        points = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
        if lowest:
            points = [min(part, key=lambda point: point[1]) for part in parts]
        kept = {x for x, _ in points}
        spans = [span for span in line.spans if span[0] in kept or not lowest]
        lines.append(line.model_copy(update={"points": points, "spans": spans}))
    what = "the lowest" if lowest else "the mean"
    say = f"{chart.say} In long runs a point is {what} of up to {count} steps.".strip()
    return chart.model_copy(update={"lines": lines, "say": say})
