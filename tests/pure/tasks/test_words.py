"""The puzzle language: every word one id, and what is a number."""

import pytest

from sparrow.tasks.words import EOS, NUMBERS, PAD, VOCABULARY, WORDS, decode, encode, number


def test_every_id_has_one_spelling() -> None:
    assert len(WORDS) == VOCABULARY
    assert len(set(WORDS)) == VOCABULARY
    assert all(word == "".join(word.split()) for word in WORDS)


def test_text_and_ids_go_both_ways() -> None:
    everything = " ".join(WORDS[2:])
    assert encode(everything) == list(range(2, VOCABULARY))
    assert decode(range(VOCABULARY)) == everything


def test_end_and_padding_are_left_out() -> None:
    assert decode(encode(f"x1 {EOS} {PAD}")) == "x1"
    assert decode([]) == ""
    assert encode("") == []


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="'seven' is no word of the puzzle language"):
        encode("x1 = seven")


def test_numbers_are_what_the_language_writes() -> None:
    assert [number(str(n)) for n in range(NUMBERS)] == list(range(NUMBERS))


@pytest.mark.parametrize(
    "word",
    [
        "",
        "x1",
        "-1",
        "+1",
        "007",
        "01",
        "1.0",
        "1e1",
        "1_0",
        "٣",
        "²",
        "\uff19",
        "=",
        "1\0",
        "9" * 5000,
    ],
)
def test_no_numbers(word: str) -> None:
    assert number(word) is None
    assert number(str(NUMBERS)) is None
