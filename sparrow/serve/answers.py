"""Answers to a request: the choices of OpenAI's objects, whole or in chunks."""

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sparrow.engine.answer import ResolvedDecoding
from sparrow.engine.engine import Engine
from sparrow.engine.scoring import TokenLogprobs, score_tokens
from sparrow.schema.openai import ChatRequest, CompletionRequest, GenerationRequest
from sparrow.schema.sampling import Completion
from sparrow.serve import responses
from sparrow.serve.parsing import MessageDelta, MessageParser, parse_message
from sparrow.serve.responses import Json, TokenDraw, Usage
from sparrow.serve.sampling import Failed, Piece
from sparrow.serve.service import EncodedPrompt, Service


@dataclass(kw_only=True)
class Answers(ABC):
    """The answers to one request, on their way."""

    kind: ClassVar[str]  # of the object
    prefix: ClassVar[str]  # of its id

    service: Service
    request: GenerationRequest
    prompts: Sequence[EncodedPrompt]
    decoding: ResolvedDecoding
    top_logprobs: int | None  # of each token; None: no log-probs
    usage: Usage = field(default_factory=Usage)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.usage.prompt = sum(len(prompt.ids) for prompt in self.prompts)
        self.envelope = responses.Envelope(self.kind, self.service.name, self.prefix)

    async def whole(self) -> Json:
        """Answer the request with one object; Overloaded if the server has no room for it."""
        with self._admitted():
            choices = await self._initial_choices()
            async for number, piece in self._pieces():
                completion = piece.completion
                if completion is not None:
                    choice = self._choice(number, completion, self._draws(completion))
                    choices[number] = choice | self._details(piece)
        self.service.count(self.usage, self.decoding)
        return self.envelope.whole([choices[number] for number in sorted(choices)], self.usage)

    async def chunks(self) -> AsyncIterator[Json]:
        """Yield chunks, each with what came since the last one of its choice.

        Overloaded, before the first of them, if the server has no room for it.
        """
        with self._admitted():
            for choice in (await self._initial_choices()).values():
                yield self.envelope.chunk([choice])
            first = True
            async for number, piece in self._pieces():
                if first:
                    self.service.metrics.first_token.observe(time.monotonic() - self.begun)
                    first = False
                choice = self._chunk(number, piece, self._draws(piece)) | self._details(piece)
                yield self.envelope.chunk([choice])
        self.service.count(self.usage, self.decoding)
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self.envelope.chunk([], self.usage)

    def _admitted(self) -> AbstractContextManager[None]:
        return self.service.sampler.admitted(sum(prompt.params.n for prompt in self.prompts))

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all choices, counted; none where no token is asked for."""
        if self.request.token_limit == 0:
            return
        top = 0 if self.top_logprobs is None else max(self.top_logprobs, int(self._greedy))
        pieces = self.service.pieces(self.prompts, self.request, self.decoding, top)
        async with aclosing(pieces):  # type: ignore[type-var]
            async for number, piece in pieces:
                if piece.completion is not None:
                    self.usage.add(piece.completion, first=piece.sample == 0)
                yield number, piece

    @property
    def _greedy(self) -> bool:
        return self.request.temperature == 0

    def _draws(self, drawn: Piece | Completion) -> list[TokenDraw]:
        """What was drawn, if log-probs were asked for."""
        top = self.top_logprobs
        if top is None:
            return []
        if isinstance(drawn, Completion):
            draws = responses.completion_draws(drawn)
        else:
            draws = responses.draws(drawn.tokens, drawn.logprobs, drawn.top)
        return responses.shown_draws(draws, top, greedy=self._greedy)

    def _details(self, piece: Piece) -> Json:
        """The key `sparrow` of a choice, if it was asked for."""
        options, streamed = self.request.sparrow, self.request.stream
        made: Json = {}
        if piece.completion is not None and (options.return_token_ids or options.hidden_states):
            made = responses.details(
                piece.completion, ids=options.return_token_ids, hidden=options.hidden_states
            )
            made["weights_id"] = self.service.weights_id
        if streamed and options.return_token_ids:  # those of this chunk
            made |= {"token_ids": list(piece.tokens), "logprobs": list(piece.logprobs)}
        return {"sparrow": made} if made else {}

    @abstractmethod
    async def _initial_choices(self) -> dict[int, Json]:
        """The choices before anything is sampled, by number; of a stream the first chunks."""

    @abstractmethod
    def _choice(self, number: int, completion: Completion, draws: list[TokenDraw]) -> Json:
        """A whole choice."""

    @abstractmethod
    def _chunk(self, number: int, piece: Piece, draws: list[TokenDraw]) -> Json:
        """What a piece adds to a choice."""


@dataclass(kw_only=True)
class TextAnswers(Answers):
    """Answers of `/v1/completions`."""

    kind, prefix = "text_completion", "cmpl"
    request: CompletionRequest

    @classmethod
    def of(cls, service: Service, request: CompletionRequest) -> "TextAnswers":
        return cls(
            service=service,
            request=request,
            prompts=service.prompts(request),
            decoding=service.resolve(request.sparrow),
            top_logprobs=request.logprobs,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prompts: list[tuple[str, list[TokenDraw]]] = []
        self._offsets: dict[int, int] = {}

    async def _initial_choices(self) -> dict[int, Json]:
        """With `echo` the prompts; they are the answers where no token is asked for."""
        for prompt in self.prompts if self.request.echo else ():
            draws: list[TokenDraw] = []
            if self.top_logprobs is not None:
                draws = responses.prompt_draws(prompt.ids, await self._score(prompt))
            self._prompts.append((self.service.language.decode(prompt.ids), draws))
        ended = None if self.request.token_limit else "length"
        if not self._prompts or (ended is None and not self.request.stream):
            return {}
        numbers = range(len(self.prompts) * self.request.n)
        return {
            number: self._text_choice(number, *self._prompt(number), ended) for number in numbers
        }

    async def _score(self, prompt: EncodedPrompt) -> TokenLogprobs:
        def score(engine: Engine) -> TokenLogprobs:
            if not engine.ready:
                raise Failed("the engine sleeps or has no weights, try again later")
            return score_tokens(engine.model, prompt.ids, self.top_logprobs or 0)

        return await self.service.rollouts.run(score)

    def _prompt(self, number: int) -> tuple[str, list[TokenDraw]]:
        return self._prompts[number // self.request.n] if self._prompts else ("", [])

    def _choice(self, number: int, completion: Completion, draws: list[TokenDraw]) -> Json:
        text, before = self._prompt(number)
        text += completion.text or ""
        return self._text_choice(number, text, [*before, *draws], completion.finish_reason)

    def _chunk(self, number: int, piece: Piece, draws: list[TokenDraw]) -> Json:
        reason = None if piece.completion is None else piece.completion.finish_reason
        return self._text_choice(number, piece.text, draws, reason)

    def _text_choice(
        self, number: int, text: str, draws: list[TokenDraw], reason: str | None
    ) -> Json:
        logprobs = None
        if self.top_logprobs is not None:
            offset = self._offsets.get(number, 0)
            logprobs = responses.text_logprobs(draws, self.service.names, offset)
            self._offsets[number] = offset + sum(map(len, logprobs["tokens"]))
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(kw_only=True)
class ChatAnswers(Answers):
    """Answers of `/v1/chat/completions`: thinking and tool calls are parsed out of the text."""

    kind, prefix = "chat.completion", "chatcmpl"
    request: ChatRequest
    inside_thinking: bool  # where the prompt ends

    @classmethod
    def of(cls, service: Service, request: ChatRequest) -> "ChatAnswers":
        prompt, inside_thinking = service.chat_prompt(request)
        return cls(
            service=service,
            request=request,
            prompts=[prompt],
            decoding=service.resolve(request.sparrow),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            inside_thinking=inside_thinking,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers = [MessageParser(**self._parsing()) for _ in range(self.request.n)]
        self._calls = [0] * self.request.n

    def _parsing(self) -> dict[str, Any]:
        return {
            "thinking": self.service.thinks,
            "inside_thinking": self.inside_thinking,
            "tools": bool(self.request.template_tools()),
        }

    async def _initial_choices(self) -> dict[int, Json]:
        if not self.request.stream:
            return {}
        start = {"role": "assistant", "content": ""}
        return {number: _delta(number, start) for number in range(self.request.n)}

    def _choice(self, number: int, completion: Completion, draws: list[TokenDraw]) -> Json:
        parsed = parse_message(completion.text or "", **self._parsing())
        return {
            "index": number,
            "message": responses.message(parsed),
            "logprobs": self._logprobs(draws),
            "finish_reason": _reason(completion, calls=bool(parsed.tool_calls)),
        }

    def _chunk(self, number: int, piece: Piece, draws: list[TokenDraw]) -> Json:
        parser = self._parsers[number]
        parsed = parser.feed(piece.text)
        if piece.completion is not None:
            parsed = MessageDelta(*map(operator.add, parsed, parser.finish()))
        made = responses.delta(parsed, self._calls[number])
        self._calls[number] += len(parsed.tool_calls)
        reason = _reason(piece.completion, calls=self._calls[number] > 0)
        return _delta(number, made, reason, self._logprobs(draws))

    def _logprobs(self, draws: list[TokenDraw]) -> Json | None:
        names = self.service.names
        return None if self.top_logprobs is None else responses.chat_logprobs(draws, names)


def _delta(
    number: int, made: Json, reason: str | None = None, logprobs: Json | None = None
) -> Json:
    return {"index": number, "delta": made, "logprobs": logprobs, "finish_reason": reason}


def _reason(completion: Completion | None, *, calls: bool) -> str | None:
    if completion is None:
        return None
    ended = completion.finish_reason
    return "tool_calls" if calls and ended == "stop" else ended
