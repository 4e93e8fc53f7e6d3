"""How a model reads and writes: prompts to tokens, tokens to text."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sparrow.engine.answer import encode_messages, encode_prompt
from sparrow.models import Decoder, load_tokenizer
from sparrow.tasks.base import IDS, WORDS, Message, decode, encode

Prompt = str | tuple[Message, ...]


class Language(NamedTuple):
    """How prompts, texts or chat messages, become tokens, and tokens text."""

    encode: Callable[[Prompt], list[int]]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> "Language":
        """That of a model with a tokenizer; a text is a user's message where it can chat."""

        def encode(prompt: Prompt) -> list[int]:
            if isinstance(prompt, str):
                return encode_prompt(tokenizer, prompt, chat=True, model=model)
            return encode_messages(tokenizer, prompt, model=model)

        return cls(encode, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


def _encode_words(prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        raise ValueError(f"puzzles are texts, got chat messages: {prompt!r:.80}")
    return encode(prompt)


PUZZLE_LANGUAGE = Language(_encode_words, decode)


def language_of(model: Decoder, puzzles: bool = False) -> Language:
    """How a model reads and writes; models of the package read puzzles word for word."""
    if puzzles and model.spec.vocabulary == len(WORDS):
        return PUZZLE_LANGUAGE
    return Language.of(tokenizer_of(model), str(model.source))


def tokenizer_of(model: Decoder) -> Any:
    if model.source is None:
        raise ValueError("a model without a source has no tokenizer: give prompts as token ids")
    return load_tokenizer(model.source)


def speaks_puzzles(model: Decoder) -> bool:
    """Whether a model has the words of the puzzles, each in its place."""
    if model.source is None or model.spec.vocabulary != len(WORDS):
        return False
    return tokenizer_of(model).get_vocab() == IDS
