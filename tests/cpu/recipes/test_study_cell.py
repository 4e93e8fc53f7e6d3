"""A cell that was killed between the end of its training and its own; p05 by bin, by hand."""

from pathlib import Path

import numpy as np
import pytest

from sparrow.schema.gate import AcceptanceReading
from sparrow.schema.loading import load_config
from sparrow_recipes.study.cell import run_cell, tail_bins
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.study.design import END, Study

LITTLE = Path(__file__).parents[3] / "bench" / "faults" / "study.toml"
SMALLER = ["--probe.prompts=2", "--train.rollout.samples=2", "--train.rollout.max_tokens=16"]
SMALLER += ["--train.gate.sample=2", "--train.validation.prompts=2", "--train.run.steps=1"]


def test_a_cell_that_was_trained_but_not_ended_ends_the_same(tmp_path: Path) -> None:
    study = Study(load_config(StudyConfig, [LITTLE], [*SMALLER, f"--out={tmp_path}"]))
    cell = study.cell("dense-0")
    run_cell(study, cell, 3e-4)
    folder = study.folder_of(cell)
    trained = (folder / "model" / "model.safetensors").read_bytes()
    (folder / END).unlink()
    run_cell(study, cell, 3e-4)
    assert study.ended(cell)
    assert (folder / "model" / "model.safetensors").read_bytes() == trained


def reading(
    prompt: str, start: int, alpha: list[float], entropy: list[float] | float = 1.0
) -> AcceptanceReading:
    lengths = start + np.arange(len(alpha))
    return AcceptanceReading(
        prompt=prompt, lengths=lengths, alpha=alpha, entropy=np.broadcast_to(entropy, len(alpha))
    )


def test_p05_of_a_bin_by_hand() -> None:
    """0.00 to 1.00 in hundredths: p05 is 0.05; unsure are the first 21: 0.00 to 0.20, 0.01."""
    alpha = [i / 100 for i in range(101)]
    entropy = [0.2] * 21 + [0.1] * 80  # 0.1 is not above 0.1
    (found,) = tail_bins((reading("a", 100, alpha, entropy),), 128 * 2)
    assert (found.start, found.stop) == (0, 256)
    assert (found.tokens, found.prompts, found.uncertain) == (101, 1, 21)
    assert (found.p05, found.p05_uncertain) == (pytest.approx(0.05), pytest.approx(0.01))
    assert found.low <= found.p05 <= found.high


def test_tokens_go_where_their_lengths_are_and_prompts_are_counted_once() -> None:
    """150 tokens at 50 to 199 in bins of 100: 50 below 100 of each of four readings."""
    readings = tuple(reading(name, 50, [1.0] * 50 + [0.5] * 100) for name in "aabc")
    low, high = tail_bins(readings, 100)
    assert (low.start, low.stop, low.tokens, low.prompts, low.p05) == (0, 100, 200, 3, 1.0)
    assert (high.start, high.tokens, high.prompts, high.p05) == (100, 400, 3, 0.5)


def test_bins_that_are_not_told() -> None:
    """100 tokens are enough, 99 are not; an empty bin between others is none."""
    readings = (reading("a", 0, [1.0] * 99), reading("b", 200, [0.9] * 100, 0.0))
    (found,) = tail_bins(readings, 100)
    assert (found.start, found.tokens, found.uncertain, found.p05_uncertain) == (200, 100, 0, None)
    assert tail_bins((), 100) == tail_bins((reading("a", 0, []),), 100) == []
