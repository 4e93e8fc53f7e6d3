"""A study from rate to rate: what is kept, set aside, refused, and gone on with."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from support.pretending import pretend
from support.studies import DENSE, SPARSE, study

from sparrow_recipes.study import stages
from sparrow_recipes.study.design import Study
from sparrow_recipes.study.running import JobFailed
from sparrow_recipes.study.stages import (
    NoRate,
    accuracies,
    conduct,
    gain,
    jobs_of,
    not_learnt,
    open_study,
    rate_of,
    state_of,
)


def cell(made: Study, name: str, *found: float, ended: bool = True, status: str = "done") -> None:
    """A cell's folder after evaluations with these accuracies."""
    folder = made.folder_of(made.cell(name))
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": i, "val-core/a/acc/mean@1": acc}) for i, acc in enumerate(found)]
    (folder / "validation.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if ended:
        (folder / "end.json").write_text(json.dumps({"status": status}), encoding="utf-8")


def conducted(made: Study, events: list[str] | None = None, parallel: int = 2) -> bool:
    seen = [] if events is None else events
    return conduct(
        made,
        command="sparrow study s.toml",
        parallel=parallel,
        stop=lambda: False,
        event=seen.append,
        look=lambda _: None,
    )


def opened(
    tmp_path: Path, patch: pytest.MonkeyPatch, finals: Mapping[float, float], **changes: object
) -> Study:
    """A study whose runs pretend; finals: their accuracy at the end, by rate; 0.5 at the start."""
    pretend(tmp_path, patch, finals)
    made, lock = open_study(study(tmp_path / "s", **changes).config)
    lock.close()
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# What was gained.


def test_gain_is_of_the_last_three_evaluations(tmp_path: Path) -> None:
    for number, (found, expected) in enumerate(
        [
            ((0.5, 0.2, 0.6, 0.7, 0.8), 0.2),  # the last three: 0.7
            ((0.5, 0.6, 0.7, 0.8), 0.2),
            ((0.9, 0.1, 0.1, 0.1), -0.8),
        ]
    ):
        made = study(tmp_path / str(number))
        cell(made, "dense-0", *found)
        assert gain(made.folder_of(made.cell("dense-0"))) == pytest.approx(expected)


def test_accuracy_is_the_mean_over_sources(tmp_path: Path) -> None:
    line = {"val-core/a/acc/mean@2": 0.5, "val-core/b/acc/mean@2": 1.0, "val-core/a/acc/low": 0.1}
    (tmp_path / "validation.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert accuracies(tmp_path) == [0.75]


def test_the_baseline_is_judged_when_all_its_seeds_have_ended(tmp_path: Path) -> None:
    made = study(tmp_path)
    cell(made, "dense-0", 0.5, 0.5, 0.5, 0.5)
    cell(made, "dense-1", 0.5, 0.9, 0.9, 0.9, ended=False)
    assert not_learnt(made) is None
    (made.folder_of(made.cell("dense-1")) / "end.json").write_text("{}", encoding="utf-8")
    assert "dense-0" in str(not_learnt(made))


def test_every_seed_of_the_baseline_must_gain_enough(tmp_path: Path) -> None:
    """0.25 is enough where 0.25 is wanted."""
    made = study(tmp_path, outcome={"gain": 0.25})
    cell(made, "dense-0", 0.5, 0.75, 0.75, 0.75)
    cell(made, "dense-1", 0.5, 0.8, 0.8, 0.8)
    cell(made, "p-0", 0.5, 0.1, 0.1, 0.1)
    assert not_learnt(made) is None


# From rate to rate.


def test_a_study_whose_baseline_learns_takes_the_first_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path, monkeypatch, {1e-4: 0.9})
    events: list[str] = []
    assert conducted(made, events)
    assert names(made.folder / "cells") == {"dense-0", "dense-1", "p-0", "p-1"}
    assert not (made.folder / "rejected").exists()
    assert rate_of(made) == 1e-4
    assert events[0] == "plans: begins"
    assert events.index("plans: done") < events.index("p-0: begins")
    design = json.loads(made.design.read_text(encoding="utf-8"))
    assert (design["rate"], design["command"]) == (1e-4, "sparrow study s.toml")
    again: list[str] = []
    assert conducted(made, again)
    assert again == []


def test_a_rate_at_which_the_baseline_does_not_learn_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path, monkeypatch, {1e-4: 0.6, 1e-5: 0.7})
    events: list[str] = []
    assert conducted(made, events)
    assert any("0.0001" in event and "dense-0" in event for event in events)
    assert rate_of(made) == 1e-5
    assert names(made.folder / "rejected") == {"0.0001"}
    assert names(made.rejected(1e-4)) >= {"dense-0", "dense-1"}
    for folder, rate in ((made.rejected(1e-4), 1e-4), (made.folder / "cells", 1e-5)):
        assert json.loads((folder / "dense-0" / "end.json").read_text())["rate"] == rate
    assert names(made.folder / "cells") == {"dense-0", "dense-1", "p-0", "p-1"}
    assert json.loads(made.design.read_text(encoding="utf-8"))["rate"] == 1e-5
    assert events.count("plans: begins") == 1


