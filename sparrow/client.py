"""Clients of an OpenAI-compatible server, for trainers: prompts in, `Completion` records out.

    client = Client("http://127.0.0.1:8000/v1")
    print(client.capabilities())
    completions = client.complete(prompt, SamplingParams(n=8), decoding="sparse", budget=64)

`AsyncClient` has the same methods to await. Besides `sparrow serve` they speak with servers that
return token ids and log-probs as vLLM and SGLang do (`return_token_ids`). The extra `client` of the
package installs what they need.
"""

import asyncio
import base64
import json
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, TypedDict, TypeVar, Unpack

import httpx2
import numpy as np
from pydantic import ValidationError

from sparrow.files import http_digest
from sparrow.schema.base import problems
from sparrow.schema.openai import SparrowOptions
from sparrow.schema.sampling import (
    LOGPROB_NOISE,
    Acceptance,
    Completion,
    Decoding,
    SamplingParams,
)
from sparrow.schema.serve import DAMAGED, DIGEST, Capabilities
from sparrow.schema.types import clean_key

LOST = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)  # worth a retry
PROBE = SamplingParams(max_tokens=4, top_k=1)  # the only token that may be drawn: log-prob 0
STANDARD = ("stop", "tools", "chat_template_kwargs")  # options that are not sparrow's
NOTES = {
    "token_ids": "no token ids are returned, so complete and chat fail",
    "prompt_token_ids": "ids of prompts are not returned, so prompts must be token ids",
    "logprobs": "no log-probs are returned, so complete and chat fail",
    "logprobs_as_drawn": "log-probs are not of what was drawn from (vLLM: --logprobs-mode "
    "processed_logprobs), so temperature must be 0, or 1 without top_k, top_p and min_tokens",
    "weight_versions": "weight versions are not returned, so they are 0",
    "decoding": "there is no sparse or exact decoding",
}

