"""What goes wrong in a run: rows, verifiers, losses, states, a full disk, other configurations.

Nothing of it passes unnoticed, and nothing that was done is lost.
"""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import cli, toys
from support.training import Hears, config, lines, metrics, noisy, trained, weights_of

from sparrow.dataflow import checkpoints as states
from sparrow.dataflow.local.loop import step, train
from sparrow.dataflow.local.messages import Diverged
from sparrow.dataflow.local.run import Run, open_run, schedule_notes
from sparrow.dataflow.run_files import read_rollouts
from sparrow.schema.loading import ConfigError, load_config, save_resolved
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.training.learner import Learner

SHORT = {"max_tokens": 8, "samples": 2}
NAN = "support.toys:nan_later"


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    toys.calls["surrogate"] = 0


def opened(chosen: TrainConfig, **settings: Any) -> Run:
    return open_run(chosen, judge=noisy, **settings)


def after(chosen: TrainConfig, steps: int = 1, *, save: bool = True) -> Run:
    """A run that was closed after some steps."""
    run = opened(chosen)
    for _ in range(steps):
        step(run)
    if save:
        run.save()
    run.close()
    return run


# Rows and verifiers.


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A file of rows, and the configuration that reads them in order, judged by a toy."""
    file = folder / "rows.jsonl"
    base = {"prompt": "x1 = 3 ; find x1", "answer": "3", "data_source": "own"}
    file.write_text("".join(json.dumps(base | row) + "\n" for row in rows))
    return {
        "file": str(file),
        "task": None,
        "reward": "support.rewards:odd",
        "shuffle": False,
        "deadline": 0.5,
    }


def test_rows_that_cannot_be_used_are_counted_and_named(model: Path, tmp_path: Path) -> None:
    long = " ".join(["x1 = 3 ;"] * 20)
    data = rows_file(tmp_path, [{}, {"answer": None}, {"prompt": long}, {"prompt": None}, {}])
    told: list[str] = []
    chosen = config(model, tmp_path / "run", data=data, rollout=SHORT, run={"steps": 1})
    trained(chosen, report=told.append)
    named = (tmp_path / "run" / "left_out.txt").read_text(encoding="utf-8").splitlines()
    assert [line.partition(":")[0] for line in named] == ["row 1", "row 3", "row 2"]
    said = "\n".join(told)
    assert all(line in said for line in named)
    assert any("row 2" in line and "80" in line and "40" in line for line in told)
    assert metrics(tmp_path / "run")[0]["faults/left_out_rows"] == 3
    assert {g.prompt_id for g in read_rollouts(tmp_path / "run", 0)} == {"row 0", "row 4"}
    none = rows_file(tmp_path, [{"prompt": long}])
    with pytest.raises(ValueError, match="row 0"):
        open_run(config(model, tmp_path / "none", data=none, rollout=SHORT))


def test_prompts_of_a_task_that_are_too_long_are_left_out(model: Path, tmp_path: Path) -> None:
    """Rows 1, 2 and 4 of these have 33 tokens, the others 27."""
    watch = Hears()
    data, rollout = {"first": 5004}, {**SHORT, "max_prompt": 30}
    run = trained(
        config(model, tmp_path / "run", data=data, rollout=rollout, run={"steps": 2}), watch=watch
    )
    found = metrics(tmp_path / "run")
    assert [line["data/overlong_prompts"] for line in found] == [2, 1]
    assert [line["faults/overlong_prompts"] for line in found] == [2, 3]
    assert run.ledger.position == 7
    assert "assignments-100-5005 (33 of at most 30 tokens), assign" in watch.told[0]
    with pytest.raises(ValueError, match="max_prompt"):
        trained(config(model, tmp_path / "no", rollout={**SHORT, "max_prompt": 10}))


def test_a_verifier_that_hangs_crashes_or_raises_gives_0_and_is_counted(
    model: Path, tmp_path: Path
) -> None:
    faults = ("hang", "crash", "raise", None)
    data = rows_file(tmp_path, [{"extra_info": {"fault": fault}} for fault in faults])
    rollout, steps = {**SHORT, "prompts": 4}, {"steps": 2, "save_every": 1}
    chosen = config(model, tmp_path / "run", data=data, rollout=rollout, run=steps)
    watch = Hears()
    run = open_run(chosen, callbacks=watch)
    header = "\n".join(run.header())
    assert "(pid namespace)" in header or "(subreaper)" in header
    step(run)
    run.close()
    (first,) = metrics(tmp_path / "run")
    kinds = ("timeouts", "crashes", "errors")
    assert [first[f"faults/verifier_{kind}"] for kind in kinds] == [2, 2, 2]
    assert "6 of 8 verdicts failed" in watch.told[0]
    assert "(2 timeouts, 2 crashes, 2 errors)" in watch.told[0]
    by_row = {group.prompt_id: group for group in read_rollouts(tmp_path / "run", 0)}
    for row in ("row 0", "row 1", "row 2"):
        assert {one.reward for one in by_row[row].trajectories} == {0.0}
    assert "0.5" in str(by_row["row 0"].trajectories[0].note), "it says after how many seconds"
    trained(chosen)
    second = metrics(tmp_path / "run")[1]
    assert second["faults/verifier_timeouts"] == 2, "counts go through a resume"


def test_a_step_whose_verdicts_all_fail_ends_the_run(model: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"extra_info": {"fault": "raise"}}])
    file = save_resolved(config(model, tmp_path / "run", data=data, rollout=SHORT), tmp_path)
    ended = cli.run("train", file)
    assert ended.code == 5, ended.said
    assert "every verdict of step 0" in ended.said
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_000000"], "it was not taken"


# Losses and dense passes that are no numbers.


def test_too_many_in_a_row_end_the_run_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """And at another rate it goes on from there, as the message says."""
    chosen = config(
        model,
        tmp_path / "run",
        algorithm={"surrogate": {"use": NAN, "settings": {"since": 1, "until": 3}}},
        rollout={**SHORT, "episode": "support.toys:episode"},
        run={"steps": 4, "save_every": 50, "skips": 2},
    )
    file = save_resolved(chosen, tmp_path / "own")
    ended = cli.run("train", file)
    assert ended.code == 4, ended.said
    assert "optimiser.rate" in ended.said
    assert "after 3 steps" in ended.said
    again = cli.run("train", file, "--optimiser.rate=1e-4")
    assert again.code == 0, again.said
    assert "optimiser.rate 0.001 -> 0.0001" in again.said
    assert [line["actor/lr"] for line in metrics(tmp_path / "run")] == [1e-3] * 3 + [1e-4]


def test_a_dense_pass_that_gives_no_numbers_is_skipped_counted_and_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs from the second step on. Acceptance that is no number is no tail either."""
    inner, spoilt = Learner.score, {"since": 1, "part": "logprob"}

    def score(self: Learner, *given: Any, **named: Any) -> Any:
        found, part = inner(self, *given, **named), spoilt["part"]
        spoilt["since"] -= 1
        if spoilt["since"] >= 0:
            return found
        nans = [np.full_like(one.logprob, np.nan) for one in found]
        known = [getattr(one, part) is not None for one in found]
        return [
            one._replace(**{part: nan}) if has else one
            for one, nan, has in zip(found, nans, known, strict=True)
        ]

    monkeypatch.setattr(Learner, "score", score)
    run = opened(config(model, tmp_path / "run", rollout=SHORT, run={"steps": 9, "skips": 2}))
    with pytest.raises(Diverged, match="2 steps"):
        train(run)
    run.close()
    assert run.ledger.checkpoints.steps() == [2, 3]
    found = metrics(tmp_path / "run")
    assert [line["actor/skipped"] for line in found] == [0, 1, 1]
    assert found[-1]["faults/skipped_updates"] == 2
    assert found[-1]["actor/pg_loss"] is None
    spoilt |= {"since": 0, "part": "alpha"}
    gate = {"mode": "act", "sample": 8, "least": 10, "prompts": 2, "patience": 1}
    trained(config(model, tmp_path / "alpha", gate=gate, rollout=SHORT, run={"steps": 1}))
    assert metrics(tmp_path / "alpha")[0]["actor/skipped"] == 1
    assert not lines(tmp_path / "alpha" / "actions.jsonl")


