"""From TOML files and command-line words to a checked configuration, and back to a file.

One language for every verb: TOML files (`NAME.toml`, a shipped name, or `-c FILE`), then options in
any order: `--key value`, `--key=value`, `--section.key=value`, `-k value`, `--flag`, `--no-flag`; a
key of several values may be repeated. `-` and `_` are the same in keys. Words without a dash are
the positional fields.

Files left to right, then options; these layers are kept after the merge, so that an error can say
where a value came from.
"""

import difflib
import json
import re
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib.resources import files as package_files
from itertools import islice
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
from sparrow.schema.base import FieldError, Record
from sparrow.schema.options import Option, bare, fields_of, kind_at, options_of, takes_text

RESOLVED = "config.resolved.toml"
MOST_BYTES = 2**20  # of a file
DEEPEST = 32  # parts of a dotted key
MOST_PROBLEMS = 50  # that a message names one by one
LONGEST_VALUE = 200  # characters of a value that a message shows
FILE = "file "  # what the source of such a layer begins with
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array"}
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"?|'[^'\n]*+'?""")

Root = TypeVar("Root", bound=Record)
Table = dict[str, Any]
KeyPath = tuple[str | int, ...]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has one line for each problem."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class Layer(NamedTuple):
    """What one file or one option gives."""

    source: str  # as a user would name it
    table: Table


def load_config(cls: type[Root], files: Sequence[str | Path], words: Sequence[str] = ()) -> Root:
    """The configuration of class `cls`: its defaults, then files left to right, then options.

    A file may be a shipped one's name: "tiny" for TrainConfig is that of `sparrow train tiny`.
    Words are those of the command line; a value is read as TOML, or as text if it is none or the
    field wants text. Raises ConfigError with every problem that it finds.
    """
    parsed = parse(cls, words)
    return resolve(cls, [*files, *parsed.files], parsed.layers)


def resolve(cls: type[Root], files: Sequence[str | Path], layers: Sequence[Layer]) -> Root:
    """The configuration that files say, and layers over them."""
    verb = cls.__name__.removesuffix("Config").lower()
    layers = [*(read_file(name, verb) for name in files), *layers]
    # From JSON, pydantic takes a list for a tuple and a text for a path while it stays strict
    # about everything else. No field takes a TOML date: as [[...]] it is refused in its place.
    merged = merge(*(layer.table for layer in layers))
    try:
        return cls.model_validate_json(json.dumps(merged, default=lambda date: [[str(date)]]))
    except ValidationError as error:
        raise _explained(cls, error, layers) from None


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


# Files.


def shipped_configs(verb: str) -> dict[str, Path]:
    """The files that come with the package for a verb, or `schedules`, by their names."""
    folder = Path(str(package_files("sparrow_recipes"))) / "configs" / verb
    return {file.stem: file for file in sorted(folder.glob("*.*"))}


def find_config(verb: str, name: str | Path) -> Path:
    """The file of a configuration: one that is given by its path, or a shipped one by its name."""
    path, text = Path(name), str(name)
    if len(path.parts) > 1 or text.endswith((".toml", ".json")):
        return path
    shipped = shipped_configs(verb)
    if text not in shipped and not isfile(text):
        allowed = " or one of ".join(["a file", *([", ".join(shipped)] if shipped else [])])
        raise ConfigError(f"{verb}: got {_described(text)}, allowed: {allowed}")
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
        return Layer(source, _checked(_parse(text), source))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source}: not a TOML file: {error}") from error


def _parse(text: str) -> Table:
    """The table that a TOML text is; ValueError where it is none, or too deep for any setting."""
    # Before the parser, which takes quadratic time for a long dotted key.
    if "k." * DEEPEST in re.sub(r"[ \t]+", "", _KEY_PART.sub("k", text)):
        raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _checked(table: Table, source: str) -> Table:
    """The table itself; ConfigError where it nests too deep or holds an endless integer."""
    try:
        json.dumps(table, default=str)
    except (ValueError, RecursionError):
        raise ConfigError(f"{source}: nested too deep, or a number without end") from None
    return table


def merge(*tables: Table) -> Table:
    """Later tables over earlier ones: tables merge, everything else (lists too) is replaced."""
    return reduce(_overlay, tables, {})


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
    """What words come to: files and layers for `resolve`, and what the verb has extra."""

    files: list[str]
    layers: list[Layer]
    extras: dict[str, Any]


def parse(cls: type[Record], words: Sequence[str], extras: Sequence[Option] = ()) -> Parsed:
    """Sort command-line words; ConfigError names the word that is not understood."""
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
    given = reader.given.values()
    layers = [each.layer() for each in given if each.option.path]
    return Parsed(
        reader.files, layers, {g.option.name: g.value() for g in given if not g.option.path}
    )


