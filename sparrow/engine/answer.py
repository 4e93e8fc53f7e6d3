"""Text in, text out: what `sparrow generate` does between the command line and the engine.

A run directory, where one is asked for, gets the resolved configuration and one JSON line per
completion.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from sparrow.config import GenerateConfig, save_resolved
from sparrow.engine.generate import describe, generate
from sparrow.models import Decoder, load, load_tokenizer
from sparrow.models.attention import Sparsity
from sparrow.ops import versions
from sparrow.records import Completion, to_dict

COMPLETIONS = "completions.jsonl"
OnText = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A loaded model with its tokenizer, under one configuration."""

    config: GenerateConfig
    model: Decoder
    tokenizer: Any

    @classmethod
    def open(cls, config: GenerateConfig, report: Callable[[str], None] | None = None) -> "Session":
        """Load what the configuration names; write it, resolved, into its run directory."""
        if config.run.dir is not None and (config.run.dir / COMPLETIONS).exists():
            taken = config.run.dir / COMPLETIONS
            raise ValueError(f"{taken} exists; give the run a directory of its own")
        name, chosen = config.model.name, config.model
        model = load(name, dtype=chosen.dtype, device=chosen.device, report=report)
        tokenizer = load_tokenizer(model.source or name)
        if config.run.dir is not None:
            save_resolved(config, config.run.dir)
        return cls(config=config, model=model, tokenizer=tokenizer)

    def header(self) -> str:
        """One line that says what runs."""
        model, spec = self.model, self.model.spec
        fast = versions(model.device.type, model.dtype, spec.head_size)
        kernels = ", ".join(f"{op} by {name}" for op, name in fast.items())
        return (
            f"{self.config.model.name} | {spec.family}, {spec.parameters() / 1e6:.1f} M weights, "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device} | "
            f"attention: {describe(self.config.attention.budget, Sparsity())} | "
            f"ops: {kernels or 'definitions only'}"
        )

    def encode(self, prompt: str, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt, as a user's message where the model has a chat template."""
        _check_text(prompt)
        if not chat or self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode(prompt, verbose=False))
        message = [{"role": "user", "content": prompt}]
        try:
            encoded = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise ValueError(f"{self.model.source}: bad chat template: {error}") from error
        return list(encoded["input_ids"])

    def answer(
        self, prompts: Sequence[str], *, chat: bool = True, on_text: OnText | None = None
    ) -> list[Completion]:
        """Completions with their text; `on_text(row, piece)` is called as pieces come."""
        stream = _Stream(self.tokenizer, on_text) if on_text is not None else None
        completions = generate(
            self.model,
            [self.encode(prompt, chat=chat) for prompt in prompts],
            self.config.sampling,
            budget=self.config.attention.budget,
            on_token=stream,
        )
        if stream is not None:
            stream.finish()
        completions = [replace(c, text=self._decode(c)) for c in completions]
        if self.config.run.dir is not None:
            _append(self.config.run.dir / COMPLETIONS, completions)
        return completions

    def _decode(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)


class _Stream:
    """Turns tokens into pieces of text; a piece is held back while a character is incomplete."""

    def __init__(self, tokenizer: Any, on_text: OnText) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.shown: dict[int, int] = defaultdict(int)

    def __call__(self, row: int, token: int) -> None:
        self.tokens[row].append(token)
        text = self.tokenizer.decode(self.tokens[row], skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(row, text)

    def finish(self) -> None:
        """Show what was held back to the end."""
        for row, tokens in self.tokens.items():
            self._show(row, self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _show(self, row: int, text: str) -> None:
        if len(text) > self.shown[row]:
            self.on_text(row, text[self.shown[row] :])
            self.shown[row] = len(text)


def _check_text(prompt: str) -> None:
    if not prompt:
        raise ValueError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {prompt!r} is not valid UTF-8") from error


def _append(file: Path, completions: Sequence[Completion]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        for completion in completions:
            lines.write(json.dumps(to_dict(completion)) + "\n")
