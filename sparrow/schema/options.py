"""One command language for every verb, derived from the verb's configuration class.

TOML files (`NAME.toml`, a shipped name, or `-c FILE`), then options in any order: `--key value`,
`--key=value`, `--section.key=value`, `-k value`, `--flag`, `--no-flag`; a key of several values may
be repeated. `-` and `_` are the same in keys. Words without a dash are the positional fields.
"""

import difflib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sparrow.files import CONTROL, printable
from sparrow.schema.base import Record
from sparrow.schema.errors import ConfigError, bare, fields_of, kind_at, shortened, takes_text
from sparrow.schema.layers import Layer, checked, parse_value
from sparrow.schema.loading import load_config

Root = TypeVar("Root", bound=Record)

# The same thing has the same name, letter, word for its value and help in every verb; a field says
# more where its verb differs. Of two names with one letter in a verb, the first has it.
LETTERS = {
    "model": "m",
    "budget": "b",
    "length": "l",
    "target": "t",
    "task": "t",
    "prompts": "n",
    "samples": "k",
    "seed": "s",
    "format": "f",
    "out": "o",
}
METAVARS = {
    "model": "MODEL",
    "budget": "TOKENS",
    "length": "TOKENS",
    "target": "P05",
    "flow": "FLOW",
    "rows": "FILE",
    "out": "FOLDER",
    "texts": "FOLDER",
    "dense_layers": "LAYERS",
    "case": "CASE",
}
KINDS = {int: "N", float: "X", Path: "FILE"}
HELP = {
    "model": "tiny, small, smollm2-135m, a folder, or owner/name of the hub.",
    "task": "assignments, countdown, graph or gym/NAME.",
    "rows": ".jsonl or .parquet in verl's schema, or a dataset of the hub (owner/name).",
    "skip": "Rows to leave out at the start.",
    "samples": "Answers to each prompt.",
    "temperature": "Of sampling; 1 is the model's own, 0 is greedy.",
    "seed": "Of the random draws.",
    "flow": "What chooses the tokens to keep: a built-in name or FILE[:name].",
    "budget": "Tokens kept at every length.",
    "schedule": "Budgets by length: a file, or a name of `sparrow presets`.",
    "target": "The p05 of acceptance to keep at every length, 0 to 1.",
    "force": "Take a schedule that was made for another model.",
    "dense": "Dense, whatever files say: to compare with.",
    "page": "Tokens in a page.",
    "device": "auto (a GPU where there is one), cpu or cuda.",
    "dtype": "auto, float32 or bfloat16.",
    "steps": "How many.",
    "max_tokens": "Longest answer.",
    "out": "Where to write.",
}
PANELS = {
    "Arguments": (),
    "What is asked, and how it is answered": (
        *("task", "rows", "texts", "ids", "reward", "length", "prompts", "skip", "samples"),
        *("tokens", "start", "max_tokens", "temperature", "seed", "first_round", "raw"),
    ),
    "Sparse attention": (
        *("flow", "budget", "schedule", "window", "force", "dense", "target", "by", "variant"),
        *("allow_dense", "bin", "dense_layers", "layer_groups", "by_layer", "page"),
        *("first", "last"),
    ),
    "Machine and workload": (
        *("device", "dtype", "hardware", "bandwidth", "memory", "flops", "lengths"),
        *("prompt_tokens", "batch"),
    ),
    "Output": ("compare", "check", "out", "leaderboard", "plots", "open", "json"),
    "Options": (),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class Option(NamedTuple):
    """What can be given on the command line: a field of a configuration, or an extra of a verb."""

    name: str
    path: tuple[str, ...]
    kind: Any
    help: str = ""
    default: Any = None
    metavar: str = ""
    letter: str = ""
    alias: str = ""
    positional: bool = False

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
    def panel(self) -> str:
        return "Arguments" if self.positional else PANEL_OF.get(self.name, "Options")


def option(default: Any, help: str = "", metavar: str = "", alias: str = "") -> Any:
    """A field with more than its name says; `...` as default: it must be given."""
    return Field(default, description=help, json_schema_extra={"metavar": metavar, "alias": alias})


def argument(default: Any, help: str, metavar: str = "") -> Any:
    """A field that is given without its name."""
    extra: Any = {"metavar": metavar, "positional": True}
    return Field(default, description=help, json_schema_extra=extra)


def options_of(cls: type[Record]) -> list[Option]:
    """Every option of a configuration: its fields that are no tables, then its short names.

    `shortcuts` of a class are short names for settings in its sections.
    """
    shortcuts: Mapping[str, str] = getattr(cls, "shortcuts", {})
    names = {*cls.model_fields, *shortcuts}
    letters = {letter: name for name, letter in reversed(LETTERS.items()) if name in names}
    own = {name: letter for letter, name in letters.items()}
    fields = [
        _option_of(name, field, own.get(name, ""))
        for name, field in cls.model_fields.items()
        if not _is_table(field.annotation)
    ]
    return fields + [
        _shortcut_of(cls, name, path, own.get(name, "")) for name, path in shortcuts.items()
    ]


def _is_table(kind: Any) -> bool:
    """Whether it is a section, or several of one kind."""
    elements = get_args(bare(kind)) if get_origin(bare(kind)) is tuple else ()
    return bool(fields_of(kind)) or any(map(fields_of, elements))


def _option_of(name: str, field: FieldInfo, letter: str) -> Option:
    given: Any = field.json_schema_extra or {}
    extra = dict(given)
    positional = extra.get("positional", False)
    made = _known(name, (name,), field.annotation, "" if positional else letter)
    help, metavar = field.description or made.help, extra.pop("metavar", "") or made.metavar
    return made._replace(help=help, default=_default(field), metavar=metavar, **extra)


def _shortcut_of(cls: type[Record], name: str, path: str, letter: str) -> Option:
    keys = path.split(".")
    section: Any = bare(kind_at(cls, keys[:-1]))
    made = _known(name, tuple(keys), kind_at(cls, keys), letter)
    return made._replace(default=_default(section.model_fields[keys[-1]]))


def _default(field: FieldInfo) -> Any:
    return None if field.default is PydanticUndefined else field.default


def _known(name: str, path: tuple[str, ...], kind: Any, letter: str) -> Option:
    """An option as its name alone says."""
    made = Option(name, path, kind, HELP.get(name, ""), letter=letter)
    word = METAVARS.get(name) or KINDS.get(bare(made.element), "NAME")
    return made._replace(metavar="" if made.flag else word)


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
        self.named = {option.alias: option for option in options if option.alias}
        self.named |= {option.name: option for option in options}
        self.letters = {option.letter: option for option in options if option.letter}
        self.positionals = deque(option for option in options if option.positional)
        self.any_text = getattr(cls, "any_text", False)  # positional words are prompts
        self.takes_files = not self.positionals
        self.files: list[str] = []
        self.settings: list[str] = []
        self.given: dict[str, _Given] = {}

    def take_positional(self, word: str) -> None:
        _refuse(word, any_text=self.any_text)
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
        _refuse(word)
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
                value = _value(option.element, following)
                if not sign or (option.flag and not isinstance(value, bool)):
                    raise ConfigError(f"option {shortened(repr(typed))}: allowed: without a value")
                self._give(option, typed, value)

    def _find(self, word: str, name: str) -> tuple[Option, bool]:
        """The option of a name, and whether it was not negated."""
        known = self.letters if len(name) == 1 else self.named
        positive = self.named.get(name.removeprefix("no_"))
        if name in known:
            return known[name], True
        if positive is not None and positive.flag:
            return positive, False
        if "." in name:
            path, negated = tuple(name.split(".")), tuple(name.removeprefix("no_").split("."))
            if path != negated and bare(kind_at(self.cls, negated)) is bool:
                return Option(name, negated, bool), False
            return Option(name, path, kind_at(self.cls, path)), True
        close = difflib.get_close_matches(name, self.named, n=1)
        meant = "".join(f"; did you mean {self.named[match].long}?" for match in close)
        shown = shortened(printable(word.split("=")[0]))
        raise ConfigError(f"no option {' '.join(shown.split())}{meant}")

    def _give(self, option: Option, typed: str, value: Any) -> None:
        key = ".".join(option.path) or option.name  # a short name and its setting are one
        given = self.given.setdefault(key, _Given(option, [], []))
        if given.values and not option.several:
            now, earlier = shortened(repr(typed)), shortened(repr(given.typed[0]))
            raise ConfigError(f"option {now}: already given by {earlier}, allowed: once")
        given.typed.append(typed)
        given.values.append(value)

    def parsed(self) -> Parsed:
        for text in self.settings:
            given = self.given.get(text.removeprefix("--").partition("=")[0])
            if given is not None:
                now, earlier = shortened(repr(text)), shortened(repr(given.typed[0]))
                raise ConfigError(f"option {now}: already given by {earlier}, allowed: once")
        own = [given for given in self.given.values() if given.option.path]
        extras = {name: given.value for name, given in self.given.items() if not given.option.path}
        return Parsed(self.files, [*self.settings, *(given.layer for given in own)], extras)


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
    if re.match(r"--?[A-Za-z]", rest[0]):
        raise ConfigError(f"option {shortened(word)}: a value is missing before {rest[0][:80]!r}")
    _refuse(rest[0])
    return rest.popleft()


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


def _refuse(word: str, *, any_text: bool = False) -> None:
    """Refuse what is no text, and what an error message would hand on to the terminal."""
    if any("\ud800" <= char <= "\udfff" for char in word):
        raise ConfigError(f"argument {word[:80]!r} is not valid UTF-8")
    if CONTROL.search(word) and not any_text:
        raise ConfigError(f"argument {word[:80]!r}: allowed: text without control characters")
