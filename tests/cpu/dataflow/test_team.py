"""Several policies: a loop by hand, bit for bit; resume; turns and tokens."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.products import rows_are_independent
from support.teams import LORA, OWN, apart, team, timeless, together, trained, weights
from support.training import FIRST, SPARSE, Hears, far_adapter, metrics, noisy

from sparrow import load
from sparrow.dataflow.backend import EngineBackend, open_backend
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.episodes import Actor, single_turn
from sparrow.dataflow.language import PUZZLE_LANGUAGE, load_language
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.local.messages import RolloutBatch
from sparrow.dataflow.local.rollout import PromptSlot
from sparrow.dataflow.team.learners import LearnerProcess
from sparrow.dataflow.team.rollout import TeamRollout
from sparrow.dataflow.team.run import TeamRun
from sparrow.engine.answer import DENSE
from sparrow.models import hf_views
from sparrow.models.lora import Adapter
from sparrow.schema.episode import Group
from sparrow.schema.loading import read_resolved, save_resolved
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.tasks.base import Example, encode
from sparrow.tasks.choosing import open_rows
from sparrow.training.learner import Learner
from sparrow.training.objectives.algorithms import make_algorithm
from sparrow.training.policy import Policy

# Against a loop by hand.


def part_of(groups: list[Group], name: str, number: int) -> RolloutBatch:
    """What a policy learns from: masks and rewards, written out."""
    taken = []
    for group in groups:
        own = [
            t.replace(loss_mask=t.policy_id == number, reward=t.rewards.get(name, t.reward))
            for t in group.trajectories
            if number in t.policy_id
        ]
        taken.append(group.replace(trajectories=tuple(own)))
    return RolloutBatch(groups=tuple(taken), position=0)


def by_hand(
    chosen: Any, model: Path, play: Any, steps: int = 2
) -> dict[str, dict[str, torch.Tensor]]:
    """The same training, written out: no run, no members, no shared parts."""
    views = {name: chosen.policy(name) for name in ("solver", "checker")}
    rows = open_rows(chosen.data, seed=0)
    language = load_language(load(model, device="cpu"), puzzles=True)
    algorithm = make_algorithm(chosen.algorithm, max_tokens=40)
    learners, engines = {}, {}
    for name, view in views.items():
        policy = Policy(load(model, dtype="float32", device="cpu"), recompute=True)
        own = Learner(policy, view.optimiser, steps=2, tokens=256)
        learners[name] = LearnerSide(config=view, learner=own, algorithm=algorithm)
        limits = {"max_running": None, "max_context": 80, "kv_bytes": int(0.01 * 2**30)}
        engines[name] = open_backend(load(model, device="cpu"), None, **limits)
    for step in range(steps):
        groups = asyncio.run(_played(play, rows, language, engines, step))
        for number, (name, learner) in enumerate(learners.items()):
            batch = part_of(groups, name, number)
            learner.update(learner.score(batch, DENSE), DENSE)
            engines[name].sync_weights(learner.weights(), version=step + 1)
    return {
        name: {key: value.clone() for key, value in learner.weights().items()}
        for name, learner in learners.items()
    }


async def _played(play: Any, rows: Any, language: Any, engines: Any, step: int) -> list[Group]:
    groups = []
    async with engines["solver"].serving() as one, engines["checker"].serving() as other:
        for position in (2 * step, 2 * step + 1):
            example = rows.at(position)
            actors = {
                name: Actor(
                    engine=sampler,
                    language=language,
                    judge=noisy,
                    params=SamplingParams(max_tokens=40),
                    decoding=DENSE,
                    samples=4,
                    context=80,
                    key=(0, step, position, name),
                    policy=number,
                )
                for number, (name, sampler) in enumerate({"solver": one, "checker": other}.items())
            }
            played = await play(actors, example)
            groups.append(Group(prompt_id=example.id, trajectories=tuple(played)))
    return groups


@pytest.mark.parametrize(
    ("play", "name"), [(apart, "random"), (together, "random"), (apart, "tiny")]
)
def test_two_policies_learn_as_in_a_loop_by_hand(
    play: Any, name: str, model: Path, tmp_path: Path
) -> None:
    model = Path("tiny") if name == "tiny" else model
    chosen = team(model, tmp_path / "run", play=play.__name__)
    run, expected = trained(chosen), by_hand(chosen, model, play)
    start = hf_views(load(model, device="cpu"))
    for name in ("solver", "checker"):
        found = weights(run, name)
        assert any(not value.equal(start[key]) for key, value in found.items())
        for key, value in found.items():
            assert value.equal(expected[name][key]), f"{name}: {key}"
    assert {member.version for member in run.members.values()} == {2}


@pytest.mark.parametrize("play", ["apart", "together"])
@pytest.mark.parametrize("policies", [OWN, LORA], ids=["own weights", "adapters"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    policies: Any, play: str, model: Path, tmp_path: Path
) -> None:
    whole = trained(team(model, tmp_path / "whole", policies, play=play, run={"steps": 3}))
    trained(team(model, tmp_path / "parts", policies, play=play, run={"steps": 1}))
    parts = trained(team(model, tmp_path / "parts", policies, play=play, run={"steps": 3}))
    for name in policies:
        expected = weights(whole, name)
        assert all(value.equal(expected[key]) for key, value in weights(parts, name).items())
        assert (tmp_path / "parts" / "model" / name / "config.json").is_file()
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")


def test_policies_do_not_advance_in_lock_step(model: Path, tmp_path: Path) -> None:
    """Two prompts a step: one learns from each alone, the other waits for five it took part in."""
    policies = {"solver": {"prompts": 1}, "checker": {"prompts": 5}}
    chosen = team(model, tmp_path / "run", policies, play="half", run={"steps": 6})
    run = trained(chosen)
    lines = metrics(tmp_path / "run")
    assert [line["policy/solver/steps"] for line in lines] == [2.0] * 6
    assert run.members["solver"].version == 12
    checker = run.members["checker"]
    taken = sum(line["policy/checker/steps"] for line in lines)
    assert checker.version == taken
    assert taken < 6
    assert any(line["policy/checker/pending"] for line in lines)
    parts = team(model, tmp_path / "parts", policies, play="half", run={"steps": 4})
    trained(parts)
    again = trained(team(model, tmp_path / "parts", policies, play="half", run={"steps": 6}))
    for name in policies:
        expected = weights(run, name)
        assert all(value.equal(expected[key]) for key, value in weights(again, name).items())


def test_a_frozen_policy_never_changes(model: Path, tmp_path: Path) -> None:
    run = trained(team(model, tmp_path / "run", {"solver": {}, "checker": {"frozen": True}}))
    assert run.members["checker"].learner is None
    assert run.members["solver"].version == 2
    assert not (tmp_path / "run" / "model" / "checker").exists()


def test_engines_of_their_own_begin_with_the_adapters_that_are_given(
    model: Path, tmp_path: Path
) -> None:
    own = {"model": str(model), "lora": {"adapter": str(far_adapter(model, tmp_path / "adapter"))}}
    policies = {"solver": own, "checker": own | {"frozen": True}}
    run = trained(team(model, tmp_path / "run", policies, run={"steps": 1}))
    assert metrics(tmp_path / "run")[0]["policy/solver/mismatch/k3"] < 1e-8
    expected = load(model, device="cpu")
    place: Any = {"dtype": torch.float32, "device": "cpu"}
    Adapter.load(tmp_path / "adapter", expected.spec, **place).merge_into(expected)
    backend = run.members["checker"].backend
    assert isinstance(backend, EngineBackend)
    found = hf_views(backend.engine.model)
    assert all(value.equal(found[key]) for key, value in hf_views(expected).items())


def test_tokens_carry_policy_and_version(model: Path, tmp_path: Path) -> None:
    with open_training(team(model, tmp_path / "run", LORA, play="together"), judge=noisy) as run:
        assert isinstance(run, TeamRun)
        run.take_step()
        rollouts = run.rollout.generate(run.request())
    for trajectory in rollouts.trajectories:
        assert {*trajectory.policy_id.tolist()} == {-1, 0, 1}
        assert {*trajectory.weight_version[trajectory.policy_id >= 0].tolist()} == {1}


def test_held_out_rows_are_answered_by_each_and_together(model: Path, tmp_path: Path) -> None:
    held = {"every": 1, "prompts": 4, "first": 0, "episode": True}
    trained(team(model, tmp_path / "run", LORA, validation=held, run={"steps": 1}))
    text = (tmp_path / "run" / "validation.jsonl").read_text()
    assert all(f"policy/{name}/val-core" in text for name in LORA)
    assert all(f"policy/{name}/val-episode/assignments/acc" in text for name in LORA)
    assert "val-episode/assignments/team_reward/mean" in text


def test_any_of_them_can_be_evaluated(model: Path, tmp_path: Path) -> None:
    policies = {"solver": {}, "checker": {"frozen": True}}
    held = {"every": 1, "prompts": 4, "first": 0, "policies": ["checker"]}
    trained(team(model, tmp_path / "run", policies, validation=held, run={"steps": 1}))
    text = (tmp_path / "run" / "validation.jsonl").read_text()
    assert "policy/checker/val-core" in text
    assert "policy/solver/val-core" not in text


async def _spoken(run: TeamRun, example: Any, chosen: Any) -> Any:
    """A conversation of two policies; the prompts that each engine got."""
    assert isinstance(run.rollout, TeamRollout)
    prompts = []

    class Records:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        async def generate(self, prompt: Any, *arguments: Any, **settings: Any) -> Any:
            prompts.append(list(prompt))
            return await self.sampler.generate(prompt, *arguments, **settings)

    async with run.rollout.serving() as samplers:
        recorded = {name: Records(sampler) for name, sampler in samplers.items()}
        slot = PromptSlot(example, 0, 0)
        actors = run.rollout.actor(run.request(), recorded, slot)
        return await chosen(actors), prompts


def test_turns_of_others_are_extended_by_token_ids(model: Path, tmp_path: Path) -> None:
    """What a random model says is no text that encodes to the same tokens again."""

    async def talk(actors: Any) -> Any:
        said = actors["solver"].conversation(example)
        for number in range(3):
            await said.reply(max_tokens=7, actor=actors["checker" if number % 2 else "solver"])
            if number == 0:
                said.add_text("so x1")
        return said

    with open_training(team(model, tmp_path / "run"), judge=noisy) as run:
        assert isinstance(run, TeamRun)
        example = open_rows(run.config.data, seed=0).at(FIRST)
        said, prompts = asyncio.run(_spoken(run, example, talk))
        ids = load_language(load(model, device="cpu"), puzzles=True).encode(example.prompt)
        trajectory = said.trajectory(1.0)
    for number, (reply, prompt) in enumerate(zip(said.replies, prompts, strict=True)):
        ids += encode("so x1") if number == 1 else []
        assert prompt == ids
        ids += reply.token_ids.tolist()
    assert trajectory.ids.tolist() == ids
    owners = [policy for policy in trajectory.policy_id.tolist() if policy >= 0]
    counts = [len(reply.token_ids) for reply in said.replies]
    assert owners == np.repeat([0, 1, 0], counts).tolist()


def test_a_conversation_that_is_full_is_an_error_and_nothing_is_cut_off(
    model: Path, tmp_path: Path
) -> None:
    async def talk(actors: Any) -> Any:
        said = actors["solver"].conversation(example)
        said.add_text("x1 " * (said.actor.context - len(said.ids)))
        assert said.room == 0
        with pytest.raises(ValueError, match="room"):
            await said.reply(actor=actors["checker"])
        return said

    with open_training(team(model, tmp_path / "run"), judge=noisy) as run:
        assert isinstance(run, TeamRun)
        example = open_rows(run.config.data, seed=0).at(FIRST)
        said, prompts = asyncio.run(_spoken(run, example, talk))
    assert prompts == []
    assert said.replies == []


def test_another_tokenizer_cannot_go_on_with_token_ids() -> None:
    actor = Actor(
        engine=None,
        language=PUZZLE_LANGUAGE,
        judge=noisy,
        params=SamplingParams(),
        decoding=DENSE,
        samples=1,
        context=80,
    )
    said = actor.conversation(Example(id="1", source="sums", prompt="x1", ground_truth=""))
    with pytest.raises(ValueError, match="tokenizer"):
        asyncio.run(said.reply(actor=replace(actor, policy=1, vocabulary=1)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": {"loop": "async"}, "dispatch": {"workers": 2}}, "dispatch"),
        ({"rollout": {"episode": None}}, "rollout.episode"),
        ({"rollout": {"distill": {"rank": 2}, "attention": SPARSE}}, "rollout.distill.rank"),
        ({"optimiser": {"decay": 10}}, "policies.solver.optimiser.decay"),
        ({"batch": {"updates": 2}, "policies": {"solver": {"prompts": 3}}}, "batch.updates"),
        ({"policies": {"solver": {"frozen": True}}}, "policies"),
        ({"policies": {"solver": {"algorithm": {"name": "remax"}}}}, "solver.algorithm.name"),
        ({"policies": {"solver": {"algorithm": {"kl": 0.1}}}}, "solver.algorithm.kl"),
        ({"policies": {"solver": {}, "judge": {"frozen": True, "lora": {"rank": 2}}}}, "lora.rank"),
        ({"policies": {"solver": {}, "judge": {"frozen": True, "prompts": 2}}}, "prompts"),
        ({"policies": {"../solver": {}}}, "solver"),
        ({"policies": {"\x1b[2J": {}}}, "letters, digits"),
        ({"policies": {"a.settings.b": {}}}, "letters, digits"),
        ({"algorithm": {"refills": 2}}, "solver.algorithm.refills"),
        ({"policies": {"solver": {"algorithm": {"refills": 2}}}}, "solver.algorithm.refills"),
        ({"rollout": {"sleep": False}}, "rollout.sleep"),
        ({"rollout": {"agents": {"policies": ["checkr"]}}}, "rollout.agents.policies"),
        (
            {"policies": {}, "rollout": {"agents": {"policies": ["solver"]}}},
            "rollout.agents.policies",
        ),
        (
            {"policies": {"solver": {"rollout": {"decoding": "exact"}}}},
            "policies.solver.rollout.decoding",
        ),
        ({"validation": {"policies": ["checkr"]}}, "validation.policies"),
    ],
)
def test_what_several_policies_cannot_do_is_refused(
    changes: Any, named: str, model: Path, tmp_path: Path
) -> None:
    policies = changes.pop("policies", OWN)
    with pytest.raises(ValueError, match=re.escape(named)):
        team(model, tmp_path / "run", policies, **changes)


@pytest.mark.parametrize("name", ["actor", "settings", "A-b_1"])
def test_a_policy_may_have_any_name_without_dots(name: str, model: Path, tmp_path: Path) -> None:
    async def alone(actors: Any, example: Any) -> Any:
        return await single_turn(actors[name], example)

    chosen = team(model, tmp_path / "run", {name: {"lora": {"rank": 2}}}, run={"steps": 1})
    with open_training(chosen, judge=noisy, episode=alone) as run:
        train(run)
    assert metrics(tmp_path / "run")[0][f"policy/{name}/version"] == 1


def test_a_section_of_a_policy_is_laid_over_that_of_the_run(model: Path, tmp_path: Path) -> None:
    """Field by field, also after it was written and read; a budget replaces a schedule."""
    own = {
        "optimiser": {"rate": 1e-4},
        "gate": {"sample": 2},
        "algorithm": {"entropy": 0.1},
        "rollout": {"attention": {"budget": 96}},
    }
    sections: dict[str, Any] = {
        "optimiser": {"rate": 1e-3, "clip": 0.1, "weight_decay": 0.3, "warm_up": 7},
        "gate": {"mode": "off", "target": 0.7},
        "algorithm": {"name": "dapo", "advantage": "rloo"},
        "rollout": {"attention": {"budget": 64, "flow": "quest"}},
    }
    chosen = team(model, tmp_path / "run", {"solver": own, "checker": {}}, **deepcopy(sections))
    again = TrainConfig.model_validate_json(chosen.model_dump_json())
    save_resolved(chosen, tmp_path)
    for each in (chosen, again, read_resolved(TrainConfig, tmp_path)):
        assert each.policy("solver") == chosen.policy("solver")
        solver, checker = each.policy("solver"), each.policy("checker")
        assert (solver.optimiser.rate, checker.optimiser.rate) == (1e-4, 1e-3)
        assert solver.optimiser.replace(rate=1e-3) == checker.optimiser == chosen.optimiser
        assert solver.gate == chosen.gate.replace(sample=2)
        assert solver.algorithm == chosen.algorithm.replace(entropy=0.1)
        assert (solver.rollout.attention.budget, solver.rollout.attention.flow) == (96, "quest")
    scheduled = chosen.rollout.attention.replace(budget=None, schedule="any", force=True)
    scheduled = chosen.replace(rollout=chosen.rollout.replace(attention=scheduled))
    assert scheduled.policy("solver").rollout == chosen.policy("solver").rollout
    assert scheduled.policy("checker").rollout.attention.schedule == "any"


@pytest.mark.parametrize("name", ["solver", "settings", "x_settings", "sets"])
def test_code_of_a_policy_is_found_whatever_it_is_called(
    name: str, model: Path, tmp_path: Path
) -> None:
    chosen = team(model, tmp_path / "run", {name: {"algorithm": {"advantage": "other:code"}}})
    assert code_settings(chosen)[f"policies.{name}.algorithm.advantage"] == "other:code"


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_cannot_be_opened_is_said_to_be_of_a_policy(
    frozen: bool, kind: str, model: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "none")
    own = {"model": {"model": place}, "adapter": {"lora": {"adapter": place}}}[kind]
    policies = {"solver": {}, "checker": {"frozen": frozen, **own}}
    with pytest.raises((ValueError, OSError), match=r"policies\.checker: "):
        open_training(team(model, tmp_path / "run", policies), judge=noisy)


def test_what_a_policy_does_not_learn_from_is_said(model: Path, tmp_path: Path) -> None:
    """The solver's rewards are equal; the checker takes no part, and never learns."""

    async def equal(actors: Any, example: Any) -> Any:
        return [t.replace(reward=1.0) for t in (await apart(actors, example))[::2]]

    said = Hears()
    chosen = team(model, tmp_path / "run", run={"steps": 1})
    with open_training(chosen, judge=noisy, episode=equal, callbacks=said) as run:
        train(run)
    told = "\n".join(map(str, said.told))
    assert "policy solver: the rewards of every group are equal" in told
    assert "no optimiser step" in told
    assert "policy checker: no samples to learn from" in told
    assert "policy checker never learnt: it had 0 of 2 groups" in told
    assert "policy solver never" not in told
    assert "policy solver: no samples" not in told


