"""A study from rate to rate: what is kept, set aside, refused, and gone on with."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support import study_folders as folders
from support.pretending import pretend
from support.studies import DENSE, SPARSE, study

from sparrow_recipes.study import stages
from sparrow_recipes.study.design import Study
from sparrow_recipes.study.files import CellEnd, CellTail, StartAnswers, read_study
from sparrow_recipes.study.plans import check_start
from sparrow_recipes.study.running import JobFailed


def cell(made: Study, name: str, *found: float | None, status: str | None = "done") -> Path:
    """A cell's folder after evaluations with these accuracies; the study has its design."""
    if not made.design.exists():
        made.write_design(1e-4, "")
    arm, _, seed = name.rpartition("-")
    return folders.cell(made.folder, arm, int(seed), found, status=status, every=1)


def conducted(made: Study, events: list[str] | None = None) -> bool:
    event = ([] if events is None else events).append
    return stages.conduct(
        made, "sparrow study s.toml", stop=lambda: False, event=event, show=lambda _: None
    )


def opened(
    tmp_path: Path, patch: pytest.MonkeyPatch, finals: Mapping[float, float], **changes: object
) -> Study:
    """A study whose runs pretend; finals: their accuracy at the end, by rate; 0.5 at the start."""
    pretend(tmp_path, patch, finals)
    made, lock = stages.open_study(study(tmp_path / "s", **{"parallel": 2, **changes}).config)
    lock.close()
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_baseline_is_judged_when_all_its_seeds_have_ended(tmp_path: Path) -> None:
    """Every seed must gain enough, by the last three evaluations; 0.25 is enough for 0.25."""
    for number, (first, second, told) in enumerate(
        (
            ((0.5, 0.5), None, ""),
            ((0.5, 0.5), (0.5, 0.9), "dense-0 gained +0.000"),
            ((0.5, 0.0, 0.75, 0.75, 0.75), (0.5, 0.8), ""),
            ((0.5, 0.75, 0.75, 0.7), (0.5, 0.8), "dense-0 gained +0.233"),
        )
    ):
        made = study(tmp_path / str(number), outcome={"gain": 0.25})
        cell(made, "dense-0", *first)
        cell(made, "dense-1", *(second or (0.5,)), status="done" if second else None)
        cell(made, "p-0", 0.5, 0.1)
        assert (stages.failed_baseline(made) or "").startswith(told)
        assert (stages.failed_baseline(made) is None) == (not told)


def test_a_baseline_that_diverged_or_was_not_evaluated(tmp_path: Path) -> None:
    made, other = study(tmp_path / "s"), study(tmp_path / "other")
    cell(made, "dense-0", 0.1, 0.9)
    cell(made, "dense-1", 0.1, status="diverged")
    assert stages.failed_baseline(made) == "dense-1 diverged"
    for name, found in (("dense-0", (0.1, 0.9)), ("dense-1", (0.1, None))):
        cell(other, name, *found)
    with pytest.raises(ValueError, match=r"dense-1/validation\.jsonl"):
        stages.failed_baseline(other)


def test_a_rate_at_which_the_baseline_does_not_learn_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path, monkeypatch, {1e-4: 0.6, 1e-5: 0.7})
    events: list[str] = []
    assert conducted(made, events)
    assert any("0.0001" in event and "dense-0" in event for event in events)
    assert events[0] == "plans: started"
    assert events.index("plans: done") < events.index("p-0: started")
    design = json.loads(made.design.read_text(encoding="utf-8"))
    assert (design["rate"], design["command"]) == (stages.rate_of(made), "sparrow study s.toml")
    assert stages.rate_of(made) == 1e-5
    assert names(made.folder / "rejected") == {"0.0001"}
    assert names(made.rejected(1e-4)) >= {"dense-0", "dense-1"}
    for folder, rate in ((made.rejected(1e-4), 1e-4), (made.folder / "cells", 1e-5)):
        assert json.loads((folder / "dense-0" / "end.json").read_text())["rate"] == rate
    assert names(made.folder / "cells") == {"dense-0", "dense-1", "p-0", "p-1"}
    assert events.count("plans: started") == 1
    told = len(events)
    assert conducted(made, events)
    assert len(events) == told, "all is done"


