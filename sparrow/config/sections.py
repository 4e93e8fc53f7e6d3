"""Which keys a section has, and of which type: sections are schema classes or records."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sparrow.config.schema import Section


def fields_of(kind: Any) -> dict[str, Any]:
    """The keys of a section with their types; none if `kind` is not a section."""
    kind = _bare(kind)
    if isinstance(kind, type) and issubclass(kind, Section):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return get_type_hints(kind) if is_dataclass(kind) else {}


def kind_at(root: type[Section], path: Sequence[str | int]) -> Any:
    """The type at a dotted key, None if there is no such key."""
    kind: Any = root
    for key in path:
        kind = fields_of(kind).get(str(key))
    return kind


def takes_text(kind: Any) -> bool:
    """Whether only text can be given for a value of this type, so that `123` means "123"."""
    kind = _bare(kind)
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind in (str, Path)


def _bare(kind: Any) -> Any:
    """`kind` without its annotations and without `| None`."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return _bare(members[0]) if len(members) == 1 else kind
    return kind
