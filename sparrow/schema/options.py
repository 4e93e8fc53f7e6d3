"""Command-line options derived from a configuration class: names, letters, help, defaults.

sparrow/schema/loading.py parses them, sparrow/cli/verbs.py prints their help.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import Field
from pydantic_core import PydanticUndefined

from sparrow.schema.base import Record

# An option has the same name, letter and help in every verb, unless its field has a help text.
# Where two options of a verb share a letter, the first gets it.
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
HELP = {
    "model": "tiny, small, small-rl, smollm2-135m, a folder, or owner/name of the hub.",
    "task": "assignments, countdown, graph, code or gym/NAME.",
    "rows": "A .jsonl, .csv or .parquet file, humaneval, or owner/name[:split] of the hub.",
    "length": "About how long a task's answers are.",
    "reward": "Reward function: math, code, or module:function.",
    "episode": "Multi-turn episode: module:function.",
    "advantage": "Advantage estimator: a built-in name, or module:function.",
    "rate": "Learning rate.",
    "prompts": "Prompts of a step.",
    "columns": 'Columns of rows, such as {prompt = "question"}.',
    "skip": "Rows to leave out at the start.",
    "samples": "Answers to each prompt.",
    "temperature": "Of sampling; 1 is the model's own, 0 is greedy.",
    "seed": "Of the random draws.",
    "flow": "What chooses the tokens to keep: a built-in name or FILE[:name].",
    "budget": "Tokens kept at every length.",
    "schedule": "Budgets by length: a file, or a name of `sparrow presets`.",
    "target": "The p05 of acceptance to keep at every length, 0 to 1.",
    "force": "Take a schedule that was made for another model.",
    "decoding": "dense, sparse or exact. Default: sparse with a budget or schedule.",
    "draft_tokens": "Of exact decoding, a round.",
    "adapter": "Of the sparse actor: a folder of sparrow distill, or of a run.",
    "distill": "Rank of an adapter of the sparse actor, distilled after every update. 0: none.",
    "lora": "Rank of an adapter that is trained in place of the weights. 0: the weights are.",
    "policy": "Of a run of several policies: the name of one.",
    "policies": "Several policies by name, such as {solver = {lora = {rank = 8}}, judge = {}}.",
    "page": "Tokens in a page.",
    "device": "auto (a GPU where there is one), cpu or cuda.",
    "dtype": "auto, float32 or bfloat16.",
    "url": "Base URL of a server that answers instead of an engine here; repeat it for several.",
    "loop": "sync, or async: rollout and learning at once.",
    "ray": "local, or the address of a Ray cluster: learner, workers and judges are its actors.",
    "steps": "How many.",
    "system": "System prompt of the chat.",
    "max_tokens": "Longest answer.",
    "out": "Where to write.",
}


class Option(NamedTuple):
    """A command-line option: a field of a configuration, or an extra of a verb."""

    name: str
    path: tuple[str, ...]  # in the configuration; (): an extra of the verb
    kind: Any
    help: str = ""
    default: Any = None
    letter: str = ""
    positional: bool = False

    @property
    def flag(self) -> bool:
        return bare(self.kind) is bool

    @property
    def several(self) -> bool:
        return get_origin(bare(self.kind)) is tuple

    @property
    def element(self) -> Any:
        """The type of a single value."""
        return get_args(bare(self.kind))[0] if self.several else self.kind

    @property
    def long(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """The placeholder of its value in help texts."""
        if self.flag:
            return ""
        return {int: "N", float: "X"}.get(bare(self.element), self.name.upper())


def option(default: Any, help: str) -> Any:
    """Declare a field with a help text."""
    return Field(default, description=help)


def argument(default: Any, help: str) -> Any:
    """Declare a positional field; default `...`: required."""
    return Field(default, description=help, json_schema_extra={"positional": True})


def list_options(cls: type[Record]) -> list[Option]:
    """List the options of a configuration: its plain fields, then its short names.

    `shortcuts` of a class are short names for settings in its sections.
    """
    shortcuts: Mapping[str, str] = getattr(cls, "shortcuts", {})
    names = {*cls.model_fields, *shortcuts}
    letters = {letter: name for name, letter in reversed(LETTERS.items()) if name in names}
    paths = {name: name for name, kind in section_fields(cls).items() if not _is_table(kind)}
    paths |= shortcuts
    return [_option(cls, name, tuple(path.split(".")), letters) for name, path in paths.items()]


def _option(
    cls: type[Record], name: str, path: tuple[str, ...], letters: Mapping[str, str]
) -> Option:
    field = bare(kind_at(cls, path[:-1])).model_fields[path[-1]]
    positional, is_table = bool(field.json_schema_extra), isinstance(field.default, Record)
    letter = LETTERS.get(name, "")
    return Option(
        name,
        path,
        field.annotation,
        help=field.description or HELP.get(name, ""),
        default=None if is_table or field.default is PydanticUndefined else field.default,
        letter=letter if letters.get(letter) == name and not positional else "",
        positional=positional,
    )


# Types of fields.


def section_fields(kind: Any) -> dict[str, Any]:
    """Return the keys of a section with their types; empty if `kind` is not a section."""
    kind = bare(kind)
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        return {}
    return {name: field.annotation for name, field in kind.model_fields.items()}


def kind_at(root: type[Record], path: Sequence[str | int]) -> Any:
    """Return the type at a dotted key, or None."""
    kind: Any = root
    for key in path:
        by_name = get_args(kind)[1] if get_origin(kind) is dict else None
        kind = by_name or section_fields(kind).get(str(key))
    return kind


def takes_text(kind: Any) -> bool:
    """Whether values of this type are text only, so that `123` means "123"."""
    kind = bare(kind)
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind in (str, Path)


def bare(kind: Any) -> Any:
    """Strip annotations and `| None` from a type."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return bare(members[0]) if len(members) == 1 else kind
    return kind


def _is_table(kind: Any) -> bool:
    """Whether a type is a section, or a tuple of sections."""
    elements = get_args(bare(kind)) if get_origin(bare(kind)) is tuple else ()
    return bool(section_fields(kind)) or any(map(section_fields, elements))
