"""One command language for every verb, derived from the verb's configuration class.

TOML files (`NAME.toml`, a shipped name, or `-c FILE`), then options in any order: `--key value`,
`--key=value`, `--section.key=value`, `-k value`, `--flag`, `--no-flag`; a key of several values may
be repeated. `-` and `_` are the same in keys. Words without a dash are the positional fields.
"""

import difflib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sparrow.files import CONTROL
from sparrow.schema.base import Record
from sparrow.schema.errors import ConfigError, bare, fields_of, kind_at, shortened, takes_text
from sparrow.schema.layers import Layer, checked, parse_value
from sparrow.schema.loading import load_config

Root = TypeVar("Root", bound=Record)
OPTIONS = "Options"  # the panel of what no panel names
METAVARS = {int: "N", float: "X"}


class Option(NamedTuple):
    """What can be given on the command line: a field of a configuration, or an extra of a verb."""

    name: str
    path: tuple[str, ...]
    kind: Any
    help: str = ""
    metavar: str = ""
    letter: str = ""
    alias: str = ""
    default: Any = None
    positional: bool = False
    panel: str = OPTIONS

    @property
    def flag(self) -> bool:
        return bare(self.kind) is bool

    @property
    def several(self) -> bool:
        return get_origin(bare(self.kind)) is tuple

    @property
    def element(self) -> Any:
        """The type of one value."""
        return get_args(bare(self.kind))[0] if self.several else self.kind

    @property
    def long(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown_metavar(self) -> str:
        if self.flag:
            return ""
        return self.metavar or METAVARS.get(bare(self.element), "NAME")


class Shortcut(NamedTuple):
    """A short name for a setting in a section, for what people type every day."""

    path: str
    help: str
    letter: str = ""
    metavar: str = ""


def option(default: Any, help: str, metavar: str = "", letter: str = "", *, alias: str = "") -> Any:
    """A field with its help text; `...` as default: it must be given."""
    return _field(default, help, metavar=metavar, letter=letter, alias=alias)


def argument(default: Any, help: str, metavar: str) -> Any:
    """A field that is given without its name."""
    return _field(default, help, metavar=metavar, positional=True)


def _field(default: Any | EllipsisType, help: str, **extra: Any) -> Any:
    return Field(default, description=help, json_schema_extra=extra)


def options_of(cls: type[Record]) -> list[Option]:
    """Every option of a configuration: its fields that are no tables, then its shortcuts."""
    panels: Mapping[str, Sequence[str]] = getattr(cls, "panels", {})
    panel_of = {name: panel for panel, names in panels.items() for name in names}
    fields = [
        _option_of(name, field, panel_of.get(name, OPTIONS))
        for name, field in cls.model_fields.items()
        if not _is_table(field.annotation)
    ]
    shortcuts: Mapping[str, Shortcut] = getattr(cls, "shortcuts", {})
    return fields + [
        _shortcut_of(cls, name, shortcut, panel_of.get(name, OPTIONS))
        for name, shortcut in shortcuts.items()
    ]


def _is_table(kind: Any) -> bool:
    """Whether it is a section, or several of one kind."""
    elements = get_args(bare(kind)) if get_origin(bare(kind)) is tuple else ()
    return bool(fields_of(kind)) or any(map(fields_of, elements))


def _option_of(name: str, field: FieldInfo, panel: str) -> Option:
    extra: Any = field.json_schema_extra or {}
    default = None if field.default is PydanticUndefined else field.default
    return Option(
        name,
        (name,),
        field.annotation,
        field.description or "",
        default=default,
        panel=panel,
        **extra,
    )


def _shortcut_of(cls: type[Record], name: str, shortcut: Shortcut, panel: str) -> Option:
    path = tuple(shortcut.path.split("."))
    kind = kind_at(cls, path)
    metavar, letter = shortcut.metavar, shortcut.letter
    return Option(name, path, kind, shortcut.help, metavar, letter, panel=panel)


class Parsed(NamedTuple):
    """What words come to: files and options for `load_config`, and what the verb has extra."""

    files: list[str]
    overrides: list[str | Layer]
    extras: dict[str, Any]


def configure(cls: type[Root], words: Sequence[str]) -> Root:
    """The configuration that command-line words say."""
    parsed = parse(cls, words)
    return load_config(cls, parsed.files, parsed.overrides)


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
    return reader.parsed()


class _Given(NamedTuple):
    option: Option
    typed: list[str]
    values: list[Any]

    @property
    def layer(self) -> Layer:
        node = self.value
        for key in reversed(self.option.path):
            node = {key: node}
        source = f"option {shortened(repr(' '.join(self.typed)))}"
        return Layer(source, checked(node, source))

    @property
    def value(self) -> Any:
        """Of an option that may be repeated, values that were given one by one or as lists."""
        if not self.option.several:
            return self.values[0]
        lists = [value if isinstance(value, list) else [value] for value in self.values]
        return [value for values in lists for value in values]


class _Reader:
    def __init__(self, cls: type[Record], extras: Sequence[Option]) -> None:
        options = [*options_of(cls), *extras]
        self.cls = cls
        self.named = {name: option for option in options for name in _names(option)}
        self.letters = {option.letter: option for option in options if option.letter}
        self.positionals = deque(option for option in options if option.positional)
        self.any_text = getattr(cls, "any_text", False)  # positional words are prompts
        self.takes_files = not self.positionals
        self.files: list[str] = []
        self.settings: list[str] = []
        self.given: dict[str, _Given] = {}

    def take_positional(self, word: str) -> None:
        _refuse_bytes(word)
        if not self.any_text:
            _refuse_control(word)
        if self.takes_files or (word.endswith(".toml") and not self.any_text):
            self.files.append(word)
        elif not self.positionals:
            raise ConfigError(f"argument {shortened(repr(word))}: one more than is taken")
        else:
            option = self.positionals[0]
            self._give(option, word, word)
            if not option.several:
                self.positionals.popleft()

    def take_option(self, word: str, rest: deque[str]) -> None:
        _refuse_bytes(word)
        _refuse_control(word)
        name, equals, text = _split(word)
        if "." in name and equals:
            self.settings.append(f"--{name}={text}")
        elif name in ("c", "config"):
            self.files.append(text if equals else _next(word, rest))
        else:
            option, sign = self._find(word, name)
            if option.flag and not equals:
                self._give(option, word, sign)
            else:
                following = text if equals else _next(word, rest)
                typed = word if equals else f"{word} {following}"
                self._give(option, typed, _value(option.element, following))

    def _find(self, word: str, name: str) -> tuple[Option, bool]:
        """The option of a name, and whether it was not negated."""
        known = self.letters if len(name) == 1 else self.named
        positive = self.named.get(name.removeprefix("no_"))
        if name in known:
            return known[name], True
        if positive is not None and positive.flag:
            return positive, False
        if "." in name:
            path = tuple(name.split("."))
            return Option(name, path, kind_at(self.cls, path)), True
        close = difflib.get_close_matches(name, self.named, n=1)
        meant = "".join(f"; did you mean {self.named[match].long}?" for match in close)
        raise ConfigError(f"no option {shortened(word.split('=')[0])}{meant}")

    def _give(self, option: Option, typed: str, value: Any) -> None:
        given = self.given.setdefault(option.name, _Given(option, [], []))
        if given.values and not option.several:
            now, earlier = shortened(repr(typed)), shortened(repr(given.typed[0]))
            raise ConfigError(f"option {now}: already given by {earlier}, allowed: once")
        given.typed.append(typed)
        given.values.append(value)

    def parsed(self) -> Parsed:
        own = [given for given in self.given.values() if given.option.path]
        extras = {name: given.value for name, given in self.given.items() if not given.option.path}
        return Parsed(self.files, [*self.settings, *(given.layer for given in own)], extras)


def _names(option: Option) -> Iterator[str]:
    yield option.name
    if option.alias:
        yield option.alias


def _split(word: str) -> tuple[str, str, str]:
    """The key with underscores, whether there is a value, and the value; `-n4` is `-n=4`."""
    if not word.startswith("--"):
        value = word[2:].removeprefix("=")
        return word[1], "=" if value else "", value
    key, equals, value = word[2:].partition("=")
    return key.replace("-", "_"), equals, value


def _next(word: str, rest: deque[str]) -> str:
    if not rest:
        raise ConfigError(f"option {shortened(word)}: a value is missing")
    text = rest.popleft()
    _refuse_bytes(text)
    _refuse_control(text)
    return text


def _value(kind: Any, text: str) -> Any:
    """A value as TOML, or as text where it is none or the field wants text."""
    if takes_text(kind):
        return text
    value = parse_value(text)
    if isinstance(value, str) and bare(kind) is float:
        try:
            return float(value)  # .5 and 5. are no TOML
        except ValueError:
            return value
    return value


def _refuse_control(word: str) -> None:
    """Refuse what an error message would hand on to the terminal."""
    if CONTROL.search(word):
        raise ConfigError(f"argument {word[:80]!r}: allowed: text without control characters")


def _refuse_bytes(word: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in word):
        raise ConfigError(f"argument {word[:80]!r} is not valid UTF-8")
