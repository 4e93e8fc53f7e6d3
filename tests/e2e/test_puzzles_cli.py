"""`sparrow puzzle` and `warmup` as a user runs them."""

from pathlib import Path

from support.cli import refused, run


def test_a_puzzle_with_its_gold_chain_is_judged_right(tmp_path: Path) -> None:
    done = run("puzzle", "graph", "--length", "200", "--seed", "7", "--gold", "3")
    prompt, chain = done.stdout.splitlines()
    assert done.code == 0
    assert prompt.endswith("<think>")
    answer = tmp_path / "answer"
    answer.write_text(chain)
    words = ("puzzle", "graph", "-l", "200", "-s", "7", "--judge", answer)
    assert run(*words)[:2] == (0, "score 1, accuracy 1: right\n")
    answer.write_text(f"{chain} x1")
    done = run(*words)
    assert done.code == 1
    assert "does not end with" in done.stdout


def test_mistakes_are_named() -> None:
    for words, name in (
        (("puzzle", "sudoku"), "assignments, countdown, graph"),
        (("puzzle", "graph", "--length", "9000"), "100 to 8000"),
        (("puzzle", "graph", "--gold", "1", "--judge", "x"), "gold"),
        (("warmup", "nowhere.toml"), "nowhere.toml"),
    ):
        assert name in refused(*words)
