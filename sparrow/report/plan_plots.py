"""Figures of a plan: its schedule with the tail it keeps, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.report.files import read
from sparrow.report.labels import Label, beside, every, inches_of, label_ends, percent
from sparrow.report.lengths import Lengths, lengths_of
from sparrow.report.panels import (
    ABOVE,
    BELOW,
    LEFT,
    Box,
    Plain,
    heading,
    lowest,
    target_line,
)
from sparrow.report.style import ACCENT, FAINT, INK, SOFT, Sheet, drawing, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, RIGHT, MARGIN = 7.6, 1.5, 0.98
DENSE, COMPARED, CHECKED = "#b9c0c8", "#8a5a00", "#b3214f"
OTHERS = ("#c06a8a", "#3a9d97")
"""Colours of schedules for lower and for higher targets."""


@drawing()
def schedule(plan: Plain) -> "Figure":
    """Budgets as steps over length, with other targets and a preset; below, the tail they keep."""
    page = sheet(
        MARGIN + WIDE + RIGHT, 5.75, schedule_title(plan), _subtitle(plan), _schedule_note(plan)
    )
    _steps_panel(page, Box(left=MARGIN, bottom=2.95, width=WIDE, height=2.5), plan)
    _rows(page, Box(left=MARGIN, bottom=2.45, width=WIDE, height=0.42), plan)
    _tail_panel(page, Box(left=MARGIN, bottom=BELOW, width=WIDE, height=1.7), plan)
    return page.figure


def schedule_title(plan: Plain) -> str:
    """What the budgets do, in words that follow the data."""
    sparse = [bin for bin in plan["bins"] if bin["budget"] is not None]
    target = f"p05 at {plan['target']:g} or above"
    if not sparse:
        return f"No measured budget keeps {target}: every length stays dense"
    low, high = (pick(bin["budget"] for bin in sparse) for pick in (min, max))
    kept = f"{low} kept tokens" if low == high else f"{low} to {high} kept tokens"
    below = sum(bin["p05"] is not None and bin["p05"] < plan["target"] for bin in sparse)
    if below:
        return f"{kept}; p05 is below {plan['target']:g} in {below} of {len(plan['bins'])} bins"
    some = "; the other lengths stay dense" if len(sparse) < len(plan["bins"]) else ""
    return f"{kept} hold {target}{some}"


def _subtitle(plan: Plain) -> str:
    words = (plan["model"], plan["variant"], plan["hardware"], plan["workload"])
    return " · ".join(word for word in words if word)


def _schedule_note(plan: Plain) -> str:
    by = "the lower end of the interval" if plan["by"] == "low" else "the measured p05"
    words = [f"Budgets are the smallest with {by} at the target.", "Boxes: 95 % intervals of p05."]
    if any(bin["budget"] is None for bin in plan["bins"]):
        words.append("Grey: dense.")
    if plan["check"]:
        words.append("Points: p05 in a run under this schedule, with its interval.")
    words.append("KV read: bytes of keys, values and landmarks, of dense ones.")
    return " ".join(words)


def _steps_panel(page: Sheet, box: Box, plan: Plain) -> None:
    axes, lengths = page.axes(box.place), lengths_of(plan["bins"])
    lines = _schedules(plan)
    known = [budget for line in lines for budget in line.budgets if budget is not None]
    axes.set_ylim(0, 1.15 * max(known, default=lengths.edges[-1]))
    _shade_dense(axes, lengths, plan["bins"])
    ends = [_steps(axes, lengths, line) for line in lines]
    labels = [*_diagonal(axes, lengths), *(end for end in ends if end is not None)]
    lengths.dress(axes, box.width, label="")
    axes.tick_params(axis="x", labelbottom=False)
    axes.set_ylabel("budget, kept tokens")
    axes.yaxis.set_label_coords(-0.55 / box.width, 0.5)
    label_ends(axes, labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A schedule to draw."""

    text: str
    starts: Sequence[int]
    budgets: Sequence[int | None]
    colour: str
    width: float = 1.0
    dashed: bool = False
    own: bool = False


def _schedules(plan: Plain) -> list[Steps]:
    """Other targets, the compared preset, and the plan's own schedule on top."""
    starts = [bin["start"] for bin in plan["bins"]]
    lines = []
    for other in plan["sensitivity"]:
        if other["reached"] and other["target"] != plan["target"]:
            text, colour = _aside(plan, other), OTHERS[other["target"] > plan["target"]]
            lines.append(Steps(text=text, starts=starts, budgets=other["budgets"], colour=colour))
    if plan["compare"]:
        name, begins, budgets = (plan["compare"][key] for key in ("name", "starts", "budgets"))
        looks: dict[str, Any] = {"colour": COMPARED, "width": 1.3, "dashed": True}
        lines.append(Steps(text=name, starts=begins, budgets=budgets, **looks))
    own = [bin["budget"] for bin in plan["bins"]]
    text, looks = f"target {plan['target']:g}", {"colour": ACCENT, "width": 2.4, "own": True}
    return [*lines, Steps(text=text, starts=starts, budgets=own, **looks)]


