"""A page with everything a page can have: six runs, long and hostile names, gaps, empty charts."""

import math
import random

from sparrow.report.page import (
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
STEP = Axis(name="step", form=".0f")


def curve(steps: int, start: float, stop: float, seed: int, noise: float = 0.03) -> list[Point]:
    """Rises from start to stop like a training curve, with noise."""
    draw = random.Random(seed)
    return [
        (
            float(step),
            start + (stop - start) * (1 - math.exp(-4 * step / steps)) + draw.gauss(0.0, noise),
        )
        for step in range(steps)
    ]


def smooth(points: list[Point], over: int = 7) -> tuple[Point, ...]:
    """The mean over the last points."""
    return tuple(
        (x, sum(y for _, y in points[max(0, i - over + 1) : i + 1]) / min(over, i + 1))
        for i, (x, _) in enumerate(points)
    )


def reward() -> Chart:
    """Two runs of different lengths, each with what it is the smooth of, and a level."""
    dense, sparse = curve(60, 0.22, 0.86, 1), curve(48, 0.22, 0.78, 2)
    return Chart(
        key="reward",
        title="Reward while training",
        say="The share of answers that were right, smoothed over seven steps.",
        x=STEP,
        y=Axis(name="mean reward", low=0, high=1, form=".2f"),
        lines=(
            Line(name="dense, each step", points=tuple(dense), role="dense", faint=True),
            Line(name="dense", points=smooth(dense), role="dense"),
            Line(name="sparse, each step", points=tuple(sparse), role="sparse", faint=True),
            Line(name="sparse", points=smooth(sparse), role="sparse"),
        ),
    )


def surface() -> Chart:
    """Six ordered lines with intervals as bars: a legend, a target."""
    budgets = (64, 96, 128, 192, 256, 384)
    lengths = (64, 192, 320, 448, 576)
    lines = []
    for rank, budget in enumerate(budgets):
        points = [(float(x), 1 / (1 + 0.12 * max(0, x / budget - 0.8) ** 0.8)) for x in lengths]
        spans = tuple((x, y - 0.05 * (1.02 - y) - 0.004, min(1, y + 0.004)) for x, y in points)
        lines.append(
            Line(
                name=f"{budget} kept",
                points=tuple(points),
                role=f"ramp-{rank}",
                shape="dots",
                spans=spans,
            )
        )
    return Chart(
        key="surface",
        title="The tail falls with length",
        say="p05 of acceptance: 95 % of tokens are at least this close to the dense model.",
        x=Axis(name="tokens so far", form=".0f"),
        y=Axis(name="p05 of acceptance", high=1.0, form=".2f"),
        lines=tuple(lines),
        levels=(Level(y=0.86, name="target 0.86"),),
    )


def schedule() -> Chart:
    """Steps with a band, one line and one that was not measured."""
    points = ((0.0, 64.0), (128.0, 128.0), (256.0, 192.0), (384.0, 320.0), (640.0, 320.0))
    return Chart(
        key="schedule",
        title="The schedule",
        say="How many tokens of the past each new token may read.",
        x=Axis(name="tokens so far", form=".0f"),
        y=Axis(name="tokens kept", low=0, form=".0f"),
        lines=(
            Line(
                name="planned",
                points=points,
                role="sparse",
                shape="steps",
                spans=tuple((x, y * 0.8, y * 1.15) for x, y in points),
            ),
            Line(name="all of them", points=((0.0, 0.0), (420.0, 420.0)), role="quiet"),
        ),
    )


def tail() -> Chart:
    """Labels that would touch: three lines that end close together beside two levels."""
    lines = tuple(
        Line(name=name, points=smooth(curve(40, 0.93, end, seed, 0.01)), role=f"ramp-{rank}")
        for rank, (name, end, seed) in enumerate(
            (("0 to 128", 0.91, 3), ("128 to 256", 0.9, 4), ("256 and more", 0.885, 5))
        )
    )
    return Chart(
        key="tail",
        title="p05 by length while training",
        say="Each line is a bin of lengths. The gate acts where one falls below the target.",
        x=STEP,
        y=Axis(name="p05 of acceptance", form=".3f"),
        lines=lines,
        levels=(Level(y=0.86, name="target 0.86"), Level(y=0.80, name="stop 0.80")),
    )


def six_runs() -> Chart:
    """Six runs of a thousand steps whose names are long and differ in their ends."""
    return Chart(
        key="six",
        title="Six runs by step",
        say="A thousand points each.",
        x=STEP,
        y=Axis(name="mean reward", form=".2f"),
        lines=tuple(
            Line(
                name=LONG.format(i),
                role=f"run-{i}",
                points=smooth(curve(1000, 0.2, 0.5 + 0.08 * i, 10 + i), 40),
            )
            for i in range(6)
        ),
    )


def odd_charts() -> tuple[Chart, ...]:
    """What is rare: hostile names, single points, equal values, negative ones, none at all."""
    return (
        Chart(
            key="hostile",
            title=HOSTILE,
            say=HOSTILE,
            x=Axis(name=HOSTILE),
            y=Axis(name=HOSTILE),
            lines=(
                Line(name=HOSTILE, points=((0, 1), (1, 2)), role="run-0"),
                Line(name="名前がとても長い実行 🐦", points=((0, 2), (1, 1)), role="run-1"),
                Line(name="never ran", points=(), role="run-2"),
            ),
            levels=(Level(y=1.5, name=HOSTILE),),
        ),
        Chart(
            key="single",
            title="One point each",
            x=Axis(name="step"),
            y=Axis(name="value"),
            lines=(
                Line(name="a", points=((3, 7),), role="run-0"),
                Line(name="b", points=((3, 7),), role="run-1"),
            ),
        ),
        Chart(
            key="equal",
            title="All equal",
            x=STEP,
            y=Axis(name="kept", form=".0%"),
            lines=(Line(name="kept", points=tuple((i, 1.0) for i in range(5)), role="quiet"),),
        ),
        Chart(
            key="negative",
            title="Below zero, and large",
            x=Axis(name="tokens", form=".0f"),
            y=Axis(name="advantage", form="g"),
            lines=(
                Line(name="low", points=((0, -3.5), (200000, -12.0)), role="run-3"),
                Line(name="high", points=((0, -3.0), (200000, 4.0)), role="run-4"),
            ),
        ),
        Chart(key="empty", title="Nothing here", x=STEP, y=Axis(name="value"), lines=()),
    )


def times() -> Bars:
    """Two groups with their own scales, one with intervals."""
    return Bars(
        key="times",
        title="Rollout time",
        unit="s",
        say="Sparse is slower on short chains: choosing pages costs more than it saves.",
        groups=(
            BarGroup(
                name="at 300 tokens",
                say="1.3x slower",
                bars=(
                    Bar(name="dense", value=14.2, role="dense", interval=(13.6, 14.9)),
                    Bar(name="sparse", value=18.4, role="sparse", interval=(17.2, 19.9)),
                ),
            ),
            BarGroup(
                name="one step at 8K",
                say="1.9x faster",
                bars=(
                    Bar(name="dense", value=0.42, role="dense"),
                    Bar(name="sparse", value=0.22, role="sparse"),
                ),
            ),
        ),
        form=".3g",
    )


def odd_bars() -> Bars:
    """Hostile names, negative values, zero alone, an empty group."""
    return Bars(
        key="oddbars",
        title="Odd bars",
        unit="points",
        groups=(
            BarGroup(
                name=LONG.format(1),
                say=HOSTILE,
                bars=(
                    Bar(name=HOSTILE, value=-4.0, role="run-0"),
                    Bar(name=LONG.format(2), value=9.0, role="run-1", interval=(7.0, 12.0)),
                ),
            ),
            BarGroup(name="zero", bars=(Bar(name="none", value=0.0, role="quiet"),)),
            BarGroup(name="empty", bars=()),
        ),
    )


def table() -> Table:
    columns = (
        "run",
        "steps",
        "accuracy",
        "95 % interval",
        "p05 at the end",
        "kept KV",
        "rollout",
        "learning",
        "total",
    )
    row = ("60", "0.83", "0.79 to 0.87", "0.871", "41 %", "312 s", "118 s", "447 s")
    return Table(
        key="final",
        title="At the end",
        say="Intervals are over prompts.",
        columns=columns,
        rows=(("dense", *row), (LONG.format(0), *row), (HOSTILE, *row)),
    )


def rich_page() -> Page:
    """Everything at once, in the order of the demo's page."""
    remarks = (
        "step 12: p05 of bin 2 fell to 0.842; budgets of layers 3 to 5 raised to 192.",
        "step 31: back above the target for 5 steps; budgets kept.",
        f"Names are shown as given: {HOSTILE}; code as `sparrow report RUN`.",
    )
    return Page(
        title="Sparse rollout, dense policy: a demo",
        lead="A small thinking model was measured, given a schedule that keeps the tail of "
        "acceptance above 0.86, and trained with it for 48 steps on this machine's CPU.",
        numbers=(
            Number(
                value="0.22 → 0.78",
                name="answers that are right",
                say="before and after training, over 64 new prompts",
            ),
            Number(value="41 %", name="of the KV cache read", say="by the average token"),
            Number(value="0.871", name="p05 of acceptance", say="target 0.86: the gate kept it"),
        ),
        sections=(
            Section(
                key="reward",
                title="Does it learn?",
                items=(reward(), tail()),
                say="Reward rises with sparse rollout about as fast as with dense rollout.",
            ),
            Section(
                key="plan",
                title="What it may forget",
                items=(surface(), schedule()),
                say="The further a chain goes, the more tokens have to be kept.",
            ),
            Section(
                key="time",
                title="What it costs",
                items=(times(),),
                say="Sparse attention pays once chains are long.",
            ),
            Section(
                key="gate",
                title="What the gate did",
                say="It watches every step.",
                items=(six_runs(), Remarks(key="actions", title="Actions", lines=remarks), table()),
            ),
            Section(key="odd", title="Odd things", say="", items=(*odd_charts(), odd_bars())),
            Section(key="none", title="Empty", say="Nothing follows.", items=()),
        ),
        foot=(
            "Made by `sparrow report runs/a runs/b` from what these runs left behind.",
            "2 cores, torch 2.13.0.",
        ),
    )
