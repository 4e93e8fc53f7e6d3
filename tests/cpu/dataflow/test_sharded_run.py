"""`sparrow train` in two processes against one: the same rollouts, numbers, files and ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from support.products import rows_are_independent
from support.ranks import PATIENCE, on_ranks
from support.sharded_runs import STEPS, distilled, ended, of, plain, several
from support.training import lines, metrics, model_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # as the ranks have: other sums round otherwise
    found = tmp_path_factory.mktemp("runs")
    model_folder(found / "model")
    return found


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    assert ended(of(place / "model", place / "alone")) == (str(place / "alone/model"), STEPS)
    return place / "alone"


def torchrun(place: Path, folder: Path, fault: str = "") -> "subprocess.CompletedProcess[str]":
    """The command of a user, on a free port."""
    file = place / f"{folder.name}.toml"
    file.write_text(tomli_w.dumps(plain(place / "model", folder)))
    words = ["--standalone", "--nproc_per_node=2", "-m", "sparrow", "train", str(file)]
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT / 'tests'}"
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SPARROW_RANK_FAULT": fault}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, **own, "COLUMNS": "300"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def two(place: Path) -> Path:
    done = torchrun(place, place / "two")
    assert done.returncode == 0, done.stderr
    (place / "two.log").write_text(done.stdout)
    return place / "two"


@pytest.fixture(scope="module")
def ranks(place: Path, alone: Path) -> list[dict[str, Any]]:
    """Runs by ranks, of which the first goes on where one process was after its first step."""
    cut_back(alone, place / "resumed")
    return on_ranks(several, place)


def cut_back(source: Path, target: Path) -> None:
    """A run as it was after its first step, with what was written since in the way."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "model", ignore_errors=True)
    for checkpoint in (target / "checkpoints").glob("step_*"):
        if checkpoint.name > "step_000001":
            shutil.rmtree(checkpoint)


def assert_same_rollout(one: Path, other: Path, step: int) -> None:
    """Bit for bit, unless the rounding of products depends on how many rows they have."""
    rounding = 0.0 if rows_are_independent() else 1e-4
    mine, theirs = (lines(folder / f"rollouts/step_{step:06d}.jsonl") for folder in (one, other))
    for left, right in zip(mine, theirs, strict=True):
        logprobs = [row.pop("rollout_logprob") for row in (left, right)]
        assert logprobs[0] == pytest.approx(logprobs[1], rel=rounding, abs=rounding)
        assert {**left, "digest": ""} == {**right, "digest": ""}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_near(one: dict[str, Any], other: dict[str, Any], rel: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value == pytest.approx(other[name], rel=rel, abs=rel), name


def test_rollouts_numbers_and_files_are_those_of_one_process(alone: Path, two: Path) -> None:
    """Up to rounding; later rollouts see weights that differ by it."""
    assert_same_rollout(two, alone, 0)
    names = [{str(p.relative_to(f)) for p in f.rglob("*")} for f in (alone, two)]
    assert names[0] == names[1]
    assert len(lines(two / "validation.jsonl")) == len(lines(alone / "validation.jsonl")) == 3
    mine, theirs = metrics(two), metrics(alone)
    assert [line["step"] for line in mine] == list(range(STEPS))
    assert_near(mine[0], theirs[0], rel=1e-4)
    assert theirs[0]["sparse/accept_p05"] < 0.999  # acceptance was measured
    for name in ("sparse/accept_p05", "actor/grad_norm", "actor/entropy"):
        assert mine[1][name] == pytest.approx(theirs[1][name], rel=0.05), name


def test_the_weights_at_the_end_are_close(alone: Path, two: Path) -> None:
    """AdamW makes whole steps of 1e-3 of gradients that are rounding, so a few differ by more."""
    mine, theirs = (load_file(folder / "model/model.safetensors") for folder in (two, alone))
    assert mine.keys() == theirs.keys()
    gaps = torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in theirs])
    assert gaps.max() <= 2 * STEPS * 1e-3
    assert gaps.quantile(0.9) < 1e-4


def test_one_rank_speaks(place: Path, two: Path) -> None:
    said = (place / "two.log").read_text()
    assert said.count("reward") == 1  # the head of the table
    assert said.count(str(two / "model")) == 1
    assert said.count("rollout: sparse") == 1


def test_ranks_go_on_where_one_process_was(
    place: Path, alone: Path, two: Path, ranks: list[dict[str, Any]]
) -> None:
    """And the reverse: from equal weights the same answers, however many ranks there were."""
    assert all(one["resumed"] == (str(place / "resumed/model"), STEPS) for one in ranks)
    assert_same_rollout(place / "resumed", alone, 1)
    mine, theirs = metrics(place / "resumed"), metrics(alone)
    assert mine[0] == theirs[0]
    assert_near(mine[1], theirs[1], rel=1e-4)
    cut_back(two, place / "single")
    expected = (str(place / "single/model"), STEPS)
    assert ended(of(place / "model", place / "single")) == expected
    assert_same_rollout(place / "single", two, 1)


def test_an_episode_that_fails_on_one_rank_ends_all_and_is_named(
    place: Path, ranks: list[dict[str, Any]]
) -> None:
    for one in ranks:
        told, step = one["raise"]
        assert told.startswith("EpisodeFailed: rank 1: step 1: the episode of assignments")
        assert "no such tool" in told
        assert step == 1
    assert steps(place / "raise") == ["step_000001"]


def test_one_rank_s_wish_to_stop_is_everybody_s(
    place: Path, alone: Path, ranks: list[dict[str, Any]]
) -> None:
    """All end after the same step, with a checkpoint, from which they go on."""
    (first, step), (second, other) = (one["stop"] for one in ranks)
    assert first == second == "Stopped: "
    assert step == other
    assert f"step_{step:06d}" in steps(place / "stop")
    assert all(one["stopped"] == (str(place / "stop/model"), STEPS) for one in ranks)
    assert_same_rollout(place / "stop", alone, 0)
    assert len(metrics(place / "stop")) == STEPS


def test_fewer_prompts_than_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for message, step in (rank["idle"] for rank in ranks):
        assert (message.startswith("ValueError: rollout.prompts"), step) == (True, -1)


def test_a_rank_that_dies_ends_the_others(place: Path) -> None:
    """The other says that one is gone, torchrun which; the steps before are not lost."""
    done = torchrun(place, place / "killed", fault="kill")
    assert done.returncode != 0
    assert "error: rank 0: one of 2 ranks has ended" in done.stderr
    cause = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in cause
    assert "exitcode  : -9" in cause
    assert steps(place / "killed") == ["step_000001"]


@pytest.mark.parametrize("teacher", ["new", "old"])
def test_the_actors_adapter_is_that_of_one_process(
    teacher: str, place: Path, ranks: list[dict[str, Any]]
) -> None:
    """Its gradient is the sum over ranks; policy and adapter are those of one, up to rounding."""
    folder, one = place / f"distilled-{teacher}", place / f"one-{teacher}"
    assert {str(rank[teacher]) for rank in ranks} == {str((str(folder / "model"), 2))}
    ended(distilled(place / "model", one, teacher))
    for name in ("model/model.safetensors", "actor/adapter_model.safetensors"):
        mine, theirs = load_file(folder / name), load_file(one / name)
        assert mine.keys() == theirs.keys()
        for key, weight in mine.items():
            torch.testing.assert_close(weight, theirs[key], atol=2e-3, rtol=0)
    assert metrics(folder)[0]["distill/loss"] == pytest.approx(
        metrics(one)[0]["distill/loss"], rel=1e-3
    )
