"""`sparrow demo` as a newcomer meets it, on smaller numbers: every stage, stopped and gone on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from sparrow.cli import main
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
from sparrow.files import read_lines

main()
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    script = folder.parent / "smaller.py"
    script.write_text(SMALLER, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(script), "demo", "--out", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", "TERM": "dumb"},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Whole lines; what comes after the last end of a line is being written."""
    file = folder / "train" / "metrics.jsonl"
    return read_lines(file, growing=True) if file.exists() else []


def measured(folder: Path) -> dict[tuple[str, int, int], str]:
    """The answers of a calibration that are on the disk, by arm, prompt and sample."""
    file = folder / "calibration" / "measured.jsonl"
    rows = read_lines(file, growing=True)[1:] if file.exists() else []
    return {tuple(row["key"].values()): row["figures"]["ids"] for row in rows}


def wait_for(process: subprocess.Popen[str], happened: Callable[[], object]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.02)


@pytest.fixture(scope="module")
def stopped_and_ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A demo that was stopped while it trained, and then went on to its end."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    process = start(folder)
    wait_for(process, lambda: metrics(folder))
    process.send_signal(signal.SIGINT)
    code, before = ended(process)
    assert code == 130, before
    measured = (folder / "calibration" / "surface.json").stat().st_mtime_ns
    code, after = ended(start(folder))
    assert code == 0, after
    assert (folder / "calibration" / "surface.json").stat().st_mtime_ns == measured
    return folder, before, after


def test_an_interrupted_demo_goes_on(stopped_and_ended: tuple[Path, str, str]) -> None:
    folder, before, after = stopped_and_ended
    assert "goes on" in before
    assert re.search(rf"goes on after [1-{STEPS - 1}] steps", after)
    assert [line["step"] for line in metrics(folder)] == list(range(STEPS))


@pytest.mark.slow
def test_a_demo_that_was_killed_while_it_calibrated_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = start(folder)
    wait_for(process, lambda: measured(folder))
    process.kill()
    code, said = ended(process)
    assert code == -signal.SIGKILL, said
    assert not (folder / "calibration" / "surface.json").exists()
    before = measured(folder)
    process = start(folder)
    wait_for(process, (folder / "calibration" / "surface.json").exists)
    process.kill()
    _, said = ended(process)
    assert (folder / "calibration" / "surface.json").exists(), said
    after = measured(folder)
    assert len(after) == 3 * 8 > len(before)  # dense and two budgets, eight prompts
    assert before.items() <= after.items()


def test_it_ends_with_the_page_and_what_it_promises(
    stopped_and_ended: tuple[Path, str, str],
) -> None:
    folder, _, after = stopped_and_ended
    tail = after[after.index("5 of 5") :]
    assert str(folder / "report.html") in tail
    for told in ("accuracy on held-out rows", "p05 of acceptance", "512 tokens", "sparrow eval"):
        assert told in tail, told
    page = (folder / "report.html").read_text(encoding="utf-8")
    for figure in ("surface-0", "kept-tokens", "plan-0", "reward-by-step", "accuracy-by-step"):
        assert f'id="{figure}"' in page, figure
    for figure in ("tail-0", "kept-kv", "speed-0", "final-table"):
        assert f'id="{figure}"' in page, figure


def test_a_demo_that_has_ended_is_shown_again_at_once(
    stopped_and_ended: tuple[Path, str, str],
) -> None:
    folder, _, _ = stopped_and_ended
    lines, speed = metrics(folder), (folder / "speed.json").read_text()
    page = (folder / "report.html").read_bytes()
    code, said = ended(start(folder))
    assert code == 0, said
    assert (metrics(folder), (folder / "speed.json").read_text()) == (lines, speed)
    assert (folder / "report.html").read_bytes() == page


def test_folders_of_others_and_of_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others, older = tmp_path / "mine", tmp_path / "older"
    (others / "train").mkdir(parents=True)
    older.mkdir()
    (older / "demo.json").write_text("{}", encoding="utf-8")
    for folder, words, told in (
        (others, (), "--out"),
        (others, ("--fresh",), "--out"),
        (older, (), "--fresh"),
    ):
        monkeypatch.setattr(sys, "argv", ["sparrow", "demo", "--out", str(folder), *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert told in capsys.readouterr().err
    assert (others / "train").exists()
