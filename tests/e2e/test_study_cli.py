"""`sparrow study` as a user meets it, on few tokens: stopped, gone on, killed, done, and told."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import cli, waiting
from support.leftovers import gone, marked, marking
from support.waiting import output, wait_for

from sparrow.files import read_document, read_lines

ROOT = Path(__file__).parents[2]
LITTLE = (ROOT / "bench" / "faults" / "study.toml").read_text(encoding="utf-8")
CELLS = ("dense-0", "p05-0.86-0")
PLACE = Path("runs/study/little")


def written(folder: Path, *, dense_alone: bool = False, steps: int = 2) -> Path:
    file = folder / "little.toml"
    text = LITTLE.replace(', {name = "p05-0.86", target = 0.86}', "") if dense_alone else LITTLE
    file.write_text(text.replace("steps = 2", f"steps = {steps}"), encoding="utf-8")
    return file


def start(file: Path, *words: str) -> "subprocess.Popen[str]":
    return waiting.start(file.parent, "-m", "sparrow", "study", file, *words)


Here = Callable[..., str]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """`sparrow study` in this process, at the folder of its file: what it says."""

    def run(file: Path, *words: str, code: int = 0) -> str:
        monkeypatch.chdir(file.parent)
        words = ("study", str(file), *words)
        monkeypatch.setattr(sys, "argv", ["sparrow", *words])  # the report names the command
        done = cli.run(*words)
        assert done.code == code, done.said
        return done.said

    return run


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A study that was stopped when its first run had begun, and then went on to its end."""
    file = written(tmp_path_factory.mktemp("study"))
    begun = file.parent / PLACE / "cells" / "dense-0" / "start.json"
    process = start(file)
    wait_for(process, begun.exists)
    process.send_signal(signal.SIGINT)
    before = output(process, 130)
    assert begun.exists(), before
    looked = begun.stat().st_mtime_ns
    early = begun.with_name("end.json").exists()  # it ended before it was asked: a fast machine
    after = output(start(file))
    assert early or "dense-0: done" in after
    assert begun.stat().st_mtime_ns == looked
    return file, before, after


@pytest.fixture
def folder(little: tuple[Path, str, str]) -> Path:
    return little[0].parent / PLACE


def test_an_interrupted_study_goes_on_and_tells_of_every_cell(
    little: tuple[Path, str, str], folder: Path
) -> None:
    _, before, after = little
    assert "resumes" in before
    assert "dense-0: done" not in before
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "p05-0.86-0: done" in after
    for name in CELLS:
        assert f"| {name} | done | 2 |" in text
        cell = folder / "cells" / name
        for file, steps in (("metrics.jsonl", [0, 1]), ("validation.jsonl", [0, 1, 2])):
            assert [line["step"] for line in read_lines(cell / file)] == steps
        end = read_document(cell / "end.json")
        assert (end["status"], end["steps"], end["rate"]) == ("done", 2, 3e-4)
    assert after.splitlines()[-1] == str(PLACE / "report.md")


def test_arms_differ_in_their_schedule_alone(folder: Path) -> None:
    """Both begin with the same weights and evaluation; one has a plan, with no dense layers."""
    starts = [read_lines(folder / "cells" / name / "validation.jsonl")[0] for name in CELLS]
    assert starts[0] == starts[1]
    dense, sparse = (read_document(folder / "cells" / name / "start.json") for name in CELLS)
    assert min(one["p05"] for one in dense["bins"]) > 0.99
    plan = read_document(folder / "plans" / "p05-0.86.json")
    assert (dense["schedule"], sparse["schedule"]) == ("dense", plan["name"])
    assert plan["dense_layers"] == []


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file that a run, a plan or a calibration wrote: when, and what."""
    parts = ("cells", "plans", "calibration")
    files = [path for part in parts for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_study_that_is_done_is_only_told_again(
    little: tuple[Path, str, str], folder: Path, here: Here
) -> None:
    before, report = snapshot(folder), (folder / "report.md").read_bytes()
    for words in ((), ("--report",)):
        (folder / "report.md").unlink()
        said = here(little[0], *words)
        assert ": begins" not in said
        assert (snapshot(folder), (folder / "report.md").read_bytes()) == (before, report)
    said = here(little[0], "--dry-run")
    assert said.count("0: done") == len(CELLS)
    said = here(little[0], "--train.run.steps=3", code=2)
    assert "another design (train" in said


def test_mistakes_are_told_in_a_line_and_make_no_folder(tmp_path: Path, here: Here) -> None:
    file, broken = written(tmp_path), tmp_path / "broken.toml"
    broken.write_text("[[arms]\n", encoding="utf-8")
    for place, words, told in (
        (file, ("--cell", "dense-7"), "dense-7"),
        (file, ("--cell", "p05-0.86-0"), "--plan"),
        (file, ("--plan", "--cell", "dense-0"), "--cell"),
        (file, ("--report",), "design.json"),
        (file, ("--train.gate.mode=act",), "train.gate.mode"),
        (file, ("--seed=[0]",), "seed"),
        (broken, (), "broken.toml"),
    ):
        said = here(place, *words, code=2)
        assert told in said
        assert "Traceback" not in said
    said = here(file, "--dry-run")
    assert said.count("0: waits") == len(CELLS)
    assert not (tmp_path / "runs").exists()


SECOND = """
[[arms]]
name = "dense"
role = "baseline"

