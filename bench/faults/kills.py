"""kill -9 at random points of train, calibrate, study and demo: started again, nothing differs."""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from faults.outcomes import Progress, Try
from support.leftovers import gone, marking

ROUND = 4  # kills before a run is let to its end
Kill = tuple[str, bool]  # when, and whether a process is left
SHARES = {"train": 0.4, "calibrate": 0.3, "study": 0.2, "demo": 0.1}
FEW = 10  # below, only the first two verbs are killed
LONGEST = 900.0  # seconds that a run may take to its end
TRAIN = """
model = {name = "tiny", device = "cpu"}
data = {task = "assignments", length = 100, first = 10000}
rollout = {prompts = 2, samples = 2, max_tokens = 48, max_prompt = 64, attention = {budget = 48}}
batch = {tokens = 8192, recompute = false}
validation = {every = 3, rows = 2}
run = {steps = 6, save_every = 1, tensorboard = false}
"""
CALIBRATE = (
    "calibrate tiny --task assignments --length 100 --max-tokens 64 -b 64 -b 96 --bin 64 "
    "-n 8 --first-round 4 --layer-groups 2 --no-plots"
)
STUDY = """
name = "little"
seeds = [0]
rates = [3e-4]
parallel = 2
arms = [{name = "dense", role = "baseline"}, {name = "p05-0.86", target = 0.86}]
surface = {bin = 32, prompts = 8, budgets = [64, 96]}
outcome = {gain = -1.0}
probe = {prompts = 4}
[train]
model = {name = "tiny", device = "cpu"}
data = {task = "assignments", length = 100}
rollout = {prompts = 2, samples = 4, max_tokens = 80, max_prompt = 64}
batch = {tokens = 8192, recompute = false}
gate = {mode = "warn", sample = 4, bin = 32}
validation = {every = 1, rows = 4}
run = {steps = 2, save_every = 1, keep = 1, rollouts = 0, tensorboard = false}
"""


class Verb(NamedTuple):
    """words: of the command, for a folder; results: what must be equal however it was killed."""

    words: Callable[[Path], list[str]]
    results: Callable[[Path], Any]


def train_words(folder: Path) -> list[str]:
    (folder / "train.toml").write_text(TRAIN, encoding="utf-8")
    return ["train", str(folder / "train.toml"), f"--run.dir={folder / 'run'}"]


def calibrate_words(folder: Path) -> list[str]:
    return [*CALIBRATE.split(), "-o", str(folder / "run")]


def study_words(folder: Path) -> list[str]:
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    return ["study", str(folder / "study.toml"), f"--dir={folder / 'run'}"]


def demo_words(folder: Path) -> list[str]:
    return ["demo", "--out", str(folder / "run")]


def _metrics(run: Path) -> Any:
    """Metrics and validations without times, and the weights."""
    found = []
    for name in ("metrics.jsonl", "validation.jsonl", "actions.jsonl"):
        for line in (run / name).read_text(encoding="utf-8").splitlines():
            values = json.loads(line).items()
            kept = {k: v for k, v in values if not k.startswith(("timing_s/", "perf/", "digest"))}
            found.append(kept)
    return found, (run / "model" / "model.safetensors").read_bytes()


def _surface(folder: Path) -> Any:
    data = json.loads((folder / "surface.json").read_text(encoding="utf-8"))
    return {k: v for k, v in data.items() if k not in ("created", "command", "digest")}


VERBS = {
    "train": Verb(train_words, lambda folder: _metrics(folder / "run")),
    "calibrate": Verb(calibrate_words, lambda folder: _surface(folder / "run")),
    "study": Verb(
        study_words,
        lambda folder: (
            [_surface(folder / "run" / "calibration")]
            + [_metrics(cell) for cell in sorted((folder / "run" / "cells").iterdir())]
        ),
    ),
    "demo": Verb(
        demo_words,
        lambda folder: (
            _surface(folder / "run" / "calibration"),
            _metrics(folder / "run" / "train"),
            (folder / "run" / "report.html").exists(),
        ),
    ),
}


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    rng, progress = random.Random(seed), Progress("kills", count, every=5)
    names = list(VERBS)[: 2 if count < FEW else len(VERBS)] if verb is None else [verb]
    total = sum(SHARES[name] for name in names)
    for name in names:
        wanted = round(count * SHARES[name] / total)
        with tempfile.TemporaryDirectory(prefix=f"kills-{name}-") as place:
            _kill_verb(name, VERBS[name], wanted, Path(place), rng, progress)
    return progress.tries


def _kill_verb(
    name: str, verb: Verb, wanted: int, place: Path, rng: random.Random, progress: Progress
) -> None:
    whole = place / "whole"
    whole.mkdir()
    begun = time.monotonic()
    code, said = _to_the_end(verb, whole)
    if code:
        raise RuntimeError(f"{name} does not run: {said[-2000:]}")
    seconds, results, turn = time.monotonic() - begun, verb.results(whole), 0
    print(f"{name}: {seconds:.0f} s without a kill", flush=True)
    while wanted > 0:
        folder = place / f"turn-{turn}"
        folder.mkdir()
        attempts = iter(partial(_killed, verb, folder, seconds, rng), None)
        kills = list(itertools.islice(attempts, min(ROUND, wanted)))
        outcome, detail = _compared(verb, folder, results)
        for moment, left in kills:
            failed = "orphan" if left else outcome
            progress.add(name, failed, f"killed {moment}; {detail}" if failed != "resumed" else "")
        wanted, turn = wanted - len(kills), turn + 1


def _started(verb: Verb, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "sparrow", *verb.words(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, "TERM": "dumb"},
    )


def _killed(verb: Verb, folder: Path, seconds: float, rng: random.Random) -> Kill | None:
    """Kill it after a while, every other time just as it writes. None where it ended before."""
    after, writing = rng.uniform(0, seconds), rng.random() < 0.5
    with marking() as mark:
        process = _started(verb, folder)
        assert process.stdout is not None
        with process.stdout:
            until = time.monotonic() + after
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.002)
            until = time.monotonic() + seconds
            while writing and process.poll() is None and time.monotonic() < until:
                if any(folder.rglob(".*.unfinished")):
                    break
            if process.poll() is not None:
                return None
            process.kill()
            process.wait()
        left = not gone(mark)
    return f"after {after:.1f} s{', as it wrote' if writing else ''}", left


def _to_the_end(verb: Verb, folder: Path) -> tuple[int, str]:
    process = _started(verb, folder)
    try:
        said, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        return -1, f"no end within {LONGEST:g} s"
    return process.returncode, said


def _compared(verb: Verb, folder: Path, results: Any) -> tuple[str, str]:
    """Let it go on to its end; what came of it against the run that nobody killed."""
    ended = (folder / "run" / "model").exists() and "train" in verb.words(folder)[0]
    code, said = (0, "") if ended else _to_the_end(verb, folder)
    if code == -1:
        return "hang", said
    if "Traceback" in said or code:
        return "traceback", f"exit code {code}: {said[-1500:]}"
    if verb.results(folder) != results:
        return "differs", "other results than without a kill"
    left = [str(path) for path in (folder / "run").rglob(".*.unfinished")]
    return ("differs", f"left: {left}") if left else ("resumed", "")
