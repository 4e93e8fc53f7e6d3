"""Read configurations from TOML files and command-line words, and write them.

The same syntax for every verb: TOML files (`NAME.toml`, a shipped name, or `-c FILE`), then options
in any order: `--key value`, `--key=value`, `--section.key=value`, `-k value`, `--flag`,
`--no-flag`; a key of several values may be repeated. `-` and `_` are the same in keys. Words
without a dash are the positional fields.

Files are merged left to right, then options; error messages name the layer of a value.
"""

import difflib
import json
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib.resources import files as package_files
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
from pydantic import ValidationError

from sparrow.files import (
    CONTROL,
    add_digest_line,
    check_digest_line,
    printable,
    read_text,
    write_whole,
)
from sparrow.schema.base import KEY, FieldError, Record
from sparrow.schema.options import Option, bare, kind_at, list_options, section_fields, takes_text

RESOLVED = "config.resolved.toml"
MOST_BYTES = 2**20  # of a file
DEEPEST = 32  # parts of a dotted key
MOST_PROBLEMS = 50  # listed in a message
LONGEST_VALUE = 200  # characters of a value that a message shows
FILE = "file "  # the prefix of the source of a file's layer
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array"}
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"?|'[^'\n]*+'?""")

Root = TypeVar("Root", bound=Record)
Table = dict[str, Any]
KeyPath = tuple[str | int, ...]


class ConfigError(ValueError):
    """Raised for invalid configurations; the message has a line for each problem."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class Layer(NamedTuple):
    """The settings of one file or option."""

    source: str  # for error messages
    table: Table


def load_config(cls: type[Root], files: Sequence[str | Path], words: Sequence[str] = ()) -> Root:
    """Load a configuration: defaults, then files left to right, then command-line words.

    A file may be a shipped one's name: "tiny" for TrainConfig is that of `sparrow train tiny`.
    Values in words are TOML; invalid TOML, and values of text fields, are text. Raises ConfigError
    with every problem.
    """
    parsed = parse(cls, words)
    return resolve(cls, [*files, *parsed.files], parsed.layers)


def resolve(cls: type[Root], files: Sequence[str | Path], layers: Sequence[Layer]) -> Root:
    """Merge files and layers, and validate the result."""
    verb = cls.__name__.removesuffix("Config").lower()
    file_layers = [read_file(name, verb) for name in files]
    # From JSON, pydantic accepts lists as tuples and text as paths, and is strict otherwise. No
    # field takes a TOML date: as [[...]] it is refused with its key.
    options = merge(*(layer.table for layer in layers))
    merged = merge_settings(cls, *(layer.table for layer in file_layers), options)
    layers = [*file_layers, *layers]
    try:
        return cls.model_validate_json(json.dumps(merged, default=lambda date: [[str(date)]]))
    except ValidationError as error:
        raise _explained(cls, error, layers) from None


def save_resolved(config: Record, directory: Path) -> Path:
    """Write `config.resolved.toml`; loading it gives an equal configuration.

    Fields that are None are left out: TOML has no None, and it is their default. The first line
    is a comment with the digest of the others. The file is written atomically.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RESOLVED
    table = config.model_dump(mode="json", exclude_none=True)
    write_whole(path, [add_digest_line(tomli_w.dumps(table))])
    return path


def read_resolved(root: type[Root], directory: Path) -> Root:
    """Read the configuration of a run directory; ValueError names the file."""
    path = directory / RESOLVED
    text = read_text(path, "configuration")
    try:
        check_digest_line(text)
    except ValueError as error:
        raise ValueError(f"configuration {path}: {error}") from error
    return load_config(root, [path])


# Files.


def shipped_configs(verb: str) -> dict[str, Path]:
    """Return the shipped configuration files of a verb, or `schedules`, by name."""
    folder = Path(str(package_files("sparrow_recipes"))) / "configs" / verb
    return {file.stem: file for file in sorted(folder.glob("*.*"))}


def find_config(verb: str, name: str | Path) -> Path:
    """Find a configuration file by its path, or a shipped one by its name."""
    path, text = Path(name), str(name)
    if len(path.parts) > 1 or text.endswith((".toml", ".json")):
        return path
    shipped = shipped_configs(verb)
    if text not in shipped and not isfile(text):
        allowed = " or one of ".join(["a file", *([", ".join(shipped)] if shipped else [])])
        hint = f"; a model is set by --model {printable(text)}" if verb == "train" else ""
        raise ConfigError(f"{verb}: got {_described(text)}, allowed: {allowed}{hint}")
    return shipped.get(text, path)


def read_file(name: str | Path, verb: str) -> Layer:
    """Read a TOML file: a path, or the name of a shipped file of the verb."""
    path = find_config(verb, name)
    source = f"{FILE}{path}"
    if path.is_dir():
        resume = f"; to resume the run: {path / RESOLVED}" if (path / RESOLVED).is_file() else ""
        raise ConfigError(f"expected a TOML file, got a folder; a model: --model {path}{resume}")
    try:
        text = read_text(path, most=MOST_BYTES)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        return Layer(source, _checked(_parse(text), source))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source}: invalid TOML: {error}") from error


