"""What a person sees of a training run: a panel on a terminal, a line a step elsewhere."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Metrics = Mapping[str, float]

ROWS = 10  # steps in the table
AROUND = 12  # lines of the panel that are not rows
WIDEST = 100
REFRESHES = 4  # a second
NEAR = 0.02  # p05 less than this above its target is yellow

REWARD = "critic/score/mean"
P05 = "sparse/accept_p05_min"  # of the worst bin: what the target is about


class Column(NamedTuple):
    """A value of a step: its heading, its metric, its room, and how it is written."""

    title: str
    metric: str
    width: int
    form: str = ".3f"


COLUMNS = (
    Column(title="reward", metric=REWARD, width=7),
    Column(title="acc", metric="critic/acc/mean", width=6),
    Column(title="length", metric="response_length/mean", width=7, form=".0f"),
    Column(title="p05", metric=P05, width=6),
    Column(title="kept", metric="sparse/kv_budget", width=7, form=".0f"),
    Column(title="loss", metric="actor/pg_loss", width=9, form=".3g"),
    Column(title="grad", metric="actor/grad_norm", width=8, form=".3g"),
    Column(title="seconds", metric="timing_s/step", width=8, form=".1f"),
)
STEP = 6  # room of the step's number
# What a narrow terminal goes without, in this order.
LEAST_FIRST = ("loss", "grad", "acc", "kept", "length", "seconds", "p05")

# name, metric, colour, block, block where the terminal has ASCII alone
SPLIT = (
    ("rollout", "timing_s/gen", "cyan", "█", "#"),
    ("log-probs", "timing_s/old_log_prob", "magenta", "▓", "="),
    ("update", "timing_s/update_actor", "green", "▒", "-"),
    ("other", "", "bright_black", "░", "."),
)
# name, metric, form, factor
DETAILS = (
    ("tokens/s", "perf/throughput", ".0f", 1.0),
    ("entropy", "actor/entropy", ".3f", 1.0),
    ("clipped", "actor/pg_clipfrac", ".1f", 100.0),
    ("cut off", "response_length/clip_ratio", ".1f", 100.0),
    ("density", "sparse/density", ".1f", 100.0),
)
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


class Phase(NamedTuple):
    """What is going on within a step."""

    name: str
    done: int | None
    total: int | None
    since: float


class Display:
    """Shows the steps from `first` to `steps` of a run while it is entered.

    Steps count from 0, as in metrics.jsonl. `header` is printed once, above. `target` is what
    p05 should not fall below: it gives the colour.
    """

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        first: int,
        header: Sequence[str],
        target: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps, self._first = steps, first
        self._header = list(header)
        self._target = target
        self._clock = clock
        self._begun = self._stepped = clock()
        # Replaced, never changed: the terminal is refreshed by a thread of its own.
        self._history: tuple[Metrics, ...] = ()
        self._phase: Phase | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._begun = self._stepped = self._clock()
        for line in self._header:
            self._print(line)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            shown: Any = {"console": self._console, "get_renderable": self._panel}
            self._live = Live(**shown, refresh_per_second=REFRESHES)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        """The last panel stays."""
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is going on, and how far it is where that is known."""
        now = self._phase
        since = now.since if now is not None and now.name == name else self._clock()
        self._phase = Phase(name=name, done=done, total=total, since=since)

    def step(self, metrics: Metrics) -> None:
        """Show a step that has ended. Any metric may be missing."""
        now = self._clock()
        number = self._first + len(self._history)
        shown = {"timing_s/step": now - self._stepped, **metrics}
        self._stepped, self._phase = now, None
        self._history = (*self._history, shown)
        if self._live is not None:
            self._live.refresh()
            return
        if len(self._history) == 1:
            self._print("  ".join(["  step", *(f"{c.title:>{c.width}}" for c in COLUMNS)]))
        cells = (f"{_cell(column, shown):>{column.width}}" for column in COLUMNS)
        self._print("  ".join([f"{number:>{STEP}}", *cells]))

    def event(self, text: str, style: str = "") -> None:
        """Say something that stays above the panel: an action of the gate, a warning."""
        self._print(text, style)

    def _print(self, text: str, style: str = "") -> None:
        clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        styled = Text(clean, style=style if self._console.is_terminal else "")
        self._console.print(styled, soft_wrap=True)

    # The panel.

    def _panel(self) -> RenderableType:
        width = min(self._console.width, WIDEST)
        inside = width - 4  # borders and the blank beside them
        parts: list[RenderableType] = [self._progress(inside)]
        if self._history:
            parts += [self._table(inside), *_time_split(self._history[-1], inside, self._ascii)]
            parts += [*_details(self._history[-1], inside), *self._sparklines(inside)]
        return Panel(Group(*parts), title="sparrow train", width=width, border_style="blue")

    @property
    def _ascii(self) -> bool:
        return self._console.options.ascii_only

    def _progress(self, width: int) -> RenderableType:
        done = self._first + len(self._history)
        count = f"{done}/{self._steps} steps"
        left = self._remaining()
        room = max(4, width - len(count) - len(left) - 4)
        bar = ProgressBar(total=max(1, self._steps), completed=done, width=room)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(count, style="bold"), bar, Text(left))
        return Group(grid, _cropped(self._phase_text(), width))

    def _phase_text(self) -> Text:
        phase = self._phase
        if phase is None:
            return Text()
        text = Text(phase.name, style="yellow")
        if phase.done is not None:
            text.append(f" {phase.done}" + (f"/{phase.total}" if phase.total is not None else ""))
        text.append(f" for {_duration(self._clock() - phase.since)}", style="dim")
        return text

    def _remaining(self) -> str:
        """By the mean of this session's steps, whatever they were busy with."""
        count = len(self._history)
        left = self._steps - self._first - count
        if not count or left <= 0:
            return ""
        mean = (self._stepped - self._begun) / count
        seconds = max(0.0, mean * left - (self._clock() - self._stepped))
        return f"{_duration(seconds)} left, {mean:.3g} s a step"

    def _table(self, width: int) -> Table:
        columns = _columns_within(width)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("step", justify="right", width=STEP, no_wrap=True, style="dim")
        for column in columns:
            table.add_column(column.title, justify="right", width=column.width, no_wrap=True)
        rows = max(1, min(ROWS, self._console.height - AROUND))
        start = max(0, len(self._history) - rows)
        for offset, metrics in enumerate(self._history[start:]):
            cells = [
                Text(_cell(column, metrics), self._style(column, metrics)) for column in columns
            ]
            table.add_row(str(self._first + start + offset), *cells)
        return table

    def _style(self, column: Column, metrics: Metrics) -> str:
        value = metrics.get(column.metric)
        if value is None:
            return "dim"
        target = self._target if column.metric == P05 else None
        if not math.isfinite(value) or (target is not None and value < target):
            return "bold red"
        if target is None:
            return ""
        return "yellow" if value < target + NEAR else "green"

    def _sparklines(self, width: int) -> list[RenderableType]:
        """Reward and p05 over this session, with their last values."""
        shown = []
        for title, metric in (("reward", REWARD), ("p05", P05)):
            values = [metrics.get(metric, math.nan) for metrics in self._history]
            if any(map(math.isfinite, values)):
                shown.append((title, values))
        room = (width - 2) // max(1, len(shown)) - len("reward ") - len(" -0.000")
        text = Text("  ").join(
            Text.assemble(
                (f"{title} ", "dim"),
                (_sparkline(values, room, ASCII_BARS if self._ascii else BARS), "cyan"),
                f" {values[-1]:.3f}",
            )
            for title, values in shown
        )
        return [_cropped(text, width)] if shown else []


