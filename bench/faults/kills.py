"""kill -9 at random points of train, calibrate, study and demo; resumed, results must be equal."""

import itertools
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from faults.outcomes import Progress, Try
from support import waiting
from support.leftovers import gone, marking

ROUND = 4  # kills before a run is let to its end
Kill = tuple[str, bool]  # when, and whether a process is left
SHARES = {"train": 0.4, "calibrate": 0.3, "study": 0.2, "demo": 0.1}
FEW = 10  # below, only the first two verbs are killed
LONGEST = 900.0  # seconds that a run may take to its end
HERE = Path(__file__).parent
TRAIN, STUDY = HERE / "train.toml", HERE / "study.toml"
CALIBRATE = (
    "calibrate tiny --task assignments --length 100 --max-tokens 64 -b 64 -b 96 --bin 64 "
    "-n 8 --first-round 4 --layer-groups 2 --no-plots"
)


class Verb(NamedTuple):
    """command: whose folder is to follow; results: what must be equal however it was killed."""

    command: str
    results: Callable[[Path], Any]

    def words(self, folder: Path) -> list[str]:
        return f"{self.command}{folder / 'run'}".split()


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


def _study(run: Path) -> Any:
    cells = [_metrics(cell) for cell in sorted((run / "cells").iterdir())]
    return _surface(run / "calibration"), cells


def _demo(run: Path) -> Any:
    page = (run / "report.html").exists()
    return _surface(run / "calibration"), _metrics(run / "train"), page


VERBS = {
    "train": Verb(f"train {TRAIN} --run.out=", _metrics),
    "calibrate": Verb(f"{CALIBRATE} -o ", _surface),
    "study": Verb(f"study {STUDY} --out=", _study),
    "demo": Verb("demo --out ", _demo),
}


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    rng, progress = random.Random(seed), Progress("kills", count, every=5)
    names = list(VERBS)[: 2 if count < FEW else len(VERBS)] if verb is None else [verb]
    total = sum(SHARES[name] for name in names)
    for name in names:
        remaining = round(count * SHARES[name] / total)
        with tempfile.TemporaryDirectory(prefix=f"kills-{name}-") as place:
            _kill_verb(name, VERBS[name], remaining, Path(place), rng, progress)
    return progress.tries


def _kill_verb(
    name: str, verb: Verb, remaining: int, place: Path, rng: random.Random, progress: Progress
) -> None:
    whole = place / "whole"
    whole.mkdir()
    begun = time.monotonic()
    code, said = _to_the_end(verb, whole)
    if code:
        raise RuntimeError(f"{name} does not run: {said[-2000:]}")
    seconds, results, turn = time.monotonic() - begun, verb.results(whole / "run"), 0
    print(f"{name}: {seconds:.0f} s without a kill", flush=True)
    while remaining > 0:
        folder = place / f"turn-{turn}"
        folder.mkdir()
        attempts = iter(partial(_killed, verb, folder, seconds, rng), None)
        kills = list(itertools.islice(attempts, min(ROUND, remaining)))
        outcome, detail = _compared(verb, folder, results)
        for moment, left in kills:
            failed = "orphan" if left else outcome
            progress.add(name, failed, f"killed {moment}; {detail}" if failed != "resumed" else "")
        remaining, turn = remaining - len(kills), turn + 1


def _started(verb: Verb, folder: Path) -> "subprocess.Popen[str]":
    return waiting.start(folder, "-m", "sparrow", *verb.words(folder))


def _killed(verb: Verb, folder: Path, seconds: float, rng: random.Random) -> Kill | None:
    """Kill it after a while, every other time during a write. None if it ended before."""
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
                try:
                    if any(folder.rglob(".*.unfinished")):
                        break
                except FileNotFoundError:  # a folder was renamed or removed as we looked into it
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
    """Resume to the end, and compare with the run that was not killed."""
    ended = (folder / "run" / "model").exists() and "train" in verb.words(folder)[0]
    code, said = (0, "") if ended else _to_the_end(verb, folder)
    if code == -1:
        return "hang", said
    if "Traceback" in said or code:
        return "traceback", f"exit code {code}: {said[-1500:]}"
    if verb.results(folder / "run") != results:
        return "differs", "other results than without a kill"
    left = [str(path) for path in (folder / "run").rglob(".*.unfinished")]
    return ("differs", f"left: {left}") if left else ("resumed", "")
