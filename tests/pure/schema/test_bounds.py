"""Absurd numbers and names: refused at the start, by a line with the key and its source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.cli.verbs import VERBS
from sparrow.schema.base import Record
from sparrow.schema.bench import BenchDecodeConfig, BenchTrainConfig
from sparrow.schema.calibrate import CalibrateConfig
from sparrow.schema.common import GenerateConfig
from sparrow.schema.evaluation import EvalConfig
from sparrow.schema.loading import ConfigError, load_config
from sparrow.schema.options import Option, bare, section_fields, takes_text
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
# What a verb must be given besides, by the first word of its name.
GIVEN = {
    "calibrate": ["tiny", "--task", "assignments"],
    "eval": ["tiny"],
    "plan": ["surface.json"],
    "flow": ["quest"],
    "replay": ["run"],
    "report": ["run"],
}
FREE = "puzzle"  # any number is another puzzle
WORDS: dict[type[Record], list[str]] = {
    verb.config: GIVEN.get(name.split()[0], []) for name, verb in VERBS.items() if name != FREE
} | {config: ["-c", str(file)] for config, file in FILES.items()}
ABSURD = ("1e300", "-1e300", str(10**30), str(-(10**30)), "nan", "inf", "", "0x" + "f" * 5000)
LARGE = (str(2**63), str(-(2**63)))  # for settings of files: figures of machines may be larger
CONTROL = ("\x1b]0;pwned\x07", "a\rb", "\x9b31m", "a\x00b", "a\nb", "\x7f")


def settings(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a section and of those in it, with its type."""
    for name, inner in section_fields(kind).items():
        key = f"{path}.{name}" if path else name
        if section_fields(inner):
            yield from settings(inner, key)
        else:
            yield key, inner


def refused(root: type[Record], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(root, [], [*WORDS[root], *overrides])
    return list(error.value.args)


def test_every_number_has_an_upper_and_a_lower_bound() -> None:
    keys = [
        (root, key)
        for root in WORDS
        for key, kind in settings(root)
        if bare(Option(key, (), kind).element) in (int, float)
    ]
    assert len(keys) > 150
    for root, key in keys:
        for text in ABSURD + LARGE * (root in FILES):
            if key == "dense_layers" and not text:
                continue  # none are meant
            problems = refused(root, f"--{key}={text}")
            assert any(f"--{key}=" in line for line in problems), (key, text, problems)
            assert all(len(line) < 1000 for line in problems), key


@pytest.mark.parametrize("root", FILES)
def test_every_text_is_without_control_characters_and_of_some_length(root: type[Record]) -> None:
    for key, kind in settings(root):
        if takes_text(kind):
            several_lines = key.endswith("chat.system")
            long = "x" * (2**16 + 1 if several_lines else 5000)
            for text in (
                *(text for text in CONTROL if "\n" not in text or not several_lines),
                long,
            ):
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
    for root, key, *words in (
        (TrainConfig, "rollout.samples", "--rollout.prompts=2048", "--rollout.samples=1024"),
        (
            TrainConfig,
            "validation.samples",
            "--validation.prompts=2048",
            "--validation.samples=1024",
        ),
        (StudyConfig, "probe.samples", "--probe.prompts=2048", "--probe.samples=1024"),
        (EvalConfig, "samples", "-n65536", "-k65536"),
        (CalibrateConfig, "samples", "-n65536", "-k65536"),
        (BenchDecodeConfig, "case", "--case=999999999,999999999"),
        (BenchTrainConfig, "case", "--case=9999999999,2"),
    ):
        (line,) = refused(root, *words)
        assert line.startswith(key), line


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
