"""Rollouts by servers: the same bits as by an engine, weights by delta, and servers that fail."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.products import rows_are_independent
from support.proxy import Line, Proxy
from support.ranks import on_ranks
from support.serving import Running, serving
from support.sharded_runs import STEPS, served
from support.training import (
    SPARSE,
    config,
    metrics,
    model_folder,
    row_config,
    trained,
    weights_of,
)

from sparrow import models
from sparrow.dataflow import servers
from sparrow.dataflow.backend import open_backend
from sparrow.dataflow.local.run import Run
from sparrow.dataflow.run_files import read_rollouts
from sparrow.dataflow.servers import PublishedWeights, ServerBackend, ServerError
from sparrow.models.deltas import Delta
from sparrow.schema.sampling import Completion, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

KEYS = {"api_key": "the-api-key", "admin_key": "the-admin-key"}
PROMPT = [2, 3, 4, 5, 6]
EXACT = rows_are_independent()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_API_KEY", KEYS["api_key"])
    monkeypatch.setenv("SPARROW_ADMIN_KEY", KEYS["admin_key"])
    monkeypatch.setattr(servers, "WAIT", (0.05, 0.2))


@contextmanager
def two_servers(model: Path, **changes: Any) -> Iterator[list[Running]]:
    given = {"dtype": "float32", "max_running": 8, "kv_gib": 0.01, **KEYS, **changes}
    with ExitStack() as opened:
        yield [opened.enter_context(serving(str(model), **given)) for _ in range(2)]


def urls(running: list[Running]) -> list[str]:
    return [server.url for server in running]


def run_whole(model: Path, folder: Path, rollout: dict[str, Any], **changes: Any) -> Run:
    return trained(config(model, folder, rollout=rollout, **changes))


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics(folder)]


def assert_equal_runs(here: Run, there: Run, folders: tuple[Path, Path], steps: int) -> None:
    """Bit for bit, unless the rounding of products depends on how many rows they have."""
    if not EXACT:
        pairs = zip(*(read_rollouts(folder, 0) for folder in folders), strict=True)
        for one, two in pairs:
            for mine, theirs in zip(one.trajectories, two.trajectories, strict=True):
                assert np.array_equal(mine.ids, theirs.ids)
                assert np.allclose(mine.rollout_logprob, theirs.rollout_logprob, atol=1e-4)
        return
    weights = weights_of(there)
    for name, weight in weights_of(here).items():
        assert torch.equal(weight, weights[name]), name
    assert without_times(folders[0]) == without_times(folders[1])
    for step in range(steps):
        assert read_rollouts(folders[0], step) == read_rollouts(folders[1], step)


@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"attention": SPARSE},
        pytest.param(
            {"attention": SPARSE, "decoding": "exact", "speculative": {"draft_tokens": 3}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"attention": SPARSE, "distill": {"rank": 4}}, marks=pytest.mark.slow),
    ],
    ids=["dense", "sparse", "exact", "distilled"],
)
def test_a_run_by_two_servers_is_that_by_an_engine(
    model: Path, tmp_path: Path, rollout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = run_whole(model, tmp_path / "local", rollout)
    messages: list[bytes] = []
    send = servers.RolloutServer._load

    def record(self: Any, message: bytes, **query: str) -> int:
        messages.append(message)
        return send(self, message, **query)

    monkeypatch.setattr(servers.RolloutServer, "_load", record)
    exact = {"decoding": "exact", "budget": 48} if "decoding" in rollout else {}
    with two_servers(model, **exact) as running:
        there = run_whole(model, tmp_path / "served", rollout | {"url": urls(running)})
        for server in running:
            assert server.service.engine.version == 4
            server.wait_until_free()
            views = models.hf_views(server.service.engine.model)
            for name, weight in weights_of(there).items():
                assert torch.equal(views[name], weight), name
    assert_equal_runs(local, there, (tmp_path / "local", tmp_path / "served"), 4)
    start = models.hf_views(models.load(str(model), dtype="float32", device="cpu"))
    assert any(not torch.equal(start[name], w) for name, w in weights_of(local).items())
    assert len(messages) == 8  # one for each version and server, none for the start


def test_bfloat16_versions_travel_as_deltas(model: Path, tmp_path: Path) -> None:
    weights = models.hf_views(models.load(str(model), dtype="bfloat16", device="cpu"))
    published = PublishedWeights(weights, 0)
    new = {name: weight.float() * (1 + 3e-3) for name, weight in weights.items()}
    published.publish(new, 1)
    delta, whole = (Delta.decode(published.message(held)) for held in (published.base, None))
    assert (delta.base_version, delta.version, whole.is_whole) == (0, 1, True)
    assert 0 < delta.changed < whole.changed
    copies = {name: weight.clone() for name, weight in weights.items()}
    assert delta.apply(copies) == published.held.digest
    for name, copy in copies.items():
        assert torch.equal(copy, new[name].bfloat16()), name


def test_a_resumed_run_resets_the_servers(model: Path, tmp_path: Path) -> None:
    whole = run_whole(model, tmp_path / "whole", {})
    with two_servers(model) as running:
        rollout = {"url": urls(running)}
        run_whole(model, tmp_path / "other", rollout, run={"steps": 5}, optimiser={"rate": 1e-2})
        run_whole(model, tmp_path / "cut", rollout, run={"steps": 2, "out": str(tmp_path / "cut")})
        resumed = run_whole(model, tmp_path / "cut", rollout)
    assert_equal_runs(whole, resumed, (tmp_path / "whole", tmp_path / "cut"), 4)


def backend_of(model: Path, running: list[Running], said: list[str]) -> ServerBackend:
    def starts(dtype: str) -> dict[str, torch.Tensor]:
        return dict(models.hf_views(models.load(str(model), dtype=dtype, device="cpu")))

    return ServerBackend(urls(running), starts=starts, report=said.append)


def sample(backend: Any, prompts: list[list[int]], **asked: Any) -> list[list[Completion]]:
    async def work() -> list[list[Completion]]:
        async with backend.serving() as sampler:
            params = [SamplingParams(n=3, max_tokens=20, seed=n) for n in range(len(prompts))]
            pairs = zip(prompts, params, strict=True)
            return list(await asyncio.gather(*(sampler.generate(*p, **asked) for p in pairs)))

    return asyncio.run(work())


def same(here: list[list[Completion]], there: list[list[Completion]]) -> None:
    for group, other in zip(here, there, strict=True):
        for one, two in zip(group, other, strict=True):
            for name in ("token_ids", "weight_versions"):
                assert np.array_equal(getattr(one, name), getattr(two, name)), name
            for name in ("logprobs", "entropies", "kept"):
                mine, theirs = getattr(one, name), getattr(two, name)
                rounding = 0.0 if EXACT else 1e-4
                assert np.allclose(mine, theirs, rtol=rounding, atol=rounding), name
            assert one.attention == two.attention


def test_prompts_go_to_the_least_loaded_server(model: Path) -> None:
    prompts = [[*PROMPT, n] for n in range(8)]
    with two_servers(model) as running:
        sample(backend_of(model, running, []), prompts)
        counts = [s.service.metrics.completion_tokens.labels("dense")._value.get() for s in running]
    assert min(counts) > 0.3 * sum(counts)


def test_prompts_that_begin_alike_go_to_one_server(model: Path) -> None:
    start = [2 + n % 50 for n in range(servers.PREFIX)]
    with two_servers(model) as running:
        backend = backend_of(model, running, [])
        for _ in range(3):
            sample(backend, [start])

        async def turns() -> None:
            async with backend.serving() as sampler:
                for turn in range(4):
                    await sampler.generate([*start, *[5] * turn], SamplingParams(max_tokens=4))

        before = [s.service.metrics.prompt_tokens._value.get() for s in running]
        asyncio.run(turns())
        after = [s.service.metrics.prompt_tokens._value.get() for s in running]
    assert sum(x > y for x, y in zip(after, before, strict=True)) == 1


def test_a_schedule_travels_with_its_request(model: Path) -> None:
    schedule = Schedule.fixed(64, name="of-the-gate")
    loaded = models.load(str(model), dtype="float32", device="cpu")
    drafts = SpeculativeParams(draft_tokens=3, acceptance="shared_noise", reselect=2)
    local = open_backend(loaded, Rule(), drafts, max_running=8)
    with two_servers(model, budget=48, decoding="exact") as running:
        backend = backend_of(model, running, [])
        for asked in ({"schedule": schedule}, {"schedule": schedule, "speculative": drafts}):
            here, there = (sample(one, [PROMPT * 8], **asked) for one in (local, backend))
            same(here, there)
            assert here[0][0].speculation == there[0][0].speculation
        with pytest.raises(ValueError, match="schedule"):
            sample(backend, [PROMPT], schedule=Schedule.fixed(64, flow="other", flow_digest="ab"))


def test_a_server_that_goes_away_is_left_out_and_mended_when_it_is_back(model: Path) -> None:
    prompts, said = [[*PROMPT, n] for n in range(6)], list[str]()
    local = open_backend(models.load(str(model), dtype="float32", device="cpu"), None)
    new = {name: w * 1.01 for name, w in models.hf_views(local.engine.model).items()}
    given = {"dtype": "float32", "max_running": 8, "kv_gib": 0.01, **KEYS}
    with serving(str(model), **given) as stays:
        with serving(str(model), **given) as leaves:
            backend, port = backend_of(model, [stays, leaves], said), leaves.port
            admin = leaves.service.admin_port
            same(sample(local, prompts), sample(backend, prompts))
        same(sample(local, prompts), sample(backend, prompts))  # by the other one
        for one in (local, backend):
            one.sync_weights(new, version=1)
        same(sample(local, prompts), sample(backend, prompts))
        assert any("was not loaded" in text for text in said)
        with serving(str(model), port=port, admin=admin, **given) as back:
            while not any("is back" in text for text in said):
                same(sample(local, prompts), sample(backend, prompts))
            assert back.service.engine.version == 1
            before = back.service.metrics.prompt_tokens._value.get()
            while back.service.metrics.prompt_tokens._value.get() == before:
                same(sample(local, prompts), sample(backend, prompts))


@pytest.mark.parametrize("fault", ["cut", "corrupt", "repeat"])
def test_answers_over_a_bad_line_are_those_over_a_good_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(servers, "ATTEMPTS", 100)
    local = open_backend(models.load(str(model), dtype="float32", device="cpu"), None)
    prompts = [[*PROMPT, n] for n in range(12)]
    line = Line(**{fault: 0.2})
    with serving(str(model), dtype="float32", kv_gib=0.01) as running:
        backend = ServerBackend([running.url], starts=None)

        async def work() -> list[list[Completion]]:
            async with Proxy("127.0.0.1", running.port, line).listening() as port:
                backend.servers[0].url = f"http://127.0.0.1:{port}/v1"
                async with backend.serving() as sampler:
                    params = [SamplingParams(n=3, max_tokens=20, seed=n) for n in range(12)]
                    pairs = zip(prompts, params, strict=True)
                    return list(await asyncio.gather(*(sampler.generate(*p) for p in pairs)))

        there = asyncio.run(work())
        while line.faults[fault] < 2:
            there = asyncio.run(work())
        same(sample(local, prompts), there)


def test_a_server_that_was_restarted_between_two_requests_is_noticed(model: Path) -> None:
    said: list[str] = []
    local = open_backend(models.load(str(model), dtype="float32", device="cpu"), None)
    new = {name: w * 1.01 for name, w in models.hf_views(local.engine.model).items()}
    with two_servers(model) as running:
        backend = backend_of(model, running, said)
        for one in (local, backend):
            one.sync_weights(new, version=1)
        engine = running[0].service.engine
        old = models.hf_views(models.load(str(model), dtype="float32", device="cpu"))
        engine.apply_delta(Delta.whole(old, version=0), reset=True)  # as after a restart
        prompts = [[*PROMPT, n] for n in range(6)]
        same(sample(local, prompts), sample(backend, prompts))
        assert engine.version == 1


def test_weights_of_another_run_are_noticed_though_their_version_is_the_same(model: Path) -> None:
    said: list[str] = []
    local = open_backend(models.load(str(model), dtype="float32", device="cpu"), None)
    new = {name: w * 1.01 for name, w in models.hf_views(local.engine.model).items()}
    with two_servers(model) as running:
        backend, other = (backend_of(model, running, said) for _ in range(2))
        for one in (local, backend):
            one.sync_weights(new, version=1)
        other.sync_weights({name: w * 1.5 for name, w in new.items()}, version=1)
        prompts = [[*PROMPT, n] for n in range(6)]
        same(sample(local, prompts), sample(backend, prompts))
    assert any("has not sent" in text for text in said)


def test_a_server_of_another_configuration_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    for name in ("config.json", "SHA256SUMS"):
        (other / name).chmod(0o644)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    (other / "SHA256SUMS").unlink()
    with (
        serving(str(other), dtype="float32", kv_gib=0.01, **KEYS) as running,
        pytest.raises(ValueError, match="configuration"),
    ):
        run_whole(model, tmp_path / "run", {"url": [running.url]})


def test_damaged_lost_and_repeated_versions_are_mended_by_a_whole_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = servers.RolloutServer._load

    def damaged(self: Any, message: bytes, **query: str) -> int:
        if "reset" not in query:
            kind = next(kinds)
            if kind == "lost answer":
                send(self, message, **query)
                raise ServerError("the answer was lost")
            if kind == "repeated":
                send(self, message, **query)
            elif kind == "cut":
                message = message[:-5]
            elif kind == "corrupt":
                message = message[:-40] + b"x" * 40
            elif kind == "of another base":
                message = Delta.whole(later, version=99).encode()[:-1]
        return send(self, message, **query)

    monkeypatch.setattr(servers.RolloutServer, "_load", damaged)
    faults = ["lost answer", "repeated", "cut", "corrupt", "of another base", "none"]
    kinds = iter([fault for fault in faults for _ in range(2)])
    with two_servers(model) as running:
        backend = backend_of(model, running, [])
        later = models.hf_views(models.load(str(model), dtype="float32", device="cpu"))
        for version in range(1, len(faults) + 1):
            later = {name: w * 1.001 for name, w in later.items()}
            backend.sync_weights(later, version=version)
            for server in running:
                assert server.service.engine.version == version
                views = models.hf_views(server.service.engine.model)
                assert all(torch.equal(views[name], w) for name, w in later.items())


def test_new_weights_reach_samples_under_way(model: Path) -> None:
    with two_servers(model, max_context=256) as running:
        backend = backend_of(model, running, [])
        old = models.hf_views(models.load(str(model), dtype="float32", device="cpu"))
        new = {name: weight * 1.01 for name, weight in old.items()}

        async def work() -> list[list[Completion]]:
            params = SamplingParams(n=2, max_tokens=200, ignore_eos=True, seed=1)
            async with backend.serving() as sampler:
                asked = [
                    asyncio.create_task(sampler.generate([*PROMPT, n], params)) for n in range(2)
                ]
                while not all(server.service.sampler.in_flight for server in running):
                    await asyncio.sleep(0.01)
                await sampler.update(new, version=1, in_flight="keep")
                return list(await asyncio.gather(*asked))

        versions = {
            int(v) for group in asyncio.run(work()) for c in group for v in c.weight_versions
        }
    assert 1 in versions <= {0, 1}


def test_what_cannot_be_used_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        ServerBackend(["http://127.0.0.1:9/v1"], starts=None)
    with serving(str(model), max_context=64, kv_gib=0.01) as plain:
        with pytest.raises(ValueError, match="admin port"):
            run_whole(model, tmp_path / "a", {"url": [plain.url]})
        with pytest.raises(ValueError, match="64"):
            run_whole(model, tmp_path / "b", {"url": [plain.url], "fixed_weights": True})
    with serving(str(model), kv_gib=0.01, **KEYS) as closed:
        monkeypatch.setenv("SPARROW_ADMIN_KEY", "another-key")
        with pytest.raises(ServerError, match="SPARROW_ADMIN_KEY"):
            ServerBackend([closed.url], starts=dict)
        monkeypatch.setenv("SPARROW_ADMIN_KEY", "")
        with pytest.raises(ServerError, match="SPARROW_ADMIN_KEY is not set"):
            ServerBackend([closed.url], starts=dict)
        monkeypatch.setenv("SPARROW_API_KEY", "another-key")
        with pytest.raises(ServerError, match="key"):
            ServerBackend([closed.url], starts=dict)
    ports = ("http://host:abc/v1", "http://host:99999/v1")
    for url in ("ftp://host/v1", "http://name:secret@host/v1", "host:8000/v1", *ports):
        with pytest.raises(ValueError, match="url"):
            config(model, tmp_path / "c", rollout={"url": [url]})
    with pytest.raises(ValueError, match="every server once"):
        config(model, tmp_path / "c", rollout={"url": ["http://host/v1", "http://host/v1/"]})


def test_servers_may_keep_their_weights(model: Path, tmp_path: Path) -> None:
    with serving(str(model), dtype="float32", kv_gib=0.01, **KEYS) as running:
        rollout = {"url": [running.url], "fixed_weights": True}
        run_whole(model, tmp_path / "run", rollout)
        assert running.service.engine.version == 0
    drift = [step["mismatch/k3"] for step in metrics(tmp_path / "run")]
    assert drift[0] < 1e-6 < 1e-5 < drift[-1]  # the policy leaves the weights of its rollouts


def test_an_answer_may_take_long_but_a_server_must_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "HEALTH_SECONDS", 0.05)

    class Client:
        base_url = "http://127.0.0.1:9/v1"

    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answer"

    work = servers._while_healthy(Client(), slow(0.01))
    assert asyncio.run(work) == "answer"
    work = servers._while_healthy(Client(), slow(60))
    with pytest.raises(servers.ClientError, match="no longer answers"):
        asyncio.run(work)


def test_a_server_with_another_rule_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    schedule = tmp_path / "schedule.json"
    Schedule.fixed(48, dense_layers=(0, 1)).save(schedule)
    with serving(str(model), dtype="float32", kv_gib=0.01, **KEYS) as running:
        rollout = {"url": [running.url], "attention": {"schedule": str(schedule)}}
        before = running.service.weights_id
        new = model_folder(tmp_path / "new", size=5.0)
        with pytest.raises(ValueError, match="--schedule"):
            run_whole(new, tmp_path / "run", rollout)
        assert running.service.weights_id == before  # nothing was sent


@pytest.mark.slow
def test_an_asynchronous_run_by_servers_equals_the_synchronous_one(
    chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    weights = {}
    for loop in ("sync", "async"):
        with two_servers(chat_model) as running:
            own = {
                "rollout": {"attention": SPARSE, "url": urls(running)},
                "run": {"loop": loop, "steps": 3},
            }
            chosen = row_config(
                chat_model, tmp_path / loop, rows, loop, dispatch={"staleness": 0}, **own
            )
            weights[loop] = weights_of(trained(chosen, judge=None))
    start = models.hf_views(models.load(str(chat_model), dtype="float32", device="cpu"))
    for name, weight in weights["sync"].items():
        assert torch.equal(weight, weights["async"][name]) or not EXACT, name
    assert any(not torch.equal(weight, weights["sync"][name]) for name, weight in start.items())


@pytest.mark.slow
def test_two_ranks_share_the_servers(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    with two_servers(model) as running:
        (tmp_path / "urls.txt").write_text(" ".join(urls(running)))
        for place, steps in on_ranks(served, tmp_path):
            assert (place, steps) == (str(tmp_path / "run/model"), STEPS)
        trained_weights = load_file(tmp_path / "run/model/model.safetensors")
        for server in running:
            assert server.service.engine.version == STEPS
            assert server.service.metrics.prompt_tokens._value.get() > 20
            views = models.hf_views(server.service.engine.model)
            assert all(torch.equal(trained_weights[name], view) for name, view in views.items())
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(start[name], weight) for name, weight in trained_weights.items())
