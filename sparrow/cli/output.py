"""What verbs print with: results on standard output, notes and progress on standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment

from sparrow.files import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from sparrow.schema.base import R


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

MOST = 2**16  # prompts, rows or samples: as settings allow (config/bounds.py)
MOST_TOKENS = 2**20
MOST_ROW = 2**63 - 1  # the number of a row, and a seed
MOST_ANSWERS = 2**20
OUTPUT = "Output"  # the panel of options that say what is written
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OutputJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of text.", rich_help_panel=OUTPUT)
]


def plain(text: str) -> str:
    """The text with nothing in it that rich would read as markup, or a terminal would obey."""
    from rich.markup import escape

    return escape(printable(text))


def write(text: str, end: str = "\n") -> None:
    """Print a result as it is; to a terminal, with control characters spelled out."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def report(text: str) -> None:
    notes.print(printable(text), style="dim")


def alert(mark: str, text: str, style: str = "bold red") -> None:
    """Say what went wrong, or what to mind."""
    notes.print(f"[{style}]{mark}[/] {plain(text)}", markup=True)


def refuse_answers(rows: int, samples: int) -> None:
    """Refuse numbers that are each allowed, but not together."""
    if rows * samples > MOST_ANSWERS:
        given = f"--samples {samples} for each of {rows}"
        raise ValueError(f"{given}: {rows * samples} answers, allowed: at most {MOST_ANSWERS}")


@contextmanager
def measuring(what: str = "measuring") -> Iterator[Callable[[str], None]]:
    with notes.status(plain(what)) as status:
        yield lambda text: status.update(plain(text))


def show_result(result: "R", table: "Callable[[R], Table]", *, as_json: bool) -> None:
    from sparrow.schema.base import to_dict

    if as_json:
        print(json.dumps(to_dict(result), indent=2))
    else:
        console.print(table(result))


def progress_bar() -> "Progress":
    """A progress bar on standard error that leaves nothing behind."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=notes, transient=True)
