"""One engine for several policies: ways to decode, versions, adapters loaded anew."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.teams import LORA, noise, team, trained
from support.training import SPARSE, metrics, noisy

from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.team.run import TeamRun
from sparrow.dataflow.team.shared_engine import AdapterBackend
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.schema.episode import Trajectory

EXACT = {"attention": SPARSE, "decoding": "exact", "speculative": {"draft_tokens": 4}}
POLICIES: dict[str, Any] = {
    "solver": {"lora": {"rank": 2}, "rollout": EXACT},
    "checker": {"lora": {"rank": 4}},
    "other": {"lora": {"rank": 3}, "rollout": EXACT | {"speculative": {"draft_tokens": 2}}},
    "opponent": {"frozen": True, "rollout": {"attention": SPARSE}},
}


async def in_turn(actors: Any, example: Any) -> list[Trajectory]:
    """All of them go on with one text."""

    async def play(sample: int) -> Trajectory:
        talk = actors["solver"].conversation(example, sample)
        for name in (*POLICIES, "solver"):
            await talk.reply(max_tokens=15, actor=actors[name])
        return talk.trajectory(noise(talk.text))

    return list(await asyncio.gather(*map(play, range(actors["solver"].samples))))


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_dense_sparse_and_exact_policies_share_an_engine(
    loop: str, model: Path, tmp_path: Path
) -> None:
    """What dense and exact ones sample is their own, also after their adapters have changed."""
    chosen = team(
        model,
        tmp_path / "run",
        POLICIES,
        rollout={"max_tokens": 100},
        gate={"mode": "warn", "sample": 8, "least": 1},
        run={"steps": 3, "loop": loop},
        dispatch={"staleness": 0},
    )
    with open_training(chosen, judge=noisy, episode=in_turn) as run:
        assert isinstance(run, TeamRun)
        backends = [member.backend for member in run.members.values()]
        (engine,) = {b.shared.engine for b in backends if isinstance(b, AdapterBackend)}
        step, batches = engine.step, list[set[str | None]]()

        def noted() -> Any:
            batches.append({sample.request.adapter for sample in engine.scheduler.running})
            return step()

        engine.step = noted
        train(run)
    assert max(map(len, batches)) > 1, "requests of several in one batch"
    for line in metrics(tmp_path / "run"):
        for name in ("solver", "checker", "other"):
            assert line[f"policy/{name}/mismatch/k3"] < 1e-8
            assert line[f"policy/{name}/sparse/accept_p01"] > 0.999
            assert line[f"policy/{name}/staleness_mean"] == 0


def test_versions_go_on_after_a_resume(model: Path, tmp_path: Path) -> None:
    """One learns twice a round, so that versions of the engine are not those of a policy."""
    policies = {name: {**own, "prompts": n} for n, (name, own) in enumerate(LORA.items(), 1)}
    trained(team(model, tmp_path / "run", policies, play="together"))
    chosen = team(model, tmp_path / "run", policies, play="together", run={"steps": 3})
    with open_training(chosen, judge=noisy) as run:
        found = run.rollout.generate(run.request()).trajectories
    line = metrics(tmp_path / "run")[-1]
    assert [line[f"policy/{name}/staleness_mean"] for name in LORA] == [1, 0]  # of the last update
    for number, version in enumerate((4, 2)):
        assert {int(v) for t in found for v in t.weight_version[t.policy_id == number]} == {version}


def test_the_version_of_an_adapter_is_known_before_a_token_is_drawn_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, known = AsyncEngine.run, list[int | None]()

    async def noted(self: AsyncEngine, work: Any) -> Any:
        def load(engine: Any) -> Any:
            found = work(engine)
            assert isinstance(opened, TeamRun)
            own = [member.backend for member in opened.members.values()]
            maps = [backend.versions for backend in own if isinstance(backend, AdapterBackend)]
            known.append(next((m[engine.version] for m in maps if engine.version in m), None))
            return found

        return await run(self, load)

    monkeypatch.setattr(AsyncEngine, "run", noted)
    chosen = team(model, tmp_path / "run", LORA, run={"loop": "async", "steps": 2})
    with open_training(chosen, judge=noisy) as opened:
        train(opened)
    assert sorted(known, key=str) == [1, 1, 2, 2]
