"""From a configuration to rows and a judge: who judges what, and what nobody judges."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparrow.schema.train import RowsConfig
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example
from sparrow.tasks.choosing import MATH_SOURCE, judge_of, rows_of
from sparrow.tasks.judging import InProcess, Judges

ROOT = Path(__file__).parents[3]


def lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def verl(number: int = 0, source: str = "openai/gsm8k") -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": str(number)}
    return {"data_source": source, "prompt": "1 + 1?", "reward_model": truth}


def chosen(config: RowsConfig) -> tuple[Any, Any]:
    rows = rows_of(config, seed=0)
    return rows, judge_of(config, rows)


def verdict(judge: Any, example: Example, text: str) -> Any:
    with judge:
        return asyncio.run(judge(example, text))


@pytest.mark.parametrize("family", PUZZLES)
def test_puzzles_are_judged_here(family: str) -> None:
    rows, judge = chosen(RowsConfig(task=family, first=5, length=200))
    assert isinstance(judge, InProcess)
    puzzle = PUZZLES[family]
    gold = puzzle.chain(puzzle.row(5, 200), 0)
    assert verdict(judge, rows.at(0), gold).score == 1
    assert verdict(judge, rows.at(0), "no").score == 0


def test_puzzles_of_a_file(tmp_path: Path) -> None:
    truth = {"family": "graph", "seed": 3, "length": 200}
    row = {"data_source": "mine", "prompt": "?", "answer": truth}
    bad = {**row, "answer": {**truth, "length": -1}}
    file = lines(tmp_path / "rows.jsonl", [row, bad])
    rows, judge = chosen(RowsConfig(file=str(file), shuffle=False))
    gold = PUZZLES["graph"].chain(PUZZLES["graph"].row(3, 200), 0)
    assert verdict(judge, rows.at(0), gold).score == 1
    assert "length must be" in verdict(judge, rows.at(1), gold).reason
    assert judge.counts["errors"] == 1


def test_gym_has_a_process() -> None:
    pytest.importorskip("reasoning_gym")
    config = RowsConfig(task="gym/leg_counting", workers=1, deadline=60.0)
    rows, judge = chosen(config)
    assert isinstance(judge, Judges)
    made = rows.source.row(config.first, config.length)
    text = f"</think><answer>{made.data['answer']}</answer>"
    assert verdict(judge, rows.at(0), text).score == 1


def test_mathematics_and_tasks_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    truth = {"family": "graph", "seed": 3, "length": 200}
    file = lines(tmp_path / "rows.jsonl", [verl(5), {"prompt": "?", "answer": truth}])
    gold = PUZZLES["graph"].chain(PUZZLES["graph"].row(3, 200), 0)
    for reward, scores in ((None, [1, 1]), ("math", [1])):
        config = RowsConfig(file=str(file), shuffle=False, reward=reward, workers=1, deadline=60.0)
        rows, judge = chosen(config)

        async def asked(rows: Any = rows, judge: Any = judge, count: int = len(scores)) -> list:
            texts = ((rows.at(0), r"\boxed{5}"), (rows.at(1), gold))[:count]
            return [(await judge(example, text)).score for example, text in texts]

        with judge:
            assert asyncio.run(asked()) == scores


def test_rows_that_nobody_judges_and_tasks_that_are_none(tmp_path: Path) -> None:
    """Names are not enough: others have a countdown too."""
    rows = [verl(5, source=source) for source in ("code", "hiyouga/geometry3k", "")]
    rows.append({"data_source": "countdown", "prompt": "?", "answer": {"target": 24}})
    for row in rows:
        with pytest.raises(ValueError, match=r"data\.reward"):
            chosen(RowsConfig(file=str(lines(tmp_path / "rows.jsonl", [row]))))
    with pytest.raises(ValueError, match="chess"):
        chosen(RowsConfig(task="chess"))
    with pytest.raises(ValueError, match=r"data\.reward"):
        chosen(RowsConfig(task="graph", reward="math"))


def test_a_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(source, text, truth, extra): return 0.5")
    file = lines(tmp_path / "rows.jsonl", [verl(5, source="code")])
    reward = f"{tmp_path}/mine.py:half"
    config = RowsConfig(file=str(file), reward=reward, workers=1, deadline=60.0)
    rows, judge = chosen(config)
    assert verdict(judge, rows.at(0), "")[:2] == (0.5, 0.0)


def test_names_of_mathematics() -> None:
    names = "openai/gsm8k math math_dapo lighteval/MATH DigitalLearningGmbH/MATH-lighteval"
    names += " HuggingFaceH4/MATH-500 aime2024 AIME_2025 polaris-53k numina_olympiads"
    names += " POLARIS-Project/Polaris-Dataset-53K"
    assert all(MATH_SOURCE.search(name) for name in names.split())


GYM = "from sparrow.tasks.gym import Gym; Gym(dataset='leg_counting')"
MISSING = {  # by package: the extra that has it, and what asks for it
    "pyarrow": ("parquet", "from sparrow.tasks.rows import read_rows; read_rows(sys.argv[1])"),
    "math_verify": ("math", "from sparrow.tasks.math import load; load()"),
    "reasoning_gym": ("gym", GYM),
    "cellpylib": ("gym", GYM),  # which the gym needs
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_told_by_its_extra(package: str, tmp_path: Path) -> None:
    """In a process of its own: a package that fails to load leaves parts of itself behind."""
    extra, ask = MISSING[package]
    (tmp_path / "rows.parquet").write_text("nothing")
    code = f"import sys; sys.modules[{package!r}] = None; {ask}"
    command = [sys.executable, "-c", code, str(tmp_path / "rows.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"pip install 'sparrow-rl[{extra}]'" in done.stderr
