"""The language of the puzzles: 512 words, each one token; numbers and names are words.

Text is words with one space between; ids are places in `WORDS`. The order is part of every shipped
model: a new word takes the place of the first spare one, and no word is ever moved.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

NUMBERS = 128  # 0 to 127
NAMES = 320  # x0 to x319
VOCABULARY = 512
PAD, EOS = "<pad>", "<eos>"
MARKS = ("<think>", "</think>", "<answer>", "</answer>")
SIGNS = ("=", "+", "-", "*", "/", ";", ":", ",", "?", "(", ")")
OTHERS = (
    *("assignments", "countdown", "graph", "mod", "find", "from", "to", "reach", "with"),
    *("no", "yes", "so", "then", "now", "next", "end", "path", "by", "try", "take"),
)

_IN_USE = (
    PAD,
    EOS,
    *MARKS,
    *SIGNS,
    *OTHERS,
    *(str(number) for number in range(NUMBERS)),
    *(f"x{name}" for name in range(NAMES)),
)
# The rest is room for words to come: a model may utter it, so it must have a spelling.
WORDS = _IN_USE + tuple(f"<spare{i}>" for i in range(VOCABULARY - len(_IN_USE)))


@cache
def _ids() -> dict[str, int]:
    return {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Token ids of a text; a word that the language lacks is an error."""
    ids = _ids()
    try:
        return [ids[word] for word in text.split()]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is no word of the puzzle language") from None


def decode(ids: Iterable[int]) -> str:
    """The text of token ids, end and padding left out."""
    return " ".join(WORDS[index] for index in ids if index not in (0, 1))


def number(word: str) -> int | None:
    """The number that a word is, or None; only what the language itself writes counts."""
    return int(word) if word.isascii() and word.isdigit() and word in _ids() else None


def puzzle_tokenizer() -> Any:
    """A transformers tokenizer; a word that the language lacks raises when it is encoded.

    The model names no word for unknown ones, so that there is nothing to fall back to: this is
    saved with every model and holds there too.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab=_ids()))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
