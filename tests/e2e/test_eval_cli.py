"""`sparrow eval` as a user runs it: the shipped tiny model, offline."""

import json
import shutil
from pathlib import Path

from support import cli

from sparrow import models
from sparrow.schema.schedule import Schedule
from sparrow.tasks import PUZZLES

SHORT = ("-l", "100", "--max-tokens", "40", "--device", "cpu")


def run(*words: str | Path) -> tuple[int, str]:
    """The exit code, and what was printed: of a success on standard output."""
    done = cli.run("eval", *words, columns=160)
    return done.code, done.stdout or " ".join(done.stderr.split())


def test_a_table_with_its_header() -> None:
    code, said = run("tiny", "-t", "countdown", "-t", "graph", *SHORT, "-n", "2", "-k", "3")
    assert code == 0, said
    words = " ".join(said.split())
    assert "attention: dense" in words
    for shown in (
        "mean@3",
        "pass@2",
        "pass@3",
        "right",
        "cut off",
        "wrong",
        "countdown 100",
        "graph 100",
    ):
        assert shown in words


def test_json_and_answers(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    code, said = run(
        *("tiny", "-t", "countdown", *SHORT, "-l", "120", "-n", "2", "--skip", "5", "-k", "2"),
        *("--budget", "64", "--json", "--out", out),
    )
    assert code == 0, said
    found = json.loads(said)
    assert "budget 64 tokens" in found["attention"]
    assert [(cell["source"], cell["length"]) for cell in found["cells"]] == [
        ("countdown", 100),
        ("countdown", 120),
    ]
    cell = found["cells"][0]
    assert (cell["rows"], cell["samples"]) == (2, 2)
    assert [one["k"] for one in cell["passes"]] == [1, 2]
    assert cell["mean"]["low"] <= cell["mean"]["value"] <= cell["mean"]["high"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines[::2]] == [
        f"countdown-{length}-{seed}" for length in (100, 120) for seed in (5, 6)
    ]
    assert all(line["tokens"] <= 40 and line["text"] and line["reason"] for line in lines)
    assert "out" in cli.refused("eval", "tiny", "-t", "countdown", *SHORT, "--out", out)


def test_without_a_task_all_families_at_three_lengths(tmp_path: Path) -> None:
    code, said = run("tiny", "-n", "1", "--max-tokens", "2", "--device", "cpu", "--json")
    assert code == 0, said
    assert [(cell["source"], cell["length"]) for cell in json.loads(said)["cells"]] == [
        (family, length) for family in PUZZLES for length in (200, 500, 1000)
    ]
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    other = models.random("qwen3-0.6b", **sizes, head_size=16, vocabulary=600, max_positions=64)
    folder = models.save(other, tmp_path / "other", tokenizer=models.locate("tiny"))
    assert "--task" in cli.refused("eval", folder, "--device", "cpu")  # of another language


def test_rows_of_a_file_in_a_window(tmp_path: Path) -> None:
    rows = []
    for seed in range(3):
        row = PUZZLES["graph"].row(seed, 100)
        truth = {"family": "graph", "seed": seed, "length": 100}
        row_of_file = {"data_source": "mine", "prompt": row.prompt, "ground_truth": truth}
        rows.append(row_of_file)
    rows.append({"data_source": "mine", "prompt": "x1"})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("--window", "64", "--max-tokens", "30", "--device", "cpu", "--json")
    code, said = run("tiny", "--file", file, *words)
    assert code == 0, said
    found = json.loads(said)
    (cell,) = found["cells"]
    assert (cell["source"], cell["length"], cell["rows"]) == ("mine", None, 3)
    assert len(found["left_out"]) == 1


def test_a_run_directory_and_one_that_has_not_ended(tmp_path: Path) -> None:
    shutil.copytree(models.locate("tiny"), tmp_path / "done" / "model")
    code, said = run(tmp_path / "done", "-t", "graph", *SHORT, "-n", "1")
    assert code == 0, said
    (tmp_path / "begun").mkdir()
    assert "begun" in cli.refused("eval", tmp_path / "begun", "-t", "graph", *SHORT)


def test_a_schedule_of_another_family_needs_force(tmp_path: Path) -> None:
    Schedule.fixed(64, family="llama", dense_layers=(), name="other").save(tmp_path / "s.json")
    words = ("tiny", "-t", "graph", *SHORT, "-n", "1", "--schedule", tmp_path / "s.json")
    assert "family 'llama'" in cli.refused("eval", *words)
    code, said = run(*words, "--force")
    assert code == 0, said
    assert "FORCED, made for family llama" in " ".join(said.split())


def test_mistakes_are_named() -> None:
    for words, name in (
        (("nobody", "-t", "graph"), "nobody"),
        (("tiny", "--length", "50"), "100 to 8000"),
        (("tiny", "--task", "sudoku"), "sudoku"),
        (("tiny", "--budget", "64", "--window", "64"), "window"),
        (("tiny", "--budget", "20"), "--budget 20"),
        (("tiny", "--window", "60"), "--window 60"),
        (("tiny", "--flow", "quest"), "flow"),
        (("tiny", "--force"), "force"),
        (("tiny", "--rows", "x.jsonl", "--task", "graph"), "task"),
        (("tiny", "--rows", "nowhere.jsonl"), "nowhere.jsonl"),
        (("tiny", "--reward", "math"), "reward"),
        (("tiny", "--temperature", "0", "-k", "2"), "samples"),
        (("tiny", "--out", "nowhere/answers.jsonl"), "out"),
    ):
        assert name in cli.refused("eval", *words, "--device", "cpu"), words