def test_learners_end_where_the_run_cannot_be_opened(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two flows in an engine that both policies share; their learners have started by then."""
    started, begin = list[LearnerProcess](), LearnerProcess.__post_init__

    def noted(self: LearnerProcess) -> None:
        begin(self)
        started.append(self)

    monkeypatch.setattr(LearnerProcess, "__post_init__", noted)
    flows = {"solver": "quest", "checker": "block_mean"}
    policies = {
        name: {"lora": {"rank": 2}, "rollout": {"attention": SPARSE | {"flow": flow}}}
        for name, flow in flows.items()
    }
    with pytest.raises(ValueError, match="one flow"):
        open_training(team(model, tmp_path / "run", policies, run={"loop": "async"}))
    assert len(started) == 2
    for learner in started:
        with pytest.raises(ProcessLookupError):
            os.kill(learner.pid, 0)


def test_what_is_odd_about_a_policy_is_said(model: Path, tmp_path: Path) -> None:
    """A schedule that is never sparse, and more groups to a batch than two rounds have."""
    sparse = {"rollout": {"attention": {"budget": 4096}}}
    policies = {"solver": {"prompts": 5}, "checker": {"prompts": 4, **sparse}}
    said = list[str]()
    open_training(team(model, tmp_path / "run", policies), judge=noisy, report=said.append).close()
    assert any(text.startswith("policy checker:") and "never sparse" in text for text in said)
    assert [text.split()[1] for text in said if "will not learn" in text] == ["solver"]


KILLED = """
import sys
from sparrow.dataflow.local.loop import open_training, train
from sparrow.schema.train import TrainConfig
from support.training import noisy

with open_training(TrainConfig.model_validate_json(sys.argv[1]), judge=noisy) as run:
    train(run)
"""


def test_a_run_that_was_killed_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """kill -9 after a checkpoint, whatever it was doing then."""
    policies = {"solver": {"prompts": 1}, "checker": {"lora": {"rank": 2}, "prompts": 3}}
    longer = {"steps": 8, "save_every": 2}
    whole = trained(team(model, tmp_path / "whole", policies, run=longer))
    chosen = team(model, tmp_path / "killed", policies, run=longer)
    words = [sys.executable, "-c", KILLED, chosen.model_dump_json()]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    latest = Checkpoints(tmp_path / "killed" / "checkpoints", 1).latest
    while (latest() or 0) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run = trained(chosen)
    most = 0.0 if rows_are_independent() else 0.05  # a last bit may change a token
    if not most:
        assert timeless(tmp_path / "whole") == timeless(tmp_path / "killed")
    for name in policies:
        expected = weights(whole, name)
        for key, value in weights(run, name).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=most)