def _parse(text: str) -> Table:
    """Parse TOML; ValueError if it is invalid or nested too deep."""
    # Before the parser, which takes quadratic time for a long dotted key.
    if "k." * DEEPEST in re.sub(r"[ \t]+", "", _KEY_PART.sub("k", text)):
        raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _checked(table: Table, source: str) -> Table:
    """Return the table; ConfigError if it is nested too deep or has a huge integer."""
    try:
        json.dumps(table, default=str)
    except (ValueError, RecursionError):
        raise ConfigError(f"{source}: nested too deep, or a number with too many digits") from None
    return table


def merge(*tables: Table) -> Table:
    """Merge tables; values of later ones take precedence, lists are replaced."""
    return reduce(_overlay, tables, {})


def merge_settings(cls: type[Record], *tables: Table) -> Table:
    """Merge tables of a configuration; a setting replaces its alternatives in earlier tables.

    `alternatives` of a class are groups of settings of which one is set, each with the settings
    that belong to it: where `data.rows` replaces `data.task`, `data.length` goes too.
    """
    merged: Table = {}
    for table in tables:
        for group in getattr(cls, "alternatives", ()):
            chosen = [key for key in group if _pop(deepcopy(table), key)]
            for key in group if chosen else ():
                if key not in chosen and _pop(merged, key):
                    for dependent in group[key]:
                        _pop(merged, dependent)
        merged = deepcopy(merge(merged, table))
    return merged


def _pop(table: Table, key: str) -> Any:
    """Remove the value at a dotted key and return it, or None."""
    *sections, name = key.split(".")
    for section in sections:
        inner = table.get(section)
        table = inner if isinstance(inner, dict) else {}
    return table.pop(name, None)


def _overlay(below: Table, above: Table) -> Table:
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _overlay(old, value)
        merged[key] = value
    return merged


# Words of the command line.


class Parsed(NamedTuple):
    """Parsed command-line words: files and layers for `resolve`, and extras of the verb."""

    files: list[str]
    layers: list[Layer]
    extras: dict[str, Any]


def parse(cls: type[Record], words: Sequence[str], extras: Sequence[Option] = ()) -> Parsed:
    """Parse command-line words; ConfigError names a word that is not understood."""
    reader = _Reader(cls, extras)
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word == "--":
            for word in rest:
                reader.take_positional(word)
            break
        if re.match(r"-+[A-Za-z]", word):
            reader.take_option(word, rest)
        else:
            reader.take_positional(word)
    values = reader.values.values()
    layers = [value.layer() for value in values if value.option.path]
    extras_values = {value.option.name: value.value() for value in values if not value.option.path}
    return Parsed(reader.files, layers, extras_values)


class _OptionValues(NamedTuple):
    """An option, the words that set it, and its values."""

    option: Option
    typed: list[str]
    values: list[Any]

    def value(self) -> Any:
        """Return the value; of a repeatable option, all values in one list."""
        if not self.option.several:
            return self.values[0]
        lists = [value if isinstance(value, list) else [value] for value in self.values]
        return [value for values in lists for value in values]

    def layer(self) -> Layer:
        node = self.value()
        for key in reversed(self.option.path):
            node = {key: node}
        source = f"option {_shown(' '.join(self.typed))}"
        return Layer(source, _checked(node, source))


class _Reader:
    def __init__(self, cls: type[Record], extras: Sequence[Option]) -> None:
        options = [*list_options(cls), *extras]
        self.cls = cls
        self.options = {option.name: option for option in options}
        self.options |= {option.letter: option for option in options if option.letter}
        self.positionals = deque(option for option in options if option.positional)
        self.takes_files = not self.positionals
        self.any_text = getattr(cls, "any_text", False)  # positional words are prompts
        self.files: list[str] = []
        self.values: dict[tuple[str, ...], _OptionValues] = {}

    def take_positional(self, word: str) -> None:
        _refuse(word, any_text=self.any_text)
        if self.takes_files or (word.endswith(".toml") and not self.any_text):
            self.files.append(word)
        elif not self.positionals:
            raise ConfigError(f"unexpected argument {_shown(word)}")
        else:
            option = self.positionals[0]
            self._set(option, word, word)
            if not option.several:
                self.positionals.popleft()

    def take_option(self, word: str, rest: deque[str]) -> None:
        _refuse(word)
        key, equals, text = _split(word)
        if key in ("c", "config"):
            self.files.append(text if equals else _next(word, rest))
            return
        option, positive = self._find(word, key)
        if option.flag and not equals:
            self._set(option, word, positive)
            return
        if not equals:
            text = _next(word, rest)
            word = f"{word} {text}"
        if option.flag and not (positive and option.path):
            raise ConfigError(f"option {_shown(word)}: takes no value")
        self._set(option, word, _value(option.element, text))

    def _find(self, word: str, key: str) -> tuple[Option, bool]:
        """Find the option of a key, and whether it is positive: not --no-KEY."""
        positive = key.removeprefix("no_")
        for name in (key, positive):
            first, *rest = name.split(".")
            path = (first, *rest)
            if rest and first in self.options and first not in self.cls.model_fields:
                path = (*self.options[first].path, *rest)  # such as columns of data.columns
            option = self.options.get(name, Option(name, path, kind_at(self.cls, path)))
            if option.kind is not None and (name == key or option.flag):
                return option, name == key
        if "." in key:  # an unknown section or key: validation names the valid ones
            return Option(key, tuple(key.split(".")), None), True
        close = difflib.get_close_matches(key, self.options, n=1)
        hint = "".join(f"; did you mean {self.options[match].long}?" for match in close)
        shown = _shortened(printable(word.split("=")[0]))
        raise ConfigError(f"unknown option {' '.join(shown.split())}{hint}")

    def _set(self, option: Option, typed: str, value: Any) -> None:
        key = option.path or (option.name,)  # the same for a short name and its setting
        earlier = self.values.setdefault(key, _OptionValues(option, [], []))
        if earlier.values and not option.several:
            now, before = _shown(typed), _shown(earlier.typed[0])
            raise ConfigError(f"option {now}: already set by {before}")
        earlier.typed.append(typed)
        earlier.values.append(value)


