"""How a configuration error reads: key, what was given, what is allowed, where it came from."""

import json
import re
from typing import Any

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
