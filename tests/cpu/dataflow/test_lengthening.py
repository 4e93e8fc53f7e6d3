"""A run that has ended continues where it gets more steps, however it was interrupted."""

from pathlib import Path

import pytest
import torch
from support.training import config, metrics, noisy, trained, weights_of

from sparrow import load
from sparrow.dataflow.local import run as runs
from sparrow.dataflow.local.loop import step
from sparrow.dataflow.local.run import Run, open_run
from sparrow.models import hf_views
from sparrow.schema.train import TrainConfig

SHORT = {"max_tokens": 8}


def chosen(model: Path, folder: Path, steps: int) -> TrainConfig:
    return config(model, folder, rollout=SHORT, run={"steps": steps, "save_every": 1})


def assert_same(folder: Path, run: Run, other: Path) -> None:
    """The model folder holds the learner's weights, and the run is one that was never cut."""
    written = hf_views(load(folder / "model", dtype="float32", device="cpu"))
    for name, weight in weights_of(run).items():
        assert torch.equal(written[name], weight), name
    assert metrics(folder) == metrics(other)


def test_more_steps_continue_and_the_same_or_fewer_are_refused(model: Path, tmp_path: Path) -> None:
    trained(chosen(model, tmp_path / "whole", 3))
    trained(chosen(model, tmp_path / "run", 2))
    before = (tmp_path / "run" / "model" / "SHA256SUMS").read_text()
    for steps in (2, 1):
        with pytest.raises(ValueError, match=r"\b2 steps.*run\.steps"):
            open_run(chosen(model, tmp_path / "run", steps))
    assert (tmp_path / "run" / "model" / "SHA256SUMS").read_text() == before
    run = trained(chosen(model, tmp_path / "run", 3))
    assert_same(tmp_path / "run", run, tmp_path / "whole")
    with pytest.raises(ValueError, match=r"\b3 steps"):
        open_run(chosen(model, tmp_path / "run", 3))


def test_a_kill_at_any_place_leaves_a_run_that_continues(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, before the model is written, in it, and before the digests of the run."""
    trained(chosen(model, tmp_path / "whole", 4))
    folder = tmp_path / "run"
    trained(chosen(model, folder, 2))
    with open_run(chosen(model, folder, 4), judge=noisy) as run:
        step(run)
        run.save()  # step 3, and the process is gone

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for place, name in ((runs.Run, "_write_model"), (runs, "save"), (runs.RunFiles, "finish")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killed)
            with pytest.raises(KeyboardInterrupt):
                trained(chosen(model, folder, 4))
    assert_same(folder, trained(chosen(model, folder, 4)), tmp_path / "whole")


def test_a_model_without_checkpoints_is_not_trained_over(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no checkpoint.*run\.out"):
        open_run(chosen(model, tmp_path / "run", 4))
