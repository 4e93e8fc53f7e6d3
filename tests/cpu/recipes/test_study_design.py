"""A study's cells and their settings: what an arm decides, what a seed decides, nothing else."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from support.studies import DENSE, SPARSE, TIS, study

from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow_recipes.study.design import APART, Study

FIXED = {"name": "fixed", "like": "p"}
STARVED = {"name": "starved", "role": "collapses", "budget": 64, "corrections": [], "seeds": [0]}
STILL = {"name": "still", "role": "flat", "rate": 0.0, "seeds": [1]}
ALL = (SPARSE, FIXED, STARVED, STILL, DENSE)


def trainings(tmp_path: Path, rate: float = 1e-4) -> dict[str, TrainConfig]:
    made = study(tmp_path / "s", ALL)
    return {cell.name: made.training(cell, rate) for cell in made.cells}


def test_the_baseline_comes_first_then_controls_then_arms_seed_by_seed(tmp_path: Path) -> None:
    made = study(tmp_path, ALL)
    names = [cell.name for cell in made.cells]
    assert names == [
        *("dense-0", "dense-1"),
        *("starved-0", "still-1"),
        *("p-0", "fixed-0", "p-1", "fixed-1"),
    ]
    assert [cell.name for cell in made.baseline_cells] == ["dense-0", "dense-1"]
    assert made.config.baseline.name == "dense"


def test_places(tmp_path: Path) -> None:
    made = study(tmp_path / "s")
    cell = made.cell("p-1")
    assert made.folder_of(cell) == tmp_path / "s" / "cells" / "p-1"
    assert made.plan_of(cell.arm) == tmp_path / "s" / "plans" / "p.json"
    assert made.rejected(1e-4) == tmp_path / "s" / "rejected" / "0.0001"
    assert study(tmp_path, dir=None).folder == Path("runs/study/s")
    with pytest.raises(ValueError, match="dense-0"):
        made.cell("p-2")
    assert not made.ended(cell)
    made.folder_of(cell).mkdir(parents=True)
    (made.folder_of(cell) / "end.json").write_text("{}", encoding="utf-8")
    assert made.ended(cell)


def test_arms_of_a_seed_see_the_same_rows_and_draws(tmp_path: Path) -> None:
    found = trainings(tmp_path)
    for name, config in found.items():
        seed = int(name[-1])
        assert config.run.seed == seed
        assert config.data.first == 100_000 + seed * APART
        assert (config.run.name, config.run.dir) == (name, tmp_path / "s" / "cells" / name)
    assert found["dense-0"].data == found["p-0"].data == found["starved-0"].data
    assert found["dense-0"].data != found["dense-1"].data
    assert len({config.validation.model_dump_json() for config in found.values()}) == 1


def test_only_what_the_arm_decides_differs(tmp_path: Path) -> None:
    """Set back, the sparse cell is the dense one."""
    found = trainings(tmp_path)
    dense, sparse = found["dense-1"], found["p-1"]
    assert dense.rollout.attention.schedule is None
    assert sparse.rollout.attention.schedule == str(tmp_path / "s" / "plans" / "p.json")
    run = sparse.run.model_copy(update={"dir": dense.run.dir, "name": dense.run.name})
    assert sparse.model_copy(update={"rollout": dense.rollout, "run": run}) == dense


def test_rates_and_corrections(tmp_path: Path) -> None:
    found = trainings(tmp_path, rate=3e-5)
    rates = {name: config.optimiser.rate for name, config in found.items()}
    assert rates.pop("still-1") == 0.0
    assert set(rates.values()) == {3e-5}
    assert found["starved-0"].algorithm.corrections == ()
    (kept,) = found["p-0"].algorithm.corrections
    assert (kept.use, kept.settings) == (TIS["use"], TIS["settings"])
    assert found["p-0"].algorithm == found["still-1"].algorithm == found["dense-0"].algorithm


def test_bins_of_the_gate_are_alike_in_all_cells(tmp_path: Path) -> None:
    """Without a width of its own a gate takes its schedule's bins, which differ by arm."""
    assert {config.gate.bin for config in trainings(tmp_path).values()} == {512}
    made = study(tmp_path, surface={"bin": 64})
    assert made.training(made.cell("p-0"), 1e-4).gate.bin == 64
    gate = made.config.train.gate.model_copy(update={"bin": 32})
    train = made.config.train.model_copy(update={"gate": gate})
    other = Study(config=made.config.model_copy(update={"train": train}))
    assert other.training(other.cell("dense-0"), 1e-4).gate.bin == 32


def test_rows_of_a_file_are_not_moved(tmp_path: Path) -> None:
    """Their order differs by the run's seed."""
    train = {
        "model": {"name": "tiny"},
        "data": {"file": "rows.jsonl"},
        "gate": {"mode": "warn"},
        "validation": {"every": 1, "file": "held.jsonl"},
    }
    made = study(tmp_path, train=train)
    configs = [made.training(cell, 1e-4) for cell in made.baseline_cells]
    assert configs[0].data == configs[1].data == made.config.train.data
    assert [config.run.seed for config in configs] == [0, 1]


def test_the_design_as_a_file(tmp_path: Path) -> None:
    made = study(tmp_path / "s", ALL)
    made.write_design(1e-5, "sparrow study s.toml")
    found = json.loads(made.design.read_text(encoding="utf-8"))
    assert (found["rate"], found["rates"], found["steps"], found["every"]) == (
        *(1e-5, [1e-4, 1e-5]),
        *(3, 1),
    )
    assert found["problems"] == 16  # 8 rows, each answered twice
    assert found["collapse"] == {"drop": 0.10, "length": 0.5}
    assert found["command"] == "sparrow study s.toml"
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert {name: arm["kind"] for name, arm in arms.items()} == {
        "dense": "dense",
        "p": "target",
        "fixed": "fixed",
        "starved": "budget",
        "still": "dense",
    }
    assert (arms["starved"]["budget"], arms["starved"]["correction"]) == (64, "none")
    assert (arms["dense"]["correction"], arms["dense"]["seeds"]) == ("token-tis, cap 2", [0, 1])
    assert (arms["still"]["rate"], arms["p"]["rate"], arms["p"]["target"]) == (0.0, 1e-5, 0.86)
    assert (arms["fixed"]["like"], arms["fixed"]["budget"]) == ("p", None)
    made.plans.mkdir(parents=True)
    Schedule.fixed(112).save(made.plans / "fixed.json")  # told once it is known
    made.write_design(1e-4, "")
    arms = json.loads(made.design.read_text(encoding="utf-8"))["arms"]
    assert next(arm for arm in arms if arm["name"] == "fixed")["budget"] == 112
