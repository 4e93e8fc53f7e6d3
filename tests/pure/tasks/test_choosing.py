"""From a configuration to rows and a judge: who judges what, and what nobody judges."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.rewards import row_file, verl

from sparrow.functions import register
from sparrow.schema.train import RowsConfig
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example
from sparrow.tasks.choosing import MATH_SOURCE, open_judge, open_rows
from sparrow.tasks.judging import InProcess, Judges

ROOT = Path(__file__).parents[3]


def chosen(config: RowsConfig) -> tuple[Any, Any]:
    rows = open_rows(config, seed=0)
    return rows, open_judge(config, rows)


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


def test_gym_has_a_process() -> None:
    pytest.importorskip("reasoning_gym")
    config = RowsConfig(task="gym/leg_counting", workers=1, deadline=60.0)
    rows, judge = chosen(config)
    assert isinstance(judge, Judges)
    made = rows.source.row(config.first, config.length)
    text = f"</think><answer>{made.data['answer']}</answer>"
    assert verdict(judge, rows.at(0), text).score == 1


def test_rows_of_a_file(tmp_path: Path) -> None:
    """Puzzles are judged here, mathematics in processes, and anything by a function of the user."""
    (tmp_path / "mine.py").write_text("def half(source, text, truth, extra): return 0.5")
    truth = {"family": "graph", "seed": 3, "length": 200}
    gold = PUZZLES["graph"].chain(PUZZLES["graph"].row(3, 200), 0)
    puzzle, bad = ({"prompt": "?", "answer": {**truth, "length": n}} for n in (200, -1))
    mathematics, boxed = verl(5), r"\boxed{5}"
    for rows, reward, kind, texts, scores in (
        ([puzzle, bad], None, InProcess, [gold, gold], [1, 0]),
        ([verl(data_source="code")], f"{tmp_path}/mine.py:half", Judges, [""], [0.5]),
        ([mathematics, puzzle], None, Judges, [boxed, gold], [1, 1]),
        ([mathematics, puzzle], "math", Judges, [boxed], [1]),
    ):
        if mathematics in rows:
            pytest.importorskip("math_verify")
        file = str(row_file(tmp_path / "rows.jsonl", rows))
        config = RowsConfig(rows=file, shuffle=False, reward=reward, workers=1, deadline=60.0)
        result, judge = chosen(config)
        assert isinstance(judge, kind)
        with judge:
            for place, (text, score) in enumerate(zip(texts, scores, strict=True)):
                assert asyncio.run(judge(result.at(place), text)).score == score
        assert judge.counts["errors"] == (rows[-1] is bad)


def test_rows_that_nobody_judges_and_tasks_that_are_none(tmp_path: Path) -> None:
    """Names are not enough: others have a countdown too."""
    rows = [verl(5, data_source=source) for source in ("code", "hiyouga/geometry3k", "")]
    rows.append({"data_source": "countdown", "prompt": "?", "answer": {"target": 24}})
    for row in rows:
        with pytest.raises(ValueError, match=r"data\.reward"):
            chosen(RowsConfig(rows=str(row_file(tmp_path / "rows.jsonl", [row]))))
    names = "openai/gsm8k math math_dapo lighteval/MATH DigitalLearningGmbH/MATH-lighteval"
    names += " HuggingFaceH4/MATH-500 aime2024 AIME_2025 polaris-53k numina_olympiads"
    names += " POLARIS-Project/Polaris-Dataset-53K"
    assert all(MATH_SOURCE.search(name) for name in names.split())
    with pytest.raises(ValueError, match="chess"):
        chosen(RowsConfig(task="chess"))
    with pytest.raises(ValueError, match=r"data\.reward"):
        chosen(RowsConfig(task="graph", reward="math"))


GYM = "from sparrow.tasks.gym import Gym; Gym(dataset='leg_counting')"
MISSING = {  # by package: the extra that has it, and what asks for it
    "pyarrow": ("parquet", "from sparrow.tasks.rows import read_rows; read_rows(sys.argv[1])"),
    "math_verify": ("math", "from sparrow.tasks.math import load; load()"),
    "reasoning_gym": ("gym", GYM),
    "cellpylib": ("gym", GYM),  # which the gym needs
    "textarena": ("envs", "from sparrow.tasks.choosing import find_task; find_task('textarena/a')"),
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


def test_a_function_of_a_notebook_cell_judges_in_this_process(tmp_path: Path) -> None:
    def reward(text: str, answer: str) -> bool:
        return text == answer

    file = str(row_file(tmp_path / "rows.jsonl", [verl(5, data_source="mine")]))
    config = RowsConfig(rows=file, reward=register(reward, "data.reward"))
    rows, judge = chosen(config)
    assert isinstance(judge, InProcess)
    assert [verdict(judge, rows.at(0), text).score for text in ("5", "6")] == [1, 0]
    with pytest.raises(ValueError, match=r"data\.reward.*here:other"):
        chosen(config.replace(reward="here:other"))


def test_gsm8k_as_it_is_and_mapped_columns_are_judged(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    row = {"question": "How many?", "answer": "48 / 2 = 24\n#### 72"}
    mapped = {"q": "How many?", "a": "72", "set": "math"}
    columns = {"prompt": "q", "answer": "a", "source": "set"}
    for one, settings in ((row, {}), (mapped, {"columns": columns})):
        file = str(row_file(tmp_path / "rows.jsonl", [one]))
        rows, judge = chosen(RowsConfig(rows=file, workers=1, deadline=60.0, **settings))
        with judge:
            texts = (r"so \boxed{72}", r"so \boxed{24}")
            scores = [asyncio.run(judge(rows.at(0), text)).score for text in texts]
        assert scores == [1, 0]
