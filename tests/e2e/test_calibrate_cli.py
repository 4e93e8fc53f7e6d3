"""`sparrow calibrate` and `sparrow plan` as a user meets them: the shipped tiny model, offline."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.cli import passed, refused, run
from support.waiting import until

from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface

TASK = ("--task", "assignments", "--length", "200", "--max-tokens", "120", "--bin", "64")
PLAIN = ("--bandwidth", "1e10", "--memory", "1e9", "--flops", "1e12")
LITTLE = (*TASK, "-b", "64", "-b", "96")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("calibrated")
    few = ("-n", "9", "--first-round", "9", "--layer-groups", "2")
    done = passed("calibrate", "tiny", *LITTLE, *few, "-o", place)
    assert "block-mean: p05 of acceptance by total length" in done.said
    assert "by layer" in done.stdout
    assert "fewer than 48 prompts" in done.said
    *_, answer, step = done.stdout.splitlines()  # last, after all tables
    assert "0.86" in answer
    assert step.startswith(f"next: sparrow plan {place}")
    done = passed(*step.split()[2:], "--no-plots", "-o", place / "planned")
    surface = Surface.load(place / "surface.json")
    assert (surface.model, surface.budgets) == ("tiny", (64, 96))
    drawn = {file.name for file in (place / "plots").iterdir()}
    assert {"tails.svg", "layers.svg"} <= drawn
    return place


def test_a_plan_its_files_and_a_check(folder: Path, tmp_path: Path) -> None:
    arguments = ("--by", "p05", "-t", "0.3", "--compare", "qwen3-1.7b-0.86", "-o", tmp_path)
    done = passed("plan", folder, *arguments)
    assert "predicted speed-up" in done.said
    assert "the plan beside qwen3-1.7b-0.86" in done.said
    assert "extrapolated" in done.stderr
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert schedule.family == "qwen3"
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["schedule"]["budgets"] == schedule.budgets.tolist()
    assert (tmp_path / "plots" / "schedule.svg").exists()

    check = (*TASK, "-n", "3", "--skip", "100", "--schedule", tmp_path / "schedule.json")
    done = passed("calibrate", "tiny", *check, "--no-plots", "-o", tmp_path / "check")
    assert "check at target 0.3" in done.stdout
    done = passed("plan", folder, *arguments, "--check", tmp_path / "check")
    assert json.loads((tmp_path / "plan.json").read_text())["check"]


def test_a_target_out_of_reach_exits_1_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    done = run("plan", folder / "surface.json", "-t", "0.999", "-o", tmp_path, "--no-plots")
    assert done.code == 1
    assert "nearest target that can be kept in every bin" in done.said
    assert not list(tmp_path.iterdir())
    done = passed(
        *("plan", folder / "surface.json", "-t", "0.99", "--allow-dense", "-o", tmp_path),
        *("--no-plots", "--json", *PLAIN),
    )
    assert json.loads(done.stdout)["hardware"] == "a machine by its bytes"


def test_interrupted_it_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    words = ("calibrate", "tiny", *LITTLE, "-n", "8", "--layer-groups", "0", "--no-plots")
    command = [sys.executable, "-m", "sparrow", *words, "-o", str(tmp_path)]
    # Whoever runs the tests in the background may have told all children to ignore Ctrl-C.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    until(lambda: (tmp_path / "measured.jsonl").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in " ".join(err.split())
    assert "Traceback" not in err
    passed(*words, "-o", tmp_path)


def test_texts_are_forced(tmp_path: Path) -> None:
    ids = [list(range(40 + n, 190 + n)) for n in range(3)]
    rows = [json.dumps({"ids": row, "start": 20}) for row in ids]
    (tmp_path / "ids.jsonl").write_text("\n".join(rows) + "\n")
    words = ("-b", "64", "--bin", "64", "--layer-groups", "0", "--no-plots", "-o", tmp_path / "out")
    passed("calibrate", "tiny", "--ids", tmp_path / "ids.jsonl", *words)
    surface = Surface.load(tmp_path / "out" / "surface.json")
    assert surface.mode == "forced"
    assert all(cell.estimators and cell.estimators.ratio_mean is None for cell in surface.cells)


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    rows = {"far": [1, 2, 99999], "negative": [1, 2, -3, 4], "long": [1] * 9000}
    for name, ids in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"ids": ids}) + "\n")
    (tmp_path / "number.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    graph = ("--task", "graph")
    preset = (*graph, "--schedule", "qwen3-1.7b-0.86")
    for words, name in (
        ((), "task"),
        (("--task", "chess"), "chess"),
        ((*graph, "--ids", "x"), "--ids x"),
        (("--rows", "nowhere.jsonl"), "nowhere.jsonl"),
        ((*graph, "--flow", "quset"), "quset"),
        ((*graph, "--flow", "dense"), "dense"),
        ((*graph, "--dense-layers", "7"), "layers 0 to 3"),
        ((*graph, "--schedule", "nowhere.json"), "nowhere.json"),
        ((*graph, "--schedule", "qwen3-1.7b-0.68"), "did you mean"),
        ((*preset, "-b", "64"), "-b 64"),
        ((*preset, "--dense-layers", "1"), "--dense-layers 1"),
        *((("--ids", tmp_path / f"{name}.jsonl"), f"{name}.jsonl") for name in rows),
        (("--rows", tmp_path / "number.jsonl"), "number.jsonl"),
        (("--rows", tmp_path / "bytes.jsonl"), "bytes.jsonl"),
    ):
        few = ("-n", "1", "--max-tokens", "8", "-o", tmp_path)
        assert name in refused("calibrate", "tiny", *words, *few), words


def test_bad_plans_are_one_message(folder: Path) -> None:
    surface = folder / "surface.json"
    assert "nowhere.json" in refused("plan", "nowhere.json")
    assert "surface" in refused("plan", folder / "measured.jsonl")
    run("plan", surface, "-t", "0.3", "--by", "p05", "--no-plots", "-o", folder)
    assert "sparrow calibrate" in refused("plan", folder / "plan.json")
    for words, name in (
        (("--hardware", "abacus"), "abacus"),
        (("--by", "luck"), "--by luck"),
        (("--bandwidth", "1e9"), "memory"),
        (("--lengths", "nowhere"), "nowhere"),
        (("--variant", "best"), "best"),
        (("--samples", "4"), "--samples 4"),
        (("-t", "0.3", "--by", "p05", "--check", surface), "check.json"),
    ):
        assert name in refused("plan", surface, *words), words
