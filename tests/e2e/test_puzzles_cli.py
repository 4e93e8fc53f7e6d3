"""`sparrow puzzle` and `warmup` as a user runs them."""

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
        (("warmup", "nowhere.toml"), "No such file"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], said: str) -> None:
    code, output = run(*words)
    assert code != 0
    assert said in output
