"""A study's cells and their settings: what an arm decides, what a seed decides, nothing else."""

import json
from pathlib import Path

import pytest
from support.studies import DENSE, SPARSE, TIS, study

from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow_recipes.study.design import APART, Study

FIXED = {"name": "fixed", "like": "p"}
STARVED = {"name": "starved", "role": "collapses", "budget": 64, "corrections": [], "seeds": [0]}
STILL = {"name": "still", "role": "flat", "rate": 0.0, "seeds": [1]}
ALL = (SPARSE, FIXED, STARVED, STILL, DENSE)


def trainings(made: Study, rate: float = 1e-4) -> dict[str, TrainConfig]:
    return {cell.name: made.training(cell, rate) for cell in made.cells}


def test_the_baseline_comes_first_then_controls_then_arms_seed_by_seed(tmp_path: Path) -> None:
    made = study(tmp_path, ALL)
    expected = ["dense-0", "dense-1", "starved-0", "still-1", "p-0", "fixed-0", "p-1", "fixed-1"]
    assert [cell.name for cell in made.cells] == expected
    assert [cell.name for cell in made.baseline_cells] == expected[:2]
    assert study(tmp_path, out=None).folder == Path("runs/study/s")
    with pytest.raises(ValueError, match="dense-0"):
        made.cell("p-2")


def test_with_one_rate_cells_go_seed_by_seed(tmp_path: Path) -> None:
    few = SPARSE | {"name": "few", "seeds": [0]}
    made = study(tmp_path, (SPARSE, DENSE, few), rates=[1e-4])
    assert [cell.name for cell in made.cells] == ["p-0", "dense-0", "few-0", "p-1", "dense-1"]


def test_settings_of_an_arm_alone(tmp_path: Path) -> None:
    """Everything else is as in the other arms; the flow is that of its schedule, by force."""
    own = {"algorithm": {"aggregate": "seq-mean-token-mean"}}
    own |= {"rollout": {"attention": {"flow": "fine_means(4)", "force": True}}}
    made = study(tmp_path, (DENSE, SPARSE, {"name": "own", "schedule": "tiny-0.86", "train": own}))
    found = trainings(made)
    mine, other = found["own-0"], found["p-0"]
    assert mine.algorithm == other.algorithm.replace(aggregate="seq-mean-token-mean")
    attention = mine.rollout.attention
    assert (attention.flow, attention.force) == ("fine_means(4)", True)
    assert attention.schedule == str(made.plan_of(made.cell("own-0").arm))
    assert mine.replace(algorithm=other.algorithm, rollout=other.rollout, run=other.run) == other


def test_what_arms_and_seeds_decide(tmp_path: Path) -> None:
    """Arms of a seed see the same rows and draws. Set back, the sparse cell is the dense one."""
    found = trainings(study(tmp_path / "s", ALL), rate=3e-5)
    for name, config in found.items():
        seed = int(name[-1])
        assert (config.run.seed, config.data.first) == (seed, 100_000 + seed * APART)
        assert (config.run.name, config.run.out) == (name, tmp_path / "s" / "cells" / name)
        assert config.optimiser.rate == (0.0 if name == "still-1" else 3e-5)
        assert config.validation == found["dense-0"].validation
    dense, sparse = found["dense-1"], found["p-1"]
    assert dense.rollout.attention.schedule is None
    assert sparse.rollout.attention.schedule == str(tmp_path / "s" / "plans" / "p.json")
    run = sparse.run.model_copy(update={"out": dense.run.out, "name": dense.run.name})
    assert sparse.model_copy(update={"rollout": dense.rollout, "run": run}) == dense
    assert found["starved-0"].algorithm.corrections == ()
    (kept,) = found["p-0"].algorithm.corrections
    assert (kept.use, kept.settings) == (TIS["use"], TIS["settings"])


def test_bins_of_the_gate_are_alike_in_all_cells(tmp_path: Path) -> None:
    """Without a width of its own a gate takes its schedule's bins, which differ by arm."""
    assert {config.gate.bin for config in trainings(study(tmp_path, ALL)).values()} == {512}
    made = study(tmp_path, surface={"bin": 64})
    assert made.training(made.cell("p-0"), 1e-4).gate.bin == 64
    gate = made.config.train.gate.model_copy(update={"bin": 32})
    train = made.config.train.model_copy(update={"gate": gate})
    other = Study(made.config.model_copy(update={"train": train}))
    assert other.training(other.cell("dense-0"), 1e-4).gate.bin == 32


def test_rows_of_a_file_are_not_moved(tmp_path: Path) -> None:
    """Their order differs by the run's seed."""
    train = {"model": {"name": "tiny"}, "data": {"file": "rows.jsonl"}, "gate": {"mode": "warn"}}
    train |= {"validation": {"every": 1, "file": "held.jsonl"}}
    made = study(tmp_path, train=train)
    first, second = (made.training(cell, 1e-4) for cell in made.baseline_cells)
    assert first.data == second.data == made.config.train.data
    assert (first.run.seed, second.run.seed) == (0, 1)


def test_the_design_as_a_file(tmp_path: Path) -> None:
    made = study(tmp_path / "s", ALL)
    made.write_design(1e-5, "sparrow study s.toml")
    found = json.loads(made.design.read_text(encoding="utf-8"))
    names = ("rate", "rates", "steps", "every", "problems", "command")
    expected = [1e-5, [1e-4, 1e-5], 3, 1, 16, "sparrow study s.toml"]  # 8 rows, each twice
    assert [found[name] for name in names] == expected
    assert found["collapse"] == {"drop": 0.10, "length": 0.5}
    arms = {arm["name"]: arm for arm in found["arms"]}
    kinds = {"dense": "dense", "p": "target", "fixed": "fixed", "starved": "budget"}
    assert {name: arm["kind"] for name, arm in arms.items()} == kinds | {"still": "dense"}
    assert (arms["starved"]["budget"], arms["starved"]["correction"]) == (64, "none")
    assert (arms["dense"]["correction"], arms["dense"]["seeds"]) == ("token-tis, cap 2", [0, 1])
    assert (arms["still"]["rate"], arms["p"]["rate"], arms["p"]["target"]) == (0.0, 1e-5, 0.86)
    assert (arms["fixed"]["like"], arms["fixed"]["budget"]) == ("p", None)
    made.plans.mkdir(parents=True)
    Schedule.fixed(112).save(made.plans / "fixed.json")  # told once it is known
    made.write_design(1e-4, "")
    arms = json.loads(made.design.read_text(encoding="utf-8"))["arms"]
    assert next(arm for arm in arms if arm["name"] == "fixed")["budget"] == 112
