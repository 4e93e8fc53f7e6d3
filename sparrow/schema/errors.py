"""Configuration errors in a user's terms, and which keys and types a configuration has."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparrow.schema.base import Record

LONGEST_VALUE = 200  # characters of a value that a message shows
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array"}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has one line for each problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)

    def __str__(self) -> str:
        return "\n".join(self.args)


def dotted(path: tuple[str | int, ...]) -> str:
    """A key as TOML writes it, with [i] for the elements of an array."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{_quoted(key)}" for key in path)[1:]
    return shortened(text)


def describe(value: Any) -> str:
    """A value and its TOML type."""
    if isinstance(value, dict):
        return f"the table {shortened(repr(value))}"
    return f"{shortened(repr(value))} ({_TYPES.get(type(value), type(value).__name__)})"


def shortened(text: str) -> str:
    """The text, without its middle where it would fill the screen."""
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def fields_of(kind: Any) -> dict[str, Any]:
    """The keys of a section with their types; none if `kind` is not one."""
    kind = bare(kind)
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        return {}
    return {name: field.annotation for name, field in kind.model_fields.items()}


def kind_at(root: type[Record], path: Sequence[str | int]) -> Any:
    """The type at a dotted key, None if there is no such key."""
    kind: Any = root
    for key in path:
        kind = fields_of(kind).get(str(key))
    return kind


def takes_text(kind: Any) -> bool:
    """Whether only text can be given for a value of this type, so that `123` means "123"."""
    kind = bare(kind)
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind in (str, Path)


def bare(kind: Any) -> Any:
    """`kind` without its annotations and without `| None`."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return bare(members[0]) if len(members) == 1 else kind
    return kind
