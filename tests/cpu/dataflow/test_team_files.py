"""What a run of several policies leaves: metrics, actions, replays, models by name."""

from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.training import SPARSE, config, metrics, noisy

from sparrow import load
from sparrow.dataflow.evaluation import find_run, load_policy
from sparrow.dataflow.local.loop import open_training, replay, train
from sparrow.dataflow.push import model_files
from sparrow.dataflow.run_files import read_rollouts
from sparrow.files import read_lines
from sparrow.models import hf_views
from sparrow.models.sources import locate
from sparrow.schema.run_folder import read_run

POLICIES: dict[str, Any] = {
    "solver": {"lora": {"rank": 4}, "prompts": 1},
    "checker": {
        "lora": {"rank": 2},
        "prompts": 3,
        "rollout": {"attention": SPARSE},
        "gate": {"mode": "warn", "sample": 4, "max_kl": 1e-12, "patience": 1},
    },
    "opponent": {"frozen": True},
}


def trained(model: Path, out: Path, steps: int) -> Path:
    chosen = config(
        model,
        out,
        rollout={"episode": "support.teams:apart"},
        gate={"mode": "off"},
        validation={"every": 3, "prompts": 2, "first": 0},
        run={"steps": steps, "save_every": 1, "keep": 9},
        policies=POLICIES,
    )
    with open_training(chosen, judge=noisy) as run:
        train(run)
    return out


@pytest.fixture(scope="module")
def team(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of two prompts: the solver learns twice in each, the checker in two."""
    return trained(model, tmp_path_factory.mktemp("team") / "run", 3)


def test_tokens_of_each_are_those_of_its_replies(team: Path) -> None:
    lines = metrics(team)
    for number, line in enumerate(lines):
        played = [t for group in read_rollouts(team, number) for t in group.trajectories]
        for policy, name in enumerate(POLICIES):
            sampled = sum(int((t.policy_id == policy).sum()) for t in played)
            assert line[f"policy/{name}/tokens_sampled"] == sampled
        solver = line["policy/solver/tokens_learnt"]  # of two updates
        assert solver == line["policy/solver/tokens_sampled"] > 0
    learnt = [line["policy/checker/tokens_learnt"] > 0 for line in lines]
    assert learnt == [line["policy/checker/steps"] > 0 for line in lines] == [False, True, True]
    assert "policy/opponent/steps" not in lines[0]


def test_a_gate_of_ones_own_measures_though_that_of_the_run_is_off(team: Path) -> None:
    line = metrics(team)[-1]
    assert line["policy/checker/sparse/accept_tokens"] > 0
    assert line["policy/solver/sparse/accept_tokens"] == 0


def test_a_schedule_of_one_is_not_that_of_the_run(model: Path, tmp_path: Path) -> None:
    sparse = {"lora": {"rank": 2}, "rollout": {"attention": SPARSE}}
    chosen = {"solver": sparse, "checker": {"frozen": True}}
    rollout = {"episode": "support.teams:apart"}
    with open_training(config(model, tmp_path / "run", rollout=rollout, policies=chosen)) as run:
        said = "\n".join(run.header())
    assert not (tmp_path / "run" / "schedule.json").exists()
    assert "policy checker" in said
    assert said.count("budget 48") == 1


def test_actions_are_of_a_round_and_a_policy_and_stay_on_resume(
    team: Path, model: Path, tmp_path: Path
) -> None:
    actions = list(read_lines(team / "actions.jsonl"))
    assert [action["step"] for action in actions] == [1]  # of its first update, in round 1
    assert actions[0]["reason"].startswith("policy checker: ")
    assert len(read_run(team).policies["checker"].actions) == 1
    assert not read_run(team).policies["solver"].actions
    trained(model, tmp_path / "parts", 2)
    parts = trained(model, tmp_path / "parts", 3)
    resumed = [a for a in read_lines(parts / "actions.jsonl") if a["kind"] != "changed"]
    assert resumed == actions


def test_a_round_done_again_gives_the_same_tokens_and_numbers(team: Path, tmp_path: Path) -> None:
    """All but what the gates see; the checker learns from what it had not learnt before, too."""
    found = replay(team, 2, "rollout", allow_code=True, out=tmp_path)
    assert (found["kept"], found["same_tokens"]) == (16, 16)
    assert {*read_rollouts(tmp_path, 2)[0].trajectories[0].policy_id.tolist()} == {-1, 0}
    before, found = metrics(team)[2], replay(team, 2, "train", allow_code=True)
    parts = ("actor/", "critic/", "mismatch/", "tokens", "steps", "pending", "version", "staleness")
    names = [f"policy/{name}/{part}" for name in POLICIES for part in parts]
    compared = [key for key in before if key.startswith(tuple(names))]
    assert {key: found[key] for key in compared} == {key: before[key] for key in compared}
    assert len(compared) > 40


def test_a_model_is_chosen_by_the_name_of_its_policy(team: Path) -> None:
    for folder in (team, team / "model"):
        with pytest.raises(ValueError, match=r"model/checker, .*model/solver"):
            locate(folder)
    run = find_run(str(team))
    assert run is not None
    assert find_run(str(team / "model" / "solver")) == run == find_run(str(team / "model"))
    place: Any = {"dtype": "float32", "device": "cpu"}
    solver, checker = (
        hf_views(load_policy(team, "latest", policy=name, **place))
        for name in ("solver", "checker")
    )
    written = hf_views(load(team / "model" / "solver", **place))
    assert all(value.equal(solver[key]) for key, value in written.items())
    assert not all(value.equal(checker[key]) for key, value in written.items())
    for wrong in (None, "opponent", "judge"):
        with pytest.raises(ValueError, match="solver, checker"):
            load_policy(team, "latest", policy=wrong, **place)
    with model_files(team, None, print, policy="checker") as files:
        assert {file.parent.name for file in files} == {"checker"}
    with (
        pytest.raises(ValueError, match="checker, solver"),
        model_files(team, None, print),
    ):
        pass


def test_policies_are_evaluated_by_name(team: Path, done: Path) -> None:
    """On the held-out rows of the run, whether its model or a checkpoint."""
    for more in ((), ("--checkpoint", "latest")):
        ended = cli.passed("eval", team, "--policy", "checker", "--json", *more)
        assert '"rows": 2' in ended.stdout
    assert "solver" in cli.refused("eval", team, "--checkpoint", "latest")
    assert "--policy" in cli.refused("eval", done, "--policy", "solver")
