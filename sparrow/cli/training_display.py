"""The terminal display of a training run: a line per step, and a progress bar."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from rich.console import Console
from rich.text import Text

from sparrow.cli.output import progress_bar
from sparrow.schema.run_folder import VERSION, by_policy

Metrics = Mapping[str, float]

NEAR = 0.02  # p05 less than this above its target is yellow
P05 = "sparse/accept_p05_min"  # of the worst bin: what the target is about
POOLED = "sparse/accept_p05"  # of all tokens in the gate's window, while no bin has enough of them
TOKENS = "sparse/accept_tokens"  # how many those are


class Column(NamedTuple):
    """A column: its title, metric, width and number format."""

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
STEP = 6  # width of the step's number


class Display:
    """Callbacks that show the steps from `first` to `steps` of a run while entered.

    Steps count from 0, as in metrics.jsonl. header: printed once. target: of p05, for colours;
    targets: those of several policies, which have a line each, by name.
    """

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        first: int,
        header: Sequence[str],
        target: float | None = None,
        targets: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._header, self._target = console, list(header), target
        self._targets = targets or {}
        self._first, self._done = first, first
        self._clock, self._stepped = clock, clock()
        self._explained = False  # why p05 is not that of a bin
        self._bar = progress_bar(console)
        self._task = self._bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Self:
        self._stepped = self._clock()
        for line in self._header:
            self._print(Text(line))
        if self._console.is_interactive:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_interactive:
            self._bar.stop()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase, and its progress if known."""
        count = "" if done is None else f" {done}/{total}"
        self._bar.update(self._task, description=f"{name}{count}")

    def step(self, metrics: Metrics) -> None:
        """Show the metrics of a step; any may be missing."""
        now = self._clock()
        shown = {"timing_s/step": now - self._stepped, **metrics}
        if self._done == self._first:
            titles = (f"{column.title:>{column.width}}" for column in COLUMNS)
            self._print(Text("  ".join(["step".rjust(STEP), *titles])))
        number = int(metrics.get("step", self._done))  # of a run that began again: repeated
        learning = {name: own for name, own in by_policy(shown).items() if VERSION in own}
        if not learning:
            self._print_row(str(number), shown, self._target)
        for place, (name, values) in enumerate(learning.items()):
            begin = "" if place else str(number)
            if values.get("steps") or not place:
                target = self._targets.get(name, self._target)
                self._print_row(begin, values, target, describe_policy(name, values))
            else:
                self._print(Text(f"{begin:>{STEP}}  {describe_policy(name, values)}", "dim"))
        self._done, self._stepped = self._done + 1, now
        self._bar.update(self._task, completed=number + 1)

    def _print_row(self, begin: str, shown: Metrics, target: float | None, end: str = "") -> None:
        cells = [Text(_cell(column, shown), _style(column, shown, target)) for column in COLUMNS]
        parts = [Text(f"{begin:>{STEP}}"), *cells, *([Text(end)] if end else [])]
        self._print(Text("  ").join(parts))
        if P05 not in shown and not self._explained and shown.get("steps") != 0:
            self._explained = True
            self._print(Text(_without_bins(shown), style="dim"))

    def event(self, text: str, style: str = "") -> None:
        """Show a message: an action of the gate, a warning."""
        clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        self._print(Text(clean, style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _style(column: Column, metrics: Metrics, target: float | None) -> str:
    value = metrics.get(column.metric)
    target = target if column.metric == P05 else None
    if value is None or (math.isfinite(value) and target is None):
        return ""
    if not math.isfinite(value) or (target is not None and value < target):
        return "bold red"
    return "yellow" if target is not None and value < target + NEAR else "green"


def describe_policy(name: str, values: Mapping[str, float | None]) -> str:
    """Where one of several policies is."""
    version, pending, steps = (values.get(key) or 0 for key in (VERSION, "pending", "steps"))
    parts = [f"{name}: version {version:.0f}"]
    parts += [f"{steps:.0f} updates"] if steps > 1 else []
    parts += [f"{pending:.0f} groups pending"] if pending else []
    return ", ".join(parts)


def _without_bins(metrics: Metrics) -> str:
    """Explain why p05 is not that of the worst length bin."""
    if not metrics.get(TOKENS):
        return "p05 -: no token was measured (gate.mode, gate.sample)"
    pooled = f"p05 ~: pooled over all tokens measured so far, n = {metrics[TOKENS]:.0f}"
    return f"{pooled}; no length bin has enough tokens yet (gate.least, gate.prompts)"


def _cell(column: Column, metrics: Metrics) -> str:
    """The value, shortened to the width. ~: pooled over all lengths."""
    value = metrics.get(column.metric)
    if column.metric == P05 and value is None and POOLED in metrics:
        return f"~{metrics[POOLED]:{column.form}}".rjust(column.width)
    text = "-" if value is None else f"{value:{column.form}}"
    shown = text if value is None or len(text) <= column.width else f"{value:.1e}"
    return f"{shown:>{column.width}}"