def _columns_within(width: int) -> list[Column]:
    """The columns for which there is room, the less important left out first."""
    columns = list(COLUMNS)
    for title in LEAST_FIRST:
        if STEP + sum(column.width + 1 for column in columns) + 1 <= width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def _cell(column: Column, metrics: Metrics) -> str:
    """The value in its room; one that is too long loses digits."""
    value = metrics.get(column.metric)
    if value is None:
        return "-"
    text = f"{value:{column.form}}"
    return text if len(text) <= column.width else f"{value:.1e}"


def _time_split(metrics: Metrics, width: int, ascii_only: bool) -> list[RenderableType]:
    """Where the last step's time went: a bar and its legend."""
    seconds = [max(0.0, _finite(metrics, metric)) for _, metric, *_ in SPLIT]
    seconds[-1] = max(0.0, _finite(metrics, "timing_s/step") - sum(seconds))
    total = sum(seconds)
    if total <= 0 or sum(seconds[:-1]) <= 0:
        return []
    bar, legend = Text(), Text()
    ends = [round(width * sum(seconds[: i + 1]) / total) for i in range(len(SPLIT))]
    for i, (name, _, colour, block, plain) in enumerate(SPLIT):
        sign = plain if ascii_only else block
        bar.append(sign * (ends[i] - (ends[i - 1] if i else 0)), style=colour)
        legend.append(f"{sign} ", style=colour).append(f"{name} {seconds[i] / total:.0%}   ")
    return [bar, _cropped(legend, width)]


def _details(metrics: Metrics, width: int) -> list[RenderableType]:
    shown = [
        f"{name} {metrics[metric] * factor:{form}}{'%' if factor == 100 else ''}"
        for name, metric, form, factor in DETAILS
        if metric in metrics
    ]
    return [_cropped(Text("   ".join(shown), style="dim"), width)] if shown else []


def _sparkline(values: Sequence[float], width: int, bars: str) -> str:
    """Means of as many stretches as there is room for; a blank where there is no number."""
    stretches = np.array_split(np.array(values, float), min(width, len(values)))
    finite = [stretch[np.isfinite(stretch)] for stretch in stretches]
    means = [float(stretch.mean()) if stretch.size else None for stretch in finite]
    low = min(mean for mean in means if mean is not None)
    spread = max(mean for mean in means if mean is not None) - low
    tops = len(bars) - 1
    return "".join(
        " " if mean is None else bars[round(tops * ((mean - low) / spread if spread else 0.5))]
        for mean in means
    )


def _cropped(text: Text, width: int) -> Text:
    """One line, always: a panel that changes its height flickers."""
    text.truncate(width)
    text.no_wrap = True
    return text


def _finite(metrics: Metrics, name: str) -> float:
    value = metrics.get(name, 0.0)
    return value if math.isfinite(value) else 0.0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