[[arms]]
name = "fine"
schedule = "tiny-0.86"
train.algorithm.aggregate = "seq-mean-token-mean"
train.rollout.attention = {flow = "fine_means(4)", force = true}

[analysis]
primary = ["fine", "dense"]
sd = [0.1]
predictions = [{hypothesis = "chance", compare = ["fine", "dense"], right = "open"}]
"""


def test_a_study_with_an_analysis(tmp_path: Path, here: Here) -> None:
    """Refused where the limit cuts off the start's answers; told to, it begins and is analysed."""
    file = tmp_path / "little.toml"
    text = LITTLE.replace("allow_cut_off = true\n", "").replace("rows = 4", "prompts = 2")
    arms = next(line for line in text.splitlines() if line.startswith("arms"))
    text = text.replace(arms + "\n", "").replace("\n[train]", f"{SECOND}\n[train]")
    file.write_text(text, encoding="utf-8")
    assert "fine less dense" in here(file, "--dry-run")
    assert "--allow-cut-off" in here(file, "--plan", code=2)
    assert "--allow-cut-off" in here(file, "--cell", "dense-0", code=2)
    for words in (("--plan",), ("--cell", "dense-0"), ("--cell", "fine-0"), ("--report",)):
        here(file, *words, "--allow-cut-off")
    folder = tmp_path / PLACE
    start, run = read_document(folder / "start.json"), read_document(folder / "design.json")["run"]
    assert start["cut_off"] > 0.05
    for name in ("dense-0", "fine-0"):
        assert read_document(folder / "cells" / name / "end.json")["study"] == run["id"]
    outcomes = read_document(folder / "cells" / "fine-0" / "tail.json")["outcomes"]
    assert sum(outcomes) == pytest.approx(1)
    metrics = read_lines(folder / "cells" / "fine-0" / "metrics.jsonl")
    assert metrics[-1]["sparse/step/survivors/bin_32"] == 1.0
    results = read_document(folder / "results.json")["analysis"]
    (pair,) = results["comparisons"]
    assert (pair["runs"], pair["verdict"]) == ([1, 1], "no result")
    assert sum(pair[share]["value"] for share in ("right", "cut_off", "wrong")) == pytest.approx(0)
    assert results["indicators"][0]["missing"] == 2


@pytest.mark.slow
def test_a_study_whose_runs_were_started_one_by_one_and_that_was_moved(
    tmp_path: Path, here: Here
) -> None:
    """It has more steps than it can take before it hears that it shall end."""
    file = written(tmp_path, dense_alone=True, steps=6)
    old, new = tmp_path / "old", tmp_path / "new"
    here(file, f"--out={old}", "--plan")
    process = start(file, f"--out={old}", "--cell", "dense-0")
    wait_for(process, (old / "cells" / "dense-0" / "start.json").exists)
    process.send_signal(signal.SIGINT)
    output(process, 130)
    here(file, f"--out={old}", "--train.run.steps=7", "--cell", "dense-0", code=2)
    old.rename(new)
    output(start(file, f"--out={new}"))
    assert (new / "cells" / "dense-0" / "end.json").exists()
    assert (new / "report.md").exists()
    assert not old.exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_a_killed_study_leaves_nothing_running_and_goes_on(tmp_path: Path, folder: Path) -> None:
    """While a cell trains; at its end the results are those of the study that was not killed."""
    file, place = written(tmp_path, dense_alone=True), tmp_path / PLACE
    with marking() as mark:
        process = start(file)
        wait_for(process, (place / "cells" / "dense-0" / "start.json").exists)
        assert len(marked(mark)) > 1, "the cell that trains"
        process.kill()
        process.communicate()
        assert gone(mark)
    output(start(file))
    cells = [each / "cells" / "dense-0" for each in (place, folder)]
    evaluated, before = ((cell / "validation.jsonl").read_bytes() for cell in cells)
    assert evaluated == before
    for part in ("start.json", "tail.json"):
        left, right = (read_document(cell / part) for cell in cells)
        assert left.pop("study") != right.pop("study"), "another run of the study"
        assert left == right, part
