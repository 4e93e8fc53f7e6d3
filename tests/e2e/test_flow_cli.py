"""`sparrow flow` as an author of flows meets it: a file of their own, a small model, no network."""

import json
from pathlib import Path

import pytest
import torch
from support import cli

import sparrow

MINE = """
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.formats import D, int4

def summarise(keys, values):
    return {"top": keys.max(0)}

def score(query, fields, position):
    return query.mean(0) @ fields.top

mine = Flow(name="mine", fields={"top": int4(D)}, summarise=summarise, score=score)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli.byte_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    for name in ("engine/engine.py", "ops/types.py"):
        source = Path(sparrow.__file__).parent / name
        (place / source.name).write_bytes(source.read_bytes()[:2000])
    return place


def run(*words: str | Path) -> cli.Ended:
    return cli.run("flow", *words)


def test_check_shows_the_program_and_compares(mine: Path) -> None:
    done = run("check", mine, "--head-size", "64", "--group", "3", "--device", "cpu")
    assert done.code == 0, done.stderr
    for part in ("mine (", "head size 64, group 3", "int4", "0.27x", "same pages", "ties"):
        assert part in done.stdout
    told = run("check", f"{mine}:mine", "--device", "cpu", "--json")
    result = json.loads(told.stdout)
    assert result["passed"]
    assert result["bytes"] == 64 + 2


def test_a_broken_flow_exits_2_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(MINE.replace("fields.top", "fields.top.T"))
    done = run("check", file)
    assert done.code == 2
    assert "broken.py:9: `return query.mean(0) @ fields.top.T`" in done.said


def test_mistakes_are_one_message() -> None:
    for words, name in (
        (("check", "no-such-flow"), "no_such_flow"),
        (("check", "nowhere.py"), "nowhere.py"),
        (("score", "quest", "--dense-layers", "x"), "--dense-layers x"),
        (("score", "quest", "-m", "no-such-model"), "no-such-model"),
        (("score", "quest", "--texts", "nowhere"), "nowhere"),
        (("score", "quest", "--leaderboard", "."), "leaderboard"),
    ):
        assert name in cli.refused("flow", *words), words


def test_score_measures_once_and_fills_a_leaderboard(
    folder: Path, mine: Path, texts: Path, tmp_path: Path
) -> None:
    out, board = tmp_path / "run", tmp_path / "board.jsonl"
    words = ["score", mine, "-m", folder, "-b", "64", "-b", "96", "--tokens", "300"]
    words += ["--texts", texts, "--dense-layers", "none", "--out", out, "--device", "cpu"]
    first = run(*words, "--leaderboard", board)
    assert first.code == 0, first.stderr
    for part in ("mine", "block-mean", "oracle", "2 texts of 300 tokens", "dense layers: none"):
        assert part in first.stdout
    cells = (out / "cells.jsonl").read_text()
    assert len(cells.splitlines()) == 2 * 2 * 4  # texts, budgets; three flows and the reference
    lines = [json.loads(line) for line in board.read_text().splitlines()]
    assert [line["configuration"]["budget"] for line in lines] == [64, 96]
    assert {line["formula"]["flow"] for line in lines} == {"mine"}

    again = run(*words, "--json", "--against", "block_mean")
    assert again.code == 0, again.stderr
    assert (out / "cells.jsonl").read_text() == cells
    rows = json.loads(again.stdout)["rows"]
    assert [row["p05"] for row in rows if row["flow"] == "mine"] == [
        line["p05"]["mean"] for line in lines
    ]


def test_texts_are_copied_for_another_machine(tmp_path: Path) -> None:
    done = run("texts", tmp_path / "out")
    assert done.code == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.txt"))) == 10


def test_bench_wants_a_gpu_or_to_be_told(mine: Path) -> None:
    if not torch.cuda.is_available():
        done = run("bench", mine)
        assert done.code == 2
        assert "--device cpu" in done.stderr
    small = ("--batch", "1", "--context", "128", "--kept", "4")
    done = run("bench", mine, "--device", "cpu", *small)
    assert done.code == 0, done.stderr
    assert "mine" in done.stdout
    assert "block-mean" in done.stdout
