"""Variances of runs, differences of arms, Student's intervals; the threshold and its open ends."""

import math

import numpy as np
import pytest

from sparrow_recipes.study import comparing


def sample(*finals: float, answers: int = 768) -> comparing.FinalAccuracies:
    return comparing.sample(dict(enumerate(finals)), answers)


def test_variances_have_a_floor_and_one_seed_borrows_the_pooled_one() -> None:
    """0.7, 0.8, 0.9 have 0.01; three equal ones still have 0.5 x 0.5 / 768.

    Two arms of variances 0.01 (two free) and 0.02 (one free): 0.04 / 3.
    """
    assert comparing.variance_of_run(sample(0.7, 0.8, 0.9), None) == pytest.approx(0.01)
    assert comparing.variance_of_run(sample(0.5, 0.5, 0.5), None) == pytest.approx(0.25 / 768)
    common = comparing.pooled([sample(0.7, 0.8, 0.9), sample(0.6, 0.8), sample(0.9)])
    assert common == pytest.approx(0.04 / 3)
    assert comparing.variance_of_run(sample(0.8), common) == pytest.approx(0.04 / 3)
    assert comparing.variance_of_run(sample(0.8), None) == pytest.approx(0.16 / 768)
    assert comparing.pooled([sample(0.9)]) is None


def test_a_difference_by_hand() -> None:
    """0.8 - 0.5; both have variance 0.01 over three seeds, so SE sqrt(0.02 / 3), freedom 4."""
    found = comparing.difference(sample(0.7, 0.8, 0.9), sample(0.6, 0.5, 0.4), None)
    error = math.sqrt(0.02 / 3)
    assert found.value == pytest.approx(0.3)
    assert found.error == pytest.approx(error)
    assert found.errors == pytest.approx(0.3 / error)
    assert found.interval[0] == pytest.approx(0.3 - 2.77645 * error, abs=1e-5)
    assert comparing.exceeds(found.value, found.error, 2)
    assert not comparing.exceeds(found.value, found.error, 4)
    assert not comparing.exceeds(-found.value, found.error, 0)


def test_pairs_are_of_seeds_that_both_have() -> None:
    """0.1, 0.3: mean 0.2, sd 0.1414, half 12.706 x 0.1."""
    second = comparing.sample({0: 0.6, 2: 0.6, 7: 0.1}, 768)
    found = comparing.difference(sample(0.7, 0.8, 0.9), second, None)
    assert found.by_seed == pytest.approx({0: 0.1, 2: 0.3})
    assert found.paired == pytest.approx(0.2)
    assert found.paired_interval[1] == pytest.approx(0.2 + 1.27062, abs=1e-4)


def test_one_seed_or_equal_seeds_have_no_interval() -> None:
    found = comparing.difference(sample(0.7, 0.8, 0.9), sample(0.6), 0.01)
    assert (found.interval, found.paired_interval) == (None, None)
    assert found.paired is not None
    assert found.error == pytest.approx(math.sqrt(0.01 / 3 + 0.01))
    assert comparing.difference(sample(0.5, 0.5), sample(0.4, 0.4), None).interval is None


def fitted(x: list[float], y: list[float], weights: list[int] | None = None) -> list[float]:
    given = [
        comparing.GapPoint(arm="a", seed=0, p05=p05, gap=gap) for p05, gap in zip(x, y, strict=True)
    ]
    return [gap for _, gap in comparing.fitted_gap(given, weights or [1] * len(given))]


def points(*rows: tuple[float, float], seed: int = 0) -> list[comparing.GapPoint]:
    """Cells by (p05, gap), the last the baseline's."""
    found = [
        comparing.GapPoint(arm=f"a{at}", seed=seed, p05=x, gap=y)
        for at, (x, y) in enumerate(rows[:-1])
    ]
    x, y = rows[-1]
    return [*found, comparing.GapPoint(arm="dense", seed=seed, p05=x, gap=y, baseline=True)]