def _aside(plan: Plain, other: Plain) -> str:
    """A target beside the plan's, with the variant where that is another."""
    name = other.get("variant", plan["variant"])
    return f"target {other['target']:g}" + (f", {name}" if name != plan["variant"] else "")


def _steps(axes: "Axes", lengths: Lengths, line: Steps) -> Label | None:
    """A line that is flat within a bin and breaks where one is dense; the label for its end."""
    end, x, y = lengths.edges[-1], [], []
    stops = [*line.starts[1:], max(end, line.starts[-1])]
    for start, stop, budget in zip(line.starts, stops, line.budgets, strict=False):
        if start < end:
            x += [lengths.place(start), lengths.place(stop)]
            y += [math.nan if budget is None else budget] * 2
    dashes: Any = (0, (4, 2)) if line.dashed else "solid"
    axes.plot(x, y, color=line.colour, linewidth=line.width, linestyle=dashes)
    ends = [value for value in y if not math.isnan(value)]
    if not ends:
        return None
    hold = 50 if line.own else 1
    return Label(y=ends[-1], text=line.text, colour=line.colour, bold=line.own, hold=hold)


def _shade_dense(axes: "Axes", lengths: Lengths, bins: Sequence[Plain]) -> None:
    """Grey behind the bins that the plan leaves dense."""
    for bin in bins:
        if bin["budget"] is None:
            left, right = lengths.place(bin["start"]), lengths.place(lengths.stop(bin))
            axes.axvspan(left, right, color="#eef0f3", linewidth=0)


def _diagonal(axes: "Axes", lengths: Lengths) -> list[Label]:
    """Where the budget is the length: nothing is left out. Labelled where it leaves the panel."""
    edges, top = lengths.edges, axes.get_ylim()[1]
    axes.plot([lengths.place(edge) for edge in edges], edges, color=DENSE, linewidth=1)
    crossing = lengths.place(min(top, edges[-1]))
    if crossing > 0.8 * lengths.bins:
        return [Label(y=min(top, edges[-1]), text="all kept", colour=FAINT)]
    x = crossing + 0.012 * lengths.bins
    axes.text(x, 0.985 * top, "all kept: budget = length", size=7, color=FAINT, va="top")
    return []


def _rows(page: Sheet, box: Box, plan: Plain) -> None:
    """Two rows of numbers under the steps: the budget, and the share of KV bytes read."""
    axes, lengths, bins = page.axes(box.place), lengths_of(plan["bins"]), plan["bins"]
    lengths.dress(axes, box.width, label="")
    axes.set_axis_off()
    budgets = ["dense" if bin["budget"] is None else str(bin["budget"]) for bin in bins]
    shares = [percent(bin["kept_share"]) for bin in bins]
    step = every(len(bins), box.width, 0.1 + 0.065 * max(map(len, [*budgets, *shares])))
    rows = ((0.8, "kept tokens", budgets, ACCENT), (0.3, "KV read", shares, FAINT))
    for y, name, texts, colour in rows:
        axes.text(-0.04 * lengths.bins, y, name, size=6.5, color=colour, ha="right", va="center")
        for bin, text in list(zip(bins, texts, strict=True))[::step]:
            x = lengths.middle(bin)
            axes.text(x, y, text, size=6.8, color=colour, ha="center", va="center")
    axes.set_ylim(0, 1)


def _tail_panel(page: Sheet, box: Box, plan: Plain) -> None:
    """p05 that the plan expects in each bin, and what a check run measured."""
    axes, lengths = page.axes(box.place), lengths_of(plan["bins"])
    known = [bin for bin in plan["bins"] if bin["p05"] is not None]
    check = plan["check"] or []
    spans = [bin[key] for bin in [*known, *check] for key in ("low", "high")]
    bottom, top = lowest([*spans, plan["target"]]), max([*spans, plan["target"]])
    axes.set_ylim(bottom, min(1.005, math.ceil((top + 0.005) * 20) / 20))
    for bin in known:
        left, right = lengths.place(bin["start"]), lengths.place(lengths.stop(bin))
        axes.fill_between([left, right], bin["low"], bin["high"], color=ACCENT, alpha=0.16, lw=0)
        axes.plot([left, right], [bin["p05"]] * 2, color=ACCENT, linewidth=1.8)
    for cell in check:
        x = lengths.middle(cell)
        axes.plot([x, x], [cell["low"], cell["high"]], color=CHECKED, linewidth=1)
        axes.plot(x, cell["p05"], "o", color=CHECKED, markersize=3.6)
    labels = [target_line(axes, plan["target"])]
    if known:
        labels.append(Label(y=known[-1]["p05"], text="expected", colour=ACCENT))
    if check:
        labels.append(Label(y=check[-1]["p05"], text="check run", colour=CHECKED))
    lengths.dress(axes, box.width)
    axes.set_ylabel("p05 of acceptance")
    axes.yaxis.set_label_coords(-0.55 / box.width, 0.5)
    label_ends(axes, labels)


