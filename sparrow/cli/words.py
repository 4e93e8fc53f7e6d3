"""The words of verbs that are configured: TOML files, and settings such as --a.b=c."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from sparrow.schema.base import Record

    Root = TypeVar("Root", bound=Record)


def config_argument(example: str) -> Any:
    """The argument that takes them, with a setting of the verb as an example."""
    return typer.Argument(
        metavar="CONFIG",
        help=f"TOML files, of which later ones win, and settings such as {example}.",
    )


def loaded(cls: "type[Root]", words: list[str], *settings: str) -> "Root":
    """The configuration that they make; further settings come last."""
    from sparrow.schema.loading import load_config

    files = [Path(word) for word in words if not word.startswith("--")]
    given = [word for word in words if word.startswith("--")]
    return load_config(cls, files, [*given, *settings])
