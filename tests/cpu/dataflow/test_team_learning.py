"""What each of several policies learns from: masks, rewards, groups, advantages, acceptance."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.teams import LORA, OWN, apart, team, trained
from support.training import metrics, noisy

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.episodes import build_trajectory, shaped_reward
from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.run_files import read_rollouts
from sparrow.dataflow.team.member import Member, policy_group
from sparrow.dataflow.team.run import TeamRun
from sparrow.schema.episode import Group, Trajectory, Turn
from sparrow.schema.sampling import Completion
from sparrow.tasks.base import Verdict

Json = dict[str, Any]

# By hand.


def shared(rewards: dict[str, float], team_reward: float | None = None) -> Trajectory:
    """Two tokens of a prompt, two of policy 0, one of a tool, one of policy 1."""
    policy = np.array([-1, -1, 0, 0, -1, 1], np.int16)
    return Trajectory(
        prompt_id="p",
        ids=np.arange(6, dtype=np.int32),
        loss_mask=policy >= 0,
        rollout_logprob=np.where(policy >= 0, -0.5, 0).astype(np.float32),
        weight_version=np.where(policy >= 0, 3, -1).astype(np.int32),
        policy_id=policy,
        turns=(
            Turn(start=0, stop=2, role="user"),
            Turn(start=2, stop=4, role="assistant"),
            Turn(start=4, stop=5, role="tool"),
            Turn(start=5, stop=6, role="assistant"),
        ),
        reward=0.25,
        rewards=rewards,
        team_reward=team_reward,
    )


def test_tokens_of_others_are_masked_and_rewards_are_ones_own() -> None:
    group = Group(prompt_id="p", trajectories=(shared({"b": 1.0}), shared({"a": 0.5})))
    first, second = (policy_group(group, name, number) for number, name in enumerate("ab"))
    assert first is not None
    assert second is not None
    for own, places in ((first, [2, 3]), (second, [5])):
        for trajectory in own.trajectories:
            assert np.flatnonzero(trajectory.loss_mask).tolist() == places
    assert [t.reward for t in first.trajectories] == [0.25, 0.5]
    assert [t.reward for t in second.trajectories] == [1.0, 0.25]
    assert policy_group(group, "c", 2) is None


def test_rewards_of_the_team_are_mixed_in() -> None:
    group = Group(prompt_id="p", trajectories=(shared({"a": 0.5}, 2.0),))
    for share, reward in ((0.0, 0.5), (0.25, 0.875), (1.0, 2.0)):
        own = policy_group(group, "a", 0, share)
        assert own is not None
        assert own.trajectories[0].reward == reward


def opened(chosen: Any) -> TeamRun:
    run = open_training(chosen, judge=noisy)
    assert isinstance(run, TeamRun)
    return run


def learnt(member: Member) -> Any:
    """The samples of its next update."""
    assert member.learner is not None
    batch = member.due()
    assert batch is not None
    return member.learner.learn(batch, None, member.version).batch.samples


def test_advantages_of_shared_trajectories_are_those_of_each(model: Path, tmp_path: Path) -> None:
    """Solver: 1, 0, 1/2, 1/2, and 1/2 where it is alone: grpo's mean and deviation are 1/2 and
    1/sqrt 8. Checker: half of 0, 1, 1, 0 and half of the team's 1, 1, 0, 0; dr-grpo's mean is 1/2.
    """
    mean = {"algorithm": {"name": "dr-grpo"}, "prompts": 1, "team": 0.5}
    policies = {"solver": {"prompts": 1}, "checker": mean}
    given = zip((1.0, 0.0, 0.5, 0.5), (0.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0), strict=True)
    played = [shared({"solver": one, "checker": other}, both) for one, other, both in given]
    own = {"policy_id": np.array([-1, -1, 0, 0, -1, 0], np.int16), "rewards": {}, "reward": 0.5}
    alone = played[0].replace(**own)
    group = Group(prompt_id="p", trajectories=(*played, alone))
    with opened(team(model, tmp_path / "run", policies)) as run:
        for member in run.learning:
            member.take(0, group)
        solver, checker = map(learnt, run.learning)
    far = 0.5 * np.sqrt(8)
    assert [s.advantage for s in solver] == pytest.approx([far, -far, 0, 0, 0], abs=1e-4)
    assert [s.advantage for s in checker] == [0, 0.5, 0, -0.5]
    masks = [np.flatnonzero(sample.loss_mask).tolist() for sample in (*solver, *checker)]
    assert masks == [[2, 3]] * 4 + [[2, 3, 5]] + [[5]] * 4


def test_an_overlong_answer_is_punished_for_ones_own_tokens(model: Path, tmp_path: Path) -> None:
    """From one token on, a 39th each: 1 of the solver's two of three, none of the checker's one."""
    soon = {"algorithm": {"name": "reinforce++", "overlong": 39}, "prompts": 1}
    group = Group(prompt_id="p", trajectories=(shared({}), shared({})))
    with opened(team(model, tmp_path / "run", {"solver": soon, "checker": soon})) as run:
        punished = []
        for member in run.learning:
            (own,) = [policy_group(group, member.name, member.number)]
            assert own is not None
            shaped = [shaped_reward(t, member.algorithm, 40) for t in own.trajectories]
            punished.append([0.25 - reward for reward in shaped])
    assert np.array(punished) == pytest.approx(np.array([[1 / 39] * 2, [0.0] * 2]))


# Acceptance.


def answer(prompt: list[int], ids: list[int], policy: int, width: int | None) -> Completion:
    states = None if width is None else np.full((len(ids), width), policy, np.float32)
    return Completion(
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -1, np.float32),
        weight_versions=np.zeros(len(ids), np.int32),
        finish_reason="stop",
        attention="dense",
        hidden=states,
        policy=policy,
    )


@pytest.mark.parametrize("width", [3, None])
def test_hidden_states_of_a_shared_trajectory_are_those_of_each(width: int | None) -> None:
    """Of models of other widths, and where another is not measured, or not at every answer."""
    ids = [5, 6, 7, 8, 9, 10]
    turns = [
        answer(ids[:1], ids[1:3], 0, 2),
        answer(ids[:3], ids[3:4], 1, 5),
        answer(ids[:4], ids[4:5], 0, 2),
        answer(ids[:5], ids[5:6], 1, width and 5),
    ]
    whole = build_trajectory("p", turns, Verdict(1.0, 1.0, ""), "")
    assert whole.policy_id.tolist() == [-1, 0, 0, 1, 0, 1]
    group = Group(prompt_id="p", trajectories=(whole,))
    first, second = (policy_group(group, name, number) for number, name in enumerate("ab"))
    assert first is not None
    assert second is not None
    states = first.trajectories[0].hidden
    assert states is not None
    assert states.tolist() == [[0.0, 0.0]] * 3
    states = second.trajectories[0].hidden
    assert (states is None) == (width is None)


@pytest.mark.parametrize("policies", [OWN, LORA], ids=["own weights", "adapters"])
def test_a_policy_is_measured_on_its_own_tokens_though_the_other_is_not(
    policies: Json, model: Path, tmp_path: Path
) -> None:
    """All but the first token of a reply, which is not drawn by decoding. Dense: all accepted."""
    gates = {"solver": {"mode": "warn", "sample": 8, "least": 1}, "checker": {"mode": "off"}}
    measured = {name: {**own, "gate": gates[name]} for name, own in policies.items()}
    run = {"steps": 1, "rollouts": 1}
    trained(team(model, tmp_path / "run", measured, play="together", run=run))
    (line,) = metrics(tmp_path / "run")
    played = [t for group in read_rollouts(tmp_path / "run", 0) for t in group.trajectories]
    replies = [turn for t in played for turn in t.turns if t.policy_id[turn.start] == 0]
    assert len(replies) == 16
    drawn = sum(turn.stop - turn.start - 1 for turn in replies)
    assert line["policy/solver/sparse/accept_tokens"] == drawn
    assert line["policy/solver/sparse/accept_p01"] > 0.999
    assert line["policy/checker/sparse/accept_tokens"] == 0
    for number, name in enumerate(policies):
        lengths = [(t.policy_id == number).sum() for t in played]
        assert line[f"policy/{name}/response_length/mean"] == np.mean(lengths)


@pytest.mark.parametrize(("policies", "measured"), [(OWN, 0), (LORA, 4)])
def test_states_are_not_read_by_an_lm_head_that_was_trained_since(
    policies: Json, measured: int, model: Path, tmp_path: Path
) -> None:
    """Two updates of a round: the second is of weights that did not sample; LoRA keeps the head."""
    gate = {"mode": "warn", "sample": 8, "least": 1}
    often = {name: {**own, "prompts": 1, "gate": gate} for name, own in policies.items()}
    looks = list[int]()
    with opened(team(model, tmp_path / "run", often, run={"steps": 1})) as run:
        solver = run.members["solver"]
        observe = solver.gate.observe

        def seen(step: int, readings: Any, estimates: Any = ()) -> Any:
            looks.append(len(readings))
            return observe(step, readings, estimates)

        solver.gate.observe = seen
        train(run)
    assert looks == [4, measured]


# Whose tokens they are.


@pytest.mark.parametrize("play", ["by_generate", "by_single_turn"])
def test_tokens_are_of_the_actor_that_sampled_them_however_they_are_joined(
    play: str, model: Path, tmp_path: Path
) -> None:
    run = {"steps": 1, "rollouts": 1}
    trained(team(model, tmp_path / "run", OWN, play=play, run=run))
    played = [t for group in read_rollouts(tmp_path / "run", 0) for t in group.trajectories]
    assert {policy for t in played for policy in t.policy_id.tolist()} == {-1, 1}
    assert metrics(tmp_path / "run")[0]["policy/solver/tokens_sampled"] == 0


# Dynamic sampling, and what an episode may not return.


def test_what_dynamic_sampling_leaves_out_is_counted_and_measured(
    model: Path, tmp_path: Path
) -> None:
    """By accuracy; by rewards of its own, whose accuracy is not known. Its gate sees all."""
    dapo = {"algorithm": {"name": "dapo"}, "prompts": 1, "gate": {"mode": "warn", "sample": 3}}
    policies = {"solver": dapo, "checker": {}}
    all_right = [shared({}).replace(acc=1.0, hidden_of={0: np.zeros((2, 4))}) for _ in range(2)]
    own = [t.replace(rewards={"solver": n / 2}) for n, t in enumerate(all_right)]
    with opened(team(model, tmp_path / "run", policies)) as run:
        solver = run.members["solver"]
        for place in range(4):
            solver.take(place, Group(prompt_id="p", trajectories=tuple(all_right)))
        assert not solver.pending
        solver.take(4, Group(prompt_id="p", trajectories=tuple(own)))
        batch = solver.due()
        assert batch is not None
        assert [len(group.trajectories) for group in batch.groups] == [2]
        assert len(batch.watched) == 3  # of eight: no more than its gate asks for
        assert solver.round_metrics([])["policy/solver/data/uninformative_groups"] == 4


def test_a_policy_without_informative_groups_holds_up_nobody(model: Path, tmp_path: Path) -> None:
    async def right(actors: Any, example: Any) -> list[Trajectory]:
        return [t.replace(acc=1.0) for t in await apart(actors, example)]

    policies = {"solver": {}, "checker": {"algorithm": {"name": "dapo"}}}
    with open_training(team(model, tmp_path / "run", policies), judge=noisy, episode=right) as run:
        train(run)
    lines = metrics(tmp_path / "run")
    assert [line["policy/checker/data/uninformative_groups"] for line in lines] == [2, 2]
    assert [line["policy/checker/version"] for line in lines] == [0, 0]
    assert [line["policy/solver/version"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ({}, {"rewards": {"checkr": 1.0}}),
        ({"team": 0.5}, {"team_reward": None}),
        ({"algorithm": {"name": "dapo"}}, {"acc": None}),
        ({}, {"policy_id": 7}),
    ],
    ids=["another name", "no reward of the team", "no accuracy", "another number"],
)
def test_an_episode_that_a_policy_cannot_learn_from_ends_the_run_with_a_checkpoint(
    own: Json, changes: Json, model: Path, tmp_path: Path
) -> None:
    async def wrong(actors: Any, example: Any) -> list[Trajectory]:
        return [changed(t) for t in await apart(actors, example)]

    def changed(trajectory: Trajectory) -> Trajectory:
        other = np.where(trajectory.policy_id >= 0, changes.get("policy_id", 0), -1)
        own = {"policy_id": other.astype(np.int16)} if "policy_id" in changes else {}
        return trajectory.replace(**changes | own)

    chosen = team(model, tmp_path / "run", {"solver": {}, "checker": own})
    with (
        open_training(chosen, judge=noisy, episode=wrong) as run,
        pytest.raises(EpisodeFailed, match=r"checke?r"),
    ):
        train(run)
    assert Checkpoints(tmp_path / "run" / "checkpoints", 1).latest() == 0
