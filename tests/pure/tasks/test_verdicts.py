"""Verdicts on any text: malformed completions, adversarial answers, and fuzz."""

from itertools import product
from typing import Any

import pytest

from sparrow.tasks import PUZZLES
from sparrow.tasks.base import (
    ANSWER,
    END_ANSWER,
    END_THINK,
    MARKS,
    RIGHT,
    WORDS,
    Malformed,
    Row,
    Verdict,
    answer_text,
    answer_words,
    wrong,
)


def row_of(family: str, **data: Any) -> Row:
    return Row(family=family, seed=0, length=100, prompt="", data=data)


PROGRAM = {"x1": ("5",), "x2": ("90",), "x3": ("x1", "-", "x2")}
EDGES = [("x1", "x2"), ("x3", "x2"), ("x3", "x4"), ("x1", "x3"), ("x4", "x5")]
ROWS: dict[str, tuple[Row, str]] = {  # a row of each family, and its answer
    "assignments": (row_of("assignments", program=PROGRAM, goal="x3", modulus=97), "12"),
    "countdown": (
        row_of("countdown", numbers=[3, 7, 7], target=28),
        "3 * 7 = 21 ; 21 + 7 = 28",
    ),
    "graph": (row_of("graph", edges=EDGES, start="x1", goal="x4"), "x1 x2 x3 x4"),
}
every_family = pytest.mark.parametrize("family", PUZZLES)


def verdict(family: str, text: str, row: Row | None = None) -> Verdict:
    given = PUZZLES[family].reward(row or ROWS[family][0], text)
    assert given == (RIGHT if given.reason == "right" else wrong(given.reason))
    assert given.reason
    return given


@every_family
def test_the_answer_alone_is_judged(family: str) -> None:
    """Whatever the chain says, and whatever whitespace separates words."""
    text = f"</think> <answer> {ROWS[family][1]} </answer>"
    for thoughts in ("", "no x9 = 1 ; \0 ", "x " * 500_000):
        assert verdict(family, thoughts + text) == RIGHT
    for space in ("\n", "\t", "  ", "\u2003", "\x1c"):
        assert verdict(family, f" so {text} ".replace(" ", space)) == RIGHT


@every_family
def test_a_completion_is_thoughts_and_then_one_answer(family: str) -> None:
    """Every sequence of up to six marks and answers: wrong but where all marks are in place."""
    answer = ROWS[family][1]
    for count in range(7):
        for words in product((*MARKS, answer), repeat=count):
            *thoughts, end_think, start, given, end = ("",) * 4 + words
            right = (end_think, start, given, end) == (END_THINK, ANSWER, answer, END_ANSWER)
            right = right and not set(thoughts) & {*MARKS}
            assert verdict(family, " ".join(words)).score == right, words
    whole = f"{END_THINK} {ANSWER} {answer} {END_ANSWER}"
    for text in (f"{whole} so", f"{whole} \0", whole.replace(answer, "\u3000\n"), whole[1:]):
        assert verdict(family, text).score == 0


def test_free_text_may_mention_the_marks_of_an_answer() -> None:
    text = "I write <answer> later </think>\n<answer>a\n  b </answer>\n"
    assert answer_text(text) == "a\n  b"
    with pytest.raises(Malformed, match="thoughts"):
        answer_words(text)


