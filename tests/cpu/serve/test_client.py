"""`sparrow.client` against the server, and against small ones that answer otherwise."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import Running, serving
from support.training import model_folder

from sparrow.client import AsyncClient, Client, ClientError
from sparrow.engine.engine import Engine
from sparrow.models import load
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule

PROMPT = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83 <think>"
SHORT = SamplingParams(max_tokens=4, seed=1)
Answer = tuple[int, dict[str, Any], dict[str, str]]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving("tiny", budget=64, decoding="dense", max_waiting=8, max_running=8) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[Client]:
    with Client(running.url) as client:
        yield client


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ("prompt_ids", "token_ids", "weight_versions"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
        for name in ("logprobs", "entropies", "kept", "hidden"):
            values = [getattr(side, name) for side in (ours, theirs)]
            assert (values[0] is None) == (values[1] is None), name
            if values[0] is not None:
                np.testing.assert_allclose(*values, atol=1e-4 if name == "hidden" else 1e-6)
        for name in ("text", "finish_reason", "attention", "seed"):
            assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("decoding", ["dense", "sparse", "exact"])
def test_completions_are_those_of_the_engine_in_process(
    running: Running, client: Client, decoding: str
) -> None:
    options: dict[str, Any] = {"decoding": decoding}
    options |= {} if decoding == "dense" else {"budget": 48}
    options |= {"draft_tokens": 4} if decoding == "exact" else {}
    engine = Engine(load("tiny", device="cpu"), max_running=8, kv_bytes=2**27)
    ids = running.service.language.encode(PROMPT, raw=True)
    for prompt, params in (
        (PROMPT, SamplingParams(n=3, seed=7, max_tokens=60, temperature=0.7, top_k=5)),
        (ids, SamplingParams(seed=8, temperature=0, max_tokens=20, ignore_eos=True)),
    ):
        wanted = engine.generate(
            [PROMPT],
            params,
            schedule=None if decoding == "dense" else Schedule.fixed(48),
            speculative=SpeculativeParams(draft_tokens=4) if decoding == "exact" else None,
            options=OutputOptions(hidden_states=True),
        )
        assert_same(client.complete(prompt, params, hidden_states=True, **options), wanted)


def test_stop_strings_end_an_answer(client: Client) -> None:
    params = SamplingParams(max_tokens=60, seed=3)
    (whole,) = client.complete(PROMPT, params)
    word = whole.text.split()[3]
    (cut,) = client.complete(PROMPT, params, stop=[word])
    assert cut.finish_reason == "stop"
    assert whole.text.startswith(cut.text)
    assert word not in cut.text


def test_chats(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if think %}<think> {% endif %}"
    )
    folder = model_folder(tmp_path / "model", chat=template)
    messages = [{"role": "user", "content": PROMPT.removesuffix(" <think>")}]
    with serving(str(folder), name="chatty") as server, Client(server.url) as client:
        given: dict[str, Any] = {"chat_template_kwargs": {"think": True}}
        (found,) = client.chat(messages, SamplingParams(max_tokens=8, seed=5), **given)
        engine = Engine(load(str(folder), device="cpu"), kv_bytes=2**24)
        ids = server.service.language.encode(PROMPT, raw=True)
        (wanted,) = engine.generate([ids], SamplingParams(max_tokens=8, seed=5))
    assert_same([found], [wanted.replace(text=found.text)])


def test_many_at_once_wait_for_room(running: Running, client: Client) -> None:
    """More than the server takes: those it refuses are sent again."""
    params = [SamplingParams(n=2, max_tokens=20, seed=seed) for seed in range(12)]
    alone = [client.complete(PROMPT, one) for one in params]

    async def together() -> list[list[Completion]]:
        async with AsyncClient(running.url, retries=20) as client:
            return await asyncio.gather(*[client.complete(PROMPT, one) for one in params])

    for found, wanted in zip(asyncio.run(together()), alone, strict=True):
        assert_same(found, wanted)
    running.wait_until_free()


def test_a_full_server_is_asked_again(running: Running, client: Client) -> None:
    sampler = running.service.sampler
    with sampler.admitted(sampler.most):
        with pytest.raises(ClientError) as caught, Client(running.url, retries=0) as hasty:
            hasty.complete(PROMPT, SHORT)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(client.complete(PROMPT, SHORT)))
        thread.start()
        time.sleep(0.3)
        assert not results
    thread.join(30)
    assert_same(results[0], client.complete(PROMPT, SHORT))


def test_errors_have_a_status_a_code_and_a_param(running: Running, client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.complete([10**6], SHORT)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert caught.value.code == "invalid_value"
    wrong = pytest.raises(ClientError, match=r"must be one of \['tiny'\], got 'another'")
    with wrong, Client(running.url, model="another") as other:
        other.complete(PROMPT, SHORT)
    with pytest.raises(ValueError, match="budget"):
        client.complete(PROMPT, SHORT, decoding="dense", budget=64)


def test_a_key_is_sent() -> None:
    with serving("tiny", api_key="a-long-secret") as server:
        with Client(server.url, "a-long-secret") as client:
            assert client.complete(PROMPT, SHORT)
        with pytest.raises(ClientError) as caught, Client(server.url, "wrong") as client:
            client.models()
        assert caught.value.status == 401


def test_what_our_server_can_do(client: Client) -> None:
    able = client.capabilities()
    assert (able.server, able.model, able.notes) == ("sparrow", "tiny", ())
    assert all(value for value in dict(able).values() if isinstance(value, bool))
    assert [model["id"] for model in client.models()] == ["tiny"]
    assert client.health()


# Other servers.


@contextmanager
def answering(answer: Callable[[str, dict[str, Any]], Answer]) -> Iterator[str]:
    """A server whose answers to a path and a body are (status, object, headers)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}"
            status, data, headers = answer(self.path, json.loads(body))
            text = json.dumps(data).encode()
            self.send_response(status)
            for name, value in ({"content-length": str(len(text))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)


def vllm_like(bodies: list[dict[str, Any]], *, processed: bool) -> Any:
    """Answers with token ids, as vLLM gives them; processed: log-probs are those of the draw."""

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "qwen", "owned_by": "vllm"}]}, {}
        bodies.append(body)
        assert body["return_token_ids"]
        drawn = 0.0 if processed and body["top_k"] == 1 else -0.5
        choices = []
        for index in reversed(range(body["n"])):
            choice = {"index": index, "finish_reason": "length", "token_ids": [5 + index, 6]}
            if "messages" in body:
                content = [{"token": "a", "logprob": drawn}, {"token": "b", "logprob": drawn}]
                choice |= {"message": {"content": "ab"}, "logprobs": {"content": content}}
            else:
                choice |= {"text": "ab", "logprobs": {"token_logprobs": [drawn, drawn]}}
                choice["prompt_token_ids"] = [1, 2]
            choices.append(choice)
        top = {"prompt_token_ids": [8, 9]} if "messages" in body else {}
        return 200, {"choices": choices, **top}, {}

    return answer


