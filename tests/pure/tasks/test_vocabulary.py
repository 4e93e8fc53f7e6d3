"""The puzzle language: every word one id, what is a number, and its transformers tokenizer, fresh
and as shipped models carry it.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sparrow.tasks import PUZZLES
from sparrow.tasks.base import (
    EOS,
    NUMBERS,
    PAD,
    VOCABULARY,
    WORDS,
    decode,
    encode,
    number,
    puzzle_tokenizer,
)

SHIPPED = Path(__file__).parents[3] / "sparrow" / "models" / "shipped"
FOLDERS = sorted(file.parent for file in SHIPPED.glob("*/tokenizer.json"))
UNKNOWN = ("hello x7", "x7=12", "x320", "128", "007", "X7", "<unk>", "[UNK]", "<bos>", "é", "\0")


def test_every_id_has_one_spelling_and_comes_back() -> None:
    assert len(WORDS) == len(set(WORDS)) == VOCABULARY
    assert all(word == "".join(word.split()) for word in WORDS)
    everything = " ".join(WORDS[2:])
    assert encode(everything) == list(range(2, VOCABULARY))
    assert decode(range(VOCABULARY)) == everything  # end and padding are left out
    assert (encode(""), decode([])) == ([], "")


def test_numbers_are_what_the_language_writes() -> None:
    assert [number(str(n)) for n in range(NUMBERS)] == list(range(NUMBERS))
    odd = ("", "x1", "-1", "+1", "007", "01", "1.0", "1e1", "1_0", "٣", "²", "\uff19", "=", "1\0")
    for word in (*odd, "9" * 5000, str(NUMBERS)):
        assert number(word) is None


@pytest.fixture(
    scope="module", params=["fresh", "saved", *FOLDERS], ids=lambda what: Path(what).name
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    fresh = puzzle_tokenizer()
    if request.param == "fresh":
        return fresh
    folder = request.param
    if folder == "saved":
        folder = tmp_path_factory.mktemp("tokenizer")
        fresh.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_text_and_ids_as_the_language_has_them(tokenizer: Any) -> None:
    """No token is added at either end, and no space is tidied away."""
    assert len(tokenizer) == len(WORDS)
    assert tokenizer.convert_ids_to_tokens(range(len(WORDS))) == list(WORDS)
    assert tokenizer.encode(" ".join(WORDS)) == list(range(len(WORDS)))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == tuple(encode(f"{PAD} {EOS}"))
    for puzzle in PUZZLES.values():
        row = puzzle.row(5, 400)
        text = f"{row.prompt} {puzzle.chain(row, 0)}"
        assert tokenizer.encode(text) == tokenizer(text)["input_ids"] == encode(text)
        assert tokenizer.decode(encode(text)) == text
    assert tokenizer.encode("") == []
    assert tokenizer.encode(" x7\n=\t12  ") == encode("x7 = 12")


def test_special_tokens_are_end_and_padding_alone(tokenizer: Any) -> None:
    """The marks of thoughts and answers are not: verdicts need them."""
    ids = encode(f"{PAD} x7 </think> <answer> 12 </answer> <spare3> {EOS} {PAD}")
    assert tokenizer.decode(ids, skip_special_tokens=True) == decode(ids)
    assert decode(ids) == "x7 </think> <answer> 12 </answer> <spare3>"
    assert sorted(tokenizer.all_special_tokens) == sorted((PAD, EOS))
    batch = tokenizer(["x1", "x1 = 4"], padding=True)
    assert batch["input_ids"] == [[*encode("x1"), 0, 0], encode("x1 = 4")]
    assert batch["attention_mask"] == [[1, 0, 0], [1, 1, 1]]


def test_unknown_words_are_refused(tokenizer: Any) -> None:
    """Not dropped, and not turned into another word."""
    for text in UNKNOWN:
        with pytest.raises(ValueError, match="language"):
            encode(text)
        for given in (text, ["x7", text]):
            with pytest.raises(Exception, match=r"\[UNK\]"):
                tokenizer(given, padding=True)
        assert tokenizer.convert_tokens_to_ids(text) is None
    assert tokenizer.unk_token is None
