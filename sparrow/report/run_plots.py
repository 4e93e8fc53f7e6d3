"""Figures of training runs: reward, accuracy on held-out rows, length and the tail, step by step.

Reads what `sparrow train` leaves behind (metrics.jsonl, validation.jsonl), of one run or of several
side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow.files import read_lines
from sparrow.report.labels import Label, label_ends
from sparrow.report.panels import Box, acceptance_axis, boxes, heading, lowest, target_line
from sparrow.report.style import Sheet, drawing, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f2328", "#b3214f", "#2b6cb0", "#2fada6", "#a04a9c", "#a9a23f")
REWARD, LENGTH, P05 = "critic/score/mean", "response_length/mean", "sparse/accept_p05"
VALIDATION = "val-core/"
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run as its files hold it."""

    name: str
    steps: Sequence[Line]
    validation: Sequence[Line]

    @classmethod
    def read(cls, name: str, metrics: str | Path, validation: str | Path | None = None) -> "Curve":
        kept = [] if validation is None or not Path(validation).exists() else read_lines(validation)
        return cls(name=name, steps=read_lines(metrics), validation=kept)

    def values(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps that have a metric, and its values."""
        known = [line for line in self.steps if line.get(metric) is not None]
        return [line["step"] for line in known], [line[metric] for line in known]

    def points(self) -> list[tuple[int, float, float, float]]:
        """Accuracy on held-out rows after so many steps, with its interval; of the first source."""
        found = []
        for line in self.validation:
            means = [key for key in line if key.startswith(VALIDATION) and "/mean@" in key]
            if means and line[means[0]] is not None:
                value, name = line[means[0]], means[0].rpartition("/mean@")[0]
                low, high = (line.get(f"{name}/{end}") for end in ("low", "high"))
                ends = (value if end is None else end for end in (low, high))
                found.append((line["step"], value, *ends))
        return found


@drawing()
def curves(runs: Sequence[Curve], *, title: str, note: str = "", target: float = 0.86) -> "Figure":
    """Four panels: reward, accuracy on held-out rows, length of answers, p05 of acceptance."""
    if not runs or not all(run.steps for run in runs):
        raise ValueError("curves: got no run, or one without a step")
    width, body, places = boxes(4, 2.1)
    page = sheet(width, body, title, " · ".join(run.name for run in runs), note)
    reward, held_out, length, tail = places
    _lines_panel(page, reward, runs, REWARD, "mean reward of a step")
    _validation_panel(page, held_out, runs)
    _lines_panel(page, length, runs, LENGTH, "mean tokens of an answer")
    _tail_panel(page, tail, runs, target)
    return page.figure


def plot_runs(runs: Sequence[Curve], path: str | Path, *, title: str, note: str = "") -> list[Path]:
    """The figure as files."""
    return save(curves(runs, title=title, note=note), path, formats=("svg",))


def _lines_panel(page: Sheet, box: Box, runs: Sequence[Curve], metric: str, text: str) -> None:
    axes = page.axes(box.place)
    labels = []
    for run, colour in zip(runs, COLOURS, strict=False):
        steps, values = run.values(metric)
        axes.plot(steps, values, color=colour, linewidth=1.4)
        if values:
            labels.append(Label(x=steps[-1], y=values[-1], text=run.name, colour=colour))
    _finish(axes, text, labels)


def _validation_panel(page: Sheet, box: Box, runs: Sequence[Curve]) -> None:
    axes = page.axes(box.place)
    labels = []
    for run, colour in zip(runs, COLOURS, strict=False):
        points = run.points()
        for step, _, low, high in points:
            axes.plot([step, step], [low, high], color=colour, linewidth=3, alpha=0.25)
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=colour, markersize=4)
        if points:
            text = f"{points[-1][1]:.2f}"
            labels.append(Label(x=points[-1][0], y=points[-1][1], text=text, colour=colour))
    axes.set_ylim(0, 1.02)
    _finish(axes, "accuracy on held-out rows, dense, with 95 % intervals", labels)


def _tail_panel(page: Sheet, box: Box, runs: Sequence[Curve], target: float) -> None:
    axes = page.axes(box.place)
    labels, every = [target_line(axes, target)], [target]
    for run, colour in zip(runs, COLOURS, strict=False):
        steps, values = run.values(P05)
        axes.plot(steps, values, color=colour, linewidth=1.4)
        every += values
        if values:
            labels.append(Label(x=steps[-1], y=values[-1], text=run.name, colour=colour))
    acceptance_axis(axes, lowest(every))
    _finish(axes, "p05 of acceptance, exact, over the gate's window", labels)


def _finish(axes: "Axes", text: str, labels: Sequence[Label]) -> None:
    heading(axes, text)
    axes.set_xlabel("step")
    axes.set_xlim(axes.get_xlim())  # the lines to labels shall not widen it
    if labels:
        label_ends(axes, labels)
