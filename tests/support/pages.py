"""A page with everything a page can have: six runs, long and hostile names, gaps, empty charts."""

import math
from html.parser import HTMLParser
from typing import Any

from sparrow.reporting.page import (
    Axis,
    Bar,
    BarGroup,
    Bars,
    Chart,
    Level,
    Line,
    Number,
    Page,
    Point,
    Remarks,
    Section,
    Table,
)

HOSTILE = '<script>alert("x")</script> & "quoted" | pipe'
LONG = "runs/2026-03-01/qwen3-1.7b/assignments-4096/sparse-planned-0.86-seed-{}"
STEP, TOKENS = Axis(name="step", form=".0f"), Axis(name="tokens so far", form=".0f")
VALUE = Axis(name="value")


def chart(
    key: str, title: str, *lines: Line, x: Axis = STEP, y: Axis = VALUE, **more: Any
) -> Chart:
    return Chart(key=key, title=title, x=x, y=y, lines=lines, **more)


def line(name: str, points: Any, role: str, **more: Any) -> Line:
    return Line(name=name, points=points, role=role, **more)


def curve(steps: int, start: float, stop: float) -> list[Point]:
    """Rises from start to stop like a training curve."""
    shares = [1 - math.exp(-4 * step / steps) for step in range(steps)]
    return [(float(step), start + (stop - start) * share) for step, share in enumerate(shares)]


def reward() -> Chart:
    """Two runs of different lengths, each with what it is the smooth of."""
    lines = []
    for role, points in (("dense", curve(60, 0.22, 0.86)), ("sparse", curve(48, 0.22, 0.78))):
        lines.append(line(f"{role}, each step", points, role, faint=True))
        lines.append(line(role, points[::7], role))
    y = Axis(name="mean reward", low=0, high=1, form=".2f")
    return chart("reward", "Reward while training", *lines, y=y, say="The share of right answers.")


def surface() -> Chart:
    """Six ordered lines with intervals as bars: a legend, a target."""
    lines = []
    for rank, budget in enumerate((64, 96, 128, 192, 256, 384)):
        lengths = (64.0, 192.0, 320.0, 448.0, 576.0)
        points = [(x, 1 / (1 + 0.12 * max(0, x / budget - 0.8) ** 0.8)) for x in lengths]
        spans = [(x, y - 0.05 * (1.02 - y) - 0.004, min(1, y + 0.004)) for x, y in points]
        lines.append(line(f"{budget} kept", points, f"ramp-{rank}", shape="dots", spans=spans))
    y, levels = Axis(name="p05", high=1.0, form=".2f"), [Level(y=0.86, name="target 0.86")]
    return chart("surface", "The tail falls with length", *lines, x=TOKENS, y=y, levels=levels)


def schedule() -> Chart:
    """Steps with a band, and a line."""
    points = ((0.0, 64.0), (128.0, 128.0), (256.0, 192.0), (384.0, 320.0), (640.0, 320.0))
    spans = [(x, y * 0.8, y * 1.15) for x, y in points]
    planned = line("planned", points, "sparse", shape="steps", spans=spans)
    every = line("all of them", ((0.0, 0.0), (420.0, 420.0)), "quiet")
    y = Axis(name="tokens kept", low=0, form=".0f")
    return chart("schedule", "The schedule", planned, every, x=TOKENS, y=y)


def tail() -> Chart:
    """Labels that would touch: three lines that end close together beside two levels."""
    bins = (("0 to 128", 0.91), ("128 to 256", 0.9), ("256 and more", 0.885))
    lines = [
        line(name, curve(40, 0.93, end), f"ramp-{rank}") for rank, (name, end) in enumerate(bins)
    ]
    levels = (Level(y=0.86, name="target 0.86"), Level(y=0.80, name="stop 0.80"))
    y = Axis(name="p05 of acceptance", form=".3f")
    return chart("tail", "p05 by length while training", *lines, y=y, levels=levels)


def six_runs() -> Chart:
    """Six runs of a thousand steps whose names are long and differ in their ends."""
    lines = [line(LONG.format(i), curve(1000, 0.2, 0.5 + 0.08 * i), f"run-{i}") for i in range(6)]
    return chart("six", "Six runs by step", *lines, y=Axis(name="mean reward", form=".2f"))


