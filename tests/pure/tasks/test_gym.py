"""reasoning-gym as a source: rows by seed, its verifier behind a strict form, clear refusals."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.tasks.base import RIGHT, Row, wrong
from sparrow.tasks.gym import LONGEST, PLAIN, REFUSED, Gym

ALL_DATASETS = pytest.importorskip("reasoning_gym.factory").DATASETS
ROOT = Path(__file__).parents[3]
DATASETS = ["leg_counting", "basic_arithmetic", "countdown", "spiral_matrix", "coin_flip"]
ROWS = """
import json
from sparrow.tasks.gym import Gym
gyms = [Gym(dataset=name) for name in {names}]
print(json.dumps([[gym.row(seed, 100).prompt for seed in range(5)] for gym in gyms]))
"""


def output(answer: str) -> str:
    return f"Hm.\n</think>\n<answer>{answer}</answer>\n"


@pytest.mark.parametrize("dataset", DATASETS)
def test_gold_answers_are_right(dataset: str) -> None:
    gym = Gym(dataset=dataset)
    for seed in range(5):
        row = gym.row(seed, 1000)
        assert gym.reward(row, output(row.data["answer"])) == RIGHT
        assert gym.reward(row, "<think>\n" + output(row.data["answer"])) == RIGHT
        assert row.prompt.startswith(row.data["question"])


def test_rows_belong_to_their_seed_in_every_process() -> None:
    code = ROWS.format(names=DATASETS)
    drawn = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(drawn) == 1
    assert all(len(set(prompts)) == 5 for prompts in json.loads(drawn.pop()))


@pytest.mark.parametrize("dataset", sorted(PLAIN))
def test_what_could_run_or_hang_is_not_judged(dataset: str) -> None:
    gym = Gym(dataset=dataset)
    for answer in (
        *("__import__('os').getpid()", "exit()", "9**9**9**9", "1e999999999", "nan"),
        *("[x for x in [1]]", "lambda: 0"),
    ):
        verdict = gym.reward(gym.row(0, 100), output(answer))
        assert verdict == wrong(verdict.reason)
        assert "plain" in verdict.reason
    for seed in range(20):
        row = gym.row(seed, 100)
        assert gym.reward(row, output(row.data["answer"])) == RIGHT


@pytest.mark.parametrize("dataset", ["leg_counting", "game_of_life", "prime_factorization"])
def test_junk_gets_a_verdict(dataset: str) -> None:
    """A text of another form too; a partial score is not right."""
    gym = Gym(dataset=dataset)
    for text in ("", "<think><think></think><answer>4</answer>", output("9" * (LONGEST + 1))):
        verdict = gym.reward(gym.row(0, 100), text)
        assert verdict == wrong(verdict.reason)
    junk = ("{}", "\0", "9" * 5000, "[" * 5000, "١٢", "nan", '{"a":' * 2000, "\ud800")
    for answer in junk:
        verdict = gym.reward(gym.row(0, 100), output(answer))
        assert verdict.acc == 0
        assert 0 <= verdict.score < 1
        assert verdict.reason


def test_verifiers_that_lie_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise RuntimeError("broken")

    gym = Gym(dataset="leg_counting")
    row = gym.row(0, 100)
    for score in (float("nan"), -1.0, 1.5):
        monkeypatch.setattr(type(gym._judge), "score_answer", lambda *_, score=score: score)
        assert gym.reward(row, output("4")).score == 0
    monkeypatch.setattr(type(gym._judge), "score_answer", fails)
    assert "RuntimeError" in gym.reward(row, output("4")).reason


def test_bad_settings() -> None:
    for dataset, message in (
        ("leg_count", "leg_counting"),
        ("?", "dataset"),
        ("simple_integration", "refused"),
    ):
        with pytest.raises(ValueError, match=message):
            Gym(dataset=dataset)
    gym = Gym(dataset="leg_counting")
    with pytest.raises(ValueError, match="graph"):
        gym.reward(Row(family="graph", seed=0, length=1, prompt="", data={}), "")
    with pytest.raises(ValueError, match="length"):
        gym.row(0, 0)


def test_verifiers_that_evaluate_are_all_known() -> None:
    """A new version of the gym may bring more of them."""
    harmless = {"number_sorting"}  # it evaluates its own answer, not the model's
    marks = ("eval(", "exec(", "parse_expr(", "sympify(", "Fraction(")
    result = {
        name
        for name, (dataset, _) in ALL_DATASETS.items()
        if any(mark in inspect.getsource(dataset.score_answer) for mark in marks)
    }
    assert result <= REFUSED.keys() | PLAIN.keys() | harmless
    assert REFUSED.keys() | PLAIN.keys() <= ALL_DATASETS.keys()
