"""What verbs print with: results on standard output, notes and progress on standard error."""

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
    """A console that shows what it is given: strings are markup only where `markup=True` says so.

    Control characters are spelled out in everything that is rendered: names, notes and reasons
    come from files, and a terminal would obey them.
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
    """The text with nothing in it that rich would read as markup, or a terminal would obey."""
    from rich.markup import escape

    return escape(printable(text))


def write(text: str, end: str = "\n") -> None:
    """Print a result as it is; to a terminal, with control characters spelled out."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def write_json(result: Any) -> None:
    print(json.dumps(to_dict(result) if isinstance(result, Record) else result, indent=2))


def report(text: str) -> None:
    notes.print(printable(text), style="dim")


def alert(mark: str, text: str, style: str = "bold red") -> None:
    """Say what went wrong, or what to mind."""
    notes.print(f"[{style}]{mark}[/] {plain(text)}", markup=True)


@contextmanager
def measuring(what: str = "measuring") -> Iterator[Callable[[str], None]]:
    with notes.status(plain(what)) as status:
        yield lambda text: status.update(plain(text))


@contextmanager
def counting(what: str) -> Iterator[Counting]:
    """A progress bar for stages that follow one another, each from none to its total."""
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
def going_on(folder: object) -> Iterator[None]:
    """Ctrl-C ends the program, and the next time it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"\nstopped; the same command goes on from {folder}")
        sys.exit(STOPPED)


def progress_bar(console: Console | None = None) -> "Progress":
    """A progress bar, on standard error unless told otherwise, that leaves nothing behind."""
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
