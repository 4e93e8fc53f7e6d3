"""`sparrow train` as a user meets it: killed, interrupted and started again, it is the same run."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli
from support.forking import Commands
from support.training import SPARSE, lines, metrics, model_folder, settings
from support.waiting import ended, start

from sparrow.dataflow.checkpoints import read_state
from sparrow.schema.loading import save_resolved
from sparrow.schema.train import TrainConfig

TESTS = Path(__file__).parents[1]
STEPS = 5
FULL = 150_000  # bytes that a file may have where a disk is full: less than a checkpoint has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model", size=16)


def config_file(model: Path, folder: Path, **changes: Any) -> Path:
    """Sparse rollout with a gate that acts, a distilled actor, two updates a step, validation,
    deadly functions."""
    distill = {"rank": 2, "rate": 1e-4}
    rollout = {"attention": SPARSE, "episode": "support.toys:episode", "distill": distill}
    chosen = settings(
        model,
        folder / "run",
        rollout={"prompts": 2, "samples": 3, "max_tokens": 32, "max_prompt": 40, "kv_gib": 0.01}
        | rollout,
        algorithm={"surrogate": {"use": "support.toys:deadly"}},
        batch={"tokens": 256, "updates": 2},
        gate={
            "mode": "act",
            "target": 0.99,
            "bin": 32,
            "least": 20,
            "prompts": 2,
            "patience": 1,
            "sample": 4,
        },
        validation={"every": 4, "rows": 1},
        run={"out": str(folder / "run"), "steps": STEPS, "save_every": 2, **changes},
    )
    return save_resolved(TrainConfig.model_validate_json(json.dumps(chosen)), folder)


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as server:
        yield server


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupted, by the command itself."""
    place = tmp_path_factory.mktemp("whole")
    path = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
    file = config_file(model, place)
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    code, said = ended(start(place, "-m", "sparrow", "train", file, **own))
    assert code == 0, said
    assert said.splitlines()[-1] == str(place / "run" / "model")
    return place / "run"


def assert_same_run(one: Path, two: Path) -> None:
    """Weights and files by their bytes; the last state, which has the gate's, value by value."""
    weights = ("model/model.safetensors", "actor/adapter_model.safetensors")
    for name in (*weights, "actions.jsonl", "validation.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert metrics(one) == metrics(two)
    files = [sorted(path.name for path in (run / "rollouts").iterdir()) for run in (one, two)]
    assert files[0] == files[1] == [f"step_{step:06d}.jsonl" for step in range(STEPS)]
    for name in files[0]:
        assert (one / "rollouts" / name).read_bytes() == (two / "rollouts" / name).read_bytes()
    states = [read_state(run / f"checkpoints/step_{STEPS:06d}") for run in (one, two)]
    assert_equal(*states)
    assert states[0]["gate"]["schedule"]["name"].startswith("fixed-48+gate")


def assert_equal(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step_*"))


def test_killed_anywhere_and_started_again_is_the_same_run(
    model: Path, whole: Path, commands: Commands, tmp_path: Path
) -> None:
    """A full disk and SIGKILL: in a rollout, an update, a distillation, a checkpoint."""
    file = config_file(model, tmp_path)
    limited = commands.run(tmp_path, "train", file, most_bytes=FULL)
    assert limited.returncode == 2, limited.stderr
    assert "error:" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert checkpoints(tmp_path) == []
    for where, number, left in (
        ("rollout", 3, ["step_000002"]),
        ("update", 3, ["step_000002"]),  # of step 2: after one call to try it, and two a step
        ("update", 4, ["step_000002"]),  # and a third, in distillation
        ("checkpoint", 4, ["step_000002"]),
    ):
        toy = f"{where} {number} SIGKILL {tmp_path / where}-{number}"
        killed = commands.run(tmp_path, "train", file, toy=toy)
        assert killed.returncode == -signal.SIGKILL, (where, killed.stderr)
        assert checkpoints(tmp_path) == left, where
    assert list((tmp_path / "run" / "checkpoints").glob(".step_000004.*.unfinished"))
    last = commands.run(tmp_path, "train", file)
    assert last.returncode == 0, last.stderr
    assert "after 2 steps" in last.stderr
    assert_same_run(whole, tmp_path / "run")
    assert checkpoints(tmp_path) == ["step_000004", "step_000005"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".step*"))


def test_ctrl_c_saves_and_goes_on(
    model: Path, whole: Path, commands: Commands, tmp_path: Path
) -> None:
    """In a rollout the step is given up, in an update it is finished."""
    file = config_file(model, tmp_path, save_every=100)
    for where, number, steps in (("rollout", 1, 1), ("update", 3, 2)):
        ended = commands.run(
            tmp_path, "train", file, toy=f"{where} {number} SIGINT {tmp_path / where}"
        )
        assert ended.returncode == 130, (where, ended.stderr)
        assert f"after {steps} steps" in " ".join(ended.stderr.split())
        assert checkpoints(tmp_path)[-1] == f"step_{steps:06d}"
        assert len(metrics(tmp_path / "run")) == steps
    assert commands.run(tmp_path, "train", file).returncode == 0
    assert_same_run(whole, tmp_path / "run")


def test_what_was_made_can_be_replayed_and_evaluated(
    whole: Path, commands: Commands, tmp_path: Path
) -> None:
    """Bit for bit, so in a process with as many threads as the run had."""
    replay = ("replay", whole, "--allow-code", "--json")
    found = json.loads(commands.run(tmp_path, *replay, "--step", "4").stdout)
    assert (found["kept"], found["same_tokens"]) == (6, 6)
    found = json.loads(commands.run(tmp_path, *replay, "--part", "train").stdout)
    before = metrics(whole)[4]
    assert found["step"] == 4
    for name in ("actor/pg_loss", "actor/grad_norm", "mismatch/k3", "actor/entropy"):
        assert found[name] == before[name], name
    measured = cli.run(
        "eval", whole, "-t", "assignments", "-l", "100", "-n", "2", "--max-tokens", "20", "--json"
    )
    assert measured.code == 0, measured.said
    assert json.loads(measured.stdout)


def test_mistakes_are_one_message(model: Path, whole: Path, tmp_path: Path) -> None:
    assert "ended" in cli.refused("train", whole.parent / "config.resolved.toml")
    assert len(lines(whole / "metrics.jsonl")) == STEPS
    file = config_file(model, tmp_path)
    for word, name in (
        ("--rollout.episode=nowhere:at_all", "rollout.episode"),
        ("--rollout.max_tokens=250", "256 positions"),
        ("--task=chess", "chess"),
        ("--algorithm.advantage=best", "algorithm.advantage"),
    ):
        assert name in cli.refused("train", file, word)
    assert not (tmp_path / "run").exists()
