"""The run directory: lines by step, cut where a run goes on; rollouts equal when read; a lock."""

import errno
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow.dataflow import run_files as rollouts
from sparrow.dataflow.run_files import RunFiles, read_rollouts, rollout_steps
from sparrow.files import parse_line, read_lines
from sparrow.schema.episode import NOT_SAMPLED, Group, Trajectory, Turn
from sparrow.schema.loading import load_config
from sparrow.schema.run_folder import read_run
from sparrow.schema.train import TrainConfig

CONFIG = TrainConfig.model_validate({"model": {"name": "tiny"}, "data": {"task": "countdown"}})


def open_files(folder: Path) -> RunFiles:
    return RunFiles(folder, tensorboard=False)


def run(folder: Path, first: int, stop: int) -> None:
    """A run that leaves lines, an action and rollouts at every step, from `first` to `stop`."""
    with open_files(folder) as files:
        files.begin(CONFIG, first)
        if first == 0:
            files.validation(0, {"val-core/countdown/acc/mean@1": 0.0})
        for step in range(first, stop):
            files.metrics(step, {"critic/score/mean": step / 3, "actor/pg_loss": -0.5})
            files.validation(step + 1, {"val-core/countdown/acc/mean@1": step / 7})
            files.action({"step": step, "bin": 1, "reason": "p05 0.80 < 0.86"})
            rollouts.write_rollouts(folder, step, groups(step))


def trajectory(prompt: str, seed: int, **more: Any) -> Trajectory:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(2, 9))
    sampled = np.arange(3 + count) >= 3
    logprob = -generator.exponential(size=3 + count).astype(np.float32)
    fields: dict[str, Any] = {
        "prompt_id": prompt,
        "ids": generator.integers(0, 500, size=3 + count),
        "loss_mask": sampled,
        "rollout_logprob": np.where(sampled, logprob, 0),
        "weight_version": np.where(sampled, 7, NOT_SAMPLED),
        "policy_id": np.where(sampled, 1, NOT_SAMPLED),
        "turns": (
            Turn(start=0, stop=3, role="user"),
            Turn(start=3, stop=3 + count, role="assistant"),
        ),
        "reward": float(seed % 2),
        "acc": 1 / 3,
        "note": "right \u2028 with a separator",
        "text": "so 2 \u00d7 3\nis \ud800 6",
        "truncated": bool(seed % 2),
        "kept": generator.random(3 + count, dtype=np.float32),
        "attention": "sparse",
    }
    return Trajectory(**{**fields, **more})


def groups(seed: int) -> list[Group]:
    """Two groups of one prompt side by side, one of another, with and without baseline."""
    first = Group(prompt_id="a", trajectories=(trajectory("a", seed), trajectory("a", seed + 1)))
    again = Group(prompt_id="a", trajectories=(trajectory("a", seed + 2),))
    bare = trajectory(
        "b", 3, reward=None, acc=None, note=None, text=None, kept=None, attention=None
    )
    return [
        first,
        again,
        Group(prompt_id="b", trajectories=(bare,), baseline=0.1),
    ]


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run(tmp_path, 0, 2)
    assert sorted(tree(tmp_path)) == [
        "actions.jsonl",
        "config.resolved.toml",
        "metrics.jsonl",
        "rollouts/step_000000.jsonl",
        "rollouts/step_000001.jsonl",
        "validation.jsonl",
    ]
    assert load_config(TrainConfig, [tmp_path / "config.resolved.toml"], []) == CONFIG
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "critic/score/mean": 0.0, "actor/pg_loss": -0.5},
        {"step": 1, "critic/score/mean": 1 / 3, "actor/pg_loss": -0.5},
    ]
    assert read_lines(tmp_path / "actions.jsonl")[1]["reason"] == "p05 0.80 < 0.86"
    with open_files(tmp_path) as files:  # JSON has no word for some numbers
        files.begin(CONFIG, 0)
        files.metrics(0, {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": 3})
    null = {"step": 0, "a": None, "b": None, "c": 0.5, "d": 3.0}
    assert read_lines(tmp_path / "metrics.jsonl") == [null]


def test_going_on_gives_the_files_of_an_uninterrupted_run(tmp_path: Path) -> None:
    run(tmp_path / "whole", 0, 6)
    for checkpoint in (0, 2, 5):
        folder = tmp_path / f"parts-{checkpoint}"
        run(folder, 0, 5)
        torn = folder / "metrics.jsonl"
        torn.write_text(torn.read_text() + '{"step": 5, "critic/sc')
        (folder / "rollouts" / ".step_000005.jsonl.99.unfinished").write_text("{")
        run(folder, checkpoint, 6)
        assert tree(folder) == tree(tmp_path / "whole")


def test_missing_lines_are_told_and_the_others_stay(tmp_path: Path) -> None:
    """Also those of earlier versions, without digest; a last line of zeros is torn."""
    run(tmp_path, 0, 4)
    actions, file = tmp_path / "actions.jsonl", tmp_path / "metrics.jsonl"
    plain = "".join(f"{json.dumps(line)}\n" for line in read_lines(actions))
    actions.write_bytes(plain.encode() + b"\0\0\0\n")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[2], lines[3]]))
    with open_files(tmp_path) as files:
        assert files.begin(CONFIG, 3) == [1]
    assert [line["step"] for line in read_lines(file)] == [0, 2]
    assert [line["step"] for line in read_lines(actions)] == [0, 1, 2]


