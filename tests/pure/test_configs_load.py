"""Every file in configs/ loads. Its folder is the verb, and the verb names the root class.

Dry runs of the recipes in configs/train need torch: tests/cpu/dataflow/test_preview.py.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.base import from_dict
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import load_config
from sparrow.schema.schedule import Schedule
from sparrow.schema.study import StudyConfig
from sparrow.schema.train import TrainConfig
from sparrow.schema.warmup import WarmupConfig
from sparrow.sparse import named_schedule

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes/sparrow_recipes/configs"
SCHEDULES = sorted((CONFIGS / "schedules").iterdir())
FILES = sorted(path for path in CONFIGS.rglob("*") if path.is_file() and path not in SCHEDULES)
RECIPES = sorted((CONFIGS / "train").iterdir())
ROOTS = {
    "generate": GenerateConfig,
    "study": StudyConfig,
    "train": TrainConfig,
    "warmup": WarmupConfig,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def test_there_are_configs() -> None:
    assert FILES
    assert SCHEDULES
    assert {path.stem for path in RECIPES} >= {"tiny", "small", "qwen3-1.7b-math"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_loads_as_the_root_class_of_its_folder(path: Path) -> None:
    assert path.suffix == ".toml"
    verb = path.relative_to(CONFIGS).parts[0]
    assert isinstance(load_config(ROOTS[verb], [path]), ROOTS[verb])


@pytest.mark.parametrize("path", SCHEDULES, ids=name_of)
def test_schedules_are_as_they_would_be_saved(path: Path, tmp_path: Path) -> None:
    schedule = Schedule.load(path)
    assert path.stem == schedule.name
    schedule.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("name", "plan"), [("tiny", "tiny-arm"), ("small", "small-h200")])
def test_schedules_are_those_that_were_planned(name: str, plan: str) -> None:
    planned = json.loads((ROOT / f"bench/2026-11-15-plan-{plan}.json").read_text())
    found = Schedule.load(CONFIGS / f"schedules/{name}-0.86.json")
    of_then = planned["schedule"] | {"flow_digest": found.flow_digest}  # which plans had not yet
    assert found == from_dict(Schedule, of_then)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_are_sparse_by_a_schedule_for_their_model(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths inside recipes begin at the repository's root."""
    monkeypatch.chdir(ROOT)
    recipe = load_config(TrainConfig, [path])
    schedule = named_schedule(str(recipe.rollout.attention.schedule))
    assert schedule.model == recipe.model.name.removeprefix("Qwen/")
    assert recipe.gate.mode == "act"
    target = next(note.text for note in schedule.provenance if note.key == "target")
    assert str(recipe.gate.target) in target
