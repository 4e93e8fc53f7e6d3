"""The server as clients meet it, with the openai package and with plain HTTP."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from support.serving import Running, serving

from sparrow.engine.engine import Engine
from sparrow.models import load
from sparrow.schema.sampling import SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule

PROMPT = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83 <think>"
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving("tiny", budget=64, decoding="dense", max_waiting=8, max_running=8) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


def details(choice: Any) -> dict[str, Any]:
    """The extension of a choice, which the openai package does not know."""
    return dict(choice.sparrow)


def post(running: Running, route: str = "completions", **body: Any) -> httpx2.Response:
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4} if route == "completions" else {}
    return httpx2.post(f"{running.url}/{route}", json=given | body, timeout=60)


def error(response: httpx2.Response) -> dict[str, Any]:
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize("decoding", ["dense", "sparse", "exact"])
def test_tokens_are_those_of_the_engine_in_process(
    running: Running, client: openai.OpenAI, decoding: str
) -> None:
    options: dict[str, Any] = {"decoding": decoding, "return_token_ids": True}
    options |= {} if decoding == "dense" else {"budget": 48}
    options |= {"draft_tokens": 4} if decoding == "exact" else {}
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, seed=7, max_tokens=80, extra_body={"sparrow": options}
    )
    engine = Engine(load("tiny", device="cpu"), max_running=8, kv_bytes=2**27)
    wanted = engine.generate(
        [PROMPT],
        SamplingParams(n=3, seed=7, max_tokens=80),
        schedule=None if decoding == "dense" else Schedule.fixed(48),
        speculative=SpeculativeParams(draft_tokens=4) if decoding == "exact" else None,
    )
    for choice, completion in zip(answer.choices, wanted, strict=True):
        assert details(choice)["token_ids"] == completion.token_ids.tolist()
        assert details(choice)["logprobs"] == pytest.approx(completion.logprobs.tolist(), abs=1e-6)
        assert details(choice)["prompt_token_ids"] == completion.prompt_ids.tolist()
        assert set(details(choice)["weight_versions"]) == {0}
        assert choice.text == completion.text
        assert choice.finish_reason == completion.finish_reason
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in wanted)
    if decoding == "exact":
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, PROMPT], "n": 2, "seed": 3}
    given |= {"max_tokens": 60, "logprobs": 2, "stop": ["</think>", "= 9"]}
    options = {"sparrow": {"return_token_ids": True}}
    whole = client.completions.create(**given, extra_body=options)
    texts, tokens, logprobs, ends = {}, {}, {}, {}
    usage = None
    for chunk in client.completions.create(
        **given, stream=True, stream_options={"include_usage": True}, extra_body=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            number = choice.index
            texts[number] = texts.get(number, "") + choice.text
            tokens[number] = tokens.get(number, []) + details(choice)["token_ids"]
            logprobs[number] = logprobs.get(number, []) + choice.logprobs.token_logprobs
            ends[number] = choice.finish_reason or ends.get(number)
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == details(choice)["token_ids"]
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs)
        assert ends[choice.index] == choice.finish_reason
        assert not any(stop in choice.text for stop in given["stop"])


def test_prompts_are_scored_with_echo(running: Running, client: openai.OpenAI) -> None:
    """As lm-eval does: no token, log-probs of the prompt; and greedy ones are the model's."""
    scored = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    ids = running.service.language.encode(PROMPT, raw=True)
    greedy = client.completions.create(
        model="tiny", prompt=ids, max_tokens=3, temperature=0, logprobs=1
    ).choices[0]
    both = client.completions.create(
        model="tiny", prompt=PROMPT + " " + greedy.text, max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert scored.text == PROMPT
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.tokens) == len(ids)
    assert both.logprobs.token_logprobs[len(ids) :] == pytest.approx(
        greedy.logprobs.token_logprobs, abs=1e-4
    )
    assert all(value < 0 for value in greedy.logprobs.token_logprobs)
    tops = greedy.logprobs.top_logprobs
    assert [next(iter(top)) for top in tops] == greedy.logprobs.tokens


def test_hidden_states_come_as_numbers(running: Running, client: openai.OpenAI) -> None:
    import base64

    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=5,
        seed=1,
        extra_body={"sparrow": {"hidden_states": True, "return_token_ids": True, **LONG}},
    )
    made = details(answer.choices[0])
    states = np.frombuffer(base64.b64decode(made["hidden_states"]["data"]), "<f4")
    states = states.reshape(made["hidden_states"]["shape"])
    head = running.service.engine.model.head.detach().numpy()
    logits = states @ head.T
    logp = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logp -= logits.max(1, keepdims=True)
    found = logp[np.arange(5), made["token_ids"]]
    assert found == pytest.approx(made["logprobs"], abs=1e-3)