@drawing()
def cost(plan: Plain) -> "Figure":
    """Seconds by length, dense against sparse, and the speed-up as three models see it."""
    rows = speed_ups(plan)
    tall = max(2.9, 0.42 * len(rows))
    words = _subtitle(plan)
    note = "Predicted. Bytes alone: memory traffic at full bandwidth, and nothing else."
    page = sheet(12.4, BELOW + tall + ABOVE, cost_title(plan), words, note)
    _seconds_panel(page, Box(left=LEFT, bottom=BELOW, width=6.1, height=tall), plan)
    _speed_panel(page, Box(left=9.0, bottom=BELOW, width=2.75, height=tall), rows)
    return page.figure


def cost_title(plan: Plain) -> str:
    """The rollout in seconds and as a ratio."""
    sparse, dense = (sum(bin[key] for bin in plan["bins"]) for key in ("seconds", "dense_seconds"))
    return (
        f"The rollout takes {_seconds(sparse)} instead of {_seconds(dense)}, "
        f"{plan['speed_up']:.2f}x; bytes alone would allow {plan['limit']:.2f}x"
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"


def speed_ups(plan: Plain) -> list[tuple[str, float, str]]:
    """Name, factor and colour of each bar: the plan, its neighbours, other models of its cost."""
    rows = [(f"this plan, target {plan['target']:g}", plan["speed_up"], ACCENT)]
    for other in plan["sensitivity"]:
        if other["speed_up"] is not None and other["target"] != plan["target"]:
            colour = OTHERS[other["target"] > plan["target"]]
            rows.append((_aside(plan, other), other["speed_up"], colour))
    if plan["compare"]:
        rows.append((plan["compare"]["name"], plan["compare"]["speed_up"], COMPARED))
    rows.append(("bytes alone", plan["limit"], DENSE))
    rows.append(("the paper's eFLOPs", plan["eflops"], DENSE))
    return rows


def _seconds_panel(page: Sheet, box: Box, plan: Plain) -> None:
    axes, lengths, bins = page.axes(box.place), lengths_of(plan["bins"]), plan["bins"]
    x = np.array([lengths.middle(bin) for bin in bins])
    wide = np.array([lengths.width(bin) for bin in bins]) * 0.42
    dense, sparse = ([bin[key] for bin in bins] for key in ("dense_seconds", "seconds"))
    axes.bar(x - wide / 2, dense, wide, color=DENSE)
    axes.bar(x + wide / 2, sparse, wide, color=ACCENT)
    axes.set_ylim(0, 1.16 * max([*dense, *sparse, 1e-9]))
    lengths.dress(axes, box.width)
    axes.set_ylabel("seconds of the rollout")
    heading(axes, "time spent at each length")
    wide_inches, tall = inches_of(axes)
    for rank, (text, colour) in enumerate((("dense", SOFT), ("sparse", ACCENT))):
        x_place = 1 - (1.0 - 0.5 * rank) / wide_inches
        beside(axes, x_place, 1 + 0.14 / tall, text, size=8, color=colour, weight="bold")


def _speed_panel(page: Sheet, box: Box, rows: Sequence[tuple[str, float, str]]) -> None:
    axes = page.axes(box.place)
    most = max(factor for _, factor, _ in rows)
    for row, (_, factor, colour) in enumerate(rows):
        axes.barh(row, factor, 0.62, color=colour)
        weight = "bold" if row == 0 else "normal"
        text = f"{factor:.2f}x"
        axes.text(factor + 0.02 * most, row, text, size=8, va="center", color=INK, weight=weight)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max(most, 1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed-up over dense (dotted: 1x)")
    heading(axes, "speed-up of the whole rollout")


def write_plan(path: str | Path, folder: str | Path) -> list[Path]:
    """Draw a plan's file as SVG and PNG into a folder; the paths."""
    plan = read(path, "bins", "plan: sparrow plan makes one")
    if not plan["bins"]:
        raise ValueError(f"plan {path} has no bins: nothing to draw")
    figures = {"schedule": schedule, "cost": cost}
    return [
        made for name, draw in figures.items() for made in save(draw(plan), Path(folder) / name)
    ]
