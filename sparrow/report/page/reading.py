"""The files of a run, read and checked: what is wrong is said with the file and the place in it.

NaN and infinities, which JSON does not have and some writers write, count as not measured.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparrow.files import Json, check_digest_line, printable, read_document, read_lines, read_text

Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OrNull:
    """A shape, or null."""

    shape: "Shape"


Shape = type | tuple[Any, ...] | dict[str, Any] | list[Any] | OrNull
"""What a value may be: a type or several, an object with keys, a list of something; a list that
names its shape twice has one element at least."""

FORMAT = 1
LARGEST = 1e100
LONGEST = 2**31  # tokens
NUMBER, MAYBE, WHOLE = (int, float), (int, float, type(None)), (int, type(None))
TAIL = {"p05": MAYBE, "low": MAYBE, "high": MAYBE}
CELL = {
    "variant": str,
    "budget": WHOLE,
    "start": int,
    "stop": int,
    "prompts": int,
    "mean": NUMBER,
    "p05": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
}
SCHEDULE = {
    "name": str,
    "lengths": [int, int],
    "budgets": [int, int],
    "layers": list,
    "flow": str,
    "dense_layers": [int],
}
CASE = {
    "name": str,
    "what": str,
    "why": str,
    "context": int,
    "dense_ms": [NUMBER, NUMBER],
    "sparse_ms": [NUMBER, NUMBER],
}
SHAPES: dict[str, dict[str, Any]] = {
    "surface.json": {
        "format": int,
        "model": str,
        "dtype": str,
        "device": str,
        "prompts": str,
        "targets": [NUMBER, NUMBER],
        "variants": [{"name": str}],
        "cells": [CELL],
        "floor": [CELL],
        "versions": [str],
        "command": str,
        "created": str,
    },
    "check.json": {"format": int, "cells": [CELL]},
    "plan.json": {
        "format": int,
        "variant": str,
        "target": NUMBER,
        "by": str,
        "bins": [{"start": int, "stop": WHOLE, "budget": WHOLE, "kept_share": NUMBER, **TAIL}],
        "check": OrNull([{"start": int, **TAIL}]),
        "notes": [str],
        "schedule": SCHEDULE,
    },
    "schedule.json": SCHEDULE,
    "speed.json": {
        "format": int,
        "machine": {"device": str, "cpus": int, "torch": str},
        "note": str,
        "cases": [CASE, CASE],
    },
}


SETTINGS = {
    "model": {},
    "rollout": {"attention": {}},
    "gate": {"target": NUMBER},
    "run": {},
}


def record(file: Path | None) -> Plain | None:
    """A JSON file by its name; None where there is none."""
    if file is None:
        return None
    data = document(file)
    if data.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{file} is of format {_shown(data['format'])}, allowed: {FORMAT}")
    check(data, SHAPES[file.name], str(file))
    schedule = data if file.name == "schedule.json" else data.get("schedule", {})
    bins, budgets = (len(schedule.get(key, ())) for key in ("lengths", "budgets"))
    if bins != budgets:
        raise ValueError(f"{file}: got {budgets} budgets for {bins} lengths, allowed: one each")
    _check_order(schedule.get("lengths", ()), f"{file}, lengths")
    for cell in (*data.get("cells", ()), *data.get("floor", ())):
        _check_order([0, cell["start"], cell["stop"]], f"{file}, start and stop of a cell")
    return data


def document(file: Path) -> Json:
    """The JSON object in a file as it is shown, its digest checked."""
    return _shown_values(read_document(file), str(file))


def _check_order(lengths: Sequence[int], where: str) -> None:
    """Raise ValueError where lengths fall, or are longer than any text."""
    if any(b < a for a, b in pairwise([*lengths, LONGEST])):
        raise ValueError(f"{where}: got {_shown(list(lengths))}, allowed: lengths that rise")


def check(value: object, shape: Shape, where: str) -> None:
    """Raise ValueError where a value is not as its shape says."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: got {_shown(value)}, allowed: an object")
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{where} has no {key!r}")
            check(value[key], inner, f"{where}, {key}")
    elif isinstance(shape, list):
        least = len(shape) - 1
        if not isinstance(value, list) or len(value) < least:
            some = " with something in it" if least else ""
            raise ValueError(f"{where}: got {_shown(value)}, allowed: a list{some}")
        for number, each in enumerate(value):
            check(each, shape[0], f"{where} {number}")
    elif isinstance(shape, OrNull):
        if value is not None:
            check(value, shape.shape, where)
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        raise ValueError(f"{where}: got {_shown(value)}, allowed: {_named(shape)}")


def lines(file: Path | None, *, numbers: bool) -> list[Plain]:
    """JSON lines, each of a step. A last line without an end is one that is being written.

    numbers: every value is a number, or null where it was none.
    """
    if file is None:
        return []
    found: dict[int, Plain] = {}
    rows: list[Plain] = []
    for number, line in enumerate(read_lines(file, growing=True), 1):
        where = f"{file}, line {number}"
        data = _shown_values(line, where)
        check(data, {"step": int}, where)
        if numbers:
            check(data, dict.fromkeys(data, MAYBE), where)
            if data["step"] in found:
                raise ValueError(f"{where}: step {data['step']} is there twice")
            found[data["step"]] = data
        rows.append(data)
    return sorted(rows, key=lambda row: row["step"])


def settings(file: Path | None) -> Plain:
    """The configuration of a run; empty where there is none."""
    if file is None:
        return {}
    text = read_text(file)
    try:
        check_digest_line(text)
        found = _plain(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from error
    _check_given(found, SETTINGS, str(file))
    return found


def _check_given(values: Plain, shape: dict[str, Any], where: str) -> None:
    """As `check`, of the keys that are there."""
    for key in shape.keys() & values.keys():
        check(values[key], {} if isinstance(shape[key], dict) else shape[key], f"{where}, {key}")
        if isinstance(shape[key], dict):
            _check_given(values[key], shape[key], f"{where}, {key}")


def _shown_values(data: Json, where: str) -> Json:
    try:
        return {key: _plain(value) for key, value in data.items()}
    except RecursionError:
        raise ValueError(f"{where}: nested too deep") from None


def _plain(value: Any) -> Any:
    """The same data; numbers that nobody measures (1e999) are none, and texts can be shown."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float | int) and not isinstance(value, bool):
        return value if abs(value) <= LARGEST else None
    if isinstance(value, dict):
        return {printable(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _named(shape: type | Sequence[type]) -> str:
    kinds = shape if isinstance(shape, tuple) else (shape,)
    words = {int: "a whole number", float: "a number", str: "text", list: "a list"}
    return " or ".join(words.get(kind, "null") for kind in kinds)