def _split(word: str) -> tuple[str, str, str]:
    """Split an option into key, `=` if it has a value, and value; `-n4` is `-n=4`."""
    if not word.startswith("--"):
        value = word[2:].removeprefix("=")
        return word[1], "=" if value else "", value
    key, equals, value = word[2:].partition("=")
    return key.replace("-", "_"), equals, value


def _next(word: str, rest: deque[str]) -> str:
    if not rest or re.match(r"--?[A-Za-z]", rest[0]):
        raise ConfigError(f"option {_shown(word)}: missing value")
    _refuse(rest[0])
    return rest.popleft()


def _value(kind: Any, text: str) -> Any:
    """Parse a value as TOML; invalid TOML, and values of text fields, are text."""
    if takes_text(kind):
        return text
    try:
        parsed = _parse(f"value = {text}")
    except ValueError:
        parsed = {}
    if len(parsed) == 1:
        return parsed["value"]
    try:
        return float(text) if bare(kind) is float else text  # .5 and 5. are no TOML
    except ValueError:
        return text


def _refuse(word: str, *, any_text: bool = False) -> None:
    """Refuse invalid UTF-8 and control characters."""
    if any("\ud800" <= char <= "\udfff" for char in word):
        raise ConfigError(f"argument {word[:80]!r} is not valid UTF-8")
    if CONTROL.search(word) and not any_text:
        raise ConfigError(f"argument {word[:80]!r}: allowed: text without control characters")


# Error messages.


def _explained(cls: type[Record], error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
    """Turn validation errors of the merged layers into lines with their sources."""
    shown = [_line(cls, detail, layers) for detail in error.errors()[:MOST_PROBLEMS]]
    left = error.error_count() - len(shown)
    return ConfigError(*shown, *([f"and {left} more problems"] if left > 0 else []))


def _line(cls: type[Record], detail: Mapping[str, Any], layers: Sequence[Layer]) -> str:
    path: KeyPath = tuple(part for part in detail["loc"] if part != KEY)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        place = (*path, *cause.field.split("."))
        return _refusal(place, cause.value, cause.allowed, layers)
    if detail["type"] == "missing":
        return f"{_dotted(path)}: missing{_files(layers, 'in')}, has no default"
    if detail["type"] == "extra_forbidden":
        fields = section_fields(kind_at(cls, path[:-1]))
        close = difflib.get_close_matches(str(path[-1]), fields, n=1)
        allowed = ", ".join(fields) + "".join(f"; did you mean {match}?" for match in close)
        return _refusal(path, detail["input"], allowed, layers, fault="unknown key, got")
    allowed = str(cause or detail["msg"].removeprefix("Input should be "))
    allowed = "a table" if allowed == "an object" else allowed
    return _refusal(path, detail["input"], allowed, layers)


def _refusal(
    path: KeyPath, value: Any, allowed: str, layers: Sequence[Layer], fault: str = "got"
) -> str:
    """Describe a refused value with its source; `value` is shown where no layer has one."""
    source = _files(layers, "with")
    for layer in layers:
        node: Any = layer.table
        try:
            for key in path:
                node = node[key]
        except (LookupError, TypeError):
            continue
        value, source = node, f" from {layer.source}"
    return f"{_dotted(path)}: {fault} {_described(value)}{source}, allowed: {allowed}"


def _files(layers: Sequence[Layer], preposition: str) -> str:
    """Name the files that were read, as part of a sentence."""
    names = [layer.source for layer in layers if layer.source.startswith(FILE)]
    return f" {preposition} {' and '.join(names)}" if names else ""


def _dotted(path: KeyPath) -> str:
    """Format a key as in TOML, with [i] for elements of arrays."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{_quoted(key)}" for key in path)
    return _shortened(text[1:])


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _described(value: Any) -> str:
    """Format a value with its TOML type."""
    if isinstance(value, dict):
        return f"the table {_shown(value)}"
    return f"{_shown(value)} ({_TYPES.get(type(value), type(value).__name__)})"


def _shown(value: Any) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    """Cut the middle out of a long text."""
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"
