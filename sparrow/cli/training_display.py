"""What a person sees of a training run: a line a step, and on a terminal what is going on."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

Metrics = Mapping[str, float]

REFRESHES = 4  # a second
NEAR = 0.02  # p05 less than this above its target is yellow
P05 = "sparse/accept_p05_min"  # of the worst bin: what the target is about


class Column(NamedTuple):
    """A value of a step: its heading, its metric, its room, and how it is written."""

    title: str
    metric: str
    width: int
    form: str = ".3f"


COLUMNS = (
    Column(title="reward", metric="critic/score/mean", width=7),
    Column(title="acc", metric="critic/acc/mean", width=6),
    Column(title="length", metric="response_length/mean", width=7, form=".0f"),
    Column(title="p05", metric=P05, width=6),
    Column(title="kept", metric="sparse/kv_budget", width=7, form=".0f"),
    Column(title="rollout", metric="timing_s/gen", width=8, form=".1f"),
    Column(title="grad", metric="actor/grad_norm", width=8, form=".3g"),
    Column(title="seconds", metric="timing_s/step", width=8, form=".1f"),
)
STEP = 6  # room of the step's number


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
        self._steps, self._first, self._done = steps, first, first
        self._header = list(header)
        self._target = target
        self._clock = clock
        self._begun = self._stepped = clock()
        self._phase: Phase | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._begun = self._stepped = self._clock()
        for line in self._header:
            self._print(Text(line))
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            shown: Any = {"console": self._console, "get_renderable": self.progress}
            self._live = Live(**shown, refresh_per_second=REFRESHES, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is going on, and how far it is where that is known."""
        now = self._phase
        since = now.since if now is not None and now.name == name else self._clock()
        self._phase = Phase(name=name, done=done, total=total, since=since)

    def step(self, metrics: Metrics) -> None:
        """Show a step that has ended. Any metric may be missing."""
        now = self._clock()
        shown = {"timing_s/step": now - self._stepped, **metrics}
        if self._done == self._first:
            titles = (f"{column.title:>{column.width}}" for column in COLUMNS)
            self._print(Text("  ".join(["step".rjust(STEP), *titles])))
        cells = (Text(_cell(column, shown), self._style(column, shown)) for column in COLUMNS)
        self._print(Text("  ").join([Text(f"{self._done:>{STEP}}"), *cells]))
        self._done, self._stepped, self._phase = self._done + 1, now, None

    def event(self, text: str, style: str = "") -> None:
        """Say something else: an action of the gate, a warning."""
        clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        self._print(Text(clean, style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def progress(self) -> Text:
        """One line, always: one that changes its height flickers."""
        text = Text(f"{self._done}/{self._steps} steps", no_wrap=True, overflow="ellipsis")
        text.append(self._remaining())
        phase = self._phase
        if phase is not None:
            text.append(f"   {phase.name}", style="yellow")
            text.append("" if phase.done is None else f" {phase.done}/{phase.total}")
            text.append(f" for {_duration(self._clock() - phase.since)}", style="dim")
        return text

    def _remaining(self) -> str:
        """By the mean of this session's steps, whatever they were busy with."""
        count, left = self._done - self._first, self._steps - self._done
        if not count or left <= 0:
            return ""
        mean = (self._stepped - self._begun) / count
        seconds = max(0.0, mean * left - (self._clock() - self._stepped))
        return f"   {_duration(seconds)} left, {mean:.3g} s a step"

    def _style(self, column: Column, metrics: Metrics) -> str:
        value = metrics.get(column.metric)
        target = self._target if column.metric == P05 else None
        if value is None or (math.isfinite(value) and target is None):
            return ""
        if not math.isfinite(value) or (target is not None and value < target):
            return "bold red"
        return "yellow" if target is not None and value < target + NEAR else "green"


def _cell(column: Column, metrics: Metrics) -> str:
    """The value in its room; one that is too long loses digits."""
    value = metrics.get(column.metric)
    text = "-" if value is None else f"{value:{column.form}}"
    shown = text if value is None or len(text) <= column.width else f"{value:.1e}"
    return f"{shown:>{column.width}}"


def _duration(seconds: float) -> str:
    """Hours where there are any, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
