"""Requests of the server in the engine: admission, text with stop strings, what was drawn."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.text import Detokenizer, StopStrings
from sparrow.schema.sampling import Completion, SamplingParams

BY_TOKEN = (
    *("token_ids", "logprobs", "weight_versions", "entropies", "kept"),
    *("top_ids", "top_logprobs", "hidden"),
)


class Overloaded(Exception):
    """Raised where as many samples are in flight as the server takes."""


class Failed(Exception):
    """Raised where the engine could not finish an answer."""


class Piece(NamedTuple):
    """New text of one sample with its tokens; the last piece has the completion.

    The completion is that of the answer up to its end, or up to the token that completed a stop
    string; its text ends before that string.
    """

    sample: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[tuple[Any, Any]]
    completion: Completion | None = None


class RequestSampler:
    """Answers prompts by an engine that many requests share; most: samples in flight."""

    def __init__(self, engine: AsyncEngine, decode: Callable[[list[int]], str], most: int) -> None:
        self.engine, self.decode, self.most = engine, decode, most
        self.in_flight = 0

    @contextmanager
    def admitted(self, samples: int) -> Iterator[None]:
        """Count samples as in flight; Overloaded if there is no room for them."""
        if self.in_flight + samples > self.most:
            raise Overloaded
        self.in_flight += samples
        try:
            yield
        finally:
            self.in_flight -= samples

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        streamed: bool = False,
        interval: float = 0.0,
        **settings: Any,
    ) -> AsyncIterator[Piece]:
        """Yield pieces of all samples of a prompt, at their ends alone unless streamed.

        interval: seconds between pieces. settings: those of `Engine.add`. Closing the generator
        aborts what is left.
        """
        answers = [_Answer(self.decode, stop) for _ in range(params.n)]
        by_token = streamed or bool(stop)
        settings |= {"streamed": by_token, "interval": interval if by_token else 0.0}
        outputs = self.engine.stream(prompt, params, **settings)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                answer, number = answers[output.sample], output.sample
                if output.restarts:
                    raise Failed("the weights changed while the answer was sampled")
                if by_token and not answer.stopped:
                    answer.feed(output.tokens, output.logprobs, output.top)
                    if answer.stopped:
                        self.engine.abort(output.request, number)
                if output.completion is not None:
                    yield self._last(number, answer, output.completion, by_token=by_token)
                elif streamed and answer.has_news:
                    yield answer.piece(number)

    def _last(
        self, number: int, answer: "_Answer", completion: Completion, *, by_token: bool
    ) -> Piece:
        if completion.finish_reason == "error":
            raise Failed(completion.error or "sampling failed")
        if completion.finish_reason == "abort" and not answer.stopped:
            raise Failed("the server is shutting down")
        if not by_token:
            text = self.decode(completion.token_ids.tolist())
            return Piece(number, text, (), (), (), _with_text(completion, text))
        if answer.stopped:
            completion = _cut(completion, answer.count)
        answer.finish()
        return answer.piece(number, _with_text(completion, answer.text))


class _Answer:
    """The text of one sample so far, and what of it was not yielded yet."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._detokenizer, self._stops = Detokenizer(decode), StopStrings(stop)
        self._size = 1 if stop else 2**31  # tokens at a time: a stop string ends at a token
        self.text, self.count = "", 0
        self._clear()

    def _clear(self) -> None:
        self._new = ""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[Any, Any]] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    @property
    def has_news(self) -> bool:
        return bool(self._new) and not self.stopped

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[tuple[Any, Any]]
    ) -> None:
        """Take tokens up to the one that completes a stop string."""
        for start in range(0, len(tokens), self._size):
            if self.stopped:
                return
            part = slice(start, start + self._size)
            self.count += len(tokens[part])
            self._tokens += tokens[part]
            self._logprobs += logprobs[part]
            self._top += top[part]
            self._add(self._stops.feed(self._detokenizer.feed(tokens[part])))

    def finish(self) -> None:
        """Take the text that was held back."""
        if not self.stopped:
            self._add(self._stops.feed(self._detokenizer.finish()) + self._stops.finish())

    def _add(self, text: str) -> None:
        self.text += text
        self._new += text

    def piece(self, number: int, completion: Completion | None = None) -> Piece:
        """What is new since the last piece."""
        found = Piece(number, self._new, self._tokens, self._logprobs, self._top, completion)
        self._clear()
        return found


def _with_text(completion: Completion, text: str) -> Completion:
    """The completion with its text; nothing else of it is checked again, which takes its time."""
    return completion.model_copy(update={"text": text})


def _cut(completion: Completion, count: int) -> Completion:
    """The completion of the first tokens of an answer, which a stop string ended."""
    values = {name: getattr(completion, name) for name in BY_TOKEN}
    parts = {name: x[:count] for name, x in values.items() if isinstance(x, np.ndarray)}
    return completion.replace(**parts, finish_reason="stop")
