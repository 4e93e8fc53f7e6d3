"""What verbs print with: results on standard output, notes and progress on standard error."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    Result = dict[str, Any]

console = Console()
notes = Console(stderr=True)

OUTPUT = "Output"  # the panel of options that say what is written
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
OutputJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of text.", rich_help_panel=OUTPUT)
]


def plain(text: str) -> str:
    """The text with nothing in it that rich would read as markup."""
    from rich.markup import escape

    return escape(text)


def report(text: str) -> None:
    notes.print(f"[dim]{plain(text)}[/]")


@contextmanager
def measuring(what: str = "measuring") -> Iterator[Callable[[str], None]]:
    with notes.status(plain(what)) as status:
        yield lambda text: status.update(plain(text))


def show_result(result: "Result", table: "Callable[[Result], Table]", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
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

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=notes, transient=True)
