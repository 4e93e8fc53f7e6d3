"""What every record has in common: typed fields, checked when built; conversion to plain data.

Values per token are numpy arrays: a trajectory of 32K tokens takes about 15 bytes a token, where
tuples of Python numbers would take about 100. A record copies the arrays it is given and makes
its copies read-only.
"""

import math
import numbers
from collections.abc import Mapping
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

BoolArray = Annotated[npt.NDArray[np.bool_], "bool"]
Int16Array = Annotated[npt.NDArray[np.int16], "int16"]
Int32Array = Annotated[npt.NDArray[np.int32], "int32"]
Float32Array = Annotated[npt.NDArray[np.float32], "float32"]
Int32Matrix = Annotated[npt.NDArray[np.int32], "int32", 2]
Float32Matrix = Annotated[npt.NDArray[np.float32], "float32", 2]

R = TypeVar("R", bound="Record")


class FieldError(ValueError):
    """Values that do not fit a record.

    `problems` maps a field to (what was given, what is allowed), so that a caller who knows where
    each value came from, such as the configuration, can say so.
    """

    def __init__(self, record: str, problems: Mapping[str, tuple[object, str]]) -> None:
        super().__init__(record, problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(
            f"{self.args[0]}.{field}: got {given!r}, allowed: {allowed}"
            for field, (given, allowed) in self.problems.items()
        )


class Record:
    """Base of all records: fields converted to their declared types, `==` by content.

    A subclass states its own rules in `_check`. Records with arrays are not hashable.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in self._hints().items():
            value = _conform(hint, getattr(self, name), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Raise ValueError if the fields, each of the right type, do not fit together."""

    @classmethod
    @cache
    def _hints(cls) -> dict[str, Any]:
        """The declared type of each field, in order."""
        return get_type_hints(cls, include_extras=True)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._hints()}

    def _refuse(self, name: str, bad: npt.NDArray[np.bool_], allowed: str) -> None:
        """Raise if any token is marked in `bad`."""
        if bad.any():
            given = f"{getattr(self, name)[bad][0]} at token {bad.argmax()}"
            raise ValueError(f"{type(self).__name__}.{name}: got {given}, allowed: {allowed}")

    def _require_aligned(self, *names: str) -> None:
        arrays = {name: getattr(self, name) for name in names}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: got lengths {lengths}, allowed: equal ones")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record) or type(other) is not type(self):
            return NotImplemented
        return all(map(_same, self._values().values(), other._values().values()))

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies are built anew: numpy does not pickle that an array is read-only.
        return partial(type(self), **self._values()), ()


def to_dict(record: Record) -> dict[str, Any]:
    """The record as JSON-safe data: dicts, lists, strings, numbers, None. Loses nothing."""
    return {name: _to_plain(value) for name, value in record._values().items()}


def from_dict(cls: type[R], data: object) -> R:
    """Inverse of `to_dict`. Exactly the record's keys must be there, defaults included."""
    hints = cls._hints()
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__}: got {data!r}, allowed: a mapping of {list(hints)}")
    for key in [*data, *hints]:
        if key not in hints or key not in data:
            fault = "missing" if key in hints else "unknown"
            raise ValueError(f"{cls.__name__}: {fault} key {key!r}, allowed: {list(hints)}")
    return cls(**{name: _from_plain(hint, data[name]) for name, hint in hints.items()})


def _to_plain(value: Any) -> Any:
    match value:
        case Record():
            return to_dict(value)
        case np.ndarray():
            return value.tolist()
        case tuple():
            return [_to_plain(item) for item in value]
    return value


def _from_plain(hint: Any, value: Any) -> Any:
    """Build nested records. What is not one is left as it is, for the record to check."""
    hint = _required(hint)
    if isinstance(hint, type) and issubclass(hint, Record) and value is not None:
        return from_dict(hint, value)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_from_plain(get_args(hint)[0], item) for item in value)
    return value


def _required(hint: Any) -> Any:
    """`hint` without its `| None`."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    return hint


def _conform(hint: Any, value: Any, where: str) -> Any:
    """`value` as an immutable value of type `hint`, if that changes nothing but its form."""
    required = _required(hint)
    if value is None and required is not hint:
        return None
    if get_origin(required) is Annotated:
        dtype, *dimensions = required.__metadata__
        return _frozen_array(np.dtype(dtype), value, where, *dimensions)
    if get_origin(required) is tuple and isinstance(value, tuple | list):
        item = get_args(required)[0]
        return tuple(_conform(item, member, f"{where}[{i}]") for i, member in enumerate(value))
    return _conform_scalar(required, value, where)


def _conform_scalar(hint: Any, value: Any, where: str) -> Any:
    number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    if get_origin(hint) is Literal:
        fits, allowed = value in get_args(hint), f"one of {get_args(hint)}"
    elif hint is float:
        fits, allowed = number and _is_finite(value), "a finite number"
    elif hint is int:
        fits, allowed = number and isinstance(value, numbers.Integral), "an integer"
    else:
        kind = get_origin(hint) or hint
        fits, allowed = isinstance(value, kind), f"a {kind.__name__}"
    if not fits:
        raise ValueError(f"{where}: got {value!r}, allowed: {allowed}")
    return hint(value) if hint in (int, float) else value


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float comes near
        return False


def _frozen_array(
    dtype: np.dtype[Any], value: Any, where: str, dimensions: int = 1
) -> npt.NDArray[Any]:
    """A read-only copy. Integers stay equal; floats stay finite and may round to float32."""
    given = _as_array(dtype, value, where, dimensions)
    with np.errstate(over="ignore"):
        array = given.astype(dtype)
    lost = ~np.isfinite(array) if dtype.kind == "f" else array != given
    if lost.any():
        got = f"{given[lost][0]} at token {lost.argmax() // max(1, lost[0].size)}"
        raise ValueError(f"{where}: got {got}, allowed: finite {dtype}")
    array.setflags(write=False)
    return array


def _as_array(dtype: np.dtype[Any], value: Any, where: str, dimensions: int) -> npt.NDArray[Any]:
    """`value` as an array of a kind that may become `dtype`: no floats or bools as integers."""
    allowed = f"allowed: {dimensions}-D {dtype}"
    try:
        given = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: got no array ({error}), {allowed}") from error
    if given.size == 0 and given.ndim == 1 < dimensions:
        given = given.reshape(0, *[0] * (dimensions - 1))
    kinds = {"b": "b", "i": "iu", "f": "iuf"}[dtype.kind]
    if given.ndim != dimensions or (given.size > 0 and given.dtype.kind not in kinds):
        raise ValueError(f"{where}: got {given.dtype} of shape {given.shape}, {allowed}")
    if dtype.kind != "b" and isinstance(value, list | tuple) and bool in map(type, value):
        raise ValueError(f"{where}: got a bool among numbers, {allowed}")
    return given


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