@pytest.mark.parametrize(
    ("status", "param", "body"),
    [
        (400, "suffix", {"suffix": "x"}),
        (400, "unheard_of", {"unheard_of": 1}),
        (400, "n", {"n": 100_000}),
        (400, "prompt", {"prompt": "words that no puzzle has"}),
        (400, "prompt", {"prompt": [10**6]}),
        (400, "prompt", {"max_tokens": 10**6}),
        (400, "sparrow.schedule", {"sparrow": {"schedule": "/etc/passwd"}}),
        (400, "sparrow", {"sparrow": {"schedule": "qwen3-1.7b-0.86"}}),
        (400, "sparrow.budget", {"sparrow": {"decoding": "dense", "budget": 64}}),
        (400, "sparrow.stop_token_ids", {"sparrow": {"stop_token_ids": [512]}}),
        (
            400,
            "sparrow.stop_token_ids",
            {"sparrow": {"stop_token_ids": [*range(40)], "min_tokens": 1}},
        ),
        (404, "model", {"model": "another"}),
    ],
)
def test_what_is_refused_is_an_error_object(
    running: Running, status: int, param: str, body: dict[str, Any]
) -> None:
    response = post(running, **body)
    assert response.status_code == status
    found = error(response)
    assert found["param"] == param
    assert "/work" not in found["message"]


def test_other_errors_are_error_objects_too(running: Running) -> None:
    root = running.root
    for response, status in (
        (httpx2.get(f"{root}/nowhere"), 404),
        (httpx2.get(f"{root}/v1/completions"), 405),
        (httpx2.post(f"{root}/v1/completions", content=b"{"), 400),
        (httpx2.post(f"{root}/v1/completions", content=b"[" * 10_000), 400),
        (httpx2.post(f"{root}/v1/completions", content=b" " * 9 * 2**20), 413),
        (httpx2.post(f"{root}/v1/responses", json={}), 400),
        (post(running, "chat/completions", model="tiny", messages=[{"role": "user"}]), 400),
    ):
        assert response.status_code == status
        assert error(response)["message"]
        assert response.headers["x-request-id"]


def test_a_full_server_says_when_to_come_back(running: Running) -> None:
    """And goes on with what it has; a bad request beside it disturbs nothing."""
    body = {"n": 16, "max_tokens": 120, "seed": 5, "sparrow": LONG | {"return_token_ids": True}}
    alone = post(running, **body).json()["choices"]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, running, **body)
        while not running.service.sampler.in_flight:
            time.sleep(0.001)
        full = post(running)
        assert post(running, prompt=[10**6]).status_code == 400
        beside = first.result().json()["choices"]
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    assert error(full)["type"] == "rate_limit_error"
    ids = [[choice["sparrow"]["token_ids"] for choice in part] for part in (alone, beside)]
    assert ids[0] == ids[1]
    running.wait_until_free()
    assert post(running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_samples(running: Running, stream: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "n": 4, "max_tokens": 4000, "stream": stream}
    body |= {"sparrow": LONG}
    with httpx2.Client() as client:
        request = client.build_request("POST", f"{running.url}/completions", json=body)
        if stream:
            response = client.send(request, stream=True)
            next(response.iter_lines())
            response.close()
        else:
            request.extensions["timeout"] = dict.fromkeys(("read", "connect"), 0.5)
            with pytest.raises(httpx2.TimeoutException):
                client.send(request)
    running.wait_until_free()
    assert "sparrow_disconnects_total" in httpx2.get(f"{running.root}/metrics").text


def test_a_slow_reader_does_not_hold_up_others(running: Running) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "stream": True, "sparrow": LONG}
    with httpx2.stream("POST", f"{running.url}/completions", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        assert post(running).status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    for line in rest[:-1]:
        assert json.loads(line.removeprefix("data: "))["object"] == "text_completion"
    running.wait_until_free()


def test_models_health_and_metrics(running: Running, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve("tiny").id == model.id == "tiny"
    assert model.model_dump()["max_model_len"] == 8192
    for route in ("health", "ready"):
        assert httpx2.get(f"{running.root}/{route}").status_code == 200
    described = httpx2.get(f"{running.root}/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert {*described["paths"]} >= {"/v1/completions", "/v1/chat/completions", "/v1/models"}
    for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(described)):
        assert name in schemas
    assert post(running, prompt=[10**6]).status_code == 400
    text = httpx2.get(f"{running.root}/metrics").text
    for name in ("requests_total", "completion_tokens_total", "samples_in_flight"):
        assert f"sparrow_{name}" in text
    assert 'sparrow_requests_total{route="/v1/completions",status="400"}' in text


def test_many_at_once(running: Running) -> None:
    """Threads with requests of all kinds; each gets what it gets alone."""
    bodies = [
        {"max_tokens": 10 + number, "seed": number, "sparrow": {"decoding": kind, **more}}
        for number, (kind, more) in enumerate(
            [("dense", {}), ("sparse", {"budget": 48}), ("exact", {"budget": 48})] * 2
        )
    ]
    alone = [post(running, **body).json()["choices"][0]["text"] for body in bodies]
    barrier = threading.Barrier(len(bodies))

    def together(body: dict[str, Any]) -> str:
        barrier.wait()
        return str(post(running, **body).json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(bodies)) as threads:
        assert list(threads.map(together, bodies)) == alone


def test_a_key_is_required_where_one_is_set() -> None:
    with serving("tiny", api_key="a-long-secret") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer another-secret"}, 401),
            ({"Authorization": "Basic a-long-secret"}, 401),
            ({"Authorization": "Bearer a-long-secret"}, 200),
        ):
            response = httpx2.get(f"{server.url}/models", headers=headers)
            assert response.status_code == status
        assert httpx2.get(f"{server.root}/health").status_code == 200
        wrong = openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
