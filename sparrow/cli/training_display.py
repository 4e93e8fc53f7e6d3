"""What a person sees of a training run: a panel on a terminal, a line a step elsewhere."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Metrics = Mapping[str, float]

ROWS = 10  # steps in the table
AROUND = 7  # lines of the panel that are not rows
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
# Two lines on the last step: name, metric, form.
DETAILS = (
    (
        ("tokens/s", "perf/throughput", ".0f"),
        ("entropy", "actor/entropy", ".3f"),
        ("clipped", "actor/pg_clipfrac", ".1%"),
        ("cut off", "response_length/clip_ratio", ".1%"),
        ("density", "sparse/density", ".1%"),
    ),
    (
        ("seconds of rollout", "timing_s/gen", ".1f"),
        ("log-probs", "timing_s/old_log_prob", ".1f"),
        ("update", "timing_s/update_actor", ".1f"),
    ),
)


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
        parts: list[RenderableType] = [_cropped(self._progress(), inside)]
        if self._history:
            lines = (_details(self._history[-1], line) for line in DETAILS)
            parts += [self._table(), *(_cropped(Text(line, "dim"), inside) for line in lines)]
        return Panel(Group(*parts), title="sparrow train", width=width, border_style="blue")

    def _progress(self) -> Text:
        done = self._first + len(self._history)
        text = Text(f"{done}/{self._steps} steps", style="bold")
        text.append(self._remaining(), style="not bold")
        phase = self._phase
        if phase is not None:
            text.append(f"   {phase.name}", style="yellow")
            text.append("" if phase.done is None else f" {phase.done}/{phase.total}")
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
        return f"   {_duration(seconds)} left, {mean:.3g} s a step"

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("step", justify="right", width=STEP, no_wrap=True, style="dim")
        for column in COLUMNS:
            table.add_column(column.title, justify="right", max_width=column.width, no_wrap=True)
        rows = max(1, min(ROWS, self._console.height - AROUND))
        start = max(0, len(self._history) - rows)
        for offset, metrics in enumerate(self._history[start:]):
            cells = [
                Text(_cell(column, metrics), self._style(column, metrics)) for column in COLUMNS
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


def _cell(column: Column, metrics: Metrics) -> str:
    """The value in its room; one that is too long loses digits."""
    value = metrics.get(column.metric)
    if value is None:
        return "-"
    text = f"{value:{column.form}}"
    return text if len(text) <= column.width else f"{value:.1e}"


def _details(metrics: Metrics, line: Sequence[tuple[str, str, str]]) -> str:
    return "   ".join(
        f"{name} {metrics[metric]:{form}}" for name, metric, form in line if metric in metrics
    )


def _cropped(text: Text, width: int) -> Text:
    """One line, always: a panel that changes its height flickers."""
    text.truncate(width)
    text.no_wrap = True
    return text


def _duration(seconds: float) -> str:
    """Hours where there are any, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
