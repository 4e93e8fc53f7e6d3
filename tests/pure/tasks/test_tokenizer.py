"""The puzzle language as a transformers tokenizer, fresh and as shipped models carry it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from transformers import AutoTokenizer

from sparrow.tasks import PUZZLES
from sparrow.tasks.words import EOS, PAD, WORDS, decode, encode, puzzle_tokenizer

SHIPPED = Path(__file__).parents[3] / "sparrow" / "models" / "shipped"
FOLDERS = sorted(file.parent for file in SHIPPED.glob("*/tokenizer.json"))


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


def test_every_word_keeps_its_id(tokenizer: Any) -> None:
    assert len(tokenizer) == len(WORDS)
    assert tokenizer.convert_ids_to_tokens(range(len(WORDS))) == list(WORDS)
    assert tokenizer.encode(" ".join(WORDS)) == list(range(len(WORDS)))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == tuple(encode(f"{PAD} {EOS}"))


@pytest.mark.parametrize("name", PUZZLES)
def test_text_and_ids_as_the_language_has_them(tokenizer: Any, name: str) -> None:
    """No token is added at either end, and no space is tidied away."""
    row = PUZZLES[name].row(5, 400)
    text = f"{row.prompt} {PUZZLES[name].chain(row, 0)}"
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text)) == text


def test_spaces_do_not_matter(tokenizer: Any) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode(" x7\n=\t12  ") == encode("x7 = 12")


def test_special_tokens_are_skipped(tokenizer: Any) -> None:
    """End and padding are, the marks of thoughts and answers are not: verdicts need them."""
    ids = encode(f"{PAD} x7 </think> <answer> 12 </answer> <spare3> {EOS} {PAD}")
    assert tokenizer.decode(ids, skip_special_tokens=True) == decode(ids)
    assert decode(ids) == "x7 </think> <answer> 12 </answer> <spare3>"
    assert sorted(tokenizer.all_special_tokens) == sorted((PAD, EOS))


def test_batches_are_padded_with_padding(tokenizer: Any) -> None:
    batch = tokenizer(["x1", "x1 = 4"], padding=True)
    assert batch["input_ids"] == [[*encode("x1"), 0, 0], encode("x1 = 4")]
    assert batch["attention_mask"] == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    "text",
    [
        "hello x7",
        "x7 hello",
        "x7=12",
        "x320",
        "128",
        "007",
        "X7",
        "<unk>",
        "[UNK]",
        "<bos>",
        "é",
        "\0",
    ],
)
def test_unknown_words_are_refused(tokenizer: Any, text: str) -> None:
    """Not dropped, and not turned into another word."""
    with pytest.raises(ValueError, match="is no word of the puzzle language"):
        encode(text)
    with pytest.raises(Exception, match=r"WordLevel error: Missing \[UNK\] token"):
        tokenizer.encode(text)
    with pytest.raises(Exception, match=r"WordLevel error: Missing \[UNK\] token"):
        tokenizer(["x7", text], padding=True)
    assert tokenizer.unk_token is None
    assert tokenizer.convert_tokens_to_ids(text) is None
