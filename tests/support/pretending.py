"""A package `sparrow` that only pretends: its processes end in a moment, as a test wants them to.

`python -m sparrow` looks into the current folder first, so a job that is started from a folder
with this package runs it instead of the real one.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

MAIN = '''
import json
import signal
import sys
import time
from pathlib import Path

BY_RATE = json.loads(Path("finals.json").read_text())


def study(file, place, what, name=None):
    """What a cell leaves: its accuracy by step, and that it has ended."""
    folder = Path(place.removeprefix("--out="))
    if what == "--plan":
        (folder / "plans").mkdir(exist_ok=True)
        (folder / "plans" / "p.json").write_text('{"budgets": [80]}')
        start = {"model": "tiny", "answers": 8, "right": 0.9, "cut_off": 0.0, "wrong": 0.1}
        (folder / "start.json").write_text(json.dumps(start))
        return 0
    rates = [float(text) for text in BY_RATE]
    rate = next(one for one in rates if not (folder / "rejected" / f"{one:g}").exists())
    cell = folder / "cells" / name
    cell.mkdir(parents=True)
    final = BY_RATE[f"{rate:g}"]
    lines = [{"step": s, "val-core/a/acc/mean@1": acc} for s, acc in enumerate([0.5, *[final] * 3])]
    (cell / "validation.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    end = {"status": "done", "message": "", "steps": 0, "seconds": 1.0, "rate": rate}
    (cell / "end.json").write_text(json.dumps(end))
    return 0


verb, *words = sys.argv[1:]
if verb == "study":
    sys.exit(study(*words))
elif verb == "write":
    Path(words[0]).touch()
elif verb == "meet":  # ends when the other is there too
    Path(words[0]).touch()
    while not Path(words[1]).exists():
        time.sleep(0.01)
elif verb == "fail":
    print("x" * 1000, "this went wrong")
    sys.exit(3)
elif verb == "wait":  # until it is asked to end
    try:
        Path(words[0]).touch()
        signal.pause()
    except KeyboardInterrupt:
        Path(words[0] + ".asked").touch()
        sys.exit(130)
elif verb == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(words[0]).touch()
    signal.pause()
'''


def pretend(
    folder: Path, patch: pytest.MonkeyPatch, finals: Mapping[float, float] | None = None
) -> None:
    """Go to `folder`, where `sparrow` pretends. finals: accuracy at the end of a cell, by rate."""
    (folder / "sparrow").mkdir()
    (folder / "sparrow" / "__init__.py").touch()  # without it, a package on PYTHONPATH comes first
    (folder / "sparrow" / "__main__.py").write_text(MAIN, encoding="utf-8")
    named = {f"{rate:g}": final for rate, final in (finals or {}).items()}
    (folder / "finals.json").write_text(json.dumps(named), encoding="utf-8")
    patch.chdir(folder)
    patch.setattr("sparrow_recipes.study.running.POLL_SECONDS", 0.02)
