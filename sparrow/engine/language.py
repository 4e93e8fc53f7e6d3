"""How a model reads and writes: prompts, plain text and chat turns to token ids, ids to text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from sparrow.models import Decoder, load_tokenizer
from sparrow.models.tokenizer import library_errors
from sparrow.schema.common import ChatConfig

Message = Mapping[str, Any]  # role, content, and what else its chat template reads
ANSWER = "<the answer of the assistant>"  # stands in a rendered chat for what was sampled
RESERVED = ("messages", "add_generation_prompt", "tools", "documents")  # of the chat template
NO_CHAT = ChatConfig()


@dataclass(frozen=True, slots=True)
class Language:
    """A tokenizer with its chat template and settings; model: its name, for error messages."""

    tokenizer: Any
    model: str
    chat: ChatConfig = field(default_factory=ChatConfig)

    @classmethod
    def load(cls, model: Decoder, chat: ChatConfig | None = None) -> Self:
        """Load the language of a model; TypeError if it is of no folder, so has no tokenizer."""
        if model.source is None:
            raise TypeError("a model without a source has no tokenizer: give prompts as token ids")
        return cls(load_tokenizer(model.source), str(model.source), chat or ChatConfig())

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Encode a prompt up to where the answer begins.

        A text is a user message if there is a chat template. raw: the text as it is. tools: those
        that a chat offers, in OpenAI's form.
        """
        if not isinstance(prompt, str):
            return self.encode_text(self._render(prompt, tools))
        if not prompt:
            raise ValueError("the prompt is empty")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt {prompt!r} is not valid UTF-8") from error
        if not raw and self.tokenizer.chat_template is not None:
            return self.encode_text(self._render([{"role": "user", "content": prompt}]))
        if self.chat != NO_CHAT:
            missing = "raw prompts have" if raw else f"{self.model} has"
            raise ValueError(f"{missing} no chat template: chat.system and chat.template unused")
        return self._token_ids(prompt)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text: no chat template, no special tokens around it."""
        return self._token_ids(text, add_special_tokens=False)

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        """Encode what the chat template puts between an answer and the next.

        after: the tokens before; None: an answer that ended by itself. What closes an answer is
        not repeated where it was sampled.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        parts = (self._render([*chat, *more]).rpartition(ANSWER) for more in ([], messages))
        (_, _, alone), (_, rendered, turn) = parts
        if not rendered or turn == alone:
            roles = ", ".join(repr(message.get("role")) for message in messages)
            raise ValueError(f"{self.model}: the chat template leaves out messages of role {roles}")
        ids = self.encode_text(turn)
        last = [self.tokenizer.eos_token_id] if after is None else list(after[-1:])
        return ids[1:] if ids[:1] == last else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return the text of a chat up to where the answer begins."""
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.model} has no chat template, so it cannot read chat messages")
        chat, system = [dict(message) for message in messages], self.chat.system
        if system is not None and chat[0].get("role") == "system":
            system = None  # the chat has its own
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        if reserved := [name for name in self.chat.template if name in RESERVED]:
            raise ValueError(f"{self.model}: {reserved[0]!r} is no argument of chat.template")
        self._check_arguments(list(self.chat.template))
        settings: dict[str, Any] = {**self.chat.template, "add_generation_prompt": True}
        if tools:
            self._check_arguments(("tools",))
            settings["tools"] = [dict(tool) for tool in tools]
        with library_errors(f"{self.model}: bad chat template, or one that refuses these messages"):
            text = str(self.tokenizer.apply_chat_template(chat, tokenize=False, **settings))
        if system is not None and system.strip() not in text:
            raise ValueError(f"{self.model}: the chat template ignores chat.system")
        return text

    def _check_arguments(self, names: Sequence[str]) -> None:
        """Refuse arguments that the chat template does not mention."""
        template = self.tokenizer.chat_template
        text = "\n".join(template.values()) if isinstance(template, dict) else template
        for name in names:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                raise ValueError(f"{self.model}: no argument {name!r} in its chat template")

    def _token_ids(self, text: str, **options: bool) -> list[int]:
        try:
            with library_errors(f"{self.model}: the tokenizer cannot encode the prompt"):
                return list(self.tokenizer.encode(text, verbose=False, **options))
        except ValueError as error:
            if type(error.__cause__) is not Exception:  # tokenizers raise that for unknown words
                raise
            vocabulary = self.tokenizer.get_vocab()
            unknown = [repr(word) for word in text.split() if word not in vocabulary]
            raise ValueError(
                f"{self.model} has no tokens for {', '.join(unknown[:5])} ({error.__cause__}); the "
                "shipped models read puzzles only, such as: sparrow puzzle assignments"
            ) from error
