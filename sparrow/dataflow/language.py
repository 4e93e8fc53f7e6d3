"""How a model reads and writes: prompts, plain text and chat turns to token ids, ids to text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparrow.engine.answer import encode_messages, encode_plain, encode_prompt, encode_turn
from sparrow.models import Decoder, load_tokenizer
from sparrow.schema.common import ChatConfig
from sparrow.tasks.base import IDS, WORDS, Message, decode, encode

Prompt = str | tuple[Message, ...]


class Language(Protocol):
    """Text and chat messages to token ids and back."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode the prompt of a row up to where the answer begins."""

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text: no chat template, no special tokens."""

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        """Encode what the chat template puts between an answer and the next one.

        after: the tokens before; None: an answer that ended by itself. What closes an answer is
        not repeated where it was sampled.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class TokenizerLanguage:
    """The language of a model with a tokenizer; a text is a user message if it has a template."""

    tokenizer: Any
    model: str
    chat: ChatConfig = field(default_factory=ChatConfig)

    def encode(self, prompt: Prompt) -> list[int]:
        about: dict[str, Any] = {"model": self.model, "settings": self.chat}
        if isinstance(prompt, str):
            return encode_prompt(self.tokenizer, prompt, chat=True, **about)
        return encode_messages(self.tokenizer, prompt, **about)

    def encode_text(self, text: str) -> list[int]:
        return encode_plain(self.tokenizer, text, model=self.model)

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        ids = encode_turn(self.tokenizer, messages, model=self.model, settings=self.chat)
        last = [self.tokenizer.eos_token_id] if after is None else list(after[-1:])
        return ids[1:] if ids[:1] == last else ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class PuzzleLanguage:
    """The language of the puzzles, one token a word, without chat."""

    def encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            raise ValueError(f"puzzles are texts, got chat messages: {prompt!r:.80}")
        return encode(prompt)

    def encode_text(self, text: str) -> list[int]:
        return encode(text)

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        raise ValueError("the puzzle language has no chat template: use encode_text")

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)


PUZZLE_LANGUAGE: Language = PuzzleLanguage()


def language_of(
    model: Decoder, puzzles: bool = False, *, chat: ChatConfig | None = None
) -> Language:
    """Return the language of a model; the shipped models read puzzles word by word."""
    chat = chat or ChatConfig()
    if not (puzzles and model.spec.vocabulary == len(WORDS)):
        return TokenizerLanguage(tokenizer_of(model), str(model.source), chat)
    if chat != ChatConfig():
        raise ValueError("puzzles have no chat template: chat.system, chat.template do nothing")
    return PUZZLE_LANGUAGE


def tokenizer_of(model: Decoder) -> Any:
    """Load the tokenizer of a model."""
    if model.source is None:
        raise ValueError("a model without a source has no tokenizer: give prompts as token ids")
    return load_tokenizer(model.source)


def speaks_puzzles(model: Decoder) -> bool:
    """Whether the vocabulary of a model is that of the puzzles."""
    if model.source is None or model.spec.vocabulary != len(WORDS):
        return False
    return tokenizer_of(model).get_vocab() == IDS
