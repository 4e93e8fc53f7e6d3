"""Layers: what each file and each override gives, merged later over earlier.

Layers are kept after the merge, so that an error can say where a value came from.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib.resources import files
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

from sparrow.files import read_text
from sparrow.schema.base import Record
from sparrow.schema.errors import ConfigError, describe, dotted, kind_at, shortened, takes_text

Table = dict[str, Any]
KeyPath = tuple[str | int, ...]

FILE = "file "  # what the source of such a layer begins with
MOST_BYTES = 2**20  # of a file
DEEPEST = 32  # tables and arrays in one another
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"?|'[^'\n]*+'?""")


class Layer(NamedTuple):
    source: str  # as a user would name it
    table: Table


class Given(NamedTuple):
    value: Any
    source: str


def shipped_configs(verb: str) -> dict[str, Path]:
    """The files that come with the package for a verb, or `schedules`, by their names."""
    folder = Path(str(files("sparrow_recipes"))) / "configs" / verb
    return {file.stem: file for file in sorted(folder.glob("*.*"))}


def find_config(verb: str, name: str | Path) -> Path:
    """The file of a configuration: one that is given by its path, or a shipped one by its name."""
    path, text = Path(name), str(name)
    if len(path.parts) > 1 or text.endswith((".toml", ".json")):
        return path
    shipped = shipped_configs(verb)
    if text not in shipped and not isfile(text):
        allowed = f"a file, or one of {', '.join(shipped)}"
        raise ConfigError(f"{verb}: got {describe(text)}, allowed: {allowed}")
    return shipped.get(text, path)


def read_file(name: str | Path, verb: str) -> Layer:
    """One TOML file; where it is a name, of those that are shipped for the verb."""
    path = find_config(verb, name)
    source = f"{FILE}{path}"
    try:
        text = read_text(path, most=MOST_BYTES)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        table = _parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not a TOML file: {error}") from error
    return Layer(source, checked(table, source))


def read_override(root: type[Record], text: str) -> Layer:
    """One `--section.key=value`; the two dashes may be left out."""
    key, equals, value_text = text.removeprefix("--").partition("=")
    source = f"override {shortened(repr(text))}"
    if not (equals and _KEY.fullmatch(key) and _is_unicode(text)):
        raise ConfigError(f"{source}: not understood, allowed: --section.key=value")
    path = key.split(".")
    node: Any = value_text if takes_text(kind_at(root, path)) else parse_value(value_text)
    for part in reversed(path):
        node = {part: node}
    return Layer(source, checked(node, source))


def repeated(overrides: Sequence[str]) -> Iterator[str]:
    """A problem for each override whose key an earlier one has: one of the two is a mistake."""
    earlier: dict[str, str] = {}
    for text in overrides:
        key = text.removeprefix("--").partition("=")[0]
        if key in earlier:
            before, now = shortened(repr(earlier[key])), shortened(repr(text))
            yield f"override {now}: {shortened(key)} already given by {before}, allowed: once"
        earlier[key] = text


def clashes(layers: Sequence[Layer]) -> Iterator[str]:
    """A problem for each key that is a table in one layer and a value in another."""
    for position, layer in enumerate(layers):
        for path, value in _entries(layer.table):
            earlier = last_given(layers[:position], path)
            if earlier and isinstance(earlier.value, dict) != isinstance(value, dict):
                yield (
                    f"{dotted(path)}: got {describe(value)} from {layer.source} and "
                    f"{describe(earlier.value)} from {earlier.source}, "
                    "allowed: a table in both or in neither"
                )


def merge(layers: Sequence[Layer]) -> Table:
    """Later layers over earlier ones: tables merge, everything else (lists too) is replaced."""
    return reduce(_overlay, (layer.table for layer in layers), {})


def last_given(layers: Sequence[Layer], path: KeyPath) -> Given | None:
    """What the last layer that has this key gives."""
    for layer in reversed(layers):
        node: Any = layer.table
        try:
            for key in path:
                node = node[key]
        except (LookupError, TypeError):
            continue
        return Given(node, layer.source)
    return None


def parse_value(text: str) -> Any:
    """The TOML value that `text` is, or the text itself."""
    try:
        parsed = _parse(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _parse(text: str) -> Table:
    """The table that a TOML text is; ValueError where it is none, or too deep for any setting."""
    # Before the parser, which takes quadratic time for a long dotted key.
    if "k." * DEEPEST in re.sub(r"[ \t]+", "", _KEY_PART.sub("k", text)):
        raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def checked(table: Table, source: str) -> Table:
    """The table itself; ConfigError where it nests too deep or holds an endless integer."""
    for path, value in _values(table):
        if len(path) > DEEPEST:
            raise ConfigError(f"{dotted(path)}: nested too deep, from {source}")
        if isinstance(value, int) and abs(value) >= 2**64:
            given = f"an integer of {value.bit_length()} bits from {source}"
            raise ConfigError(f"{dotted(path)}: got {given}, allowed: at most 64 bits")
    return table


def _values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value in another, as deep as is allowed, with its key."""
    yield path, value
    if isinstance(value, dict | list) and len(path) <= DEEPEST:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(inner, (*path, key))


def _is_unicode(text: str) -> bool:
    """Whether the shell gave valid UTF-8; Python stands in surrogates for what is not."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _entries(table: Table, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from _entries(value, (*path, key))


def _overlay(below: Table, above: Table) -> Table:
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _overlay(old, value)
        merged[key] = value
    return merged