def test_a_changed_line_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    """Also as the last one: a line that was torn is no JSON, one that was changed may be."""
    run(tmp_path, 0, 3)
    for name in ("metrics.jsonl", "validation.jsonl", "actions.jsonl"):
        file = tmp_path / name
        whole = file.read_text()
        first, *others, last = whole.splitlines(keepends=True)
        changed = [line.replace('"step": ', '"step": 1') for line in (first, last)]
        damages = {
            "".join([changed[0], *others, last]): "line 1: .*digest",
            "".join([first, *others, changed[1]]): rf"line {len(others) + 2}: .*digest",
        }
        for line in ("nonsense", "[1]", '{"step": "1"}', '{"loss": 1}', "", "true"):
            damages[f"{line}\n{whole}"] = "line 1"
        for text, told in damages.items():
            file.write_text(text)
            with (
                open_files(tmp_path) as files,
                pytest.raises(ValueError, match=f"{name}, {told}"),
            ):
                files.begin(CONFIG, 1)
        file.write_text(whole)
    file.unlink()
    os.mkfifo(file)
    with open_files(tmp_path) as files, pytest.raises(ValueError, match="regular"):
        files.begin(CONFIG, 1)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def nearly_full(descriptor: int, data: bytes) -> int:
        if len(data) < 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:8])

    with open_files(tmp_path) as files:
        files.begin(CONFIG, 0)
        files.metrics(0, {"a": 1.0})
        assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}], "at once"
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", nearly_full)
            with pytest.raises(OSError, match=r"metrics\.jsonl"):
                files.metrics(1, {"a": 2.0})
        files.metrics(1, {"a": 3.0})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}, {"step": 1, "a": 3.0}]


def test_rollouts_come_back_equal_without_hidden_states(tmp_path: Path) -> None:
    written = groups(4)
    (bare,) = written[1].trajectories
    states = np.ones(((bare.weight_version >= 0).sum(), 4), dtype=np.float32)
    seen = written[1].replace(trajectories=(bare.replace(hidden=states),))
    path = rollouts.write_rollouts(tmp_path, 12, [written[0], seen, written[2]])
    assert read_rollouts(tmp_path, 12) == read_rollouts(str(tmp_path), 12) == written
    lines = read_lines(path)
    assert [line["group_index"] for line in lines] == [0, 0, 1, 2]
    assert [line["baseline"] for line in lines] == [None, None, None, 0.1]
    assert "hidden" not in lines[0]
    assert rollout_steps(tmp_path) == [12]
    with pytest.raises(ValueError, match="step 4"):
        read_rollouts(tmp_path, 4)


