"""`sparrow calibrate` and `sparrow plan` as a user meets them: the shipped tiny model, offline."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from typer.testing import CliRunner

from sparrow.cli import app
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface

TASK = ("--task", "assignments", "--length", "200", "--max-tokens", "120", "--bin", "64")
PLAIN = ("--bandwidth", "1e10", "--memory", "1e9", "--flops", "1e12")
LITTLE = (*TASK, "-b", "64", "-b", "96", "-b", "128")


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sparrow", *map(str, words)]
    environment = {**os.environ, "COLUMNS": "160", "TERM": "dumb"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=_hears_interrupts,
    )


def _hears_interrupts() -> None:
    """Whoever runs the tests in the background may have told all children to ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    process = start(*words)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def refused(*words: str | Path, told: str) -> None:
    """In this process: `main` makes one message of these errors, as test_cli.py shows."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, ValueError | OSError)
    assert told in str(result.exception)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("calibrated")
    done = run("calibrate", "tiny", *LITTLE, "-n", "9", "--first-round", "9", "-o", place)
    assert done.returncode == 0, done.stderr
    assert "block-mean: p05 of acceptance by total length" in done.stdout
    assert "by layer" in done.stdout
    assert "fewer than 48 prompts" in " ".join(done.stderr.split())
    assert "sparrow plan" in done.stderr
    return place


def test_a_surface_and_its_plots(folder: Path) -> None:
    surface = Surface.load(folder / "surface.json")
    assert surface.model == "tiny"
    assert surface.budgets == (64, 96, 128)
    assert {"tails.svg", "means.svg", "layers.svg"} <= {
        file.name for file in (folder / "plots").iterdir()
    }


def test_a_plan_its_files_and_a_check(folder: Path, tmp_path: Path) -> None:
    arguments = ("--by", "p05", "-t", "0.3", "--compare", "qwen3-1.7b-0.86", "-o", tmp_path)
    done = run("plan", folder / "surface.json", *arguments)
    assert done.returncode == 0, done.stderr
    assert "predicted speed-up" in done.stdout
    assert "the plan beside qwen3-1.7b-0.86" in done.stdout
    assert "extrapolated" in done.stderr
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert schedule.family == "qwen3"
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["schedule"]["budgets"] == schedule.budgets.tolist()
    assert (tmp_path / "plots" / "schedule.svg").exists()

    check = (*TASK, "-n", "3", "--skip", "100", "--schedule", tmp_path / "schedule.json")
    done = run("calibrate", "tiny", *check, "--no-plots", "-o", tmp_path / "check")
    assert done.returncode == 0, done.stderr
    assert "check at target 0.3" in done.stdout
    done = run(
        "plan", folder / "surface.json", *arguments, "--check", tmp_path / "check" / "check.json"
    )
    assert "check: p05" in " ".join(done.stdout.split())


def test_a_target_out_of_reach_exits_1_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    done = run("plan", folder / "surface.json", "-t", "0.999", "-o", tmp_path, "--no-plots")
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "not reached" in told
    assert "nearest target that can be kept in every bin" in told
    assert not list(tmp_path.iterdir())
    done = run(
        "plan", folder / "surface.json", "-t", "0.99", "--allow-dense", "-o", tmp_path, "--no-plots"
    )
    assert done.returncode == 0, done.stderr


def test_as_json(folder: Path, tmp_path: Path) -> None:
    words = ("-t", "0.3", "--by", "p05", "-o", tmp_path, "--no-plots", "--json")
    done = run("plan", folder / "surface.json", *words, *PLAIN)
    assert json.loads(done.stdout)["hardware"] == "a machine by its bytes"


def test_interrupted_it_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    words = ("calibrate", "tiny", *LITTLE, "-n", "4", "--layer-groups", "0", "--no-plots")
    process = start(*words, "-o", tmp_path)
    while not (tmp_path / "measured.sqlite").exists():
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in " ".join(err.split())
    assert "Traceback" not in err
    done = run(*words, "-o", tmp_path)
    assert done.returncode == 0, done.stderr


def test_texts_are_forced(tmp_path: Path) -> None:
    ids = [list(range(40 + n, 190 + n)) for n in range(3)]
    rows = [json.dumps({"ids": row, "start": 20}) for row in ids]
    (tmp_path / "ids.jsonl").write_text("\n".join(rows) + "\n")
    words = ("-b", "64", "--bin", "64", "--layer-groups", "0", "--no-plots", "-o", tmp_path / "out")
    done = run("calibrate", "tiny", "--ids", tmp_path / "ids.jsonl", *words)
    assert done.returncode == 0, done.stderr
    surface = Surface.load(tmp_path / "out" / "surface.json")
    assert surface.mode == "forced"
    assert all(cell.estimators and cell.estimators.ratio_mean is None for cell in surface.cells)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give one of --task, --rows, --texts and --ids"),
        (("--task", "chess"), "no task 'chess'"),
        (("--task", "graph", "--ids", "x"), "give one of"),
        (("--rows", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--ids", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--task", "graph", "-t", "1.2"), "between 0 and 1"),
        (("--task", "graph", "-b", "20"), ">= 48"),
        (("--task", "graph", "--temperature", "0"), "greedy policy"),
        (("--task", "graph", "--flow", "quset"), "quset"),
        (("--task", "graph", "--dense-layers", "7"), "layers 0 to 3"),
        (("--task", "graph", "--schedule", "nowhere.json"), "nowhere.json cannot be read"),
        (("--task", "graph", "--schedule", "qwen3-1.7b-0.68"), "did you mean"),
        (("--task", "graph", "--schedule", "qwen3-1.7b-0.86", "-b", "64"), "which has its own"),
        (("--task", "graph", "--flow", "dense"), "the floor measures that already"),
        (("--task", "graph", "--temperature", "nan"), "greedy policy"),
        (("--ids", "{folder}/far.jsonl"), "token id 99999, allowed: 0 to 511"),
        (("--ids", "{folder}/negative.jsonl"), "token id -3"),
        (("--ids", "{folder}/long.jsonl"), "allowed: 3 to 8192"),
        (("--rows", "{folder}/number.jsonl"), "must be a text or chat messages"),
        (("--rows", "{folder}/bytes.jsonl"), "is not UTF-8 text"),
    ],
)
def test_bad_input_is_one_message(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    rows = {"far": [1, 2, 99999], "negative": [1, 2, -3, 4], "long": [1] * 9000}
    for name, ids in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"ids": ids}) + "\n")
    (tmp_path / "number.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    words = tuple(word.format(folder=tmp_path) for word in words)
    refused("calibrate", "tiny", *words, "-n", "1", "--max-tokens", "8", "-o", tmp_path, told=told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.json",), "cannot be read"),
        (("{folder}/surface.json", "--hardware", "abacus"), "no machine 'abacus'"),
        (("{folder}/surface.json", "--by", "luck"), "give low or p05"),
        (("{folder}/surface.json", "--bandwidth", "1e9"), "go together"),
        (("{folder}/surface.json", "--lengths", "nowhere"), "no such file"),
        (("{folder}/surface.json", "--variant", "best"), "no variant 'best'"),
        (("{folder}/measured.sqlite",), "surface"),
        (("{folder}/surface.json", "-t", "1.5"), "between 0 and 1"),
        (("{folder}/surface.json", "-t", "nan"), "between 0 and 1"),
        (("{folder}/surface.json", "--samples", "4"), "goes with --prompts"),
        (("{folder}/surface.json", *PLAIN[:3], "inf", *PLAIN[4:]), "above 0"),
        (
            (
                "{folder}/surface.json",
                "-t",
                "0.3",
                "--by",
                "p05",
                "--check",
                "{folder}/surface.json",
            ),
            "give the check.json of its schedule",
        ),
    ],
)
def test_bad_plans_are_one_message(words: tuple[str, ...], told: str, folder: Path) -> None:
    refused("plan", *(word.format(folder=folder) for word in words), told=told)
