"""Workloads by name, file and number."""

from pathlib import Path

import numpy as np
import pytest

from sparrow.calibrate.planning.context import workload
from sparrow.calibrate.planning.cost import published_lengths


def test_published() -> None:
    made = workload("published")
    np.testing.assert_array_equal(made.lengths, published_lengths())
    assert "60 sequences" in made.describe()


def test_surface_drawn_to_prompts_and_samples() -> None:
    made = workload("surface", measured=[100, 300], prompts=4, samples=8, most=16, cutoff=200)
    assert len(made.lengths) == 32
    assert set(made.lengths.tolist()) == {100, 200}
    assert "at most 16 at once" in made.describe()
    assert made.describe().startswith("surface, cut at 200 tokens: ")
    assert workload("surface", measured=[100], cutoff=200).name == "surface"


@pytest.mark.parametrize("text", ["[40, 50]", "40\n50\n"])
def test_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    made = workload(str(tmp_path / "lengths"))
    assert made.lengths.tolist() == [40, 50]
    assert made.shortest_prompt == 16


def test_short_sequences_have_short_prompts() -> None:
    assert workload("surface", measured=[5, 100]).shortest_prompt == 4


def test_refusals() -> None:
    for name, settings, told in (
        ("nowhere", {}, "nowhere"),
        ("surface", {}, "lengths"),
        ("published", {"prompts": 0}, "0 prompts"),
        ("published", {"prompts": 10**12}, "16384"),
        ("surface", {"measured": [100] * 20_000}, "20000"),
        ("surface", {"measured": [10**12]}, "2 to"),
        ("surface", {"measured": [1]}, "2 to"),
        ("published", {"most": 0}, "batch"),
    ):
        with pytest.raises(ValueError, match=told):
            workload(name, **settings)
