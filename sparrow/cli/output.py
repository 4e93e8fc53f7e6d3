"""Terminal output: results on standard output, notes and progress on standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.segment import Segment

from sparrow.files import printable
from sparrow.schema.base import Record, to_dict

if TYPE_CHECKING:
    from rich.progress import Progress

STOPPED = 130  # exit code after Ctrl-C
AsJson = Annotated[bool, "Print JSON instead of text."]
Counting = Callable[[int, int, str], None]  # done, total, what


class PlainConsole(Console):
    """A console without markup, unless `markup=True`.

    Control characters are escaped in everything that is rendered: names, notes and reasons come
    from files, and a terminal would obey them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **settings):
            shown = segment if segment.control else Segment(printable(segment.text), segment.style)
            yield shown


console = PlainConsole()
notes = PlainConsole(stderr=True)


def plain(text: str) -> str:
    """Escape rich markup and control characters."""
    from rich.markup import escape

    return escape(printable(text))


def write(text: str, end: str = "\n") -> None:
    """Print a result; on a terminal, control characters are escaped."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def write_json(result: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(to_dict(result) if isinstance(result, Record) else result, indent=2))


def duration(seconds: float) -> str:
    """Format a time: in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def report(text: str) -> None:
    """Print a note to standard error."""
    notes.print(printable(text), style="dim")


def alert(mark: str, text: str, style: str = "bold red") -> None:
    """Print an error or a warning to standard error."""
    notes.print(f"[{style}]{mark}[/] {plain(text)}", markup=True)


@contextmanager
def measuring(what: str = "measuring") -> Iterator[Callable[[str], None]]:
    """Show a spinner; yields a function that changes its text."""
    with notes.status(plain(what)) as status:
        yield lambda text: status.update(plain(text))


@contextmanager
def counting(what: str) -> Iterator[Counting]:
    """Show a progress bar; yields a callback (done, total, what) that moves it, stage by stage."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        stage = [""]

        def progress(done: int, total: int, what: str) -> None:
            if what.split(":")[0] != stage[0]:
                bar.reset(task)
                stage[0] = what.split(":")[0]
            bar.update(task, completed=done, total=total, description=what)

        yield progress


@contextmanager
def resumable(folder: object) -> Iterator[None]:
    """Exit on Ctrl-C with a note that the same command resumes."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"\nstopped; the same command resumes from {folder}")
        sys.exit(STOPPED)


def progress_bar(console: Console | None = None) -> "Progress":
    """Make a progress bar that disappears at its end; on standard error by default."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console or notes, transient=True)
