"""A cell that was killed between the end of its training and its own."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from sparrow.schema.study import StudyConfig
from sparrow_recipes.study.cell import run_cell
from sparrow_recipes.study.design import END, Study

CONFIG = {
    "name": "little",
    "seeds": (0,),
    "rates": (3e-4,),
    "arms": ({"name": "dense", "role": "baseline"}, {"name": "p05-0.86", "target": 0.86}),
    "surface": {"bin": 32, "prompts": 8, "budgets": (64, 96)},
    "probe": {"prompts": 2},
    "train": {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"task": "assignments", "length": 100},
        "rollout": {"prompts": 2, "samples": 2, "max_tokens": 16, "max_prompt": 64},
        "batch": {"tokens": 8192, "recompute": False},
        "gate": {"mode": "warn", "sample": 2, "bin": 32},
        "validation": {"every": 1, "rows": 2},
        "run": {"steps": 1, "rollouts": 0, "tensorboard": False},
    },
}


def test_a_cell_that_was_trained_but_not_ended_ends_the_same(tmp_path: Path) -> None:
    study = Study(config=StudyConfig.model_validate(CONFIG | {"dir": tmp_path}))
    cell = study.cell("dense-0")
    run_cell(study, cell, 3e-4)
    folder = study.folder_of(cell)
    trained = (folder / "model" / "model.safetensors").read_bytes()
    (folder / END).unlink()
    run_cell(study, cell, 3e-4)
    assert study.ended(cell)
    assert (folder / "model" / "model.safetensors").read_bytes() == trained