class _Given(NamedTuple):
    """An option, the words that gave it, and its values."""

    option: Option
    typed: list[str]
    values: list[Any]

    def value(self) -> Any:
        """Of an option that may be repeated, values that were given one by one or as lists."""
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
        options = [*options_of(cls), *extras]
        self.cls = cls
        self.options = {option.name: option for option in options}
        self.options |= {option.letter: option for option in options if option.letter}
        self.positionals = deque(option for option in options if option.positional)
        self.takes_files = not self.positionals
        self.any_text = getattr(cls, "any_text", False)  # positional words are prompts
        self.files: list[str] = []
        self.given: dict[tuple[str, ...], _Given] = {}

    def take_positional(self, word: str) -> None:
        _refuse(word, any_text=self.any_text)
        if self.takes_files or (word.endswith(".toml") and not self.any_text):
            self.files.append(word)
        elif not self.positionals:
            raise ConfigError(f"argument {_shown(word)}: one more than is taken")
        else:
            option = self.positionals[0]
            self._give(option, word, word)
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
            self._give(option, word, positive)
            return
        if not equals:
            text = _next(word, rest)
            word = f"{word} {text}"
        if option.flag and not (positive and option.path):
            raise ConfigError(f"option {_shown(word)}: allowed: without a value")
        self._give(option, word, _value(option.element, text))

    def _find(self, word: str, key: str) -> tuple[Option, bool]:
        """The option of a key, and whether it was not negated."""
        positive = key.removeprefix("no_")
        for name in (key, positive):
            path = tuple(name.split("."))
            option = self.options.get(name, Option(name, path, kind_at(self.cls, path)))
            if option.kind is not None and (name == key or option.flag):
                return option, name == key
        if "." in key:  # of no section, which is said with what there is
            return Option(key, tuple(key.split(".")), None), True
        close = difflib.get_close_matches(key, self.options, n=1)
        meant = "".join(f"; did you mean {self.options[match].long}?" for match in close)
        shown = _shortened(printable(word.split("=")[0]))
        raise ConfigError(f"no option {' '.join(shown.split())}{meant}")

    def _give(self, option: Option, typed: str, value: Any) -> None:
        key = option.path or (option.name,)  # a short name and its setting are one
        given = self.given.setdefault(key, _Given(option, [], []))
        if given.values and not option.several:
            now, earlier = _shown(typed), _shown(given.typed[0])
            raise ConfigError(f"option {now}: already given by {earlier}, allowed: once")
        given.typed.append(typed)
        given.values.append(value)


def _split(word: str) -> tuple[str, str, str]:
    """The key with underscores, whether there is a value, and the value; `-n4` is `-n=4`."""
    if not word.startswith("--"):
        value = word[2:].removeprefix("=")
        return word[1], "=" if value else "", value
    key, equals, value = word[2:].partition("=")
    return key.replace("-", "_"), equals, value


def _next(word: str, rest: deque[str]) -> str:
    if not rest or re.match(r"--?[A-Za-z]", rest[0]):
        raise ConfigError(f"option {_shown(word)}: a value is missing")
    _refuse(rest[0])
    return rest.popleft()


def _value(kind: Any, text: str) -> Any:
    """A value as TOML, or as text where it is none or the field wants text."""
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
    """Refuse what is no text, and what an error message would hand on to the terminal."""
    if any("\ud800" <= char <= "\udfff" for char in word):
        raise ConfigError(f"argument {word[:80]!r} is not valid UTF-8")
    if CONTROL.search(word) and not any_text:
        raise ConfigError(f"argument {word[:80]!r}: allowed: text without control characters")


# What is wrong, in a user's terms.


def _explained(cls: type[Record], error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
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
        yield f"{_dotted(path)}: missing{_files(layers, 'in')}, and it has no default"
    elif detail["type"] == "extra_forbidden":
        fields = fields_of(kind_at(cls, path[:-1]))
        close = difflib.get_close_matches(str(path[-1]), fields, n=1)
        allowed = ", ".join(fields) + "".join(f"; did you mean {match}?" for match in close)
        yield _refusal(path, detail["input"], allowed, layers, fault="unknown key, got")
    else:
        allowed = str(cause or detail["msg"].removeprefix("Input should be "))
        allowed = "a table" if allowed == "an object" else allowed
        yield _refusal(path, detail["input"], allowed, layers)


def _refusal(
    path: KeyPath, value: Any, allowed: str, layers: Sequence[Layer], fault: str = "got"
) -> str:
    """One line; `value` is shown where no layer gives one: it is a default, or follows from all."""
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
    """The files that were read, as part of a sentence."""
    names = [layer.source for layer in layers if layer.source.startswith(FILE)]
    return f" {preposition} {' and '.join(names)}" if names else ""


def _dotted(path: KeyPath) -> str:
    """A key as TOML writes it, with [i] for the elements of an array."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{_quoted(key)}" for key in path)
    return _shortened(text[1:])


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _described(value: Any) -> str:
    """A value and its TOML type."""
    if isinstance(value, dict):
        return f"the table {_shown(value)}"
    return f"{_shown(value)} ({_TYPES.get(type(value), type(value).__name__)})"


def _shown(value: Any) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    """The text, without its middle where it would fill the screen."""
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"
