"""Recipes of several policies and of agents, from their warm-up to their report."""

import sys
from pathlib import Path

import pytest
from support.training import metrics

import sparrow
from sparrow_recipes import proposer_solver, recursive_crafting, solver_verifier

SIZES = "--samples=2 --prompts=2 --steps=2 --every=2 --held-out=2 --warm-up=16"
RECIPES = {
    "verifier": (solver_verifier, "--length=100 --tokens=96"),
    "proposer": (proposer_solver, "--length=100 --tokens=64"),
    "frozen": (proposer_solver, "--length=100 --tokens=64 --frozen"),
    "recursive": (recursive_crafting, "--tokens=96 --warm-steps=2 --warm-batch=8"),
    "flat": (recursive_crafting, "--tokens=96 --warm-steps=2 --warm-batch=8 --flat"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_warms_up_trains_and_writes_its_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, words = RECIPES[name]
    given = ["recipe", f"--out={tmp_path}", *SIZES.split(), *words.split()]
    monkeypatch.setattr(sys, "argv", given)
    recipe.main()
    assert len(metrics(tmp_path / "run")) == 2
    assert "</html>" in (tmp_path / "report.html").read_text()
    if recipe is recursive_crafting:
        found = sparrow.audit(tmp_path / "run")
        assert not found.problems
        most = max(line["agents/count/mean"] for line in metrics(tmp_path / "run"))
        assert most == 1 or name == "recursive"


def test_recipes_are_short() -> None:
    for recipe, _ in RECIPES.values():
        assert len(Path(recipe.__file__).read_text().splitlines()) < 150
