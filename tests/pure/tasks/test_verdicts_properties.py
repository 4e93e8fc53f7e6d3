"""Any text gets a verdict: 0 or 1 and a reason, never an exception."""

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from sparrow.tasks import PUZZLES
from sparrow.tasks.base import RIGHT, wrong
from sparrow.tasks.words import WORDS

CHARACTERS = st.text(st.characters(codec=None), max_size=80)  # lone surrogates and NUL included
WORD_SALAD = st.lists(st.sampled_from(WORDS[2:60]), max_size=30).map(" ".join)
ARITHMETIC = st.lists(
    st.sampled_from(["0", "3", "7", "21", "+", "-", "*", "/", "+-", "=", ";", "x1", "x4"]),
    max_size=12,
)
ANSWERS = st.one_of(CHARACTERS, WORD_SALAD, ARITHMETIC.map(" ".join))
TEXTS = st.one_of(
    CHARACTERS,
    WORD_SALAD,
    ANSWERS.map(lambda answer: f"</think> <answer> {answer} </answer>"),
)


@pytest.mark.parametrize("name", PUZZLES)
@given(text=TEXTS)
def test_any_text_gets_a_verdict(name: str, text: str) -> None:
    verdict = PUZZLES[name].reward(PUZZLES[name].row(1, 100), text)
    assert verdict == (RIGHT if verdict.score else wrong(verdict.reason))
    assert verdict.reason


@pytest.mark.parametrize("name", PUZZLES)
@given(seed=st.integers(0, 10**12), length=st.integers(100, 600), data=st.data())
def test_a_gold_chain_with_a_word_changed(
    name: str, seed: int, length: int, data: st.DataObject
) -> None:
    """Right before; afterwards whatever it is, with a reason."""
    puzzle = PUZZLES[name]
    row = puzzle.row(seed, length)
    words = puzzle.chain(row, 0).split()
    assert puzzle.reward(row, " ".join(words)) == RIGHT
    place = data.draw(st.integers(len(words) - 10, len(words) - 1))
    words[place] = data.draw(st.sampled_from(WORDS))
    verdict = puzzle.reward(row, " ".join(words))
    assert verdict == (RIGHT if verdict.score else wrong(verdict.reason))
