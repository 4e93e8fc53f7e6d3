"""From TOML files and overrides to a checked configuration, and back to a file.

Files left to right, then `--section.key=value`; layers are kept after the merge, so that an error
can say where a value came from.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from sparrow.files import add_digest_line, check_digest_line, read_text, write_whole
from sparrow.schema.base import FieldError, Record
from sparrow.schema.errors import ConfigError, describe, dotted, fields_of, kind_at
from sparrow.schema.layers import (
    FILE,
    KeyPath,
    Layer,
    clashes,
    last_given,
    merge,
    read_file,
    read_override,
    repeated,
)

RESOLVED = "config.resolved.toml"
MOST_PROBLEMS = 50  # that a message names one by one
Root = TypeVar("Root", bound=Record)


def load_config(
    cls: type[Root], files: Sequence[str | Path], overrides: Sequence[str | Layer] = ()
) -> Root:
    """The configuration of class `cls`: its defaults, then files left to right, then overrides.

    A file may be a shipped one's name: "tiny" for TrainConfig is that of `sparrow train tiny`.
    An override is `--section.key=value`; the value is read as TOML, or as text if it is none or
    the field wants text. Options of the command line are layers already (options.py). Raises
    ConfigError with every problem that it finds.
    """
    layers = _read_layers(cls, files, overrides)
    # From JSON, pydantic takes a list for a tuple and a text for a path while it stays strict
    # about everything else. No field takes a TOML date: as [[...]] it is refused in its place.
    data = json.dumps(merge(layers), default=lambda date: [[str(date)]])
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        raise explain(cls, error, layers) from None


def _read_layers(
    cls: type[Record], files: Sequence[str | Path], overrides: Sequence[str | Layer]
) -> list[Layer]:
    verb = cls.__name__.removesuffix("Config").lower()
    texts = [text for text in overrides if isinstance(text, str)]
    readers: list[Callable[[], Layer]] = [
        *(partial(read_file, name, verb) for name in files),
        *(partial(read_override, cls, text) for text in texts),
    ]
    layers: list[Layer] = []
    problems = [*repeated(texts)]
    for read in readers:
        try:
            layers.append(read())
        except ConfigError as error:
            problems += error.args
    layers += [layer for layer in overrides if isinstance(layer, Layer)]
    problems += clashes(layers)
    if problems:
        raise ConfigError(*problems)
    return layers


def save_resolved(config: Record, directory: Path) -> Path:
    """Write `config.resolved.toml`; loading it gives an equal configuration.

    Fields that are None are left out: TOML has no word for it, and None is their default. The
    first line, a comment, is the digest of the others. The file appears whole or not at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RESOLVED
    table = config.model_dump(mode="json", exclude_none=True)
    write_whole(path, [add_digest_line(tomli_w.dumps(table))])
    return path


def read_resolved(root: type[Root], directory: Path) -> Root:
    """The configuration that a run directory holds, as it was written; ValueError with the file."""
    path = directory / RESOLVED
    text = read_text(path, "configuration")
    try:
        check_digest_line(text)
    except ValueError as error:
        raise ValueError(f"configuration {path}: {error}") from error
    return load_config(root, [path])


def explain(cls: type[Record], error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
    """What pydantic found wrong with the merged layers, each problem with its source."""
    lines = (line for detail in error.errors() for line in _lines(cls, detail, layers))
    shown = list(islice(lines, MOST_PROBLEMS))
    left = error.error_count() - len(shown)
    return ConfigError(*shown, *([f"and {left} problems more"] if left > 0 else []))


def _lines(cls: type[Record], detail: Mapping[str, Any], layers: Sequence[Layer]) -> Iterator[str]:
    path: KeyPath = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        for field, (value, allowed) in cause.problems.items():
            yield _refusal((*path, *field.split(".")), value, allowed, layers)
    elif detail["type"] == "missing":
        yield f"{dotted(path)}: missing{_files(layers, 'in')}, and it has no default"
    elif detail["type"] == "extra_forbidden":
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
