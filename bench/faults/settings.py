"""Absurd settings and options: each is refused by one message, or runs, within seconds."""

import contextlib
import io
import random
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from faults.outcomes import Progress, Try, attempt, written_out

from sparrow.cli import main
from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import load_config
from sparrow.schema.options import section_fields
from sparrow.schema.train import TrainConfig
from sparrow.tasks import PUZZLES
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.warmup.config import WarmupConfig

PROMPT = PUZZLES["assignments"].row(0, 100).prompt
SECONDS = 20.0
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)")  # not colours
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VALUES = [*map(written_out, DATA["values"]), "\ud800"]
OPTIONS = [
    (form, value) for form, own in DATA["options"].items() for value in map(written_out, own)
]


def keys_of(section: Any, above: str = "") -> list[str]:
    """Every dotted key of a configuration."""
    keys = []
    for name, kind in section_fields(section).items():
        inner = keys_of(kind, f"{above}{name}.")
        keys += inner or [f"{above}{name}"]
    return keys


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    """Try settings in a temporary folder, as some write files."""
    with tempfile.TemporaryDirectory(prefix="settings-") as place, contextlib.chdir(place):
        return _try_all(count, seed)


def _try_all(count: int, seed: int) -> list[Try]:
    """Two thirds are settings of configurations, the others options of verbs."""
    rng, progress = random.Random(seed), Progress("settings", count)
    roots: list[tuple[list[str], type[Record]]] = [
        (["train", "tiny", "--dry-run"], TrainConfig),
        (["train", "tiny", "--dry-run"], TrainConfig),
        (["study", "tiny", "--dry-run"], StudyConfig),
        (["generate", "--model.name=tiny", "--sampling.max_tokens=4", PROMPT], GenerateConfig),
        (["warmup"], WarmupConfig),
    ]
    for number in range(count):
        if number % 3 == 2:
            form, value = rng.choice(OPTIONS)
            words = [value if word == "{}" else word for word in form.split()]
            progress.add(f"options of {words[0]}", *_tried(words))
        else:
            words, root = rng.choice(roots)
            setting = f"--{rng.choice(keys_of(root))}={rng.choice(VALUES)}"
            tried = _loaded(setting) if root is WarmupConfig else _tried([*words, setting])
            progress.add(f"settings of {words[0]}", *tried)
    return progress.tries


def _loaded(setting: str) -> tuple[str, str]:
    """The warm-up has no dry run: its configuration is loaded alone."""
    kind, result = attempt(lambda: load_config(WarmupConfig, ["tiny"], [setting]), SECONDS)
    return ("ran", "") if kind == "value" else (kind, f"{setting[:100]}: {result}")


def _tried(words: list[str]) -> tuple[str, str]:
    """Errors that `main` turns into one message are refusals; all others are failures."""
    case = repr(words)[:200]
    printed = io.StringIO()
    kind, result = attempt(lambda: _code(words, printed), SECONDS)
    if kind != "value":
        return kind, f"{case}: {result}"
    if CONTROL.search(printed.getvalue()):
        return "traceback", f"{case}: control characters in {printed.getvalue()!r}"[:400]
    return ("refused" if result else "ran"), ""


def _code(words: list[str], printed: io.StringIO) -> object:
    """The exit code of a command line."""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(words)
        except SystemExit as end:
            return end.code
    raise AssertionError("main() exits always")
