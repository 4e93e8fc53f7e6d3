"""The asynchronous loop: equal to the synchronous one at staleness 0, bounded above, and every
prompt ends once whatever is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rewards import row_file, verl
from support.training import Hears, lines, metrics, row_config, weights_of

from sparrow.dataflow.asynchronous.prompt_ledger import LedgerAudit, PromptLedger
from sparrow.dataflow.asynchronous.rollout import AsyncRolloutSide
from sparrow.dataflow.local.loop import replay, train
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.run_files import lines_by_step, read_rollouts
from sparrow.functions import register
from sparrow.schema.asynchronous import PROMPTS
from sparrow.schema.train import TrainConfig

OWN_TO_A_LOOP = ("timing_s/", "perf/", "async/")
EPISODES = "support.async_episodes"
PROMPT = [{"role": "user", "content": "1 + 2 = ?"}]


def run_whole(settings: TrainConfig, watch: Hears | None = None) -> Run:
    with open_run(settings, callbacks=watch or Hears()) as run:
        train(run)
    return run


def audit(folder: Path) -> LedgerAudit:
    with PromptLedger(folder / PROMPTS) as ledger:
        return ledger.audit(len(metrics(folder)))


def common(folder: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on time."""
    return [
        {name: value for name, value in step.items() if not name.startswith(OWN_TO_A_LOOP)}
        for step in metrics(folder)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_staleness_0_is_the_synchronous_loop(
    chat_model: Path, rows: Path, tmp_path: Path, algorithm: str
) -> None:
    weights = {}
    for loop in ("sync", "async"):
        settings = row_config(
            chat_model,
            tmp_path / loop,
            rows,
            loop,
            algorithm={"name": algorithm, "refills": 100},
            dispatch={"staleness": 0},
            gate={"mode": "off"} if algorithm == "dapo" else {},
        )
        weights[loop] = weights_of(run_whole(settings))
    for name, weight in weights["sync"].items():
        assert torch.equal(weight, weights["async"][name]), name
    left_out = {"data/rounds"} if algorithm == "dapo" else set()
    for here, there in zip(common(tmp_path / "sync"), common(tmp_path / "async"), strict=True):
        assert {k: v for k, v in here.items() if k not in left_out} == {
            k: v for k, v in there.items() if k not in left_out
        }
    for step in range(4):
        pairs = zip(
            read_rollouts(tmp_path / "sync", step),
            read_rollouts(tmp_path / "async", step),
            strict=True,
        )
        assert all(here == there for here, there in pairs)
    assert audit(tmp_path / "async").problems == ()


def test_staleness_is_bounded_and_every_token_says_its_version(
    chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    dispatch = {"staleness": 2}
    run_whole(row_config(chat_model, tmp_path, rows, "async", dispatch=dispatch, run={"steps": 6}))
    steps = metrics(tmp_path)
    assert len(steps) == 6
    assert 0 < max(step["async/staleness_max"] for step in steps) <= 2
    for step in range(6):
        for group in read_rollouts(tmp_path, step):
            for trajectory in group.trajectories:
                versions = trajectory.weight_version[trajectory.loss_mask]
                assert (versions <= step).all()
                assert (versions >= step - 2).all()
    found = audit(tmp_path)
    assert found.problems == ()
    assert found.used == 6 * 2


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_no_prompt_is_lost(
    chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    heard, kills = Hears(), 2
    held = row_file(tmp_path / "held.jsonl", [verl(n, prompt=PROMPT) for n in range(2)])
    settings = row_config(
        chat_model,
        tmp_path,
        rows,
        "async",
        dispatch={"staleness": 1},
        run={"steps": 6},
        validation={"every": 3, "prompts": 2, "rows": str(held)},
    )
    with open_run(settings, callbacks=heard) as run:
        side = run.rollout
        assert isinstance(side, AsyncRolloutSide)

        def kill_workers() -> None:
            for step in range(1, kills + 1):
                while run.step < 2 * step - 1 or side.coordinator.worker_pid is None:
                    time.sleep(0.02)
                os.kill(side.coordinator.worker_pid, signal.SIGKILL)

        killing = threading.Thread(target=kill_workers, daemon=True)
        killing.start()
        train(run)
        killing.join(1.0)
        assert side.coordinator.restarts >= kills
    assert sum("is started again" in text for text in heard.told) >= kills
    assert len(metrics(tmp_path)) == 6
    assert audit(tmp_path).problems == ()
    assert {line["step"] for line in lines(tmp_path / "validation.jsonl")} == {0, 3, 6}


@pytest.mark.slow
def test_a_group_that_never_ends_and_one_that_fails_are_counted(
    chat_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs").mkdir()
    monkeypatch.setenv("SPARROW_TEST_HANGS", str(tmp_path / "hangs"))
    settings = row_config(
        chat_model,
        tmp_path / "run",
        rows,
        "async",
        rollout={"episode": f"{EPISODES}:third_hangs_once"},
        dispatch={"staleness": 1, "deadline": 2.0},
        run={"steps": 3},
    )
    run_whole(settings)
    found = audit(tmp_path / "run")
    assert found.problems == ()
    assert any(count.reason == "deadline" for count in found.counts)
    assert sum(step["async/again"] for step in metrics(tmp_path / "run")) > 0

    failing = {"episode": f"{EPISODES}:fifth_fails"}
    run_whole(row_config(chat_model, tmp_path / "failing", rows, "async", rollout=failing))
    found = audit(tmp_path / "failing")
    assert found.problems == ()
    assert {count.reason for count in found.counts} >= {"used", "failed too often"}

    always = {"episode": f"{EPISODES}:always_fails"}
    with pytest.raises(EpisodeFailed, match="the tool is down"):
        run_whole(row_config(chat_model, tmp_path / "always", rows, "async", rollout=always))
    assert audit(tmp_path / "always").problems == ()


PROGRAM = """
import sys
from sparrow.dataflow.local.loop import replay, train
from sparrow.dataflow.local.run import open_run
from sparrow.schema.train import TrainConfig
with open_run(TrainConfig.model_validate_json(open(sys.argv[1]).read())) as run:
    train(run)
"""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_killed_run_resumes(chat_model: Path, rows: Path, tmp_path: Path, staleness: int) -> None:
    """At staleness 0 to the same bits; above, which version draws a token depends on time."""
    dispatch, whole = {"staleness": staleness}, tmp_path / "whole"
    killed = row_config(
        chat_model, tmp_path / "killed", rows, "async", dispatch=dispatch, run={"steps": 5}
    )
    file, written = tmp_path / "config.json", tmp_path / "killed" / "metrics.jsonl"
    file.write_text(killed.model_dump_json(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM, str(file)]
    for step in (1, 3):
        process = subprocess.Popen(words, env=environment)
        while len(lines_by_step(written)) <= step and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
    run_whole(killed)
    assert [step["step"] for step in metrics(tmp_path / "killed")] == [*range(5)]
    found = audit(tmp_path / "killed")
    assert found.problems == ()
    assert any("taken again" in count.reason for count in found.counts)
    if staleness == 0:
        run_whole(row_config(chat_model, whole, rows, "async", dispatch=dispatch, run={"steps": 5}))
        for step in range(5):
            here, there = read_rollouts(whole, step), read_rollouts(tmp_path / "killed", step)
            assert all(a == b for a, b in zip(here, there, strict=True))
        assert common(whole) == common(tmp_path / "killed")


def test_replay_and_a_ledger_that_is_missing(chat_model: Path, rows: Path, tmp_path: Path) -> None:
    """Nothing repeats a rollout, and no checkpoint is resumed over another ledger."""
    folder = tmp_path / "run"
    settings = row_config(chat_model, folder, rows, "async", run={"steps": 2, "loop": "async"})
    run_whole(settings)
    before = (folder / PROMPTS).read_bytes()
    with pytest.raises(ValueError, match="cannot be repeated"):
        replay(folder, None, "rollout", allow_code=True)
    assert replay(folder, 0, "train", allow_code=True)["step"] == 0
    assert (folder / PROMPTS).read_bytes() == before
    (folder / PROMPTS).unlink()
    more = row_config(chat_model, folder, rows, "async", run={"steps": 3, "loop": "async"})
    with pytest.raises(ValueError, match="not the ledger of the checkpoint"):
        run_whole(more)


def test_objects_of_this_process_are_refused(chat_model: Path, rows: Path, tmp_path: Path) -> None:
    def own(groups: Any) -> Any:
        return [group.rewards for group in groups]

    text = register(own, "algorithm.advantage")
    settings = row_config(chat_model, tmp_path, rows, "async", algorithm={"advantage": text})
    with pytest.raises(ValueError, match=r"needs algorithm\.advantage as module:function"):
        run_whole(settings)
