"""The asynchronous loop of several policies: overlap, staleness, faults."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.teams import LORA, OWN, apart, team, timeless, trained, weights
from support.training import metrics, noisy

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.episodes import single_turn
from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.team.asynchronous import take_steps
from sparrow.dataflow.team.learners import LearnerProcess
from sparrow.dataflow.team.member import Member
from sparrow.dataflow.team.run import TeamRun
from sparrow.files import read_lines


@pytest.mark.parametrize("policies", [OWN, LORA], ids=["own weights", "adapters"])
def test_without_staleness_the_asynchronous_loop_is_the_other(
    policies: Any, model: Path, tmp_path: Path
) -> None:
    """Also where it was stopped between."""
    whole = trained(team(model, tmp_path / "sync", policies))
    changes = {"run": {"loop": "async"}, "dispatch": {"staleness": 0}}
    chosen = team(model, tmp_path / "async", policies, **changes)
    trained(chosen.replace(run=chosen.run.replace(steps=1)))
    with open_training(chosen, judge=noisy) as run:
        train(run)
        assert isinstance(run, TeamRun)
        for name in policies:
            expected = weights(whole, name)
            assert all(value.equal(expected[key]) for key, value in weights(run, name).items())
    assert timeless(tmp_path / "sync") == timeless(tmp_path / "async")


@pytest.mark.parametrize(
    ("policies", "play"), [(OWN, "half"), (LORA, "together")], ids=["own weights", "adapters"]
)
def test_episodes_and_learners_overlap_within_the_staleness(
    policies: Any, play: str, model: Path, tmp_path: Path
) -> None:
    several = enumerate(policies.items(), 1)
    policies = {name: {**own, "prompts": prompts} for prompts, (name, own) in several}
    chosen = team(
        model,
        tmp_path / "run",
        policies,
        play=play,
        run={"steps": 6, "save_every": 3, "loop": "async", "rollouts": 1},
        dispatch={"staleness": 2},
        gate={"mode": "warn", "least": 1, "prompts": 2, "sample": 2},
    )
    with open_training(chosen, judge=noisy) as run:
        train(run)
    assert isinstance(run, TeamRun)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(6))
    for name, member in run.members.items():
        stale = [line.get(f"policy/{name}/staleness_mean", 0.0) for line in lines]
        assert 0 <= max(stale) <= 2
        assert member.version == sum(line[f"policy/{name}/steps"] for line in lines)
    assert run.members["solver"].version == 12
    again = chosen.replace(run=chosen.run.replace(steps=9))
    with open_training(again, judge=noisy) as run:
        train(run)
    assert isinstance(run, TeamRun)
    assert run.members["solver"].version == 18


def test_a_learner_that_was_killed_ends_the_run_which_then_goes_on(
    model: Path, tmp_path: Path
) -> None:
    changes = {"run": {"loop": "async", "steps": 4, "save_every": 2}}
    chosen = team(model, tmp_path / "run", **changes)
    with open_training(chosen, judge=noisy) as run:
        assert isinstance(run, TeamRun)
        take_steps(run)
        learner = run.members["checker"].learner
        assert isinstance(learner, LearnerProcess)
        os.kill(learner.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"checker.*-9"):
            train(run)
    with open_training(chosen, judge=noisy) as run:
        assert run.step == 2
        train(run)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_an_episode_that_begins_before_the_weights_arrive_is_of_the_former_ones(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third answers while the first update is on its way; later ones then wait for it."""
    sync, note, ages, begun = Member.sync_in_flight, Member.note, list[int](), list[str]()
    syncing, answered = asyncio.Event(), asyncio.Event()

    async def slow(self: Member, *arguments: Any) -> None:
        syncing.set()
        await answered.wait()
        await sync(self, *arguments)

    def noted(self: Member, batch: Any, *arguments: Any) -> Any:
        oldest = min(int(t.weight_version[t.loss_mask].min()) for t in batch.trajectories)
        ages.append(self.version - oldest)
        return note(self, batch, *arguments)

    async def play(actors: Any, example: Any) -> Any:
        begun.append(example.id)
        number = len(begun)
        found = await single_turn(actors["checker" if number == 2 else "solver"], example)
        if number == 2:
            await syncing.wait()
        if number == 3:
            answered.set()
            await asyncio.sleep(3)  # the fourth is done then
        return found

    monkeypatch.setattr(Member, "sync_in_flight", slow)
    monkeypatch.setattr(Member, "note", noted)
    policies = {"solver": {"lora": {"rank": 2}, "prompts": 1}, "checker": {"frozen": True}}
    run = {"loop": "async", "steps": 4, "save_every": 4}
    chosen = team(model, tmp_path / "run", policies, run=run, dispatch={"staleness": 1})
    with open_training(chosen, judge=noisy, episode=play) as opened:
        train(opened)
    assert len(ages) == 7
    assert max(ages) == 1