def test_the_fit_never_rises() -> None:
    assert fitted([0.7, 0.8, 0.9], [0.3, 0.2, 0.1]) == [0.3, 0.2, 0.1]
    assert fitted([0.7, 0.8, 0.9], [0.1, 0.3, 0.0]) == pytest.approx([0.2, 0.2, 0.0])
    # 0.2 and 0.4 give 0.3, then 0.6 pools all three: 0.4.
    assert fitted([0.6, 0.7, 0.8, 0.9], [0.2, 0.4, 0.6, 0.1]) == pytest.approx([0.4, 0.4, 0.4, 0.1])
    # At 0.7 (0.1 x 3 + 0.5) / 4 = 0.2; then 0.3 above it: (0.2 x 4 + 0.3) / 5 = 0.22.
    assert fitted([0.8, 0.7, 0.7], [0.3, 0.1, 0.5], [1, 3, 1]) == pytest.approx([0.22, 0.22])


def test_the_estimate_and_its_bracket() -> None:
    """The baseline's own gap of 0 is no evidence for a threshold below it."""
    rows = points((0.75, 0.3), (0.80, 0.08), (0.86, 0.05), (0.92, 0.01), (0.99, 0.0))
    assert comparing.crossing(rows, [1] * 5, 0.05) == (0.86, 0.80, 0.86)
    below = points((0.75, 0.04), (0.86, 0.0), (0.99, 0.0))
    assert comparing.crossing(below, [1] * 3, 0.05) == (-math.inf, -math.inf, 0.75)
    above = points((0.75, 0.3), (0.92, 0.1), (0.99, 0.0))
    assert comparing.crossing(above, [1] * 3, 0.05) == (math.inf, 0.92, math.inf)


def test_no_threshold_of_a_baseline_alone() -> None:
    assert comparing.crossing(points((0.99, 0.0)), [1], 0.05) is None
    assert comparing.find_threshold(points((0.99, 0.0)), 0.05) is None
    assert comparing.find_threshold([], 0.05) is None


def test_draws_and_quantiles() -> None:
    """All draws that there are for few seeds; quantiles by inverse CDF, which may be infinite."""
    found, many = comparing.draws([0, 1, 2]), comparing.draws(range(6))
    assert len({tuple(draw) for draw in found.tolist()}) == len(found) == 27
    assert many.shape == (2000, 6)
    assert np.array_equal(many, comparing.draws(range(6)))
    values = [3.0, 1.0, 2.0, math.inf]
    shares = {0.025: 1.0, 0.25: 1.0, 0.5: 2.0, 0.51: 3.0, 0.975: math.inf}
    assert {share: comparing.quantile(values, share) for share in shares} == shares


def test_the_interval_over_two_seeds_by_hand() -> None:
    """Seed 0 is within from 0.82 on, seed 1 from 0.90 on: draws 00, 01, 10, 11.

    01 and 10 pool nothing: at 0.80 gaps 0.2, 0.81 0.2, 0.82 0.0, 0.83 0.1, which rises, so that
    0.82 and 0.83 are both 0.05, within: the threshold is 0.82.
    """
    zero = points((0.80, 0.2), (0.82, 0.0), (0.99, 0.0), seed=0)
    one = points((0.81, 0.2), (0.83, 0.1), (0.90, 0.0), (0.98, 0.0), seed=1)
    found = comparing.find_threshold([*zero, *one], 0.05)
    assert found.value == 0.82
    assert (found.value_low, found.value_high) == (0.82, 0.90)
    assert (found.low, found.high) == (0.80, 0.90)  # lower ends: 0.80, 0.81, 0.81, 0.83
    assert (found.draws, found.open_below, found.open_above, found.empty) == (4, 0, 0, 0)
    assert found.holds_published


def test_open_and_empty_draws_are_counted_and_open_the_interval() -> None:
    zero = points((0.80, 0.2), (0.99, 0.0), seed=0)  # open above
    one = points((0.80, 0.0), (0.99, 0.0), seed=1)  # open below; both: 0.1, open above
    found = comparing.find_threshold([*zero, *one], 0.05)
    assert (found.low, found.high) == ("open below", "open above")
    assert found.holds_published
    assert (found.open_below, found.open_above) == (1, 3)
    lone = [*points((0.8, 0.0), (0.99, 0.0), seed=0), *points((0.98, 0.0), seed=1)]
    found = comparing.find_threshold(lone, 0.05)
    assert (found.draws, found.empty, found.high) == (4, 1, 0.8)
    assert not found.holds_published, "open below, up to 0.8"
