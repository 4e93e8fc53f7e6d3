"""The model behind the server: decoding and prompts of requests, and the pieces of answers."""

import asyncio
import copy
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from sparrow.engine.answer import DENSE, ResolvedDecoding
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.engine.language import Language
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import stop_ids
from sparrow.schema.base import from_dict
from sparrow.schema.common import ChatConfig
from sparrow.schema.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    SparrowOptions,
)
from sparrow.schema.sampling import OutputOptions, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.serve import ServeConfig
from sparrow.serve.metrics import ServerMetrics
from sparrow.serve.parsing import THINK
from sparrow.serve.responses import TokenNames, Usage
from sparrow.serve.sampling import Piece, RequestSampler
from sparrow.sparse.presets import preset, preset_names


class EncodedPrompt(NamedTuple):
    """A prompt in tokens with its sampling parameters."""

    ids: list[int]
    params: SamplingParams


class NumberedPiece(NamedTuple):
    """A piece of an answer with the number of its choice."""

    choice: int
    piece: Piece


@dataclass(kw_only=True)
class Service:
    """A model that answers requests; `start` it in the event loop that serves."""

    config: ServeConfig
    engine: Engine
    language: Language
    decoding: ResolvedDecoding  # unless a request says otherwise
    name: str
    admin_port: int | None = None  # for trainers; None: there is none
    weights_id: str = field(default_factory=lambda: secrets.token_hex(8))  # new with every load
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        engine = self.engine
        self.rollouts = AsyncEngine(engine)
        most = engine.max_running + self.config.max_waiting
        self.sampler = RequestSampler(self.rollouts, self.language.decode, most)
        tokenizer = self.language.tokenizer
        # Long prompts are read in a thread, by a tokenizer of its own: one may not be used by two.
        own = replace(self.language, tokenizer=copy.deepcopy(tokenizer))
        self._local = threading.local()
        self.reading = ThreadPoolExecutor(
            1, "sparrow-reader", lambda: setattr(self._local, "language", own)
        )
        self.names = TokenNames(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            lambda token: str(tokenizer.convert_ids_to_tokens(token)),
        )
        watch, sampler = self.metrics.watch, self.sampler
        watch("samples_in_flight", "Samples that run or wait.", lambda: sampler.in_flight)
        watch("samples_running", "Samples in the batch.", lambda: len(engine.scheduler.running))
        watch("kv_pages_available", "Pages not in use.", lambda: engine.pool.available)

    @cached_property
    def thinks(self) -> bool:
        """Whether answers of chats may begin with a block of thinking."""
        return THINK in str(self.language.tokenizer.chat_template or "")

    @property
    def reader(self) -> Language:
        """The language that this thread may use."""
        return getattr(self._local, "language", self.language)

    @property
    def ready(self) -> bool:
        """Whether it answers now; while the engine sleeps or has no weights, requests wait."""
        return self.rollouts.running and self.engine.ready

    # Decoding.

    def resolve(self, options: SparrowOptions) -> ResolvedDecoding:
        """The decoding of a request; RequestError where this server cannot decode so."""
        decoding, default = options.decoding, self.decoding
        given = options.budget is not None or options.schedule is not None
        if decoding == "dense" or (decoding is None and not given and default.schedule is None):
            return DENSE
        schedule = self._schedule(options) if given else default.schedule
        if schedule is None:
            allowed = "with 'sparrow.budget' or 'sparrow.schedule'; this server has no default"
            raise RequestError(
                f"'sparrow.decoding' can be {decoding!r} only {allowed}.", "sparrow.decoding"
            )
        rule = self.engine.rule
        assert rule is not None
        exact = decoding == "exact" or (decoding is None and default.speculative is not None)
        names = ("draft_tokens", "acceptance", "reselect")
        asked = {name: x for name in names if (x := getattr(options, name)) is not None}
        base = default.speculative or SpeculativeParams()
        speculative = base.replace(**asked) if asked else base
        try:
            rule.check(schedule, page=PAGE, family=self.engine.model.spec.family)
            if exact:
                self.engine.check_drafts(schedule, speculative)
        except ValueError as error:
            raise RequestError(f"{error}.", "sparrow", "unsupported_value") from error
        return ResolvedDecoding(schedule, rule.flow, speculative if exact else None)

    def _schedule(self, options: SparrowOptions) -> Schedule:
        """The schedule that a request names or has, never a file; or its budget under the rule."""
        rule, name, own = self.engine.rule, options.schedule, self.decoding.schedule
        assert rule is not None
        if options.budget is not None:
            return Schedule.fixed(
                options.budget,
                first=rule.first,
                last=rule.last,
                dense_layers=tuple(sorted(rule.dense_layers)),
                flow=rule.flow.name,
                flow_digest=rule.flow.digest,
            )
        if own is not None and name == own.name:
            return own
        if isinstance(name, dict):
            try:
                return from_dict(Schedule, name)
            except ValueError as error:
                raise RequestError(f"{error}.", "sparrow.schedule") from error
        if name not in preset_names():
            known = ", ".join([*preset_names(), *([] if own is None else [own.name])])
            raise RequestError(
                f"'sparrow.schedule' must be one of {known}; got {name!r:.80}.", "sparrow.schedule"
            )
        return preset(name)

    # Prompts.

    def prompts(self, request: CompletionRequest) -> list[EncodedPrompt]:
        encoded = [
            self._encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in request.prompt
        ]
        self._check_count(request.n * len(encoded))
        return [self._fit(ids, request, "prompt") for ids in encoded]

    def _encode(self, text: str) -> list[int]:
        try:
            return replace(self.reader, chat=ChatConfig()).encode(text, raw=True)
        except ValueError as error:
            raise RequestError(f"{error}.", "prompt") from error

    def chat_prompt(self, request: ChatRequest) -> tuple[EncodedPrompt, bool]:
        """The prompt of a chat, and whether it ends inside a block of thinking."""
        self._check_count(request.n)
        language = self.reader
        if request.chat_template_kwargs:
            arguments = language.chat.template | request.chat_template_kwargs
            language = replace(language, chat=language.chat.replace(template=arguments))
        tools, template = request.template_tools(), language.tokenizer.chat_template
        if tools and template is not None and "tools" not in str(template):
            text = f"The chat template of {self.name!r} takes no tools."
            raise RequestError(text, "tools", "unsupported_value")
        try:
            ids = language.encode(request.template_messages(), tools=tools)
        except ValueError as error:
            raise RequestError(f"{error}.", "messages") from error
        prompt = self._fit(ids, request, "messages")
        end = language.tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip()
        return prompt, self.thinks and end.endswith(THINK)

    def _check_count(self, samples: int) -> None:
        if samples > self.config.max_n:
            allowed = f"at most {self.config.max_n} samples over all prompts"
            raise RequestError(f"'n' must give {allowed}, got {samples}.", "n")

    def _fit(self, ids: list[int], request: GenerationRequest, param: str) -> EncodedPrompt:
        """Refuse what exceeds the context or the vocabulary."""
        room, most = self.engine.max_context - len(ids), self.engine.model.spec.vocabulary
        limit = request.token_limit
        if room < max(1, limit or 0):
            need = "" if limit is None else f" and {limit} tokens to sample"
            raise RequestError(
                f"The context has {self.engine.max_context} tokens, the request has {len(ids)} "
                f"of its prompt{need}.",
                param,
                "context_length_exceeded",
            )
        if ids and max(ids) >= most:
            raise RequestError(f"'{param}' has token {max(ids)}, the vocabulary is {most}.", param)
        params = request.sampling(room)
        try:
            stop_ids(self.engine.model.spec, params)
        except ValueError as error:
            raise RequestError(f"{error}.", "sparrow.stop_token_ids") from error
        return EncodedPrompt(ids, params)

    # Answers.

    async def pieces(
        self,
        prompts: Sequence[EncodedPrompt],
        request: GenerationRequest,
        decoding: ResolvedDecoding,
        top_logprobs: int,
    ) -> AsyncIterator[NumberedPiece]:
        """Yield the pieces of all answers as they come; closing it aborts what is left."""
        hidden = request.sparrow.hidden_states
        settings: dict[str, Any] = {
            **decoding.request,
            "options": OutputOptions(top_logprobs=top_logprobs, hidden_states=hidden),
            "stop": request.stop,
            "streamed": request.stream,
            "interval": self.config.stream_interval,
        }
        if len(prompts) == 1:  # no task in between: that costs a wake-up of each piece
            stream = self.sampler.stream(prompts[0].ids, prompts[0].params, **settings)
            async with aclosing(stream):  # type: ignore[type-var]
                async for piece in stream:
                    yield NumberedPiece(piece.sample, piece)
            return
        queue: asyncio.Queue[NumberedPiece | BaseException | None] = asyncio.Queue()

        async def answer(number: int, prompt: EncodedPrompt) -> None:
            try:
                stream = self.sampler.stream(prompt.ids, prompt.params, **settings)
                async with aclosing(stream):  # type: ignore[type-var]
                    async for piece in stream:
                        queue.put_nowait(NumberedPiece(number * request.n + piece.sample, piece))
                queue.put_nowait(None)
            except BaseException as error:  # of a task: raised where the pieces are read
                queue.put_nowait(error)
                if isinstance(error, asyncio.CancelledError):
                    raise

        tasks = [asyncio.create_task(answer(*item)) for item in enumerate(prompts)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def count(self, usage: Usage, decoding: ResolvedDecoding) -> None:
        """Add the tokens of a request to the metrics."""
        kind = "dense" if decoding.schedule is None else "sparse"
        kind = kind if decoding.speculative is None else "exact"
        self.metrics.prompt_tokens.inc(usage.prompt)
        self.metrics.cached_tokens.inc(usage.cached)
        self.metrics.completion_tokens.labels(kind).inc(usage.completion)
