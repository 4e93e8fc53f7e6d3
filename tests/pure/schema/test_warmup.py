"""The configuration of the warm-up: what is refused, the shipped files, the round trip."""

from pathlib import Path

import pytest
from support.configs import toml

from sparrow.schema.loading import ConfigError, load_config, save_resolved
from sparrow_recipes.warmup.config import WarmupConfig

SHAPE = {"layers": 1, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1}
STAGE = {"steps": 3, "tokens": 1024, "longest": 200}
SMALLEST = toml(model={"name": "m", **SHAPE, "max_positions": 1024}, stages=[STAGE])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "c.toml"
    file.write_text(SMALLEST)
    return file


def refused(file: Path, key: str, *overrides: str) -> None:
    """The first problem is that of this key."""
    with pytest.raises(ConfigError) as error:
        load_config(WarmupConfig, [file], overrides)
    assert error.value.args[0].startswith(f"{key}: "), error.value


def test_refused_values_and_files(file: Path) -> None:
    for setting in (
        "model.layers=1.0",
        "model.head_size=63",
        "data.revisit=1",
        "optimiser.rte=0.1",
    ):
        refused(file, setting.partition("=")[0], f"--{setting}")
    for key, old, new in (
        ("model.layer", "layers = 1", "layers = 1\nlayer = 2"),
        ("model.hidden", "hidden = 32\n", ""),
        ("stages[0].longest", "longest = 200\n", ""),
        ("stages", SMALLEST[SMALLEST.index("[[stages]]") :], ""),
        ("stages", SMALLEST, "stages = []\n" + SMALLEST.partition("[[stages]]")[0]),
        ("stages[0].shortest", "longest = 200", "longest = 200\nshortest = 300"),
        ("stages[0].tokens", "tokens = 1024", "tokens = 1023"),
    ):
        assert old in SMALLEST
        file.write_text(SMALLEST.replace(old, new))
        refused(file, key)


def test_one_share_above_0(file: Path) -> None:
    none = ("--data.assignments=0.0", "--data.countdown=0.0", "--data.graph=0.0")
    refused(file, "data.assignments", *none)
    for given in none:
        load_config(WarmupConfig, [file], [other for other in none if other != given])


def test_the_shipped_files_start_where_the_recorded_runs_did(tmp_path: Path) -> None:
    known = {"base": (6600, None), "small": (1700, "base"), "tiny": (2000, "base")}
    for name, (steps, start) in known.items():
        config = load_config(WarmupConfig, [name], [f"--run.out={tmp_path / 'run'}"])
        assert (config.model.name, config.steps) == (name, steps)
        assert config.model.start == (f"runs/warmup/{start}/model" if start else None)
        assert load_config(WarmupConfig, [save_resolved(config, tmp_path)]) == config
