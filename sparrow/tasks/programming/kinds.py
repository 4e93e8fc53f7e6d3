"""Kinds of values: how problems describe, draw, read and print them.

Whole numbers, strings of lowercase letters and digits, and lists of these; no fractions, so that
outputs can be compared exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

ALPHABETS = ("ab", "abc", "abc12", "abeixz019", "abcdefghijklmnopqrstuvwxyz0123456789")
NAMES = ("ann", "bob", "cy", "dee", "eve", "flo")
INSTRUCTIONS = ("add", "mul", "dup", "swap", "drop")


@dataclass(frozen=True, slots=True)
class InputKind:
    """A kind of input: a problem's arguments, or the lines that a program reads."""

    arguments: tuple[str, ...]
    meaning: str  # of the arguments, in words
    lines: str  # of standard input, in words
    read: str  # Python that reads the arguments from standard input
    write: Callable[[Any], str]  # the lines of standard input for a value
    draw: Callable[[Random, int], Any]  # a value of a size
    edges: Sequence[Any]  # values that careless programs get wrong


def _draw_integer(rng: Random, size: int) -> int:
    return rng.randint(-size * size, size * size)


def _draw_numbers(rng: Random, size: int) -> list[int]:
    most = rng.choice((4, 12, 40))  # few different values: duplicates and ties
    return [rng.randint(-most, most) for _ in range(size)]


def _draw_text(rng: Random, size: int) -> str:
    return "".join(rng.choices(rng.choice(ALPHABETS), k=size))


