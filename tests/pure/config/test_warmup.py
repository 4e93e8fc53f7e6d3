"""The configuration of the warm-up: what is refused, by field, and the shipped files."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.errors import ConfigError
from sparrow.schema.layers import shipped_configs
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.warmup import DataConfig, OptimiserConfig, StageConfig, WarmupConfig

SMALLEST = """
[model]
name = "m"
layers = 1
hidden = 32
intermediate = 64
heads = 2
kv_heads = 1
max_positions = 1024

[[stages]]
steps = 3
tokens = 1024
longest = 200
"""
NO_STAGE = SMALLEST.partition("[[stages]]")[0]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "c.toml"
    file.write_text(SMALLEST, encoding="utf-8")
    return file


def refused(toml: Path, *overrides: str) -> str:
    """The field that is refused."""
    with pytest.raises(ConfigError) as error:
        load_config(WarmupConfig, [toml], overrides)
    (line,) = str(error.value).splitlines()
    return line.split(":")[0]


def test_the_smallest_file_and_the_defaults(toml: Path) -> None:
    config = load_config(WarmupConfig, [toml])
    assert config.steps == 3
    assert config.stages == (StageConfig(steps=3, tokens=1024, shortest=100, longest=200),)
    assert config.data == DataConfig(seed=0, assignments=1, countdown=1, graph=1, revisit=True)
    assert config.optimiser == OptimiserConfig()
    assert (config.run.device, config.run.dtype, config.run.workers) == ("auto", "auto", 0)
    assert (config.model.head_size, config.model.start, config.run.dir) == (64, None, None)


def test_refused_values(toml: Path) -> None:
    for key, values in {
        "model.layers": ("0", "1.0"),
        "model.head_size": ("63", "0"),
        "model.rope_theta": ("1.0",),
        "model.name": ("",),
        "model.start": ("",),
        "data.seed": ("-1",),
        "data.graph": ("1.5", "-0.5"),
        "data.revisit": ("1",),
        "optimiser.rate": ("0.0", "1.0", "nan"),
        "optimiser.warm_up": ("-1",),
        "optimiser.decay": ("-1",),
        "optimiser.clip": ("0.0",),
        "optimiser.rte": ("0.1",),
        "run.workers": ("257",),
        "run.save_every": ("0",),
        "run.dir": ("",),
        "run.device": ("gpu",),
        "run.dtype": ("float16",),
    }.items():
        for value in values:
            assert refused(toml, f"--{key}={value}") == key


def test_refused_files(toml: Path) -> None:
    """Unknown keys, what has no default, and stages."""
    for old, new, field in (
        ("layers = 1", "layers = 1\nlayer = 2", "model.layer"),
        ("[[stages]]", "[optimizer]\nrate = 1e-3\n[[stages]]", "optimizer"),
        ("hidden = 32\n", "", "model.hidden"),
        ("longest = 200\n", "", "stages[0].longest"),
        ("longest = 200", "longest = 99", "stages[0].longest"),
        ("longest = 200", "longest = 8001", "stages[0].longest"),
        ("longest = 200", "longest = 200\nshortest = 300", "stages[0].shortest"),
        ("longest = 200", "longest = 200\nshortest = 99", "stages[0].shortest"),
        ("tokens = 1024", "tokens = 1023", "stages[0].tokens"),
        ("steps = 3", "steps = 0", "stages[0].steps"),
        (SMALLEST, NO_STAGE, "stages"),
        (SMALLEST, "stages = []\n" + NO_STAGE, "stages"),
    ):
        assert old in SMALLEST
        toml.write_text(SMALLEST.replace(old, new), encoding="utf-8")
        assert refused(toml) == field, new


def test_a_stage_of_one_length(toml: Path) -> None:
    toml.write_text(SMALLEST.replace("longest = 200", "longest = 200\nshortest = 200"), "utf-8")
    assert load_config(WarmupConfig, [toml]).stages[0].shortest == 200


def test_no_share_above_0(toml: Path) -> None:
    none = ("--data.assignments=0.0", "--data.countdown=0.0", "--data.graph=0.0")
    assert refused(toml, *none) == "data.assignments"
    for given in none:
        load_config(WarmupConfig, [toml], [other for other in none if other != given])


def test_the_files_of_the_shipped_models(tmp_path: Path) -> None:
    start = "runs/warmup/base/model"
    expected = {"base": (6600, None), "small": (1700, start), "tiny": (2000, start)}
    assert shipped_configs("warmup").keys() == expected.keys()
    for name, (steps, begun) in expected.items():
        config = load_config(WarmupConfig, [name], ["--run.workers=3", "--optimiser.rate=0.003"])
        assert (config.model.name, config.steps, config.model.start) == (name, steps, begun)
        assert load_config(WarmupConfig, [save_resolved(config, tmp_path)]) == config


def test_base_begins_with_a_stage_for_a_cpu() -> None:
    """tests/cpu/recipes/test_first_steps.py runs it again."""
    first = load_config(WarmupConfig, ["base"]).stages[0]
    assert first == StageConfig(steps=200, tokens=1024, shortest=100, longest=200)