# By family: a word of the reason, and answers that it is the reason of.
ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "assignments": {
        "right": ("12",),
        "value": ("13",),
        "modulus": ("109", "97"),  # 12 + 97
        "one number": (
            *("12 12", "x3 = 12", "012", "+12", "-85", "\uff11\uff12", "١٢", "12\0", "12."),
            *("9" * 5000, "12 " * 100_000),
        ),
    },
    "countdown": {
        "right": ("3 * 7 = 21 ; 21 + 7 = 28", "7 * 3 = 21 ; 7 + 21 = 28"),
        "at hand": (
            "3 * 7 = 21 ; 21 + 7 = 28 ; 28 + 7 = 35",
            "3 + 7 = 10 ; 3 + 7 = 10 ; 10 + 10 = 20",  # the 3 again
            "7 + 7 = 14 ; 7 + 14 = 21",
            "3 + 3 = 6 ; 7 + 6 = 13",
            "4 * 7 = 28",
            "3 * 7 = 21 ; " * 50_000 + "21 + 7 = 28",
        ),
        "false": (
            "3 * 7 = 22 ; 22 + 7 = 29",
            "7 - 7 = 0 ; 3 / 0 = 0",
            "7 / 3 = 2 ; 2 + 7 = 9",
            "3 - 7 = 4 ; 4 * 7 = 28",
        ),
        "not used": ("3 * 7 = 21",),
        "target": ("3 + 7 = 10 ; 10 + 7 = 17", "7 - 7 = 0 ; 0 / 3 = 0"),
        "form": (
            *("28", ";", "; 3 * 7 = 21 ; 21 + 7 = 28", "3 * 7 = 21 ; 21 + 7 = 28 ;"),
            *("3 * 7 = 21 ; ; 21 + 7 = 28", "3 * 7 = 21 21 + 7 = 28", "3 * 7 21 = 28"),
            *(f"3 {sign} 7 = 21 ; 21 + 7 = 28" for sign in ("+-", "*/", "+-*/", "**", "x")),
            *("03 * 7 = 21 ; 21 + 7 = 28", "٣ * 7 = 21 ; 21 + 7 = 28"),
            *("3 - 7 = -4 ; 7 * -4 = -28", "3 * 7 = " + "9" * 5000),
            "3 * 7 == 21 ; 21 + 7 = 28",
        ),
    },
    "graph": {
        "right": ("x1 x2 x3 x4", "x1 x3 x4"),
        "edge": ("x1 x4", "x1 x1 x3 x4", "x1 x99 x4", "x1 - x3 - x4"),
        "twice": ("x1 x2 x1 x3 x4", "x1 x3 x4 x5 x4", "x1 " + "x2 x1 " * 100_000 + "x3 x4"),
        "begin": ("x2 x3 x4", "x4 x3 x1", "X1 x3 x4", "x01 x3 x4"),
        "end": ("x1", "x1 x3 x4 x5", "x1 x3 x4\0"),
    },
}


@every_family
def test_answers_and_why(family: str) -> None:
    for reason, answers in ANSWERS[family].items():
        for answer in answers:
            given = verdict(family, f"so </think> <answer> {answer} </answer>")
            assert reason in given.reason, answer[:80]
    zeros = row_of("countdown", numbers=[5, 5, 7, 7], target=9)
    text = "</think> <answer> 5 - 5 = 0 ; 7 - 7 = 0 ; 0 / 0 = 9 </answer>"
    assert "false" in verdict("countdown", text, zeros).reason


# Any text gets a verdict, never an exception.

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

CHARACTERS = st.text(st.characters(codec=None), max_size=80)  # lone surrogates and NUL included
WORD_SALAD = st.lists(st.sampled_from(WORDS[2:60]), max_size=30).map(" ".join)
PIECES = ["0", "3", "7", "21", "+", "-", "*", "/", "+-", "=", ";", "x1", "x4"]
ARITHMETIC = st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join)
TEXTS = st.one_of(
    CHARACTERS,
    WORD_SALAD,
    st.one_of(CHARACTERS, WORD_SALAD, ARITHMETIC).map("</think> <answer> {} </answer>".format),
)


@every_family
@hypothesis.given(text=TEXTS)
def test_any_text_gets_a_verdict(family: str, text: str) -> None:
    verdict(family, text, PUZZLES[family].row(1, 100))


@every_family
@hypothesis.given(seed=st.integers(0, 10**12), length=st.integers(100, 600), data=st.data())
def test_a_gold_chain_with_a_word_changed(family: str, seed: int, length: int, data: Any) -> None:
    """Right before; afterwards whatever it is, with a reason."""
    puzzle = PUZZLES[family]
    row = puzzle.row(seed, length)
    words = puzzle.chain(row, 0).split()
    assert verdict(family, " ".join(words), row) == RIGHT
    place = data.draw(st.integers(len(words) - 10, len(words) - 1))
    words[place] = data.draw(st.sampled_from(WORDS))
    verdict(family, " ".join(words), row)
