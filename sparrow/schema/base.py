"""Base classes of configurations and results: strict pydantic with numpy arrays, JSON and back.

Values per token are numpy arrays: a trajectory of 32K tokens takes about 15 bytes a token, where
tuples of Python numbers would take about 100. A record copies arrays and makes the copies
read-only.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import core_schema

from sparrow.files import printable, read_document, write_document

SHOWN_ROWS = 50  # of a table in a notebook
SHOWN_CHARACTERS = 60  # of a cell of it


class _Array(NamedTuple):
    """Pydantic's schema of a read-only array; in JSON it is a list."""

    dtype: str
    dimensions: int = 1

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            partial(frozen_array, np.dtype(self.dtype), dimensions=self.dimensions),
            serialization=core_schema.plain_serializer_function_ser_schema(np.ndarray.tolist),
        )


BoolArray = Annotated[npt.NDArray[np.bool_], _Array("bool")]
Int16Array = Annotated[npt.NDArray[np.int16], _Array("int16")]
Int32Array = Annotated[npt.NDArray[np.int32], _Array("int32")]
Float32Array = Annotated[npt.NDArray[np.float32], _Array("float32")]
Int32Matrix = Annotated[npt.NDArray[np.int32], _Array("int32", 2)]
Float32Matrix = Annotated[npt.NDArray[np.float32], _Array("float32", 2)]