Json = dict[str, Any]
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class ClientError(Exception):
    """Raised for a request that was refused, or an answer that cannot be used.

    status: of the response; None: there was none. code, param: those of the error object.
    """

    def __init__(
        self, message: str, status: int | None = None, code: Any = None, param: Any = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Options(TypedDict, total=False):
    """What a request may set beside its sampling parameters; the last two only of chats."""

    stop: Sequence[str]
    decoding: Decoding
    schedule: str | Mapping[str, Any]
    budget: int
    draft_tokens: int
    acceptance: Acceptance
    reselect: int
    hidden_states: bool
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """A client whose answers are awaited, as many at once as there are callers."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        timeout: float | None = 600.0,
        retries: int = 10,
    ) -> None:
        """base_url: up to and including /v1. model: None for a server that has just one.

        timeout: seconds for an answer; None: no limit. retries: where the server is full or cannot
        be reached.
        """
        self.base_url, self.model, self.retries = base_url.rstrip("/"), model, retries
        self._capabilities: Capabilities | None = None
        key = clean_key(api_key or "", "api_key")
        self._settings: Json = {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(timeout, connect=min(timeout or 10.0, 10.0), pool=None),
            "limits": httpx2.Limits(max_connections=256),
        }
        self._open()

    async def complete(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[Options]
    ) -> list[Completion]:
        """Sample `params.n` completions of a text or of token ids."""
        given = {"prompt": prompt if isinstance(prompt, str) else [*map(int, prompt)]}
        return await self._sample("completions", given, params, options)

    async def chat(
        self, messages: Messages, params: SamplingParams, **options: Unpack[Options]
    ) -> list[Completion]:
        """Sample answers to messages; `text` is without thinking and calls, tokens have all."""
        given = {"messages": [dict(message) for message in messages]}
        return await self._sample("chat/completions", given, params, options)

    async def models(self) -> list[Json]:
        """Return the models of the server, as it describes them."""
        return _objects((await self._send("models")).get("data"))

    async def health(self) -> bool:
        """Return whether the server answers; it is asked once."""
        try:
            root = self.base_url.removesuffix("/v1")
            return (await self._request(f"{root}/health", None)).is_success
        except httpx2.TransportError:
            return False

    async def capabilities(self) -> Capabilities:
        """Return what the server can do, by a request that is sent once."""
        async with self._lock:
            if self._capabilities is None:
                self._capabilities = await self._probe()
            return self._capabilities

    async def close(self) -> None:
        await self._http.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What does I/O, and blocks in `_BlockingClient`.

    def _open(self) -> None:
        self._lock: Any = asyncio.Lock()
        self._http = httpx2.AsyncClient(**self._settings)

    async def _request(self, url: str, body: Json | None) -> httpx2.Response:
        return await self._http.request(**_message(url, body))

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # Requests.

    async def _send(self, route: str, body: Json | None = None) -> Json:
        """Send a request until it is answered, refused, or tried too often."""
        for attempt in range(self.retries + 1):
            wait = min(30.0, 0.5 * 2**attempt) * random.uniform(0.5, 1)
            try:
                response = await self._request(f"{self.base_url}/{route}", body)
            except LOST as error:
                failure = ClientError(f"{self.base_url} cannot be reached: {error!r}")
            except (httpx2.TransportError, httpx2.InvalidURL) as error:
                raise ClientError(f"{self.base_url} did not answer: {error!r}") from error
            else:
                data = _object(response)
                stated = response.headers.get(DIGEST)
                if stated is not None and stated != http_digest(response.content):
                    failure = ClientError(f"{self.base_url}: the answer was damaged on its way")
                elif response.is_success and data:
                    return data
                else:
                    failure = _error(response, data)
                if failure.status not in (None, 429, 502, 503) and failure.code != DAMAGED:
                    raise failure
                after = response.headers.get("retry-after", "")
                wait = max(wait, float(after) if after.isdigit() else 0.0)
            if attempt < self.retries:
                await self._sleep(wait)
        raise failure

    async def _probe(self) -> Capabilities:
        models = {str(model.get("id")): model for model in await self.models()}
        name = next(iter(models)) if self.model is None and len(models) == 1 else self.model
        if name not in models:
            raise ClientError(f"model must be one of {[*models]}, got {name!r}", param="model")
        self.model, about = name, models[name]
        ours, refusal, answer = "sparrow" in about, "", _Answer({}, {})
        body = self._body({"prompt": [1, 2]}, PROBE, {}, ours)
        try:
            answer = _answers(await self._send("completions", body))[0]
        except ClientError as error:
            if error.status not in (400, 422):
                raise
            refusal = f"a request for token ids is refused: {error}"
        drawn = [abs(logprob) < LOGPROB_NOISE for logprob in answer.logprobs or ()]
        able = {
            "token_ids": answer.token_ids is not None,
            "prompt_token_ids": answer.prompt_ids is not None,
            "logprobs": answer.logprobs is not None,
            "logprobs_as_drawn": bool(drawn) and all(drawn),
            "weight_versions": ours,
            "decoding": ours,
        }
        notes = [refusal] * bool(refusal) + [NOTES[name] for name in able if not able[name]]
        server = "sparrow" if ours else str(about.get("owned_by", "unknown"))
        return Capabilities(server=server, model=self.model, **able, notes=tuple(notes))

    def _body(self, prompt: Json, params: SamplingParams, options: Options, ours: bool) -> Json:
        """The body of a request; nothing is left to defaults, which a model may set."""
        given: Json = {**options}
        names = ("n", "temperature", "top_p", "max_tokens")
        body = prompt | {"model": self.model} | {name: getattr(params, name) for name in names}
        body |= {} if params.seed is None else {"seed": params.seed}
        body |= {name: given.pop(name) for name in STANDARD if name in given}
        names = ("top_k", "min_tokens", "ignore_eos", "stop_token_ids")
        more = {name: getattr(params, name) for name in names} | {"return_token_ids": True}
        if ours:
            made = SparrowOptions(**more, **given).model_dump(mode="json", exclude_defaults=True)
            return body | {"sparrow": made}
        if given.pop("decoding", "dense") != "dense" or given:
            raise ClientError(NOTES["decoding"], param="decoding")
        more |= {"top_k": params.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        return body | more | {"logprobs": 1 if "prompt" in body else True}

    async def _sample(
        self, route: str, prompt: Json, params: SamplingParams, options: Options
    ) -> list[Completion]:
        able, greedy = await self.capabilities(), params.temperature == 0
        ids = given if isinstance(given := prompt.get("prompt"), list) else None
        plain = (params.temperature, params.top_p, params.top_k, params.min_tokens) == (1, 1, 0, 0)
        needed = ["token_ids", "logprobs"] + ["prompt_token_ids"] * (ids is None)
        needed += ["logprobs_as_drawn"] * (not (greedy or plain))
        for name in needed:
            if not getattr(able, name):
                raise ClientError(NOTES[name], param=name)
        body = self._body(prompt, params, options, able.server == "sparrow")
        whole = await self._send(route, body)
        return [answer.completion(ids, greedy=greedy) for answer in _answers(whole)]


# Answers.


class _Answer:
    """A choice of an answer; what the server does not return is None."""

    def __init__(self, choice: Json, whole: Json) -> None:
        self.choice, self.details = choice, choice.get("sparrow") or choice
        self.token_ids = self.details.get("token_ids")
        self.prompt_ids = self.details.get("prompt_token_ids") or whole.get("prompt_token_ids")
        logprobs = self.details.get("logprobs")
        if isinstance(logprobs, dict):
            of_chat = [entry["logprob"] for entry in logprobs.get("content") or ()]
            logprobs = logprobs.get("token_logprobs", of_chat)
        self.logprobs: list[float] | None = logprobs

    def completion(self, prompt_ids: list[int] | None, *, greedy: bool) -> Completion:
        """Return the record. Greedy tokens are drawn with certainty: their log-probs are 0."""
        reason, count = self.choice.get("finish_reason"), len(self.token_ids or ())
        fields = {
            "prompt_ids": self.prompt_ids or prompt_ids,
            "token_ids": self.token_ids,
            "logprobs": [0.0] * count if greedy else self.logprobs,
            "weight_versions": self.details.get("weight_versions", [0] * count),
            "entropies": self.details.get("entropies"),
            "kept": self.details.get("kept"),
            "hidden": self._hidden(),
            "finish_reason": "stop" if reason == "tool_calls" else reason,
            "attention": self.details.get("attention", "unknown"),
            "speculation": self.details.get("speculation"),
            "weights_id": self.details.get("weights_id"),
            "seed": self.details.get("seed"),
            "text": self.choice.get("text", self.choice.get("message", {}).get("content")),
        }
        try:
            return Completion.model_validate(fields)
        except ValidationError as error:
            raise ClientError(f"the answer is no completion: {problems(error)}") from error

    def _hidden(self) -> np.ndarray | None:
        given = self.details.get("hidden_states")
        if given is None:
            return None
        try:
            data = base64.b64decode(given["data"], validate=True)
            return np.frombuffer(data, "<f4").reshape(given["shape"])
        except (LookupError, TypeError, ValueError) as error:
            raise ClientError(f"the hidden states cannot be read: {error}") from error


def _answers(whole: Json) -> list[_Answer]:
    choices = sorted(_objects(whole.get("choices")), key=lambda choice: choice.get("index", 0))
    if not choices:
        raise ClientError("the answer has no choices")
    return [_Answer(choice, whole) for choice in choices]


def _message(url: str, body: Json | None) -> Json:
    """Arguments of a request; with the digest of its body, the answer has one too."""
    if body is None:
        return {"method": "GET", "url": url}
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json", DIGEST: http_digest(data)}
    return {"method": "POST", "url": url, "content": data, "headers": headers}


def _object(response: httpx2.Response) -> Json:
    """The object of a response; an empty one if it has none."""
    try:
        data = response.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _objects(value: object) -> list[Json]:
    """The objects of a list; none where it is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _error(response: httpx2.Response, data: Json) -> ClientError:
    """The error of a response, in OpenAI's form or with its keys at the top; else its text."""
    about = error if isinstance(error := data.get("error"), dict) else data
    message = about.get("message") or response.text[:200] or response.reason_phrase
    return ClientError(str(message), response.status_code, about.get("code"), about.get("param"))


# The same without `await`.


class _BlockingClient(AsyncClient):
    """A client whose coroutines never suspend, because its I/O blocks."""

    def _open(self) -> None:
        self._blocking, self._lock = httpx2.Client(**self._settings), nullcontext()

    async def _request(self, url: str, body: Json | None) -> httpx2.Response:
        return self._blocking.request(**_message(url, body))

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self._blocking.close()


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking client has suspended")


class Client(AbstractContextManager["Client"]):
    """A client that waits for its answers; threads may share it."""

    def __init__(
        self, base_url: str, api_key: str | None = None, model: str | None = None, **settings: Any
    ) -> None:
        """settings: timeout and retries of `AsyncClient`."""
        self._client = _BlockingClient(base_url, api_key, model, **settings)

    def complete(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[Options]
    ) -> list[Completion]:
        """Sample `params.n` completions of a text or of token ids."""
        return _finish(self._client.complete(prompt, params, **options))

    def chat(
        self, messages: Messages, params: SamplingParams, **options: Unpack[Options]
    ) -> list[Completion]:
        """Sample answers to messages; `text` is without thinking and calls, tokens have all."""
        return _finish(self._client.chat(messages, params, **options))

    def models(self) -> list[Json]:
        """Return the models of the server, as it describes them."""
        return _finish(self._client.models())

    def health(self) -> bool:
        """Return whether the server answers; it is asked once."""
        return _finish(self._client.health())

    def capabilities(self) -> Capabilities:
        """Return what the server can do, by a request that is sent once."""
        return _finish(self._client.capabilities())

    def close(self) -> None:
        _finish(self._client.close())

    def __exit__(self, *_: object) -> None:
        self.close()
