"""How a configuration error reads: key, what was given, what is allowed, where it came from."""

import json
import re
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array"}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has one line for each problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)

    def __str__(self) -> str:
        return "\n".join(self.args)


def dotted(path: tuple[str | int, ...]) -> str:
    """A key as TOML writes it, with [i] for the elements of an array."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_quoted(key)}" for key in path)[1:]


def describe(value: Any) -> str:
    """A value and its TOML type."""
    if isinstance(value, dict):
        return f"the table {value!r}"
    return f"{value!r} ({_TYPES.get(type(value), type(value).__name__)})"


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
