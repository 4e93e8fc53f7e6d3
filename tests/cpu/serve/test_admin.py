"""The admin port: weights by delta while requests run, schedule, sleep, abort; a key of its own."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import save as save_safetensors
from support.serving import serving
from support.waiting import until

from sparrow import models
from sparrow.engine.engine import Engine
from sparrow.files import http_digest
from sparrow.models.deltas import Delta
from sparrow.models.lora import Adapter
from sparrow.schema.base import to_dict
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.serve import ServeConfig
from sparrow.serve.service import Service

KEY, API_KEY = "the-admin-key", "the-api-key"
PROMPT = [2, 3, 4, 5, 6]


class Served:
    """A server with both ports."""

    def __init__(self, service: Service, port: int, admin: int) -> None:
        self.service, self.root = service, f"http://127.0.0.1:{admin}/admin"
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        model = service.engine.model
        self.weights = {name: view.clone() for name, view in models.hf_views(model).items()}

    def post(self, what: str, key: str = KEY, **content: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.post(f"{self.root}/{what}", headers=headers, timeout=30, **content)

    def status(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        return dict(httpx2.get(f"{self.root}/status", headers=headers).json())

    def complete(self, tokens: int = 8, **more: Any) -> Any:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "seed": 7, **more}
        body["sparrow"] = {"return_token_ids": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx2.post(self.url, json=body, headers=headers, timeout=60)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving("tiny", max_running=8, api_key=API_KEY, admin_key=KEY) as running:
        assert running.service.admin_port is not None
        yield Served(running.service, running.port, running.service.admin_port)


def changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(w.shape, generator=generator) < 0.05, w * 1.3, w)
        for name, w in weights.items()
    }


def test_weights_come_by_delta_and_are_those_of_the_engine(served: Served) -> None:
    new = changed(served.weights, 1)
    delta = Delta.between(served.weights, new, base_version=0, version=1).encode()
    assert served.post("weights", API_KEY, content=delta).status_code == 401
    assert served.post("weights", content=delta[:-3]).status_code == 400
    assert served.post("weights?in_flight=perhaps", content=delta).status_code == 400
    assert served.status()["version"] == 0
    answer = served.post("weights?in_flight=keep", content=delta)
    assert (answer.status_code, answer.json()) == (200, {"version": 1, "tokens_in_flight": 0})
    assert served.post("weights", content=delta).status_code == 409  # repeated
    later = changed(new, 2)
    skipped = Delta.between(new, later, base_version=2, version=3).encode()
    assert served.post("weights", content=skipped).status_code == 409
    assert served.status()["version"] == 1
    model = models.load("tiny", device="cpu")
    engine = Engine(model, max_running=8)
    engine.update(new, version=1)
    params = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
    (own,) = engine.generate([PROMPT], params)
    details = served.complete().json()["choices"][0]["sparrow"]
    assert details["token_ids"] == own.token_ids.tolist()
    assert set(details["weight_versions"]) == {1}
    whole = Delta.whole(later, version=3).encode()
    assert served.post("weights", content=whole).json()["version"] == 3


def test_tokens_in_flight_have_both_versions(served: Served) -> None:
    delta = Delta.between(
        served.weights, changed(served.weights, 1), base_version=0, version=1
    ).encode()
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(served.complete, 600)
        until(lambda: served.status()["samples_in_flight"] == 1)
        time.sleep(0.1)
        assert served.post("weights?in_flight=keep", content=delta).json()["tokens_in_flight"] > 0
        versions = answer.result().json()["choices"][0]["sparrow"]["weight_versions"]
    assert set(versions) == {0, 1}


def test_requests_wait_while_it_sleeps_and_can_be_aborted(served: Served) -> None:
    assert served.post("sleep", json={"weights": "host"}).json()["asleep"]
    assert served.post("sleep").status_code == 409
    assert served.post("sleep", content=b"[").status_code == 400
    whole = Delta.whole(served.weights, version=1).encode()
    refused = served.post("weights", content=whole)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "refused")
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(served.complete)
        until(lambda: served.status()["samples_in_flight"] == 1)
        assert not served.post("wake").json()["asleep"]
        assert answer.result().status_code == 200
        answer = clients.submit(served.complete, 900)
        until(lambda: served.status()["samples_in_flight"] == 1)
        until(lambda: served.post("abort").json()["aborted"] or answer.done())
        assert answer.result().status_code in (200, 500)
    served.service.engine.check_integrity()


def test_requests_wait_for_weights_that_were_dropped(served: Served) -> None:
    ready = served.url.replace("/v1/completions", "/ready")
    assert served.post("sleep", json={"weights": "drop"}).status_code == 200
    assert httpx2.get(ready).status_code == 503
    answer = served.post("wake")
    assert (answer.status_code, answer.json()["digest"]) == (200, None)
    assert httpx2.get(ready).status_code == 503
    assert served.complete(0, echo=True, logprobs=1).status_code == 503
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(served.complete)
        until(lambda: served.status()["samples_in_flight"] == 1)
        whole = Delta.whole(served.weights, version=1).encode()
        assert served.post("weights", content=whole).status_code == 200
        assert waiting.result().status_code == 200
    assert httpx2.get(ready).status_code == 200


def test_a_server_whose_engine_has_failed_is_not_ready(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.service.engine, "step", lambda: 1 / 0)
    assert served.complete().status_code == 500
    assert httpx2.get(served.url.replace("/v1/completions", "/ready")).status_code == 503


def test_the_schedule_of_requests_that_name_none(served: Served) -> None:
    schedule = Schedule.fixed(64)
    data = {"schedule": json.loads(json.dumps(to_dict(schedule)))}
    assert served.post("schedule", json=data).json() == {"schedule": schedule.name}
    assert served.status()["schedule"] == schedule.name
    assert served.post("schedule", json={"schedule": {"name": "x"}}).status_code == 400
    assert served.post("schedule", json={}).status_code == 400
    assert served.post("schedule", json={"schedule": None}).status_code == 200
    assert served.status()["schedule"] is None


def test_an_adapter_comes_as_safetensors_and_goes(served: Served) -> None:
    model = served.service.engine.model
    adapter = Adapter.random(model.spec, 4, seed=1)
    data = save_safetensors({name: t.contiguous() for name, t in adapter.tensors().items()})
    for query, body in (("alpha=4", b"no file"), ("", data), ("alpha=x", data)):
        assert served.post(f"adapter?{query}", content=body).status_code == 400
    assert served.post("adapter?alpha=4", API_KEY, content=data).status_code == 401
    assert served.post("adapter?alpha=4", content=data).json() == {"rank": 4}
    assert served.post("adapter").json() == {"rank": 0}
    damaged = {"content-digest": "sha-256=:AAAA:", "authorization": f"Bearer {KEY}"}
    answer = httpx2.post(f"{served.root}/adapter?alpha=4", content=data, headers=damaged)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "damaged_body")
    assert answer.headers["content-digest"] == http_digest(answer.content)


@pytest.mark.parametrize(
    "settings",
    [
        {"admin_port": 1},
        {"admin_port": 1, "api_key": "equal-keys", "admin_key": "equal-keys"},
        {"admin_port": 8000, "admin_key": "another-key"},
    ],
)
def test_an_admin_port_needs_a_key_of_its_own(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARROW_ADMIN_KEY", raising=False)
    with pytest.raises(ValueError, match="admin_port"):
        ServeConfig.model_validate({"model": "tiny", **settings})
