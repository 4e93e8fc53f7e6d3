"""Variances of runs, differences of arms, Student's intervals."""

import math

import pytest

from sparrow.report.study.comparing import Sample, difference, pooled, variance


def sample(*finals: float, answers: int = 768) -> Sample:
    return Sample(finals=dict(enumerate(finals)), answers=answers)


def test_variance_of_seeds_has_a_binomial_floor() -> None:
    """0.7, 0.8, 0.9 have 0.01; three equal ones still have 0.5 x 0.5 / 768."""
    assert variance(sample(0.7, 0.8, 0.9), None) == pytest.approx(0.01)
    assert variance(sample(0.5, 0.5, 0.5), None) == pytest.approx(0.25 / 768)


def test_one_seed_borrows_the_pooled_variance() -> None:
    """Two arms of variances 0.01 (two free) and 0.02 (one free): 0.04 / 3."""
    common = pooled([sample(0.7, 0.8, 0.9), sample(0.6, 0.8), sample(0.9)])
    assert common == pytest.approx(0.04 / 3)
    assert variance(sample(0.8), common) == pytest.approx(0.04 / 3)
    assert variance(sample(0.8), None) == pytest.approx(0.16 / 768)
    assert pooled([sample(0.9)]) is None


def test_a_difference_by_hand() -> None:
    """0.8 - 0.5; both have variance 0.01 over three seeds, so SE sqrt(0.02 / 3), freedom 4."""
    found = difference(sample(0.7, 0.8, 0.9), sample(0.6, 0.5, 0.4), None)
    error = math.sqrt(0.02 / 3)
    assert found.value == pytest.approx(0.3)
    assert found.error == pytest.approx(error)
    assert found.errors == pytest.approx(0.3 / error)
    assert found.welch is not None
    assert found.welch.low == pytest.approx(0.3 - 2.77645 * error, abs=1e-5)
    assert found.above(2)
    assert not found.above(4)
    assert not found.below(0)


def test_pairs_are_of_seeds_that_both_have() -> None:
    """0.1, 0.3: mean 0.2, sd 0.1414, half 12.706 x 0.1."""
    second = Sample(finals={0: 0.6, 2: 0.6, 7: 0.1}, answers=768)
    found = difference(sample(0.7, 0.8, 0.9), second, None).paired
    assert found is not None
    assert found.by_seed == pytest.approx({0: 0.1, 2: 0.3})
    assert found.mean == pytest.approx(0.2)
    assert found.interval is not None
    assert found.interval.high == pytest.approx(0.2 + 1.27062, abs=1e-4)


def test_one_seed_has_no_interval() -> None:
    found = difference(sample(0.7, 0.8, 0.9), sample(0.6), 0.01)
    assert found.welch is None
    assert found.paired is not None
    assert found.paired.interval is None
    assert found.error == pytest.approx(math.sqrt(0.01 / 3 + 0.01))


def test_equal_seeds_have_no_interval_instead_of_an_empty_one() -> None:
    assert difference(sample(0.5, 0.5), sample(0.4, 0.4), None).welch is None
