"""The language of a model: that of its tokenizer, or the words of the puzzles."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.engine.language import Language as Language
from sparrow.models import Decoder
from sparrow.schema.common import ChatConfig
from sparrow.tasks.base import EOS, IDS, WORDS, decode, encode


class _PuzzleTokenizer:
    """A tokenizer of the puzzle language, for models without one."""

    chat_template, eos_token_id = None, IDS[EOS]

    def encode(self, text: str, **_: Any) -> list[int]:
        return encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return decode(ids)


PUZZLE_LANGUAGE = Language(_PuzzleTokenizer(), "the language of puzzles")


def load_language(
    model: Decoder, puzzles: bool = False, *, chat: ChatConfig | None = None
) -> Language:
    """Return the language of a model; models with the puzzle vocabulary read puzzles by words."""
    if puzzles and model.spec.vocabulary == len(WORDS):
        return Language(_PuzzleTokenizer(), PUZZLE_LANGUAGE.model, chat or ChatConfig())
    return Language.load(model, chat)


def vocabulary(language: Language) -> Mapping[str, int]:
    """Token ids by token."""
    return (
        IDS if isinstance(language.tokenizer, _PuzzleTokenizer) else language.tokenizer.get_vocab()
    )


def speaks_puzzles(model: Decoder) -> bool:
    """Whether the vocabulary of a model is that of the puzzles."""
    if model.source is None or model.spec.vocabulary != len(WORDS):
        return False
    return Language.load(model).tokenizer.get_vocab() == IDS