def test_no_rate_left_is_said_and_the_cells_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path, monkeypatch, {1e-4: 0.6, 1e-5: 0.55})
    for _ in range(2):  # and again, where it goes on
        with pytest.raises(NoRate, match="dense"):
            conducted(made)
        assert names(made.folder / "cells") >= {"dense-0", "dense-1"}
        assert names(made.folder / "rejected") == {"0.0001"}
        assert rate_of(made) == 1e-5


def test_a_run_that_fails_ends_the_study_which_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path, monkeypatch, {1e-4: 0.9})
    stray = made.folder_of(made.cell("p-0"))
    stray.mkdir(parents=True)  # the one that pretends cannot make it again
    with pytest.raises(JobFailed, match="p-0"):
        conducted(made, parallel=1)
    stray.rmdir()
    assert conducted(made)


def test_dense_cells_do_not_wait_for_plans(tmp_path: Path) -> None:
    made = study(tmp_path)
    ready = {job.name: job.ready() for job in jobs_of(made)}
    assert ready == {"plans": True, "dense-0": True, "dense-1": True, "p-0": False, "p-1": False}
    assert jobs_of(made)[0].name == "plans"
    made.plans.mkdir()
    made.plan_of(made.cell("p-0").arm).write_text("{}", encoding="utf-8")
    assert all(job.ready() for job in jobs_of(made))
    assert [job.name for job in jobs_of(made) if job.done()] == ["plans"]


def test_runs_that_share_a_gpu_say_how_much_each_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(device: str, **rollout: float) -> Study:
        monkeypatch.setattr(stages, "pick_device", lambda _: torch.device(device))
        made = study(tmp_path)
        changed = made.config.train.rollout.model_copy(update=rollout)
        train = made.config.train.model_copy(update={"rollout": changed})
        return Study(config=made.config.model_copy(update={"train": train}))

    stages.refuse_greedy(shared("cuda"), 1)
    stages.refuse_greedy(shared("cuda", kv_gib=1.0), 2)
    stages.refuse_greedy(shared("cpu"), 2)
    with pytest.raises(ValueError, match="kv_gib"):
        conducted(shared("cuda"), parallel=2)
    assert not study(tmp_path).design.exists()


def test_how_far_cells_are(tmp_path: Path) -> None:
    made = study(tmp_path)
    cell(made, "dense-0", 0.5)
    cell(made, "dense-1", 0.5, ended=False)
    (made.folder_of(made.cell("dense-1")) / "metrics.jsonl").write_text("{}\n{}\n")
    assert state_of(made) == {
        "dense-0": "done",
        "dense-1": "2 of 3 steps",
        "p-0": "waits",
        "p-1": "waits",
    }


# Whose folder it is.


def test_a_design_may_change_before_anything_ran(tmp_path: Path) -> None:
    for target in (0.8, 0.9):
        made, lock = open_study(study(tmp_path / "s", (DENSE, SPARSE | {"target": target})).config)
        lock.close()
        arms = json.loads(made.design.read_text(encoding="utf-8"))["arms"]
        assert [arm["target"] for arm in arms] == [None, target]


def test_broken_files_of_a_cell_are_named(tmp_path: Path) -> None:
    made = study(tmp_path / "s")
    cell(made, "dense-0", 0.1, 0.9)
    for text in ("", "[]", "{}", "none"):
        (made.folder_of(made.cell("dense-0")) / "end.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"dense-0/end\.json"):
            state_of(made)
    for text in ("", '{"step": 0, "val-core/a/acc/mean@1": 0.5}\n', "[]\n"):
        (tmp_path / "validation.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"validation\.jsonl"):
            gain(tmp_path)


def test_a_baseline_that_diverged_or_has_no_accuracy_has_not_learnt(tmp_path: Path) -> None:
    made, other = study(tmp_path / "s"), study(tmp_path / "other")
    cell(made, "dense-0", 0.1, 0.9)
    cell(made, "dense-1", 0.1, status="diverged")
    assert not_learnt(made) == "dense-1 diverged"
    for name in ("dense-0", "dense-1"):
        cell(other, name, 0.1, float("nan"))
    assert "nan" in str(not_learnt(other))


def test_a_folder_with_another_design_is_refused(tmp_path: Path) -> None:
    made, lock = open_study(study(tmp_path / "s").config)
    lock.close()
    cell(made, "dense-0", 0.1)
    other = study(tmp_path / "s", (DENSE, SPARSE | {"target": 0.8}), rates=[1e-4])
    with pytest.raises(ValueError, match="rates, arms"):
        open_study(other.config)
    again, lock = open_study(study(tmp_path / "s").config)  # a refusal holds no lock
    lock.close()
    assert again.folder == tmp_path / "s"


def test_how_many_run_at_once_may_change(tmp_path: Path) -> None:
    for parallel in (1, 4):
        made, lock = open_study(study(tmp_path / "s", parallel=parallel).config)
        lock.close()
        assert made.config.parallel == parallel
        (made.folder / "cells").mkdir(exist_ok=True)  # from here on it is a design's folder


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s" / "cells").mkdir(parents=True)
    with pytest.raises(ValueError, match="another dir"):
        open_study(study(tmp_path / "s").config)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    config = study(tmp_path / "s").config
    _, lock = open_study(config)
    with pytest.raises(ValueError, match=r"s\b"):
        open_study(config)
    lock.close()
    open_study(config)[1].close()
