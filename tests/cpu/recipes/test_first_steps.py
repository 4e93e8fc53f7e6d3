"""The first 200 steps of the warm-up, run again on this CPU: the curve that a GPU recorded.

The GPU multiplied in bfloat16, this runs in float32. While the rate is small the difference is that
of rounding; at higher rates it grows tenfold in 20 steps, as that of any two runs does, until the
curves agree in their course alone. Measured on an ARM CPU against the H200:

    steps           0-19    20-39   40-59   60-79   80-199
    single steps    3.4e-4  1.9e-4  8.6e-4  7.6e-3  0.39 (a spike at step 160, on the GPU alone)
    means over 20   2e-6    5.0e-5  5.1e-5  5.2e-4  0.055
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pytest_timeout")  # markers are strict: without it the one below is unknown

from sparrow.schema.loading import load_config
from sparrow_recipes.warmup.config import WarmupConfig
from sparrow_recipes.warmup.training import new_trainer, train

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "bench" / "2026-11-15-warmup-base.jsonl"
STEPS = 200
CLOSE = 60  # steps in which rounding has not grown yet


def recorded() -> list[dict[str, Any]]:
    with RECORDED.open(encoding="utf-8") as file:
        return [json.loads(next(file)) for _ in range(STEPS)]


def assert_same_course(lines: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for name in ("step", "rate", "tokens"):
        assert [line[name] for line in lines] == [line[name] for line in wanted]
    loss, other = (np.array([line["loss"] for line in curve]) for curve in (lines, wanted))
    assert loss[-20:].mean() < 0.5 * loss[:20].mean()  # something was learnt
    apart = loss - other
    means = np.abs(apart.reshape(-1, 20).mean(1))
    assert np.abs(apart[:CLOSE]).max() < 4e-3
    assert means[: CLOSE // 20].max() < 4e-4
    assert means.max() < 0.2


@pytest.mark.timeout(2400)
@pytest.mark.slow
def test_the_first_steps_reproduce_the_recorded_curve() -> None:
    config = load_config(WarmupConfig, ["base"], ["--run.device=cpu"])
    lines = list(train(new_trainer(config), config, until=STEPS))
    assert_same_course(lines, recorded())