# The disk and the run directory.


def test_a_full_disk_is_told_and_the_checkpoint_before_it_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that ended is made longer, where the rate does not depend on the end."""
    whole, broken = (
        config(model, tmp_path / name, rollout=SHORT, run={"save_every": 1, "steps": 3})
        for name in ("whole", "broken")
    )
    inner = states.sync

    def sync(file: Any) -> None:
        if "step_000002" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        inner(file)

    with monkeypatch.context() as patched:
        patched.setattr(states, "sync", sync)
        with pytest.raises(OSError, match="step 1"):
            trained(broken)
    folders = sorted(path.name for path in (tmp_path / "broken" / "checkpoints").iterdir())
    assert folders == ["step_000001"]
    trained(config(model, tmp_path / "broken", rollout=SHORT, run={"save_every": 1, "steps": 2}))
    mine, other = trained(whole), trained(broken)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    equal = zip(weights_of(mine).values(), weights_of(other).values(), strict=True)
    assert all(torch.equal(*pair) for pair in equal)


def test_a_run_directory_in_use_or_of_another_configuration(model: Path, tmp_path: Path) -> None:
    """Nothing in it is touched. Opened again, it is cleared of what killed processes wrote."""
    chosen = config(model, tmp_path / "run", rollout=SHORT, run={"steps": 2, "save_every": 1})
    folder, ended = tmp_path / "run", subprocess.Popen(["true"])
    ended.wait()
    (folder / f".model.{ended.pid}.unfinished").mkdir(parents=True)
    (folder / f".model.{ended.pid}.unfinished" / "model.safetensors").write_text("a part")
    (folder / f".x.{ended.pid}.unfinished").write_text("a part")
    run = opened(chosen)
    assert not list(folder.glob(".*.unfinished"))
    assert any(f"{model} (verified)" in line for line in run.header())
    step(run)
    with pytest.raises(ValueError, match="in use"):
        opened(chosen)
    run.close()
    other = config(model, folder, rollout={**SHORT, "samples": 3}, run={"steps": 2})
    with pytest.raises(ValueError, match=r"rollout\.samples 2 -> 3"):
        opened(other)
    assert [line["step"] for line in metrics(folder)] == [0]


def test_schedules_and_tokenizers_that_were_changed_are_another_run(
    model: Path, tmp_path: Path
) -> None:
    """A schedule that was moved is the same, as those of a study's cells are with its folder."""
    copied = shutil.copytree(model, tmp_path / "model")

    def chosen(file: str, *budgets: int) -> TrainConfig:
        own = Schedule(
            name="own", lengths=np.array([0, 40], np.int32), budgets=np.array(budgets, np.int32)
        )
        own.save(tmp_path / file)
        rollout = {**SHORT, "attention": {"schedule": str(tmp_path / file)}}
        return config(copied, tmp_path / "run", rollout=rollout, run={"steps": 9})

    assert after(chosen("here.json", 48, 64)).step == 1
    assert after(chosen("there.json", 48, 64)).step == 2
    with pytest.raises(ValueError, match="configuration"):
        opened(chosen("here.json", 48, 96))
    file = copied / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps({**tokenizer, "eos_token": "<pad>"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        opened(chosen("here.json", 48, 64))
    (copied / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="configuration"):
        opened(chosen("here.json", 48, 64))


def test_what_is_said_and_refused_at_a_resume(model: Path, tmp_path: Path) -> None:
    """Fewer steps than were taken, a gap in the metrics, changes: also where it goes on twice."""
    folder, told = tmp_path / "run", list[str]()

    def chosen(rate: float = 1e-3, **run: int) -> TrainConfig:
        run = {"save_every": 100, **run}
        return config(model, folder, rollout=SHORT, optimiser={"rate": rate}, run=run)

    after(chosen(), 2)
    with pytest.raises(ValueError, match=r"run\.steps"):
        opened(chosen(steps=1))
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")
    again = opened(chosen(), report=told.append)
    again.close()
    assert again.step == 2
    assert any("metrics.jsonl lacks 1 " in line for line in told)
    for _ in range(2):
        after(chosen(2e-3), save=False)
    (noted,) = [one for one in lines(folder / "actions.jsonl") if one["kind"] == "changed"]
    assert noted["reason"] == "optimiser.rate 0.001 -> 0.002"


def test_a_state_of_strangers_is_refused(model: Path, tmp_path: Path) -> None:
    """And that of a run which was stopped before its first step is taken."""
    run = open_run(config(model, tmp_path / "run"))
    wrong: list[tuple[str | None, str, Any]] = [
        (None, "position", "text"),
        (None, "step", 0),
        (None, "position", 10**400),
        (None, "stopped", {"reason": "why"}),
        (None, "counts", {"x": None}),
        ("gate", "step", None),
        ("gate", "watches", [1]),
        ("learner", "taken", "many"),
        ("learner", "weights", {}),
    ]
    try:
        run.save()
        before = run.state()["gate"]
        run.load_checkpoint(0)
        assert (run.step, run.state()["gate"]) == (0, before)
        for section, key, value in wrong:
            state = run.state() | {"step": 1}
            (state if section is None else state[section])[key] = value
            place = run.ledger.checkpoints.save(1, state, run.ledger.identity)
            with pytest.raises(ValueError, match="step 1"):
                run.load_checkpoint(1)
            shutil.rmtree(place)
    finally:
        run.close()


# Settings.


def test_rows_that_are_trained_on_are_no_validation() -> None:
    base, task = ["--model.name=tiny", "--validation.every=1"], ["--data.task=graph"]
    few = [*task, "--data.first=0", "--data.prompts=5"]
    for words, field in (
        ([*task, "--data.first=10"], "validation.first"),
        (few, "validation.first"),
        (["--data.rows=rows.jsonl"], "validation.rows"),
    ):
        with pytest.raises(ConfigError, match=field):
            load_config(TrainConfig, [], [*base, *words])
    load_config(TrainConfig, [], [*base, *few, "--validation.first=5"])


def test_what_a_schedule_may_not_be_is_said() -> None:
    lengths = np.zeros(1, np.int32)
    made = Schedule(name="s", lengths=lengths, budgets=np.array([512], np.int32), model="small")
    measured, never = schedule_notes(made, "tiny", 300)
    assert "measured on small" in measured
    assert "never sparse" in never
    assert schedule_notes(made, "small", 600) == schedule_notes(None, "tiny", 600) == []
    named = Schedule.fixed(64).replace(model="Qwen3-0.6B")
    assert not schedule_notes(named, "Qwen/Qwen3-0.6B@main", 1000), "a revision is no name"
    assert schedule_notes(named, "Qwen/Qwen3-1.7B@main", 1000)


def test_words_of_the_command_that_cannot_be(model: Path, tmp_path: Path) -> None:
    file = save_resolved(config(model, tmp_path / "run"), tmp_path / "own")
    assert "--dry-run" in cli.refused("train", file, "--json")
    for word, told in (("--data.task=chess", "chess"), ("--rollout.episode=no:way", "no:way")):
        assert told in cli.refused("train", file, "--dry-run", word)
    small = cli.run("train", file, "--dry-run", "--rollout.kv_gib=1e-6")
    assert small.code == 1, small.said