def odd_charts() -> tuple[Chart, ...]:
    """What is rare: hostile names, single points, equal values, negative ones, none at all."""
    hostile, level = Axis(name=HOSTILE), Level(y=1.5, name=HOSTILE)
    lines = [
        line(HOSTILE, ((0, 1), (1, 2)), "run-0"),
        line("名前がとても長い実行 🐦", ((0, 2), (1, 1)), "run-1"),
        line("never ran", (), "run-2"),
    ]
    return (
        chart("hostile", HOSTILE, *lines, x=hostile, y=hostile, say=HOSTILE, levels=[level]),
        chart("single", "Points", *(line(f"{i}", ((3, 7),), f"run-{i}") for i in range(2))),
        chart("equal", "All equal", line("kept", [(i, 1.0) for i in range(5)], "quiet")),
        chart(
            "negative",
            "Below zero, and large",
            line("low", ((0, -3.5), (200000, -12.0)), "run-3"),
            line("high", ((0, -3.0), (200000, 4.0)), "run-4"),
        ),
        chart("empty", "Nothing here"),
    )


def times() -> Bars:
    """Two groups with their own scales, one with intervals."""
    slow = (
        Bar(name="dense", value=14.2, role="dense", interval=(13.6, 14.9)),
        Bar(name="sparse", value=18.4, role="sparse", interval=(17.2, 19.9)),
    )
    fast = (
        Bar(name="dense", value=0.42, role="dense"),
        Bar(name="sparse", value=0.22, role="sparse"),
    )
    groups = (
        BarGroup(name="at 300 tokens", say="1.3x slower", bars=slow),
        BarGroup(name="one step at 8K", say="1.9x faster", bars=fast),
    )
    return Bars(key="times", title="Rollout time", unit="s", groups=groups, form=".3g")


def odd_bars() -> Bars:
    """Hostile names, negative values, zero alone, an empty group."""
    bars = (
        Bar(name=HOSTILE, value=-4.0, role="run-0"),
        Bar(name=LONG.format(2), value=9.0, role="run-1", interval=(7.0, 12.0)),
    )
    groups = (
        BarGroup(name=LONG.format(1), say=HOSTILE, bars=bars),
        BarGroup(name="zero", bars=(Bar(name="none", value=0.0, role="quiet"),)),
        BarGroup(name="empty", bars=()),
    )
    return Bars(key="oddbars", title="Odd bars", unit="points", groups=groups)


def table() -> Table:
    columns = ("run", "steps", "accuracy", "95 % interval", "p05 at the end", "kept KV", "rollout")
    columns += ("learning", "total")
    row = ("60", "0.83", "0.79 to 0.87", "0.871", "41 %", "312 s", "118 s", "447 s")
    rows = [(name, *row) for name in ("dense", LONG.format(0), HOSTILE)]
    return Table(key="final", title="At the end", columns=columns, rows=rows)


def rich_page() -> Page:
    """Everything at once, in the order of the demo's page."""
    remarks = (
        "step 12: p05 of bin 2 fell to 0.842; budgets of layers 3 to 5 raised to 192.",
        f"Names are shown as given: {HOSTILE}; code as `sparrow report RUN`.",
    )
    gate = (six_runs(), Remarks(key="actions", title="Actions", lines=remarks), table())
    parts: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        ("reward", "Does it learn?", (reward(), tail())),
        ("plan", "What it may forget", (surface(), schedule())),
        ("time", "What it costs", (times(),)),
        ("gate", "What the gate did", gate),
        ("odd", "Odd things", (*odd_charts(), odd_bars())),
        ("none", "Empty", ()),
    )
    return Page(
        title="Sparse rollout, dense policy: a demo",
        lead="A small thinking model was measured, given a schedule that keeps the tail of "
        "acceptance above 0.86, and trained with it for 48 steps on this machine's CPU.",
        numbers=[
            Number(value="0.22 → 0.78", name="answers that are right", say="of 64 new prompts"),
            Number(value="41 %", name="of the KV cache read", say="by the average token"),
        ],
        sections=[
            Section(key=key, title=title, say="A sentence.", items=items)
            for key, title, items in parts
        ],
        foot=("Made by `sparrow report runs/a runs/b` from what these runs left behind.", "End."),
    )


class Reader(HTMLParser):
    """Elements with their attributes and text; complains where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