def test_a_server_like_vllm() -> None:
    bodies: list[dict[str, Any]] = []
    with answering(vllm_like(bodies, processed=True)) as url, Client(url) as client:
        able = client.capabilities()
        first, second = client.complete("a text", SamplingParams(n=2, temperature=0.7, seed=3))
        (chat,) = client.chat([{"role": "user", "content": "?"}], SamplingParams())
        (greedy,) = client.complete("a text", SamplingParams(temperature=0))
        with pytest.raises(ClientError, match="sparse"):
            client.complete("a text", SamplingParams(), decoding="sparse", budget=64)
    assert (able.server, able.model, able.logprobs_as_drawn) == ("vllm", "qwen", True)
    assert (able.weight_versions, able.decoding, len(able.notes)) == (False, False, 2)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 6], [6, 6])
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.logprobs.tolist() == chat.logprobs.tolist() == [-0.5, -0.5]
    assert greedy.logprobs.tolist() == [0, 0]
    assert (first.weight_versions.tolist(), first.attention) == ([0, 0], "unknown")
    assert (chat.prompt_ids.tolist(), chat.text) == ([8, 9], "ab")
    # Nothing is left to the defaults of vLLM, which are those of the model's generation_config.
    wanted = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 3, "n": 2}
    assert wanted.items() <= bodies[1].items()
    assert bodies[1]["repetition_penalty"] == 1
    assert "sparrow" not in bodies[1]


def test_logprobs_that_are_not_of_the_draw_are_refused() -> None:
    with answering(vllm_like([], processed=False)) as url, Client(url) as client:
        able = client.capabilities()
        assert not able.logprobs_as_drawn
        assert any("processed_logprobs" in note for note in able.notes)
        for changes in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_tokens": 2}):
            with pytest.raises(ClientError, match="drawn"):
                client.complete("a text", SamplingParams(**changes))
        assert client.complete("a text", SamplingParams())
        assert client.complete("a text", SamplingParams(temperature=0))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_poor_server(refuses: bool) -> None:
    """It returns text alone, or refuses to be asked for more."""
    asked = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "a"}, {"id": "b"}]}, {}
        asked.append(body)
        if refuses:
            return 400, {"error": {"message": "Unknown parameter 'return_token_ids'."}}, {}
        return 200, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}, {}

    with answering(answer) as url, Client(url, model="b") as client:
        able = client.capabilities()
        with pytest.raises(ClientError, match="no token ids"):
            client.complete("a text", SamplingParams())
        with pytest.raises(ClientError, match="must be one of"), Client(url) as unnamed:
            unnamed.capabilities()
    assert not any(value for value in dict(able).values() if isinstance(value, bool))
    assert len(able.notes) == 6 + refuses
    assert ("return_token_ids" in able.notes[0]) == refuses
    assert len(asked) == 1


def test_servers_that_fail_are_asked_again_as_often_as_allowed() -> None:
    times: list[float] = []
    like_vllm = vllm_like([], processed=True)

    def answer(path: str, body: dict[str, Any]) -> Answer:
        times.append(time.monotonic())
        if len(times) <= 2:
            return (503, {}, {}) if len(times) == 1 else (429, {}, {"retry-after": "1"})
        return like_vllm(path, body)

    with answering(answer) as url, Client(url, retries=2) as client:
        assert client.models()
    assert len(times) == 3
    assert times[2] - times[1] >= 1
    with Client(url, retries=1) as client:  # it is gone
        assert not client.health()
        with pytest.raises(ClientError, match="cannot be reached") as caught:
            client.models()
    assert caught.value.status is None


def test_answers_that_are_no_completions() -> None:
    def answer(path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "a"}]}, {}
        choice = {"index": 0, "text": "x", "finish_reason": "stop", "prompt_token_ids": [1]}
        choice |= {"token_ids": [1, 2], "logprobs": {"token_logprobs": [0.0]}}
        return 200, {"choices": [choice]}, {}

    refused = pytest.raises(ClientError, match="equal lengths")
    with answering(answer) as url, Client(url) as client, refused:
        client.complete("a text", SamplingParams())


@pytest.mark.parametrize("given", [[1, None], 5, {"a": 1}])
def test_lists_that_are_none(given: Any) -> None:
    with answering(lambda path, body: (200, {"data": given}, {})) as url, Client(url) as client:
        assert client.models() == []
        with pytest.raises(ClientError, match="must be one of"):
            client.capabilities()
