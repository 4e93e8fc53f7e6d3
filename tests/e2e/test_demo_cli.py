"""`sparrow demo` as a newcomer meets it, on smaller numbers: every stage, stopped and gone on."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import waiting
from support.waiting import output, wait_for

from sparrow.files import read_lines

ROOT = Path(__file__).parents[2]
STEPS = 6  # enough that no machine is through before a signal reaches it
# The real verb; only the numbers of its recipe are smaller.
SMALLER = f"""
from sparrow_recipes import demo as recipe

recipe.BUDGETS, recipe.PROMPTS, recipe.STEPS, recipe.GROUPS = (64, 96), 8, {STEPS}, 2
recipe.SAMPLES, recipe.LENGTH, recipe.MAX_TOKENS = 4, 100, 96
recipe.LONG, recipe.LONG_BUDGET, recipe.LONG_ROWS, recipe.HELD_OUT = 512, 128, 2, 4
from sparrow.cli import main

main()
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    script = folder.parent / "smaller.py"
    script.write_text(SMALLER, encoding="utf-8")
    return waiting.start(ROOT, script, "demo", "--out", folder)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Whole lines; what comes after the last end of a line is being written."""
    file = folder / "train" / "metrics.jsonl"
    return read_lines(file, growing=True) if file.exists() else []


@pytest.fixture(scope="module")
def stopped_and_ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A demo that was stopped while it trained, and then went on to its end."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    process = start(folder)
    wait_for(process, lambda: metrics(folder))
    process.send_signal(signal.SIGINT)
    before = output(process, 130)
    measured = (folder / "calibration" / "surface.json").stat().st_mtime_ns
    after = output(start(folder))
    assert (folder / "calibration" / "surface.json").stat().st_mtime_ns == measured
    return folder, before, after


def test_an_interrupted_demo_goes_on(stopped_and_ended: tuple[Path, str, str]) -> None:
    folder, before, after = stopped_and_ended
    assert "resumes" in before
    assert re.search(rf"resuming after [1-{STEPS - 1}] steps", after)
    assert [line["step"] for line in metrics(folder)] == list(range(STEPS))


def test_it_ends_with_the_page_and_what_it_promises(
    stopped_and_ended: tuple[Path, str, str],
) -> None:
    folder, _, after = stopped_and_ended
    tail = after[after.index("5 of 5") :]
    for told in (str(folder / "report.html"), "accuracy on held-out rows", "sparrow eval"):
        assert told in tail, told
    page = (folder / "report.html").read_text(encoding="utf-8")
    measured = ("surface-0", "kept-tokens", "plan-0", "reward-by-step", "accuracy-by-step")
    for figure in (*measured, "tail-0", "kept-kv", "speed-0", "final-table"):
        assert f'id="{figure}"' in page, figure


def test_a_demo_that_has_ended_is_shown_again_at_once(
    stopped_and_ended: tuple[Path, str, str],
) -> None:
    folder, _, _ = stopped_and_ended
    names = ("train/metrics.jsonl", "speed.json", "report.html")
    before = [(folder / name).read_bytes() for name in names]
    output(start(folder))
    assert [(folder / name).read_bytes() for name in names] == before