@pytest.mark.parametrize("staleness", [2, 3])
def test_no_token_is_older_than_the_staleness_where_the_first_episodes_are_the_slowest(
    staleness: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several old ones are under way, and a batch has room for one."""
    note, ages, begun = Member.note, list[int](), list[str]()

    def noted(self: Member, batch: Any, *arguments: Any) -> Any:
        oldest = min(int(t.weight_version[t.loss_mask].min()) for t in batch.trajectories)
        ages.append(self.version - oldest)
        return note(self, batch, *arguments)

    async def play(actors: Any, example: Any) -> Any:
        begun.append(example.id)
        is_slow = len(begun) <= staleness
        found = await single_turn(actors["solver"], example)
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                while is_slow and len(ages) < staleness:
                    await asyncio.sleep(0.05)
        return found

    monkeypatch.setattr(Member, "note", noted)
    policies = {"solver": {"lora": {"rank": 2}, "prompts": 1}}
    run = {"loop": "async", "steps": 4, "save_every": 4}
    chosen = team(model, tmp_path / "run", policies, run=run, dispatch={"staleness": staleness})
    with open_training(chosen, judge=noisy, episode=play) as opened:
        train(opened)
    assert len(ages) == 8
    assert max(ages) <= staleness


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("policies", [OWN, {}], ids=["several", "one"])
def test_an_episode_that_awaits_what_it_cancelled_fails(
    loop: str, policies: Any, model: Path, tmp_path: Path
) -> None:
    changes = {"run": {"loop": loop}, "dispatch": {"staleness": 1} if loop == "async" else {}}
    chosen = team(model, tmp_path / "run", policies, play="abandons", **changes)
    judged: Any = {"judge": noisy} if policies or loop == "sync" else {}
    with open_training(chosen, **judged) as run, pytest.raises(EpisodeFailed, match="Cancelled"):
        train(run)


def test_an_episode_that_fails_ends_the_run_at_once_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    """Though a policy is in the middle of an update that takes ten minutes."""
    played = list[str]()

    async def fails(actors: Any, example: Any) -> Any:
        played.append(example.id)
        if len(played) > 2:
            await asyncio.sleep(1)
            raise KeyError("nothing of it is known")
        return await apart(actors, example)

    slow = {"algorithm": {"advantage": "support.teams:endless"}}
    run = {"loop": "async", "steps": 9, "save_every": 9}
    policies, stale = {"solver": {}, "checker": slow}, {"staleness": 2}
    chosen = team(model, tmp_path / "run", policies, run=run, dispatch=stale)
    with open_training(chosen, judge=noisy, episode=fails) as run:
        assert isinstance(run, TeamRun)
        with pytest.raises(EpisodeFailed, match="nothing of it") as failed:
            train(run)
        assert isinstance(failed.value.__cause__, KeyError)
    assert Checkpoints(tmp_path / "run" / "checkpoints", 1).latest() is None


def test_what_a_learner_raises_ends_the_run_and_is_in_its_log(model: Path, tmp_path: Path) -> None:
    policies = {"solver": {}, "checker": {"algorithm": {"advantage": "support.teams:odd"}}}
    chosen = team(model, tmp_path / "run", policies, run={"loop": "async"})
    said = "Odd: there is nothing to learn in 2"
    with open_training(chosen, judge=noisy) as run, pytest.raises(RuntimeError, match=said):
        train(run)
    assert "in odd" in (tmp_path / "run" / "workers" / "checker.log").read_text()


def test_a_policy_that_takes_no_part_holds_up_nobody(model: Path, tmp_path: Path) -> None:
    """It never learns, waits for nothing, and its model is written as it was."""

    async def alone(actors: Any, example: Any) -> Any:
        return (await apart(actors, example))[::2]

    changes = {"run": {"loop": "async", "steps": 3, "save_every": 2}, "dispatch": {"staleness": 1}}
    chosen = team(model, tmp_path / "run", LORA, **changes)
    with open_training(chosen, judge=noisy, episode=alone) as run:
        train(run)
        assert isinstance(run, TeamRun)
        assert [member.version for member in run.learning] == [3, 0]
    assert (tmp_path / "run" / "model" / "checker" / "config.json").is_file()


def test_what_was_sampled_under_former_budgets_is_no_matter_of_a_gate(
    model: Path, tmp_path: Path
) -> None:
    """Its windows begin anew when it acts: only what began since is read."""
    gate = {"mode": "act", "target": 0.95, "least": 20, "prompts": 2, "sample": 8, "patience": 1}
    sparse = {"rollout": {"attention": {"budget": 48}}, "gate": gate, "prompts": 1}
    policies = {"solver": {"lora": {"rank": 2}, **sparse}, "checker": {"lora": {"rank": 2}}}
    changes = {"run": {"loop": "async", "steps": 4, "save_every": 4}, "dispatch": {"staleness": 3}}
    rollout = {"max_tokens": 100}
    chosen = team(model, tmp_path / "run", policies, play="long", rollout=rollout, **changes)
    with open_training(chosen, judge=noisy) as run:
        assert isinstance(run, TeamRun)
        solver = run.members["solver"]
        attentions = list[set[str | None]]()
        note = solver.note

        def noted(batch: Any, *arguments: Any) -> Any:
            read = [t for t in batch.trajectories if t.hidden is not None]
            attentions.append({t.attention for t in read} - {solver.sampling().describe()})
            return note(batch, *arguments)

        solver.note = noted
        train(run)
    assert any(
        action["kind"] in ("raise", "dense")
        for action in read_lines(tmp_path / "run" / "actions.jsonl")
    )
    assert attentions == [set()] * len(attentions)
