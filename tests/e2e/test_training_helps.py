"""The product does what it is for: the reward rises under sparse rollout, and the tail holds.

`tiny` answers puzzles with few tokens to do so; about half of its answers are cut off at first. A
dozen steps on a CPU, one minute.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.waiting import ended, start

from sparrow.schema.schedule import Schedule

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPE = """
model = {name = "tiny", device = "cpu"}
data = {task = "assignments", length = 100}
batch = {recompute = false}
optimiser = {rate = 3e-4}
run = {steps = 12, save_every = 100, tensorboard = false}

[rollout]
prompts = 4
samples = 8
max_tokens = 128
max_prompt = 64
attention.schedule = "96.json"
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rise")
    Schedule.fixed(96, dense_layers=(0, 1)).save(folder / "96.json")
    recipe = RECIPE.replace("96.json", str(folder / "96.json"))
    (folder / "rise.toml").write_text(recipe, encoding="utf-8")
    words = ("train", folder / "rise.toml", f"--run.out={folder / 'run'}")
    code, said = ended(start(ROOT, "-m", "sparrow", *words))
    assert code == 0, said
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def test_the_reward_rises_under_a_sparse_rollout(steps: list[dict[str, Any]]) -> None:
    assert steps[0]["sparse/density"] < 0.97
    assert [line["step"] for line in steps] == list(range(12))
    for line in steps:
        assert line["actor/skipped"] == 0
        assert all(line[name] == 0 for name in line if name.startswith("faults/"))
    before, after = mean(steps[:3], "critic/score/mean"), mean(steps[-4:], "critic/score/mean")
    assert before < 0.65
    assert after > before + 0.2


def test_the_tail_stays_in_range(steps: list[dict[str, Any]]) -> None:
    """p05 of exact acceptance: over all lengths at every step, and in each bin at the end.

    A bin that is below target on the way is what the gate is for: it raises its budget.
    """
    assert all(0.86 <= line["sparse/accept_p05"] <= 1.0001 for line in steps)
    assert all(line["mismatch/accept_estimate"] > 0.9 for line in steps)
    for line in steps[-3:]:
        assert line["sparse/accept_p05_min"] >= 0.86
        assert line["sparse/gate_violation_frac"] == 0
