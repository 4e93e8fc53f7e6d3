"""How a model reads and writes: prompts, plain text and chat turns to token ids, ids to text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparrow.engine.answer import encode_messages, encode_plain, encode_prompt, encode_turn
from sparrow.models import Decoder, load_tokenizer
from sparrow.schema.common import ChatConfig
from sparrow.tasks.base import EOS, IDS, WORDS, Message, decode, encode

Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Language:
    """A tokenizer with its chat template and settings; model: its name, for error messages."""

    tokenizer: Any
    model: str
    chat: ChatConfig = field(default_factory=ChatConfig)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode the prompt of a row: a text is a user message if there is a chat template."""
        if isinstance(prompt, str):
            return encode_prompt(
                self.tokenizer, prompt, chat=True, model=self.model, settings=self.chat
            )
        return encode_messages(self.tokenizer, prompt, model=self.model, settings=self.chat)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text: no chat template, no special tokens."""
        return encode_plain(self.tokenizer, text, model=self.model)

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        """Encode what the chat template puts between an answer and the next.

        after: the tokens before; None: an answer that ended by itself. What closes an answer is
        not repeated where it was sampled.
        """
        ids = encode_turn(self.tokenizer, messages, model=self.model, settings=self.chat)
        last = [self.tokenizer.eos_token_id] if after is None else list(after[-1:])
        return ids[1:] if ids[:1] == last else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class _PuzzleTokenizer:
    """A tokenizer of the puzzle language, for models without one."""

    chat_template, eos_token_id = None, IDS[EOS]

    def encode(self, text: str, **_: Any) -> list[int]:
        return encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return decode(ids)


PUZZLE_LANGUAGE = Language(_PuzzleTokenizer(), "the language of puzzles")


def language_of(
    model: Decoder, puzzles: bool = False, *, chat: ChatConfig | None = None
) -> Language:
    """Return the language of a model; models with the puzzle vocabulary read puzzles by words."""
    if puzzles and model.spec.vocabulary == len(WORDS):
        return Language(_PuzzleTokenizer(), PUZZLE_LANGUAGE.model, chat or ChatConfig())
    return Language(tokenizer_of(model), str(model.source), chat or ChatConfig())


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
