"""`sparrow status`: running, ended, stopped or stale, from files and the lock; nothing written."""

import json
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import async_runs, cli
from support.run_folders import demo, team_training, training, write_lines

import sparrow
from sparrow.cli import looking
from sparrow.dataflow.status import run_status
from sparrow.files import FolderLock, write_sums
from sparrow.schema.asynchronous import STATUS, AsyncStatus


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A synchronous run of 12 steps, of how many its settings do not say."""
    return training(tmp_path / "run")


def test_a_synchronous_run(run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    found = run_status(run)
    assert (found.state, found.loop, found.process) == ("stopped", "sync", None)
    assert (found.step, found.steps, found.checkpoint) == (12, None, None)
    assert (found.seconds_per_step, found.seconds_left) == (6.0, None)
    assert [(held.step, held.value) for held in found.accuracy] == [(0, 0.55), (12, 0.9)]
    assert [action.kind for action in found.actions] == ["raise"]  # no change of settings
    assert found.metrics["critic/score/mean"] == pytest.approx(0.72)
    assert found.live is None
    assert sorted(path.name for path in run.iterdir()) == before  # not even a lock


def test_each_of_several_policies(tmp_path: Path) -> None:
    """Its clock is that of the last round, its reward that of its last update."""
    folder = team_training(tmp_path / "run", steps=5)
    found = {policy.name: policy for policy in run_status(folder).policies}
    assert list(found) == ["solver", "checker", "opponent"]
    checker = found["checker"].metrics
    assert (checker["version"], checker["pending"]) == (2.0, 1.0)
    assert checker["critic/score/mean"] == pytest.approx(0.3)
    assert [(held.step, held.value) for held in found["checker"].accuracy] == [(0, 0.25), (5, 0.75)]
    said = cli.run("status", folder).said
    assert "version 2, 1 groups pending" in said
    assert "frozen" in said


def test_a_run_that_has_ended_or_is_running(run: Path) -> None:
    write_sums(run, ["metrics.jsonl"])
    with pytest.raises(ValueError, match="is not listed"):
        run_status(run)  # as in a report: files of an ended run are verified
    names = ("metrics", "validation", "actions", "schedule", "config.resolved")
    write_sums(run, [path.name for path in run.iterdir() if path.stem in names])
    assert run_status(run).state == "ended"
    with closing(FolderLock(run)):
        found = run_status(run)
    assert (found.state, found.process) == ("running", os.getpid())
    assert run_status(run).state == "ended"


def test_time_left_of_a_running_run(tmp_path: Path) -> None:
    folder = async_runs.run(tmp_path / "run", 4)
    lines = [{"step": n, "timing_s/step": 100.0 if n == 0 else 7.0} for n in range(4)]
    write_lines(folder / "metrics.jsonl", lines)
    async_runs.save_checkpoint(folder, 2)
    async_runs.save_checkpoint(folder, 4)
    with closing(FolderLock(folder)):
        found = run_status(folder)
        shown = cli.passed("status", folder).stdout
    assert (found.loop, found.step, found.steps, found.checkpoint) == ("async", 4, 6, 4)
    assert (found.seconds_per_step, found.seconds_left) == (7.0, 14.0)
    assert "4 of 6, 7 s each, 14 s left" in shown


def test_an_asynchronous_run(tmp_path: Path) -> None:
    folder = async_runs.run(tmp_path / "run", 3)
    status = async_runs.status()
    status.save(folder)
    assert AsyncStatus.load(folder) == status
    with closing(FolderLock(folder)):
        found = run_status(folder, now=status.time + 1)
        assert (found.state, found.live, found.notes) == ("running", status, ())
        assert found.age == pytest.approx(1)
        (note,) = run_status(folder, now=status.time + 100).notes
        assert "may hang" in note
        shown = cli.passed("status", folder).stdout
    for part in (
        "learning; evaluations waiting: 1",
        "version 3, staleness at most 2",
        "5 prompts under way, 1 groups ready, 4 a step",
        "rollout 25%",
        "7 (7 uninformative); 2 dispatched again",
        "process 4343; restarts: 1",
        "far (another machine): version 2, bfloat16, 3 prompts under way, heard",
        "new: loading weights, 0 prompts under way",
        "sparrow worker --connect http://127.0.0.1:7777",
    ):
        assert part in shown
    assert "learner" not in shown  # not measured yet


def test_a_status_without_a_process_is_stale(tmp_path: Path) -> None:
    folder = async_runs.run(tmp_path / "run", 3)
    for phase, state in (("learning", "stale"), ("stopped", "stopped"), ("ended", "stopped")):
        async_runs.status(phase=phase, time=time.time() - 500).save(folder)
        found = run_status(folder)
        assert (found.state, found.process) == (state, None)
        assert bool(found.notes) == (state == "stale")
        ended = cli.run("status", folder)
        assert ended.code == 1
        assert f"run: {state}" in ended.stdout
        for gone in ("4343", "far", "--connect"):  # its workers
            assert gone not in ended.stdout
    async_runs.status(time=time.time() - 500).save(folder)
    assert (
        "'learning', 500 s ago, but no process has the run open" in cli.run("status", folder).said
    )


def test_json_and_python(run: Path) -> None:
    shown = json.loads(cli.run("status", run, "--json").stdout)
    assert (shown["state"], shown["step"], shown["live"]) == ("stopped", 12, None)
    assert sparrow.status(run).step == 12
    assert sparrow.status(run=str(run)).state == "stopped"


def test_a_demo_and_what_is_no_training(tmp_path: Path) -> None:
    assert run_status(demo(tmp_path / "demo")).run.endswith("demo/train")
    assert "not a run directory of sparrow train" in cli.refused("status", tmp_path)
    assert "leave out --json" in cli.refused("status", tmp_path, "--watch", "--json")


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    async_runs.Played(tmp_path / "run").close()
    found = run_status(tmp_path / "run")
    assert (found.step, found.seconds_per_step, found.metrics) == (0, None, {})
    assert "0 of 6" in cli.run("status", tmp_path / "run").stdout


def test_watching_ends_with_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "EVERY", 0.02)
    lock = FolderLock(run)
    timer = threading.Timer(0.3, lock.close)
    timer.start()
    try:
        ended = cli.run("status", run, "--watch")
    finally:
        timer.join()
    assert ended.code == 1
    assert "stopped" in ended.stdout


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"phase": "x\\u001b[2J"}', "nul\0", json.dumps({"time": "now"})],
)
def test_a_damaged_status_is_named(content: str, run: Path) -> None:
    (run / STATUS).write_text(content)
    said = cli.refused("status", run)
    assert STATUS in said
    assert "\x1b" not in said


def test_a_status_of_a_later_version_is_named(run: Path) -> None:
    async_runs.status().save(run)
    document = json.loads((run / STATUS).read_text())
    del document["digest"]
    (run / STATUS).write_text(json.dumps(document | {"more": 1}))
    assert "more" in cli.refused("status", run)
