"""Absurd numbers and names: refused at the start, by a line with the key and its source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import ConfigError, load_config
from sparrow.schema.options import fields_of, takes_text
from sparrow.schema.train import TrainConfig
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.warmup.config import WarmupConfig

CONFIGS = Path(__file__).parents[3] / "recipes/sparrow_recipes/configs"
FILES: dict[type[Record], Path] = {
    GenerateConfig: CONFIGS / "generate" / "demo.toml",
    StudyConfig: CONFIGS / "study" / "tiny.toml",
    TrainConfig: CONFIGS / "train" / "tiny.toml",
    WarmupConfig: CONFIGS / "warmup" / "base.toml",
}
CONTROL = ("\x1b]0;pwned\x07", "a\rb", "\x9b31m", "a\x00b", "a\nb", "\x7f")


def settings(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a section and of those in it, with its type."""
    for name, inner in fields_of(kind).items():
        key = f"{path}.{name}" if path else name
        if fields_of(inner):
            yield from settings(inner, key)
        else:
            yield key, inner


def refused(root: type[Record], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(root, [FILES[root]], overrides)
    return list(error.value.args)


def numbers(root: type[Record]) -> list[str]:
    """Keys that take a number: those which refuse a list, and not for being no text."""
    found = []
    for key, kind in settings(root):
        if takes_text(kind) or "tuple" in str(kind) or "dict" in str(kind):
            continue
        (line, *_) = refused(root, f"--{key}=[[1]]")
        if "boolean" not in line:
            found.append(key)
    return found


@pytest.mark.parametrize("root", FILES)
def test_every_number_has_an_upper_and_a_lower_bound(root: type[Record]) -> None:
    keys = numbers(root)
    assert keys
    for key in keys:
        for text in ("1e300", "-1e300", str(2**63), str(-(2**63)), "nan", "inf", "0x" + "f" * 5000):
            problems = refused(root, f"--{key}={text}")
            assert any(f"--{key}=" in line for line in problems), (key, text, problems)
            assert all(len(line) < 1000 for line in problems), key


@pytest.mark.parametrize("root", FILES)
def test_every_text_is_without_control_characters_and_of_some_length(root: type[Record]) -> None:
    for key, kind in settings(root):
        if takes_text(kind):
            for text in (*CONTROL, "x" * 5000):
                (line, *_) = refused(root, f"--{key}={text}")
                assert key in line
                assert len(line) < 1000
                assert line.isprintable()


@pytest.mark.parametrize(
    ("root", "key"),
    [(TrainConfig, "run.name"), (WarmupConfig, "model.name"), (StudyConfig, "name")],
)
def test_a_name_that_becomes_a_folder_stays_where_it_is(root: type[Record], key: str) -> None:
    for text in ("", ".", "..", "../up", "a/b", "/root", "a\\b", ".hidden", " a", "x" * 201):
        (line,) = refused(root, f"--{key}={text}")
        assert line.startswith(f"{key}: got ")
    assert load_config(root, [FILES[root]], [f"--{key}=Qwen3-1.7b_v2.1"])


def test_products_of_numbers_that_are_each_allowed() -> None:
    for root, section, first in (
        (TrainConfig, "rollout", "prompts"),
        (TrainConfig, "validation", "rows"),
        (StudyConfig, "probe", "prompts"),
    ):
        given = [f"--{section}.{first}=2048", f"--{section}.samples=1024"]
        (line,) = refused(root, *given)
        assert line.startswith(f"{section}.samples: got 1024 (integer) from option ")


def test_a_study_of_endless_runs() -> None:
    seeds = list(range(2000))
    (line,) = refused(StudyConfig, f"--seeds={seeds}")
    assert "runs" in line
    assert str(FILES[StudyConfig]) in line


def test_serious_numbers_are_taken() -> None:
    for setting in (
        "--rollout.samples=1024",
        "--rollout.prompts=8192",
        "--rollout.max_tokens=1048576",
        "--rollout.kv_gib=1024.0",
        "--run.steps=1000000",
        f"--run.seed={2**63 - 1}",
        "--data.workers=256",
        "--batch.tokens=4194304",
    ):
        load_config(TrainConfig, [FILES[TrainConfig]], [setting])
