"""`sparrow study` as a user meets it, on few tokens: stopped, gone on, done, and told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from support.cli import refused, run

from sparrow.files import read_lines

ROOT = Path(__file__).parents[2]
SETTINGS = """
name = "little"
seeds = [0]
rates = [3e-4]
parallel = 2

[[arms]]
name = "dense"
role = "baseline"

[[arms]]
name = "p05-0.86"
target = 0.86

[surface]
bin = 32
prompts = 8
budgets = [64, 96]

[outcome]
gain = -1.0

[probe]
prompts = 4

[train.model]
name = "tiny"
device = "cpu"

[train.data]
task = "assignments"
length = 100

[train.rollout]
prompts = 2
samples = 4
max_tokens = 80
max_prompt = 64

[train.batch]
tokens = 8192
recompute = false

[train.gate]
mode = "warn"
sample = 4
bin = 32

[train.validation]
every = 1
rows = 4

[train.run]
steps = 2
save_every = 1
keep = 1
rollouts = 0
tensorboard = false
"""
CELLS = ("dense-0", "p05-0.86-0")


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.Popen(
        [sys.executable, "-m", "sparrow", "study", str(file), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=file.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


def wait_for(process: subprocess.Popen[str], happened: Callable[[], object]) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.02)


def written(folder: Path) -> Path:
    file = folder / "little.toml"
    file.write_text(SETTINGS, encoding="utf-8")
    return file


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file that a run, a plan or a calibration wrote: when, and what."""
    kept = [
        path for part in ("cells", "plans", "calibration") for path in folder.rglob(f"{part}/*")
    ]
    files = [path for top in kept for path in [top, *top.rglob("*")] if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A study that was stopped when its first run had begun, and then went on to its end."""
    file = written(tmp_path_factory.mktemp("study"))
    begun = file.parent / "runs" / "study" / "little" / "cells" / "dense-0" / "start.json"
    process = start(file)
    wait_for(process, begun.exists)
    process.send_signal(signal.SIGINT)
    code, before = ended(process)
    assert code == 130, before
    assert begun.exists(), before
    looked = begun.stat().st_mtime_ns
    code, after = ended(start(file))
    assert code == 0, after
    assert begun.stat().st_mtime_ns == looked
    return file, before, after


@pytest.fixture
def folder(little: tuple[Path, str, str]) -> Path:
    return little[0].parent / "runs" / "study" / "little"


def test_an_interrupted_study_goes_on(little: tuple[Path, str, str], folder: Path) -> None:
    _, before, after = little
    assert "stopped; the same command goes on" in before
    assert "dense-0: done" not in before
    for name in CELLS:
        assert f"{name}: done" in after
        for file, steps in (("metrics.jsonl", [0, 1]), ("validation.jsonl", [0, 1, 2])):
            assert [line["step"] for line in read_lines(folder / "cells" / name / file)] == steps
        end = json.loads((folder / "cells" / name / "end.json").read_text())
        assert (end["status"], end["steps"], end["rate"]) == ("done", 2, 3e-4)
    assert after.splitlines()[-1] == str(folder.relative_to(little[0].parent) / "report.md")


def test_arms_differ_in_their_schedule_alone(folder: Path) -> None:
    """Both begin with the same weights and evaluation; one has a plan, with no dense layers."""
    starts = [read_lines(folder / "cells" / name / "validation.jsonl")[0] for name in CELLS]
    assert starts[0] == starts[1]
    dense, sparse = (
        json.loads((folder / "cells" / name / "start.json").read_text()) for name in CELLS
    )
    assert dense["schedule"] == "dense"
    assert min(one["p05"] for one in dense["bins"]) > 0.99
    plan = json.loads((folder / "plans" / "p05-0.86.json").read_text())
    assert sparse["schedule"] == plan["name"] != "dense"
    assert plan["dense_layers"] == []


def test_the_report_tells_of_every_cell(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# little: control study\n\n**Inconclusive:** no positive control")
    for name in CELLS:
        assert f"| {name} | done | 2 |" in text
    assert "**Incomplete" not in text
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results
    for figure in ("accuracy", "gaps", "tails", "budgets"):
        assert "<svg" in (folder / f"{figure}.svg").read_text(encoding="utf-8")
        assert f"({figure}.svg)" in text


def test_a_study_that_is_done_runs_nothing_again(
    little: tuple[Path, str, str], folder: Path
) -> None:
    before, report = snapshot(folder), (folder / "report.md").read_bytes()
    code, said = ended(start(little[0]))
    assert code == 0, said
    assert ": begins" not in said
    assert said.splitlines()[-1].endswith("report.md")
    assert (snapshot(folder), (folder / "report.md").read_bytes()) == (before, report)


def test_the_report_alone_is_the_same(little: tuple[Path, str, str], folder: Path) -> None:
    report = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    code, said = ended(start(little[0], "--report"))
    assert code == 0, said
    assert (folder / "report.md").read_bytes() == report


def test_a_dry_run_shows_the_arms_and_what_is_done(little: tuple[Path, str, str]) -> None:
    code, said = ended(start(little[0], "--dry-run"))
    assert code == 0, said
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["dense", "p05-0.86"]
    assert "planned for p05 0.86" in rows[1]
    assert all("0: done" in row for row in rows)
    assert "2 runs of 2 steps, 2 prompts x 4 answers <= 80 tokens" in said


def test_another_design_in_the_same_folder_is_refused(little: tuple[Path, str, str]) -> None:
    code, said = ended(start(little[0], "--train.run.steps=3"))
    assert code == 2, said
    assert "holds a study of another design (train differ)" in said


def test_a_dry_run_before_anything_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("study", written(tmp_path), "--dry-run")
    assert done.code == 0, done.said
    assert done.said.count("0: waits") == 2
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path)
    for words, name in (
        (("--cell", "dense-7"), "dense-7"),
        (("--cell", "p05-0.86-0"), "p05-0.86.json"),
        (("--plan", "--cell", "dense-0"), "--plan and --cell"),
        (("--report",), "design.json"),
        (("--train.gate.mode=act",), "gate.mode"),
        (("--seed=[0]",), "did you mean --seeds?"),
    ):
        assert name in refused("study", file, *words)
    file.write_text("[[arms]\n", encoding="utf-8")
    assert file.name in refused("study", file)
    assert not (tmp_path / "runs").exists()


def test_a_study_whose_runs_were_started_one_by_one_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "alone.toml"
    arm = '[[arms]]\nname = "p05-0.86"\ntarget = 0.86\n'
    file.write_text(SETTINGS.replace(arm, "").replace("steps = 2", "steps = 1"), encoding="utf-8")
    code, said = ended(start(file, "--cell", "dense-0"))
    assert code == 0, said
    code, said = ended(start(file, "--train.run.steps=3", "--cell", "dense-0"))
    assert code == 2
    assert "holds a study of another design (train differ)" in said
    code, said = ended(start(file))
    assert code == 0, said
    assert "begins" not in said
    assert (tmp_path / "runs" / "study" / "little" / "report.md").exists()


def processes_of(folder: Path) -> list[int]:
    """Those whose command line names something in a folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes() if place.name.isdigit() else b""
        except OSError:  # it has just ended
            continue
        if str(folder).encode() in words:
            found.append(int(place.name))
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_a_killed_study_leaves_nothing_running_and_goes_on(tmp_path: Path, folder: Path) -> None:
    """While a cell trains; at its end the results are those of the study that was not killed."""
    file = written(tmp_path)
    place = tmp_path / "runs" / "study" / "little"
    process = start(file)
    wait_for(process, (place / "cells" / "dense-0" / "start.json").exists)
    assert len(processes_of(place)) >= 1, "the cell that trains"
    process.kill()
    process.communicate()
    until = time.monotonic() + 5
    while processes_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    code, said = ended(start(file))
    assert code == 0, said
    for name in CELLS:
        for part in ("validation.jsonl", "start.json", "tail.json"):
            left, right = (each / "cells" / name / part for each in (place, folder))
            assert left.read_bytes() == right.read_bytes(), (name, part)


def test_a_study_that_was_moved_writes_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "alone.toml"
    arm = '[[arms]]\nname = "p05-0.86"\ntarget = 0.86\n'
    text = SETTINGS.replace(arm, "").replace("steps = 2", "steps = 1")
    file.write_text(text, encoding="utf-8")
    old, new = tmp_path / "old", tmp_path / "new"
    process = start(file, f"--dir={old}")
    wait_for(process, (old / "cells" / "dense-0" / "start.json").exists)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 130, said
    old.rename(new)
    code, said = ended(start(file, f"--dir={new}"))
    assert code == 0, said
    assert (new / "cells" / "dense-0" / "end.json").exists()
    assert not old.exists()
