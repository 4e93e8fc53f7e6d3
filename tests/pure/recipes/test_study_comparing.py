"""Variances of runs, differences of arms, Student's intervals."""

import math

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
