"""Absurd settings and options: each is refused by one message, or runs, within seconds."""

import contextlib
import io
import random
import re
import tempfile
from typing import Any

from faults.outcomes import Progress, Try, attempt

from sparrow.cli import main
from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.errors import fields_of
from sparrow.schema.loading import load_config
from sparrow.schema.train import TrainConfig
from sparrow.tasks import PUZZLES
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.warmup.config import WarmupConfig

PROMPT = PUZZLES["assignments"].row(0, 100).prompt
SECONDS = 20.0
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)")  # not colours
VALUES = [
    "0", "-1", "1", "100000000", "1000000000000", "1" + "0" * 30, "9" * 5000, "1e308", "-1e308",
    "1e-308", "nan", "inf", "0.5", "true", "''", "x", "x" * 20000, "\x1b[2J\x07", "../../../x", ".",
    "..", "/", "[]", "[" * 5000 + "]" * 5000, "{}", "{a=1}", "[1, 'x']", "2026-01-01", "\x00",
    "\ud800", "$(touch pwned)", "os:system", "a:b", "__import__('os')", "cuda:99", "%s%n", "☃",
]  # fmt: skip
OPTIONS = [
    ("calibrate tiny --task assignments -n {}", ["0", "-1", "1000000000000", "x", "nan"]),
    ("calibrate tiny --task assignments --length {}", ["0", "-1", "1000000000000", "9" * 400]),
    ("calibrate tiny --task assignments -n 1 -b {}", ["0", "-5", "1000000000000", "x", "1"]),
    ("calibrate tiny --task assignments -n 1 --temperature {}", ["0", "-1", "nan", "1e400"]),
    ("calibrate tiny --task {}", ["", "x", "gym/x", "../x", "\x1b[2J", "x" * 9999]),
    ("calibrate tiny --rows {}", ["/", "/dev/null", "nowhere.jsonl", "/etc/passwd", "\x00"]),
    ("calibrate {} --task assignments", ["", ".", "/", "/dev/null", "a/b/c", "x" * 9999, "\x1b"]),
    ("calibrate tiny --texts {}", ["/", "/dev", "nowhere", ""]),
    ("calibrate tiny --ids {}", ["/dev/null", "/etc/passwd", "."]),
    ("eval tiny -t assignments -l {} -n 1", ["0", "-1", "1000000000000", "x"]),
    ("eval tiny -t assignments -l 100 -n {}", ["0", "-1", "1000000000000"]),
    ("eval tiny -t assignments -l 100 -n 1 --samples {}", ["0", "-1", "1000000000000"]),
    ("eval tiny -t assignments -l 100 -n 1 --window {}", ["0", "-1", "17", "1000000000000"]),
    ("eval tiny -t assignments -l 100 -n 1 --schedule {}", ["x", "/", "/dev/null", "x.json"]),
    ("eval tiny -t assignments -l 100 -n 1 --budget 64 --flow {}", ["x", "os:system", "x.py", ":"]),
    ("eval {}", ["", "/", "nowhere", "../x"]),
    ("plan {}", ["/", "/dev/null", "/etc/passwd", "nowhere.json", "\x1b.json"]),
    ("report {}", ["/", "/dev/null", "nowhere", "."]),
    ("replay {}", ["/", "/dev/null", "nowhere", "."]),
    ("puzzle assignments --length {}", ["0", "-1", "1000000000000", "x"]),
    ("puzzle {}", ["", "x", "\x1b[2J"]),
    ("presets {}", ["", "x", "\x1b[2J", "qwen3-1.7b-0.86"]),
    ("train {} --dry-run", ["/", "/dev/null", "nowhere.toml", "\x1b.toml"]),
    ("study {} --dry-run", ["/", "/dev/null", "nowhere.toml"]),
    ("bench decode --batch {}", ["0", "-1", "x"]),
    ("flow check {}", ["x", "os:system", "nowhere.py", "/dev/null", ""]),
]


def keys_of(section: Any, above: str = "") -> list[str]:
    """Every dotted key of a configuration."""
    keys = []
    for name, kind in fields_of(section).items():
        inner = keys_of(kind, f"{above}{name}.")
        keys += inner or [f"{above}{name}"]
    return keys


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    """So many, in a folder of their own, in which some write."""
    with tempfile.TemporaryDirectory(prefix="settings-") as place, contextlib.chdir(place):
        return _try_all(count, seed)


def _try_all(count: int, seed: int) -> list[Try]:
    """Two thirds are settings of configurations, the others options of verbs."""
    rng, progress = random.Random(seed), Progress("settings", count)
    options = [(form, value) for form, values in OPTIONS for value in values]
    roots: list[tuple[list[str], type[Record]]] = [
        (["train", "tiny", "--dry-run"], TrainConfig),
        (["train", "tiny", "--dry-run"], TrainConfig),
        (["study", "tiny", "--dry-run"], StudyConfig),
        (["generate", "--model.name=tiny", "--sampling.max_tokens=4", PROMPT], GenerateConfig),
        (["warmup"], WarmupConfig),
    ]
    for number in range(count):
        if number % 3 == 2:
            form, value = rng.choice(options)
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
    """Errors that `main` turns into one message are refusals; all else is what is looked for."""
    told = repr(words)[:200]
    printed = io.StringIO()
    kind, result = attempt(lambda: _code(words, printed), SECONDS)
    if kind != "value":
        return kind, f"{told}: {result}"
    if CONTROL.search(printed.getvalue()):
        return "traceback", f"{told}: control characters in {printed.getvalue()!r}"[:400]
    return ("refused" if result else "ran"), ""


def _code(words: list[str], printed: io.StringIO) -> object:
    """The exit code of a command line."""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(words)
        except SystemExit as end:
            return end.code
    raise AssertionError("main() exits always")
