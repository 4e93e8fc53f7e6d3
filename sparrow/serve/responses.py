"""Answers as the objects of OpenAI's API, whole and in chunks."""

import base64
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparrow.engine.scoring import TokenLogprobs
from sparrow.engine.text import REPLACEMENT
from sparrow.schema.sampling import Completion
from sparrow.serve.parsing import MessageDelta, ParsedMessage, ParsedToolCall

Json = dict[str, Any]


class TokenDraw(NamedTuple):
    """A token with its log-prob (None: the first of a prompt), and the most likely ones."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


def draws(
    tokens: Iterable[int], logprobs: Iterable[float], top: Sequence[tuple[Any, Any]]
) -> list[TokenDraw]:
    """Tokens with their log-probs; top: by token the ids and log-probs of the likeliest."""
    pairs: list[list[tuple[int, float]]] = [
        list(zip(map(int, ids), map(float, values), strict=True)) for ids, values in top
    ]
    return [
        TokenDraw(int(token), float(logprob), pairs[n] if pairs else ())
        for n, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


def completion_draws(completion: Completion) -> list[TokenDraw]:
    ids, values = completion.top_ids, completion.top_logprobs
    top = [] if ids is None or values is None else list(zip(ids, values, strict=True))
    return draws(completion.token_ids, completion.logprobs, top)


def shown_draws(draws: Sequence[TokenDraw], top: int, *, greedy: bool) -> list[TokenDraw]:
    """Draws with so many of the most likely tokens.

    A greedy token was drawn with certainty; shown is the model's own log-prob, which is the
    highest. (Of tokens that tie, another one may be named first.)
    """
    return [
        TokenDraw(
            draw.token, draw.top[0][1] if greedy and draw.top else draw.logprob, draw.top[:top]
        )
        for draw in draws
    ]


def prompt_draws(ids: Sequence[int], scores: TokenLogprobs) -> list[TokenDraw]:
    top = list(zip(scores.top_ids, scores.top_logprobs, strict=True)) if scores.top_ids.size else []
    return [TokenDraw(int(ids[0]), None), *draws(ids[1:], scores.logprobs, top)]


class TokenNames:
    """The text of single tokens, as log-probs name them."""

    def __init__(self, decode: Callable[[list[int]], str], raw: Callable[[int], str]) -> None:
        """decode: ids to text, special tokens included; raw: the tokenizer's name of a token."""
        self._decode, self._raw = decode, raw
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """The text of a token and its bytes; a part of a character is "bytes:\\xe2..."."""
        if token not in self._known:
            text = self._decode([token])
            data = text.encode()
            if REPLACEMENT in text:
                data = _byte_level(self._raw(token))
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token] = text, data
        return self._known[token]


def _byte_level(name: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary, which names bytes by characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return bytes(alphabet.get(character, 0) for character in name)


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, completion: Completion, *, first: bool) -> None:
        """first: of its prompt, whose cached tokens count once."""
        self.completion += len(completion.token_ids)
        self.cached += completion.cached_tokens if first else 0
        if completion.speculation is not None:
            self.drafted += completion.speculation.draft_tokens
            self.accepted += completion.speculation.accepted_tokens

    def json(self) -> Json:
        details: Json = {}
        if self.drafted:
            rejected = self.drafted - self.accepted
            details = {"accepted_prediction_tokens": self.accepted}
            details["rejected_prediction_tokens"] = rejected
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": details,
        }


def random_id() -> str:
    """An id that nobody has to keep from guessing; the system's random bytes take longer."""
    return f"{random.getrandbits(128):032x}"


class Envelope:
    """What all objects of one answer share."""

    def __init__(self, kind: str, model: str, prefix: str) -> None:
        """kind: "text_completion" or "chat.completion"."""
        self.kind, self.model = kind, model
        self.id, self.created = f"{prefix}-{random_id()}", int(time.time())

    def whole(self, choices: Sequence[Json], usage: Usage) -> Json:
        return self._object(self.kind, choices) | {"usage": usage.json()}

    def chunk(self, choices: Sequence[Json], usage: Usage | None = None) -> Json:
        """A chunk of a streamed answer; usage: the last one, without choices."""
        kind = self.kind if self.kind == "text_completion" else f"{self.kind}.chunk"
        return self._object(kind, choices) | ({} if usage is None else {"usage": usage.json()})

    def _object(self, kind: str, choices: Sequence[Json]) -> Json:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return about | {"choices": list(choices)}


def text_logprobs(tokens: Sequence[TokenDraw], names: TokenNames, offset: int = 0) -> Json:
    """Log-probs of `/v1/completions`; offset: of the first token in the text."""
    texts = [names(draw.token)[0] for draw in tokens]
    offsets = np.cumsum([offset, *map(len, texts)])[:-1].tolist()
    top = [
        None if draw.logprob is None else {names(token)[0]: value for token, value in draw.top}
        for draw in tokens
    ]
    return {
        "tokens": texts,
        "token_logprobs": [draw.logprob for draw in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[TokenDraw], names: TokenNames) -> Json:
    """Log-probs of `/v1/chat/completions`."""

    def entry(token: int, logprob: float | None) -> Json:
        text, data = names(token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    content = [
        entry(draw.token, draw.logprob) | {"top_logprobs": [entry(*pair) for pair in draw.top]}
        for draw in tokens
    ]
    return {"content": content, "refusal": None}


def message(parsed: ParsedMessage) -> Json:
    """The message of a whole chat answer."""
    made: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        made["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        made["tool_calls"] = [_call(call) for call in parsed.tool_calls]
    return made


def delta(parsed: MessageDelta, calls_before: int) -> Json:
    """What a chunk adds to a message; calls_before: tool calls of earlier chunks."""
    made: Json = {}
    if parsed.reasoning:
        made["reasoning_content"] = parsed.reasoning
    if parsed.content:
        made["content"] = parsed.content
    if parsed.tool_calls:
        numbered = enumerate(parsed.tool_calls, calls_before)
        made["tool_calls"] = [{"index": number, **_call(call)} for number, call in numbered]
    return made


def _call(call: ParsedToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def details(completion: Completion, *, ids: bool, hidden: bool) -> Json:
    """The key `sparrow` of a choice: what trainers need, log-probs as drawn."""
    made: Json = {"attention": completion.attention, "seed": completion.seed}
    if ids:
        made["prompt_token_ids"] = completion.prompt_ids.tolist()
        made["token_ids"] = completion.token_ids.tolist()
        made["logprobs"] = completion.logprobs.tolist()
        made["weight_versions"] = completion.weight_versions.tolist()
        figures = {"entropies": completion.entropies, "kept": completion.kept}
        made |= {name: x.tolist() for name, x in figures.items() if x is not None}
        if completion.speculation is not None:
            made["speculation"] = completion.speculation.model_dump(mode="json")
    if hidden and completion.hidden is not None:
        data = np.ascontiguousarray(completion.hidden, "<f4")
        text = base64.b64encode(data.tobytes()).decode("ascii")
        made["hidden_states"] = {"dtype": "float32", "shape": list(data.shape), "data": text}
    return made


def error(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