def _draw_words(rng: Random, size: int) -> list[str]:
    letters = rng.choice(("ab", "abcd", "abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(min(size, 14))]


def _draw_log(rng: Random, size: int) -> str:
    return ";".join(f"{rng.choice(NAMES)}:{rng.randint(-9, 20)}" for _ in range(min(size, 14)))


def _draw_intervals(rng: Random, size: int) -> list[list[int]]:
    starts = [rng.randint(-2 * size, 2 * size) for _ in range(min(size, 14))]
    return [[start, start + rng.randint(0, 8)] for start in starts]


def _draw_grid(rng: Random, size: int) -> list[list[int]]:
    rows, columns = (rng.randint(min(2, size), min(size, 6)) for _ in range(2))
    return [[rng.randint(-4, 9) for _ in range(columns)] for _ in range(rows)]


def _draw_program(rng: Random, size: int) -> list[str]:
    return [
        f"push {rng.randint(-9, 20)}" if rng.random() < 0.5 else rng.choice(INSTRUCTIONS)
        for _ in range(size)
    ]


def _spaced(values: Sequence[Any]) -> str:
    return " ".join(map(str, values)) + "\n"


def _counted(lines: Sequence[str]) -> str:
    return "\n".join([str(len(lines)), *lines]) + "\n"


def _rows(rows: Sequence[Sequence[int]]) -> str:
    return _counted([" ".join(map(str, row)) for row in rows])


_READ_ROWS = "[[int(v) for v in input().split()] for _ in range(int(input()))]"
KINDS = {
    "integer": InputKind(
        ("n",),
        "`n` is an integer.",
        "one line with an integer `n`",
        "n = int(input())",
        lambda n: f"{n}\n",
        _draw_integer,
        (0, 1, -1, 10, -25, 1000),
    ),
    "pair": InputKind(
        ("a", "b"),
        "`a` and `b` are integers.",
        "one line with two integers `a` and `b`, separated by a space",
        "a, b = map(int, input().split())",
        _spaced,
        lambda rng, size: [_draw_integer(rng, size), _draw_integer(rng, size)],
        ([0, 0], [5, 5], [-3, 2], [7, -8], [0, -6], [-12, -4]),
    ),
    "numbers": InputKind(
        ("numbers",),
        "`numbers` is a list of integers; it may be empty.",
        "one line with the integers of the list `numbers`, separated by single spaces "
        "(an empty line for an empty list)",
        "numbers = [int(v) for v in input().split()]",
        _spaced,
        _draw_numbers,
        ([], [0], [-5], [3, 3, 3, 3], [-1, -2, -2, -7], [9, 4, 4, 2, 1, 0]),
    ),
    "text": InputKind(
        ("text",),
        "`text` is a string of lowercase letters and digits; it may be empty.",
        "one line with the string `text` of lowercase letters and digits (the line may be empty)",
        "text = input()",
        lambda text: f"{text}\n",
        _draw_text,
        ("", "a", "bbbb", "0", "z9y", "abba"),
    ),
    "words": InputKind(
        ("words",),
        "`words` is a list of words of lowercase letters; it may be empty.",
        "one line with the words of the list `words`, of lowercase letters, separated by single "
        "spaces (an empty line for an empty list)",
        "words = input().split()",
        _spaced,
        _draw_words,
        ([], ["a"], ["abc", "abc"], ["b", "a", "ab", "ba"], ["ac", "acb", "acbb"]),
    ),
    "log": InputKind(
        ("log",),
        '`log` is a string of entries "name:value" with ";" between them, such as "ann:5;bob:-3"; '
        "names are of lowercase letters, values are integers; the string may be empty.",
        'one line with the string `log` of entries "name:value" with ";" between them, such as '
        '"ann:5;bob:-3"; names are of lowercase letters, values are integers (the line may be '
        "empty)",
        "log = input()",
        lambda text: f"{text}\n",
        _draw_log,
        ("", "ann:0", "bob:-4;bob:-4", "eve:3;ann:3;bob:3", "cy:1;dee:9;cy:-7"),
    ),
    "intervals": InputKind(
        ("intervals",),
        "`intervals` is a list of intervals, each a list [start, end] of two integers with "
        "start <= end; it may be empty.",
        "one line with the number of intervals in the list `intervals` (it may be 0), then a line "
        "`start end` for each, two integers with start <= end",
        f"intervals = {_READ_ROWS}",
        _rows,
        _draw_intervals,
        ([], [[0, 0]], [[1, 2], [2, 3]], [[3, 4], [1, 2]], [[5, 9], [5, 9]], [[-9, -2], [-4, -3]]),
    ),
    "grid": InputKind(
        ("grid",),
        "`grid` is a list of rows, each a list of integers; all rows are equally long, and there "
        "is at least one row and one column.",
        "one line with the number of rows of `grid`, then a line for each row with its integers, "
        "separated by single spaces; all rows are equally long, and there is at least one row and "
        "one column",
        f"grid = {_READ_ROWS}",
        _rows,
        _draw_grid,
        ([[0]], [[-3]], [[1, 2, 3]], [[4], [5], [5]], [[2, 2], [2, 2]], [[-1, -5], [-2, -9]]),
    ),
    "program": InputKind(
        ("program",),
        "`program` is a list of instructions, each one of the strings `push v` (v is an integer), "
        "`add`, `mul`, `dup`, `swap`, `drop`; it may be empty.",
        "one line with the number of instructions in the list `program` (it may be 0), then a line "
        "for each: `push v` (v is an integer), `add`, `mul`, `dup`, `swap` or `drop`",
        "program = [input() for _ in range(int(input()))]",
        _counted,
        _draw_program,
        ([], ["add"], ["push 2", "dup", "mul"], ["push -3", "swap", "drop"], ["push 1", "push 1"]),
    ),
}

# Kinds of results: in words, and what prints them.
RESULTS = {
    "integer": ("an integer", "print({})"),
    "numbers": ("a list of integers", "print(*{})"),
    "text": ("a string", "print({})"),
    "words": ("a list of strings", "print(*{})"),
}


def printed(value: Any) -> str:
    """Return what a right program prints for a result."""
    return _spaced(value) if isinstance(value, list) else f"{value}\n"
