"""The power of a comparison, against tables and simulated studies."""

import math

import numpy as np
import pytest

from sparrow_recipes.study.comparing import interval_around, sample
from sparrow_recipes.study.power import power

DESIGN = {"margin": 0.05, "confidence": 0.90}


def test_half_width_by_hand() -> None:
    """t(0.95, 10) = 1.8125. Three and six: (1/3 + 1/6)^2 / (1/9/2 + 1/36/5) = 4.09 free, 2.120."""
    half = power((), (6, 6), 0.10, **DESIGN).half
    assert half == pytest.approx(1.8125 * 0.10 * math.sqrt(1 / 3), abs=1e-4)
    half = power((), (3, 6), 0.03, **DESIGN).half
    assert half == pytest.approx(2.120 * 0.03 * math.sqrt(1 / 2), abs=1e-4)


def test_one_seed_shows_nothing() -> None:
    found = power((), (1, 6), 0.03, **DESIGN)
    assert found.half is found.non_inferior is found.detectable is None


def simulated(seeds: tuple[int, int], sd: float, gap: float, above: float) -> float:
    """How often the lower end of Welch's interval of two arms `gap` apart is above a value."""
    random, shown, draws = np.random.default_rng(0), 0, 4000
    for _ in range(draws):
        first, second = (
            sample(dict(enumerate(random.normal(mean, sd, count))), 1)
            for mean, count in zip((gap, 0.0), seeds, strict=True)
        )
        interval = interval_around(first.mean - second.mean, first, second, confidence=0.90)
        assert interval is not None
        shown += interval[0] > above
    return shown / draws


@pytest.mark.parametrize(("seeds", "sd"), [((6, 6), 0.03), ((6, 6), 0.10), ((3, 6), 0.03)])
def test_power_is_that_of_simulated_studies(seeds: tuple[int, int], sd: float) -> None:
    """Two standard errors of the simulation are 0.016."""
    found = power((), seeds, sd, **DESIGN)
    assert found.non_inferior == pytest.approx(simulated(seeds, sd, 0.0, -0.05), abs=0.03)
    assert simulated(seeds, sd, found.detectable, 0.0) == pytest.approx(0.80, abs=0.04)