def test_damaged_rollouts_are_named(tmp_path: Path) -> None:
    """Changed bits, lines that are none or in another order, a group of two prompts, a pipe."""
    path, chance = rollouts.write_rollouts(tmp_path, 3, groups(3)), random.Random(0)
    whole = path.read_bytes()
    first, second, *others = whole.splitlines(keepends=True)
    parsed = list(map(parse_line, whole.decode().splitlines()))
    parsed[0]["prompt_id"] = "b"
    damaged = [
        b"".join(lines)
        for lines in ([second, first, *others], [first, *others], [first, first, *others], [])
    ]
    damaged += [whole + line for line in (b"{\n", b"[]\n", b'{"group_index": 0}\n')]
    damaged.append("".join(json.dumps(line) + "\n" for line in parsed).encode())
    for _ in range(100):
        bits = bytearray(whole)
        bits[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(bits))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"step_000003\.jsonl"):
            read_rollouts(tmp_path, 3)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="regular"):
        read_rollouts(tmp_path, 3)


def test_rollouts_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rollouts.write_rollouts(tmp_path, 3, groups(3)).read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for step in (3, 4):
        with pytest.raises(OSError, match=f"step_00000{step}.jsonl"):
            rollouts.write_rollouts(tmp_path, step, groups(4))
    assert tree(tmp_path) == {"rollouts/step_000003.jsonl": before}


def test_the_files_of_a_run_that_has_ended_lose_no_line(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.begin(CONFIG, 0)
        for step in range(3):
            files.metrics(step, {"critic/score/mean": step / 3})
        files.finish()
    read_run(tmp_path)
    for name in ("metrics.jsonl", "config.resolved.toml"):
        text = (tmp_path / name).read_text()
        for less in ("", "".join(text.splitlines(keepends=True)[:-1])):
            (tmp_path / name).write_text(less)
            with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
                read_run(tmp_path)
        (tmp_path / name).write_text(text)
    with open_files(tmp_path) as files:  # made longer
        files.begin(CONFIG, 3)
        files.metrics(3, {"critic/score/mean": 1.0})
    assert len(read_run(tmp_path).steps) == 4


def test_a_killed_process_lets_go_and_its_children_do_not_hold(tmp_path: Path) -> None:
    """The holder forks a worker, and is killed; the worker lives until its input ends."""
    program = f"""
import os, sys
from pathlib import Path
from sparrow.files import FolderLock
lock = FolderLock(Path({str(tmp_path)!r}))
if os.fork() == 0:
    print("worker", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"worker\n"
    holder.wait()
    open_files(tmp_path).close()
    holder.stdin.close()
    holder.stdout.read()
    holder.stdout.close()


def test_tensorboard_has_one_curve_after_going_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, stop, value in ((0, 4, 1.0), (2, 5, 2.0)):
        with RunFiles(tmp_path) as files:
            files.begin(CONFIG, first)
            for step in range(first, stop):
                files.metrics(step, {"a": value, "b": math.nan if step == 3 else 0.0})
                files.validation(step + 1, {"c": value, "d": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("a")]
    assert found == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert [event.step for event in events.Scalars("b")] == [0, 1, 2, 4]
    found = [(event.step, event.value) for event in events.Scalars("c")]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_validation_that_is_no_number_names_the_file(tmp_path: Path) -> None:
    run(tmp_path, 0, 1)
    (tmp_path / "validation.jsonl").write_text('{"step": 1, "acc": "text"}\n')
    with (
        RunFiles(tmp_path, tensorboard=True) as files,
        pytest.raises(ValueError, match=r"validation\.jsonl, step 1"),
    ):
        files.begin(CONFIG, 1)


def test_folders_that_are_links_or_files_are_refused(tmp_path: Path) -> None:
    for name in ("checkpoints", "rollouts", "tensorboard"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path)
        with pytest.raises(ValueError, match=f"{name}.*link"):
            open_files(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.out"):
        open_files(tmp_path / "file")