class FieldError(ValueError):
    """Raised for a field that contradicts others; a caller can add where its value came from."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field, self.value, self.allowed = field, value, allowed

    def __str__(self) -> str:
        return f"{self.field}: got {self.value!r}, allowed: {self.allowed}"


class Record(BaseModel):
    """A frozen pydantic model that is compared by content, arrays included.

    Subclasses check their fields in `_check`. Records with arrays are not hashable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Convert numpy scalars to Python numbers, and lists to tuples."""
        if not isinstance(values, dict):
            return values
        return {key: _plain(value) for key, value in values.items()}

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other; their types are right already."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked."""
        return type(self)(**(dict(self) | changes))

    def row(self) -> dict[str, Any]:
        """Return the fields as one row of a table: nested records become columns `a_b`."""
        columns: dict[str, Any] = {}
        for name, value in dict(self).items():
            inner = value.row() if isinstance(value, Record) else {"value": value}
            columns |= {name if key == "value" else f"{name}_{key}": v for key, v in inner.items()}
        return columns

    def require(self, holds: object, field: str, allowed: str, given: object = None) -> None:
        """Raise FieldError unless `holds`. given: the value to show instead of the field's."""
        if not holds:
            value = attrgetter(field)(self) if given is None else given
            raise FieldError(field, value, allowed)

    def _refuse(self, name: str, bad: npt.NDArray[np.bool_], allowed: str) -> None:
        """Raise FieldError if any token is marked in `bad`."""
        if bad.any():
            value = f"{getattr(self, name)[bad][0]} at token {bad.argmax()}"
            self.require(False, name, allowed, value)

    def _require_aligned(self, *names: str) -> None:
        arrays = {name: getattr(self, name) for name in names}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        self.require(len(set(lengths.values())) <= 1, names[0], "equal lengths", lengths)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Record)
        return all(_same(mine, theirs) for (_, mine), (_, theirs) in zip(self, other, strict=True))

    def __hash__(self) -> int:
        fields = dict(self).values()
        return hash((type(self), *(tuple(v.items()) if isinstance(v, dict) else v for v in fields)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt: numpy does not pickle that an array is read-only.
        return partial(type(self), **dict(self)), ()


class Table:
    """Base of results with rows: a one-line repr, a table in a notebook, a pandas DataFrame."""

    title: ClassVar[str] = ""  # a format string over the result
    shown: ClassVar[str] = "rows"  # the field that holds the rows

    def table(self, field: str = "") -> list[dict[str, Any]]:
        """Return the rows as dicts; field: another field that holds records."""
        return [record.row() for record in getattr(self, field or self.shown)]

    def _title(self) -> str:
        return self.title.format(self)

    def to_pandas(self, field: str = "") -> Any:
        """Return the rows as a DataFrame; field: another field that holds records."""
        try:
            from pandas import DataFrame
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "to_pandas needs pandas: pip install pandas", name="pandas"
            ) from None
        return DataFrame(self.table(field))

    def __repr__(self) -> str:
        rows = len(self.table())
        title = printable(self._title())
        return f"{type(self).__name__}({title}, {rows} {'row' if rows == 1 else 'rows'})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        rows = self.table()
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [_html_cells("th", names)]
        lines += [_html_cells("td", [row.get(name) for name in names]) for row in rows[:SHOWN_ROWS]]
        hidden = f", {SHOWN_ROWS} of {len(rows)} rows shown" if len(rows) > SHOWN_ROWS else ""
        caption = escape(printable(self._title() + hidden))
        return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"


def _html_cells(tag: str, values: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_html_text(value)}</{tag}>' for value in values)}</tr>"


def _html_text(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return escape(printable(short))


R = TypeVar("R", bound=Record)


class File(Record):
    """Base of records that are stored as a file: JSON with a digest and a format version."""

    what: ClassVar[str] = "file"
    version: ClassVar[int | None] = None  # None: the file has no key "format"
    made_by: ClassVar[str] = ""  # the command that writes such a file

    def save(self, path: str | Path) -> None:
        """Write JSON with a digest, atomically."""
        write_document(path, to_dict(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; ValueError names the file and the problem.

        A digest is verified; a file written by hand may have none.
        """
        data = cls.upgrade(read_document(path, cls.what))
        by = f"; {cls.made_by} writes one" if cls.made_by else ""
        if cls.version is not None and data.get("format") != cls.version:
            raise ValueError(f"{path}: not a {cls.what} of format {cls.version}{by}")
        try:
            return from_dict(cls, data)
        except ValueError as error:
            raise ValueError(f"{cls.what} {path}: {error}{by}") from error

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Add fields that older files of the same format do not have."""
        return data


def to_dict(record: Record) -> dict[str, Any]:
    """Return a record as JSON data: dicts, lists, strings, numbers, None; without loss."""
    return record.model_dump(mode="json")


def from_dict(cls: type[R], data: object) -> R:
    """Make a record of JSON data; every key must be present, defaults included."""
    if isinstance(data, Mapping):
        missing = [key for key in cls.model_fields if key not in data]
        if missing:
            raise ValueError(f"{cls.__name__}: missing key {missing[0]!r}")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{cls.__name__}: {problems(error)}") from None


KEY = "[key]"  # how pydantic says that the key of a mapping is wrong


def problems(error: ValidationError) -> str:
    """Describe validation errors in one line: each field, its value and what is allowed."""
    return "; ".join(map(_problem, error.errors()))


def _problem(detail: Any) -> str:
    cause = detail.get("ctx", {}).get("error")
    place = printable(".".join(str(part) for part in detail["loc"] if part != KEY))
    if cause is not None:
        joint = "." if isinstance(cause, FieldError) else ": "
        return f"{place}{joint}{cause}" if place else str(cause)
    return f"{place}: {detail['msg']}, got {str(detail['input'])[:80]!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, list | tuple):
        return value
    # Long lists of Python numbers, such as tokens, need no conversion.
    is_plain = bool(value) and type(value[0]) in (bool, int, float, str)
    return tuple(value) if is_plain else tuple(map(_plain, value))


def frozen_array(dtype: np.dtype[Any], value: Any, *, dimensions: int = 1) -> npt.NDArray[Any]:
    """Copy values to a read-only array: integers without loss, floats finite and rounded."""
    source = _as_array(dtype, value, dimensions)
    with np.errstate(over="ignore"):
        array = source.astype(dtype)
    lost = ~np.isfinite(array) if dtype.kind == "f" else array != source
    if lost.any():
        got = f"{source[lost][0]} at token {lost.argmax() // max(1, lost[0].size)}"
        raise ValueError(f"got {got}, allowed: finite {dtype}")
    array.setflags(write=False)
    return array


def _as_array(dtype: np.dtype[Any], value: Any, dimensions: int) -> npt.NDArray[Any]:
    """Make an array that can be cast to `dtype`; floats and bools are no integers."""
    allowed = f"allowed: {dimensions}-D {dtype}"
    array = np.asarray(value)
    if array.size == 0 and array.ndim == 1 < dimensions:
        array = array.reshape(0, *[0] * (dimensions - 1))
    kinds = {"b": "b", "i": "iu", "f": "iuf"}[dtype.kind]
    if array.ndim != dimensions or (array.size > 0 and array.dtype.kind not in kinds):
        raise ValueError(f"got {array.dtype} of shape {array.shape}, {allowed}")
    if dtype.kind != "b" and isinstance(value, list | tuple) and bool in map(type, value):
        raise ValueError(f"got a bool among numbers, {allowed}")
    return array


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
