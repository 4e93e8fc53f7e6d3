"""Files left to right, then overrides: what wins, and how a value is read."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.common import GenerateConfig, GenerateSampling
from sparrow.schema.loading import load_config


def load(*overrides: str) -> GenerateConfig:
    return load_config(GenerateConfig, [], overrides)


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_nothing_given_is_all_defaults() -> None:
    config = load()
    assert config == GenerateConfig()
    assert config.model.name == "smollm2-135m"
    assert config.sampling == GenerateSampling()
    assert (config.sampling.temperature, config.sampling.top_p) == (0.2, 0.9)


def test_one_setting_leaves_the_other_defaults_alone() -> None:
    sampling = load("--sampling.max_tokens=7").sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 0.2)


def test_later_files_win_key_by_key_and_overrides_last(tmp_path: Path) -> None:
    first = write(tmp_path / "1.toml", "[sampling]\nn = 2\ntop_k = 5\nseed = 1\n")
    second = write(tmp_path / "2.toml", "[sampling]\nn = 3\ntop_k = 6\n[model]\nname = 'm'\n")
    config = load_config(GenerateConfig, [first, second], ["--sampling.n=4"])
    assert (config.sampling.n, config.sampling.top_k, config.sampling.seed) == (4, 6, 1)
    assert config.model.name == "m"


def test_lists_replace(tmp_path: Path) -> None:
    first = write(tmp_path / "1.toml", "[sampling]\nstop_token_ids = [1, 2, 3]\n")
    second = write(tmp_path / "2.toml", "[sampling]\nstop_token_ids = [4]\n")
    assert load_config(GenerateConfig, [first, second]).sampling.stop_token_ids == (4,)


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("--sampling.n=3", "sampling", "n", 3),
        ("sampling.n=3", "sampling", "n", 3),
        ("--sampling.n=0x10", "sampling", "n", 16),
        ("--sampling={n = 3}", "sampling", "n", 3),
        ("--sampling.temperature=0.5", "sampling", "temperature", 0.5),
        ("--sampling.temperature=2", "sampling", "temperature", 2.0),
        ("--sampling.ignore_eos=true", "sampling", "ignore_eos", True),
        ("--sampling.stop_token_ids=[1, 2]", "sampling", "stop_token_ids", (1, 2)),
        ("--model.name=smollm2-135m", "model", "name", "smollm2-135m"),
        ("--model.name=123", "model", "name", "123"),
        ("--model.name=true", "model", "name", "true"),
        ("--model.name='m'", "model", "name", "'m'"),
        ("--model.name=a=b", "model", "name", "a=b"),
        ("--model.name=模型/é", "model", "name", "模型/é"),
        ("--model.device=cuda:1", "model", "device", "cuda:1"),
        ("--model.dtype=bfloat16", "model", "dtype", "bfloat16"),
        ("--run.dir=2024", "run", "dir", Path("2024")),
        ("--run.dir=.", "run", "dir", Path()),
    ],
)
def test_override(override: str, section: str, field: str, value: Any) -> None:
    got = getattr(getattr(load(override), section), field)
    assert (got, type(got)) == (value, type(value))


def test_an_integer_may_stand_for_a_float(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "[sampling]\ntemperature = 1\n")
    assert isinstance(load_config(GenerateConfig, [file]).sampling.temperature, float)
