"""Chats over HTTP: the template, thinking and tool calls, whole and streamed, shared prefixes."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from support.serving import Running, serving
from support.training import model_folder

from sparrow.engine.engine import Engine
from sparrow.models import load
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.serve.sampling import Piece

TEMPLATE = (
    "{# <think> #}{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if tools %}; {% endif %}{% if enable_thinking %}<think> {% endif %}"
)
TASK = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ANSWER = (
    "<think>\nfirst\n</think>\n\nLet me look. "
    '<tool_call>\n{"name": "look", "arguments": {"at": [1, 2]}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = model_folder(tmp_path_factory.mktemp("made") / "model", chat=TEMPLATE)
    with serving(str(folder), name="chatty", stream_interval=0) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **given: Any) -> Any:
    asked: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": TASK}]}
    return client.chat.completions.create(**asked | given)


def test_tokens_are_those_of_the_engine_in_process(running: Running, client: openai.OpenAI) -> None:
    given = {"n": 2, "seed": 5, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 2}
    options = {"sparrow": {"return_token_ids": True}}
    answer = chat(client, **given, extra_body=options)
    ids = running.service.language.encode([{"role": "user", "content": TASK}])
    engine = Engine(load(running.service.config.model, device="cpu"), kv_bytes=2**24)
    wanted = engine.generate([ids], SamplingParams(n=2, seed=5, max_tokens=20))
    for choice, completion in zip(answer.choices, wanted, strict=True):
        assert choice.sparrow["token_ids"] == completion.token_ids.tolist()
        entries = choice.logprobs.content
        found = [entry.logprob for entry in entries]
        assert found == pytest.approx(completion.logprobs.tolist(), abs=1e-6)
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert bytes(entries[0].bytes).decode() == entries[0].token
    assert answer.usage.prompt_tokens == len(ids)


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    given = {"n": 2, "seed": 6, "max_completion_tokens": 20, "logprobs": True}
    whole = chat(client, **given)
    texts, counts = ["", ""], [0, 0]
    usage = None
    for chunk in chat(client, **given, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content or "" for choice in whole.choices]
    assert counts == [len(choice.logprobs.content) for choice in whole.choices]
    assert usage == whole.usage


def test_arguments_of_the_template(client: openai.OpenAI) -> None:
    plain = chat(client, max_completion_tokens=2).usage.prompt_tokens
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    assert chat(client, max_completion_tokens=2, extra_body=extra).usage.prompt_tokens == plain + 1
    with_tools = chat(client, max_completion_tokens=2, tools=[TOOL]).usage.prompt_tokens
    assert with_tools == plain + 1
    for name in ("unheard_of", "messages"):
        with pytest.raises(openai.BadRequestError, match=name):
            chat(client, extra_body={"chat_template_kwargs": {name: True}})


def test_tools_need_a_template_that_takes_them(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = running.service.reader.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("tools", "documents"))
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[TOOL])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_value")
    assert chat(client, max_completion_tokens=2).choices


def test_turns_share_the_prefix_of_their_prompts(running: Running, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": " ; ".join([TASK] * 8)}]
    first = chat(client, messages=messages, max_completion_tokens=4)
    messages.append({"role": "assistant", "content": first.choices[0].message.content or ";"})
    messages.append({"role": "user", "content": "find x64"})
    second = chat(client, messages=messages, max_completion_tokens=4)
    quantum = running.service.engine.policy.quantum
    shared = first.usage.prompt_tokens // quantum * quantum
    assert second.usage.prompt_tokens_details.cached_tokens >= shared > 0


def scripted(running: Running, monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    """Have the engine say a text, in pieces of so many characters if it is streamed."""

    async def stream(ids: list[int], params: Any, **settings: Any) -> AsyncIterator[Piece]:
        pieces = [text[n : n + size] for n in range(0, len(text), size)]
        for piece in pieces if settings["streamed"] else []:
            yield Piece(0, piece, [1], [-0.5], [])
        completion = Completion(
            prompt_ids=np.array(ids, np.int32),
            token_ids=np.ones(len(pieces), np.int32),
            logprobs=np.full(len(pieces), -0.5, np.float32),
            weight_versions=np.zeros(len(pieces), np.int32),
            finish_reason="stop",
            attention="dense",
            text=text,
        )
        yield Piece(0, "", [], [], [], completion)

    monkeypatch.setattr(running.service.sampler, "stream", stream)


def test_thinking_and_tool_calls_come_apart(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(running, monkeypatch, ANSWER, 5)
    (choice,) = chat(client, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "first"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": [1, 2]}')
    (plain,) = chat(client, tools=[TOOL], tool_choice="none").choices
    assert "<tool_call>" in plain.message.content
    assert plain.finish_reason == "stop"


def test_they_come_apart_in_a_stream_too(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(running, monkeypatch, ANSWER, 3)
    reasoning, content, calls, reason = "", "", [], None
    for chunk in chat(client, tools=[TOOL], stream=True):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason or reason
    assert (reasoning, content, reason) == ("first", "Let me look.", "tool_calls")
    assert [(call.index, call.function.name) for call in calls] == [(0, "look")]


def test_an_engine_that_fails_is_an_error_object(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first chunk with a status, later as an event."""

    async def broken(*_: Any, **settings: Any) -> AsyncIterator[Piece]:
        yield Piece(0, "x", [1], [-0.5], [])
        raise RuntimeError("the engine has failed")

    monkeypatch.setattr(running.service.sampler, "stream", broken)
    with pytest.raises(openai.InternalServerError):
        chat(client)
    body = {"model": "chatty", "messages": [{"role": "user", "content": TASK}], "stream": True}
    response = httpx2.post(f"{running.url}/chat/completions", json=body)
    assert response.status_code == 500 or '"error"' in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_has_a_status_of_its_own(
    running: Running, client: openai.OpenAI, stream: bool
) -> None:
    sampler = running.service.sampler
    with sampler.admitted(sampler.most), pytest.raises(openai.RateLimitError):
        chat(client, stream=stream)
    assert chat(client, max_completion_tokens=2).choices


def test_a_model_folder_is_not_named(running: Running, tmp_path: Path) -> None:
    found = httpx2.get(f"{running.url}/models").text
    assert "chatty" in found
    assert running.service.config.model not in found
