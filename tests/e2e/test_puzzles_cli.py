"""`sparrow puzzle`, `evaluate` and `warmup` as a user runs them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from typer.testing import CliRunner

from sparrow.cli import app


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    said = done.output if done.exception is None else f"{done.output}{done.exception}"
    return done.exit_code, said


def test_a_puzzle_with_its_gold_chain_is_judged_right(tmp_path: Path) -> None:
    code, said = run("puzzle", "graph", "--length", "200", "--seed", "7", "--gold", "3")
    prompt, chain = said.splitlines()
    assert code == 0
    assert prompt.endswith("<think>")
    answer = tmp_path / "answer"
    answer.write_text(chain)
    assert run("puzzle", "graph", "-l", "200", "-s", "7", "--judge", str(answer)) == (
        0,
        "score 1, accuracy 1: right\n",
    )
    answer.write_text(f"{chain} x1")
    code, said = run("puzzle", "graph", "-l", "200", "-s", "7", "--judge", str(answer))
    assert code == 1
    assert "does not end with" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("puzzle", "sudoku"), "there are assignments, countdown, graph"),
        (("puzzle", "graph", "--length", "9000"), "100 to 8000"),
        (("puzzle", "graph", "--gold", "1", "--judge", "x"), "not both"),
        (("evaluate", "nobody"), "small, tiny"),
        (("evaluate", "tiny", "--length", "50"), "100 to 8000"),
        (("evaluate", "tiny", "--budget", "64", "--window", "64"), "not both"),
        (("evaluate", "tiny", "--gym", "x", "--budget", "64"), "--gym goes with"),
        (("warmup", "nowhere.toml"), "No such file"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], said: str) -> None:
    code, output = run(*words)
    assert code != 0
    assert said in output


def test_evaluate_gives_json() -> None:
    code, said = run("evaluate", "tiny", "-f", "countdown", "-l", "100", "--rows", "2", "--json")
    assert code == 0
    cell = json.loads(said[said.index("{") :])["countdown"]["100"]
    assert cell["answers"] == 2
    assert 0 <= cell["accuracy"] <= 1
