"""When an output is the expected one: spaces, numbers with a point, several right answers."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Words that are numbers: whole ones, those with a point or an exponent, and both. 1e5 may be
# hexadecimal; as a number Python would write it with a sign, as in 1e+16.
WHOLE = re.compile(r"-?[0-9]+")
FRACTION = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-][0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def same_output(expected: Any, got: str, tolerance: float) -> bool:
    """Compare a text with the expected one, word by word: spaces and blank lines do not count.

    Numbers with a decimal point may differ by the tolerance. expected: a text, its lines, or
    {"any": [...]}.
    """
    if (choices := _choices(expected)) is not None:
        return any(same_output(choice, got, tolerance) for choice in choices)
    if not isinstance(expected, str):
        lines = expected if isinstance(expected, Sequence) else [expected]
        expected = "\n".join(map(str, lines))
    words, others = expected.split(), got.split()
    return len(words) == len(others) and all(
        word == other or _same_number(word, other, tolerance)
        for word, other in zip(words, others, strict=True)
    )


def same_value(expected: Any, got: Any, tolerance: float) -> bool:
    """Compare values as JSON has them: tuples are lists, keys are text; numbers by the tolerance.

    expected: the value, or {"any": [...]}.
    """
    if (choices := _choices(expected)) is not None:
        return any(same_value(choice, got, tolerance) for choice in choices)
    if isinstance(expected, Mapping):
        if not isinstance(got, dict) or len(got) != len(expected):
            return False
        by_text = {_key(key): value for key, value in got.items()}
        return all(
            _key(key) in by_text and same_value(value, by_text[_key(key)], tolerance)
            for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(expected, got, strict=True))
    if isinstance(expected, float):
        return isinstance(got, int | float) and _close(expected, got, tolerance)
    return bool(expected == got)


def _choices(expected: Any) -> Sequence[Any] | None:
    if isinstance(expected, Mapping) and expected.keys() == {"any"}:
        choices = expected["any"]
        return choices if isinstance(choices, Sequence) and not isinstance(choices, str) else None
    return None


def _same_number(word: str, other: str, tolerance: float) -> bool:
    """Whether two words are the same number: whole ones by their digits, others by the tolerance.

    10.0 is 10; 007, +7 and 7e0 are not 7.
    """
    if WHOLE.fullmatch(word):
        digits, point, zeros = other.partition(".")
        return digits == word and bool(point) and not zeros.strip("0")
    if not (FRACTION.fullmatch(word) and NUMBER.fullmatch(other)):
        return False
    numbers = float(word), float(other)
    return all(map(math.isfinite, numbers)) and _close(*numbers, tolerance)


def _key(key: Any) -> str:
    """A key as JSON has it; those that JSON cannot have as Python writes them."""
    return json.dumps(key) if isinstance(key, bool | float | None) else str(key)


def _close(expected: float, got: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(expected) and math.isnan(got)
        )
    except OverflowError:  # an int beyond all floats
        return False
