"""Validation errors in the words of the person who wrote the configuration."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import ValidationError

from sparrow.config.errors import ConfigError, describe, dotted
from sparrow.config.layers import FILE, KeyPath, Layer, last_given
from sparrow.config.schema import Section
from sparrow.config.sections import fields_of, kind_at
from sparrow.records import FieldError

MOST_PROBLEMS = 50  # that a message names one by one
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of a section, of a record


def explain(cls: type[Section], error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
    """What pydantic found wrong with the merged layers, each problem with its source."""
    lines = (line for detail in error.errors() for line in _lines(cls, detail, layers))
    shown = list(islice(lines, MOST_PROBLEMS))
    left = error.error_count() - len(shown)
    return ConfigError(*shown, *([f"and {left} problems more"] if left > 0 else []))


def _lines(cls: type[Section], detail: Mapping[str, Any], layers: Sequence[Layer]) -> Iterator[str]:
    path: KeyPath = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        for field, (value, allowed) in cause.problems.items():
            yield _refusal((*path, *field.split(".")), value, allowed, layers)
    elif detail["type"] == "missing":
        yield f"{dotted(path)}: missing{_files(layers, 'in')}, and it has no default"
    elif detail["type"] in _UNKNOWN_KEY:
        allowed = _known_keys(fields_of(kind_at(cls, path[:-1])), str(path[-1]))
        yield _refusal(path, detail["input"], allowed, layers, fault="unknown key, got")
    else:
        allowed = str(cause or detail["msg"].removeprefix("Input should be "))
        allowed = "a table" if allowed == "an object" else allowed
        yield _refusal(path, detail["input"], allowed, layers)


def _refusal(
    path: KeyPath, value: Any, allowed: str, layers: Sequence[Layer], fault: str = "got"
) -> str:
    """One line; `value` is shown where no layer gives one: it is a default, or follows from all."""
    given = last_given(layers, path)
    got = describe(given.value) if given else describe(value)
    source = f" from {given.source}" if given else _files(layers, "with")
    return f"{dotted(path)}: {fault} {got}{source}, allowed: {allowed}"


def _files(layers: Sequence[Layer], preposition: str) -> str:
    """The files that were read, as part of a sentence."""
    names = [layer.source for layer in layers if layer.source.startswith(FILE)]
    return f" {preposition} {' and '.join(names)}" if names else ""


def _known_keys(fields: Mapping[str, Any], key: str) -> str:
    """The keys of a section, and the one that was probably meant."""
    close = difflib.get_close_matches(key, fields, n=1)
    return ", ".join(fields) + "".join(f"; did you mean {match}?" for match in close)
