"""Every shipped configuration has a name, by which it loads. Its folder is the verb.

Dry runs of the recipes of `sparrow train` need torch: tests/cpu/dataflow/test_preview.py.
"""

import json
from pathlib import Path

import pytest

from sparrow.schema.base import from_dict
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import ConfigError, find_config, load_config, shipped_configs
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.sparse import named_schedule
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.warmup.config import WarmupConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes/sparrow_recipes/configs"
CLASSES = (GenerateConfig, StudyConfig, TrainConfig, WarmupConfig)


def test_every_file_loads_by_its_name_as_the_class_of_its_folder() -> None:
    verbs = {cls.__name__.removesuffix("Config").lower(): cls for cls in CLASSES}
    assert {path.name for path in CONFIGS.iterdir()} == {*verbs, "schedules"}
    for verb, cls in verbs.items():
        names = shipped_configs(verb)
        assert [*names.values()] == sorted((CONFIGS / verb).iterdir())
        for name, file in names.items():
            assert find_config(verb, name) == file == find_config(verb, file)
            assert load_config(cls, [name]) == load_config(cls, [file])
    assert shipped_configs("train").keys() >= {"tiny", "small", "small-rl", "qwen3-1.7b-math"}


def test_an_unknown_name_lists_the_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tin", "", "."):
        with pytest.raises(ConfigError, match="tiny"):
            find_config("train", name)
    for name in ("tin", "tiny"):
        Path(name).touch()
    assert find_config("train", "tin") == Path("tin")  # a file without a suffix
    assert find_config("train", "tiny").is_relative_to(CONFIGS)  # a name is one everywhere
    assert find_config("train", "./tiny.toml") == Path("tiny.toml")


def test_schedules_are_as_they_would_be_saved_and_were_planned(tmp_path: Path) -> None:
    plans = {
        "tiny-0.86": "2026-11-15-plan-tiny-arm",
        "small-0.86": "2026-11-15-plan-small-h200",
        "small-rl-0.86": "2026-11-17-plan-small-rl-0.86-h200",
        "small-rl-0.80": "2026-11-17-plan-small-rl-0.80-h200",
    }
    assert shipped_configs("schedules").keys() == plans.keys()
    for name, file in shipped_configs("schedules").items():
        schedule = named_schedule(name)
        assert schedule.name == name
        schedule.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
        planned = json.loads((ROOT / f"bench/{plans[name]}.json").read_text())["schedule"]
        planned.setdefault("flow_digest", schedule.flow_digest)  # older plans have none
        assert float(planned["name"].rpartition("-")[2]) == float(name.rpartition("-")[2])
        assert schedule == from_dict(Schedule, planned | {"name": name})  # 0.8 is called 0.80


def test_recipes_are_sparse_by_a_schedule_for_their_model_or_dense() -> None:
    dense = {"small-rl", "smollm2-code"}  # a model that others start from; short answers
    for name in dense:
        recipe = load_config(TrainConfig, [name])
        assert (recipe.rollout.decoding, recipe.gate.mode) == ("dense", "off")
    for name in shipped_configs("train").keys() - dense:
        recipe = load_config(TrainConfig, [name])
        schedule = named_schedule(str(recipe.rollout.attention.schedule))
        assert schedule.model == recipe.model.name.removeprefix("Qwen/")
        assert recipe.gate.mode == "act"
        target = next(note.text for note in schedule.provenance if note.key == "target")
        assert str(recipe.gate.target) in target


def test_designs_of_the_second_study_are_as_committed_before_it_ran() -> None:
    """docs/results/control-study-2.md."""
    first, second = (load_config(StudyConfig, [f"control-2{part}"]) for part in "ab")
    for design, runs in ((first, 12), (second, 24)):
        assert sum(len(design.seeds_of(arm)) for arm in design.arms) == runs
        assert (design.rates, design.train.run.steps) == ((1e-4,), 60)
        assert (design.outcome.tolerance, design.outcome.cut_off) == (0.05, 0.05)
        assert design.analysis.confidence == 0.90
    assert (first.train.model.name, first.allow_cut_off) == ("small", True)
    assert first.train == load_config(StudyConfig, ["small"]).train
    assert (second.train.model.name, second.allow_cut_off) == ("small-rl", False)
    assert second.analysis.primary == ("p05-0.86", "dense")
    data = second.train.data.model_copy(update={"first": first.train.data.first})
    model = first.train.model
    assert second.train.model_copy(update={"data": data, "model": model}) == first.train
