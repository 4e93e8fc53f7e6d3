"""What goes wrong in a run: bad rows, bad verifiers, no finite loss, a full disk, a run in use."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from support import cli, toys
from support.training import config, metrics, model_folder, noisy, trained, weights_of

from sparrow.dataflow.local.loop import step, train
from sparrow.dataflow.local.opening import Parts, close_run, open_run
from sparrow.dataflow.local.run import Diverged
from sparrow.dataflow.local.watching import Nobody
from sparrow.dataflow.runs import states
from sparrow.dataflow.runs.rollouts import read_rollouts
from sparrow.schema.loading import save_resolved

SHORT = {"max_tokens": 8}
NAN = "support.toys:nan_later"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    toys.calls["surrogate"] = 0


class Hears(Nobody):
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def event(self, text: str, style: str = "") -> None:
        self.told.append(text)


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
    run = open_run(
        config(model, tmp_path / "run", data=data, rollout=SHORT, run={"steps": 1}),
        parts=Parts(judge=noisy),
        report=told.append,
    )
    try:
        train(run)
    finally:
        close_run(run)
    assert f"{data['file']}: 3 rows are left out (all in left_out.txt):" in told
    named = (tmp_path / "run" / "left_out.txt").read_text(encoding="utf-8").splitlines()
    assert [line.partition(":")[0] for line in named] == ["row 1", "row 3", "row 2"]
    said = "\n".join(told)
    assert "row 1: no reward_model.ground_truth" in said
    assert "row 2: prompt of 80 tokens, over 40" in said
    assert 'row 3: "prompt" must be a text or chat messages' in said
    ids = {group.prompt_id for group in read_rollouts(tmp_path / "run", 0)}
    assert ids == {"row 0", "row 4"}


def test_no_row_that_can_be_used_is_an_error(model: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"prompt": " ".join(["x1 = 3 ;"] * 20)}])
    with pytest.raises(ValueError, match=r"no row can be used. row 0: prompt of 80 tokens"):
        open_run(config(model, tmp_path / "run", data=data, rollout=SHORT))


def test_prompts_of_a_task_that_are_too_long_are_left_out(model: Path, tmp_path: Path) -> None:
    """Rows 1, 2 and 4 of these have 33 tokens, the others 27."""
    watch = Hears()
    data = {"first": 5004}
    rollout = {**SHORT, "max_prompt": 30}
    run = trained(
        config(model, tmp_path / "run", data=data, rollout=rollout, run={"steps": 2}), watch=watch
    )
    found = metrics(tmp_path / "run")
    assert [line["data/overlong_prompts"] for line in found] == [2, 1]
    assert [line["faults/overlong_prompts"] for line in found] == [2, 3]
    assert run.ledger.position == 7
    assert watch.told[0] == (
        "step 0: 2 prompts over 30 tokens were left out: assignments-100-5005 (33 tokens), "
        "assignments-100-5006 (33 tokens)"
    )
    with pytest.raises(ValueError, match="1001 prompts in a row have more than 10 tokens"):
        trained(config(model, tmp_path / "no", rollout={**SHORT, "max_prompt": 10}))


def test_a_verifier_that_hangs_crashes_or_raises_gives_0_and_is_counted(
    model: Path, tmp_path: Path
) -> None:
    faults = ("hang", "crash", "raise", None)
    data = rows_file(tmp_path, [{"extra_info": {"fault": fault}} for fault in faults])
    chosen = config(
        model,
        tmp_path / "run",
        data=data,
        rollout={**SHORT, "prompts": 4, "samples": 2},
        run={"steps": 2, "save_every": 1},
    )
    watch = Hears()
    run = open_run(chosen, watch=watch)
    step(run)
    close_run(run)
    (first,) = metrics(tmp_path / "run")
    kinds = ("timeouts", "crashes", "errors")
    assert [first[f"faults/verifier_{kind}"] for kind in kinds] == [2, 2, 2]
    assert (
        "step 0: 6 of 8 verdicts failed and gave 0 (2 timeouts, 2 crashes, 2 errors)"
        in watch.told[0]
    )
    by_row = {group.prompt_id: group for group in read_rollouts(chosen.run.dir, 0)}
    for row in ("row 0", "row 1", "row 2"):
        assert {one.reward for one in by_row[row].trajectories} == {0.0}
    assert by_row["row 0"].trajectories[0].note is not None
    assert "0.5" in by_row["row 0"].trajectories[0].note, "it says after how many seconds"
    trained(chosen)
    second = metrics(tmp_path / "run")[1]
    assert second["faults/verifier_timeouts"] == 2, "counts go through a resume"


def test_a_step_whose_verdicts_all_fail_ends_the_run(model: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path, [{"extra_info": {"fault": "raise"}}])
    chosen = config(model, tmp_path / "run", data=data, rollout=SHORT)
    file = save_resolved(chosen, tmp_path / "own")
    ended = cli.run("train", file)
    assert ended.code == 5, ended.said
    assert "every verdict of step 0 failed" in ended.said
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()


def test_a_loss_that_is_no_number_skips_the_update(model: Path, tmp_path: Path) -> None:
    watch = Hears()
    surrogate = {"use": NAN, "settings": {"since": 1, "until": 2}}
    chosen = config(
        model,
        tmp_path / "run",
        algorithm={"surrogate": surrogate},
        rollout={**SHORT, "samples": 2},
        run={"steps": 3},
    )
    run = open_run(chosen, parts=Parts(judge=noisy), watch=watch)
    step(run)
    before = weights_of(run)
    step(run)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(run).items())
    assert (run.ledger.skips, run.ledger.counts["skipped_updates"]) == (1, 1)
    step(run)
    close_run(run)
    assert run.ledger.skips == 0
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of(run).items())
    found = metrics(tmp_path / "run")
    assert [line["actor/skipped"] for line in found] == [0, 1, 0]
    assert [line["faults/skipped_updates"] for line in found] == [0, 1, 1]
    assert found[1]["actor/pg_loss"] is None
    told = [text for text in watch.told if "the update was skipped" in text]
    assert told == [
        "step 1: loss nan, gradient nan: the update was skipped, weights are as before (1 in a row)"
    ]


def test_too_many_in_a_row_end_the_run_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """And at another rate it goes on from there, as the message says."""
    chosen = config(
        model,
        tmp_path / "run",
        algorithm={"surrogate": {"use": NAN, "settings": {"since": 1, "until": 3}}},
        rollout={**SHORT, "samples": 2, "episode": "support.toys:episode"},
        run={"steps": 4, "save_every": 50, "skips": 2},
    )
    file = save_resolved(chosen, tmp_path / "own")
    ended = cli.run("train", file)
    assert ended.code == 4, ended.said
    told = ended.said
    assert "no finite loss and gradient at 2 steps in a row: lower optimiser.rate" in told
    assert "after 3 steps; the checkpoint is there" in told
    again = cli.run("train", file, "--optimiser.rate=1e-4")
    assert again.code == 0, again.said
    assert "with changes: optimiser.rate 0.001 -> 0.0001" in again.said
    assert [line["actor/lr"] for line in metrics(tmp_path / "run")] == [1e-3] * 3 + [1e-4]


def test_diverged_from_python(model: Path, tmp_path: Path) -> None:
    chosen = config(
        model,
        tmp_path / "run",
        algorithm={"surrogate": {"use": NAN, "settings": {"since": 0}}},
        rollout={**SHORT, "samples": 2},
        run={"skips": 1},
    )
    with pytest.raises(Diverged):
        trained(chosen)


def test_a_full_disk_is_told_and_the_checkpoint_before_it_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (
        config(model, tmp_path / name, rollout={**SHORT, "samples": 2}, run={"save_every": 1})
        for name in ("whole", "broken")
    )
    inner = states.sync

    def sync(file: Any) -> None:
        if "step_000003" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        inner(file)

    with monkeypatch.context() as patched:
        patched.setattr(states, "sync", sync)
        with pytest.raises(
            OSError, match=r"no space left for a checkpoint of .* last one is step 2"
        ):
            trained(broken)
    folders = sorted(path.name for path in (tmp_path / "broken" / "checkpoints").iterdir())
    assert folders == ["step_000001", "step_000002"]
    mine, other = trained(whole), trained(broken)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    equal = zip(weights_of(mine).values(), weights_of(other).values(), strict=True)
    assert all(torch.equal(*pair) for pair in equal)


def test_a_run_directory_in_use_of_another_configuration_or_finished(
    model: Path, tmp_path: Path
) -> None:
    chosen = config(
        model, tmp_path / "run", rollout={**SHORT, "samples": 2}, run={"steps": 2, "save_every": 1}
    )
    run = open_run(chosen, parts=Parts(judge=noisy))
    step(run)
    with pytest.raises(ValueError, match=r"is in use by another process \(id \d+\)"):
        open_run(chosen, parts=Parts(judge=noisy))
    close_run(run)
    other = config(
        model, tmp_path / "run", rollout={**SHORT, "samples": 3}, run={"steps": 2, "save_every": 1}
    )
    told = (
        r"is of another configuration; go back to that one, .*\. Changed: rollout\.samples 2 -> 3"
    )
    with pytest.raises(ValueError, match=told):
        open_run(other, parts=Parts(judge=noisy))
    trained(chosen)
    with pytest.raises(ValueError, match=r"this run has ended. Name another run.dir"):
        open_run(chosen, parts=Parts(judge=noisy))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1], "nothing was touched"


def test_a_run_is_made_longer(model: Path, tmp_path: Path) -> None:
    """Where the rate does not depend on the end."""
    rollout = {**SHORT, "samples": 2}
    whole, first, longer = (
        config(model, tmp_path / name, rollout=rollout, run={"steps": steps})
        for name, steps in (("whole", 3), ("run", 2), ("run", 3))
    )
    trained(whole), trained(first)
    for file in (tmp_path / "run" / "model").iterdir():
        file.unlink()
    (tmp_path / "run" / "model").rmdir()
    trained(longer)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


def test_the_header_says_how_verifiers_are_isolated(model: Path, tmp_path: Path) -> None:
    run = open_run(config(model, tmp_path / "run", data=rows_file(tmp_path, [{}])))
    try:
        header = "\n".join(run.header())
        assert "(pid namespace)" in header or "(subreaper)" in header
    finally:
        close_run(run)