def test_no_rate_left_is_said_and_the_cells_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails ends the study, which then goes on."""
    made = opened(tmp_path, monkeypatch, {1e-4: 0.6, 1e-5: 0.55}, parallel=1)
    stray = made.folder_of(made.cell("dense-0"))
    stray.mkdir(parents=True)  # the one that pretends cannot make it again
    with pytest.raises(JobFailed, match="dense-0"):
        conducted(made)
    stray.rmdir()
    for _ in range(2):  # and again, where it goes on
        with pytest.raises(stages.NoRate, match="dense"):
            conducted(made)
        assert names(made.folder / "cells") >= {"dense-0", "dense-1"}
        assert names(made.folder / "rejected") == {"0.0001"}


def started(made: Study, cut_off: float = 0.0) -> None:
    """The start model was evaluated."""
    made.folder.mkdir(parents=True, exist_ok=True)
    shares = {"right": 1 - cut_off, "cut_off": cut_off, "wrong": 0.0}
    StartAnswers(model="tiny", answers=100, **shares).save(made.start)


def test_all_cells_wait_for_the_start_and_sparse_ones_for_plans(tmp_path: Path) -> None:
    made = study(tmp_path)
    assert [job.name for job in stages.list_jobs(made) if job.ready()] == ["plans"]
    started(made)
    ready = [job.name for job in stages.list_jobs(made) if job.ready()]
    assert ready == ["plans", "dense-0", "dense-1"]
    made.plans.mkdir()
    made.plan_of(made.cell("p-0").arm).write_text("{}", encoding="utf-8")
    assert all(job.ready() for job in stages.list_jobs(made))
    assert [job.name for job in stages.list_jobs(made) if job.done()] == ["plans"]
    cell(made, "dense-0", 0.5)
    cell(made, "dense-1", 0.5, 0.6, 0.7, status=None)
    states = {"dense-0": "done", "dense-1": "2 of 3 steps", "p-0": "waits", "p-1": "waits"}
    assert stages.state_of(made) == states


def test_no_cell_begins_from_a_model_whose_answers_are_cut_off(tmp_path: Path) -> None:
    """5 % are allowed; more unless told, which is no other design."""
    made, lock = stages.open_study(study(tmp_path).config)
    lock.close()
    for cut_off, begins in ((0.05, True), (0.06, False)):
        started(made, cut_off)
        jobs = {job.name: job for job in stages.list_jobs(made)}
        assert (jobs["dense-0"].ready(), made.started()) == (begins, begins)
        assert not jobs["plans"].done()
    with pytest.raises(ValueError, match=r"6\.0% of 100"):
        check_start(made)
    told = study(tmp_path, allow_cut_off=True)
    ready = [job.name for job in stages.list_jobs(told) if job.ready()]
    assert ready == ["plans", "dense-0", "dense-1"]
    check_start(told)
    cell(made, "dense-0", 0.1)
    stages.refuse_other(told)


def test_another_design_before_the_first_run_evaluates_its_own_start(tmp_path: Path) -> None:
    made, lock = stages.open_study(study(tmp_path / "s").config)
    lock.close()
    started(made, 0.5)
    stages.prepare(made)
    assert made.start.exists()
    stages.prepare(study(tmp_path / "s", outcome={"cut_off": 0.1}))
    assert not made.start.exists()


def test_only_runs_of_one_study_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is kept as long as it is resumed; a cell of another, or another device, is refused."""
    made, lock = stages.open_study(study(tmp_path / "s").config)
    lock.close()
    run = made.run()
    assert run is not None
    stages.prepare(made)
    assert made.run() == run
    place = cell(made, "dense-0", 0.5, 0.6)
    with pytest.raises(ValueError, match="dense-0"):
        read_study(made.folder)
    for name, kind in (("start.json", CellTail), ("end.json", CellEnd)):
        kind.load(place / name).replace(study=run.id).save(place / name)
    assert read_study(made.folder).design.run == run
    stages.prepare(made, "resumed")
    assert made.run() == run
    monkeypatch.setattr(stages, "__version__", "0.0.9")
    with pytest.raises(ValueError, match=r"0\.0\.9"):
        stages.prepare(made)
    monkeypatch.undo()
    made.write_design(1e-4, "", run.replace(id="other"))
    with pytest.raises(ValueError, match=run.id):
        read_study(made.folder)


def test_runs_that_share_a_gpu_say_how_much_each_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(device: str, parallel: int, **rollout: float) -> Study:
        place = "sparrow.models.checkpoint.pick_device"
        monkeypatch.setattr(place, lambda _: torch.device(device))
        config = study(tmp_path, parallel=parallel).config
        changed = config.train.rollout.model_copy(update=rollout)
        train = config.train.model_copy(update={"rollout": changed})
        return Study(config.model_copy(update={"train": train}))

    stages.require_memory_limit(shared("cuda", 1))
    stages.require_memory_limit(shared("cuda", 2, kv_gib=1.0))
    stages.require_memory_limit(shared("cpu", 2))
    with pytest.raises(ValueError, match="kv_gib"):
        conducted(shared("cuda", 2))
    assert not study(tmp_path).design.exists()


def test_whose_folder_it_is(tmp_path: Path) -> None:
    """Before anything ran the design may change, then only how many run at a time."""
    place = tmp_path / "s"
    for target in (0.8, 0.86):
        made, lock = stages.open_study(study(place, (DENSE, SPARSE | {"target": target})).config)
        arms = json.loads(made.design.read_text(encoding="utf-8"))["arms"]
        assert [arm["target"] for arm in arms] == [None, target]
        with pytest.raises(ValueError, match=r"s\b"):  # one process at a time
            stages.open_study(study(place).config)
        lock.close()
    cell(made, "dense-0", 0.1)
    other = study(place, (DENSE, SPARSE | {"target": 0.8}), rates=[1e-4])
    with pytest.raises(ValueError, match="rates, arms"):
        stages.open_study(other.config)
    again, lock = stages.open_study(study(place, parallel=4).config)  # a refusal holds no lock
    lock.close()
    assert (again.folder, again.config.parallel) == (place, 4)
    (tmp_path / "mine" / "cells").mkdir(parents=True)
    with pytest.raises(ValueError, match="another out"):
        stages.open_study(study(tmp_path / "mine").config)
