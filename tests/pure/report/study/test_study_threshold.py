"""The monotone fit, the threshold with its open ends, and the interval over seeds."""

import math

import numpy as np
import pytest

from sparrow.report.study.threshold import (
    Point,
    crossing,
    draws,
    find_threshold,
    isotonic,
    quantile,
)


def fitted(x: list[float], y: list[float], weights: list[float] | None = None) -> list[float]:
    mass = [1.0] * len(x) if weights is None else weights
    return list(isotonic(np.array(x), np.array(y), np.array(mass)).gap)


def points(*rows: tuple[float, float], seed: int = 0) -> list[Point]:
    """Cells by (p05, gap), the last the baseline's."""
    found = [Point(arm=f"a{at}", seed=seed, p05=x, gap=y) for at, (x, y) in enumerate(rows[:-1])]
    x, y = rows[-1]
    return [*found, Point(arm="dense", seed=seed, p05=x, gap=y, baseline=True)]


def test_what_falls_is_its_own_fit() -> None:
    assert fitted([0.7, 0.8, 0.9], [0.3, 0.2, 0.1]) == [0.3, 0.2, 0.1]


def test_neighbours_that_rise_are_pooled() -> None:
    assert fitted([0.7, 0.8, 0.9], [0.1, 0.3, 0.0]) == pytest.approx([0.2, 0.2, 0.0])


def test_pooling_goes_back_as_far_as_it_must() -> None:
    """0.2 and 0.4 give 0.3, then 0.6 pools all three: 0.4."""
    assert fitted([0.6, 0.7, 0.8, 0.9], [0.2, 0.4, 0.6, 0.1]) == pytest.approx([0.4, 0.4, 0.4, 0.1])


def test_weights_and_any_order_and_equal_places() -> None:
    """At 0.7 (0.1 x 3 + 0.5) / 4 = 0.2; then 0.3 above it: (0.2 x 4 + 0.3) / 5 = 0.22."""
    gaps = fitted([0.8, 0.7, 0.7], [0.3, 0.1, 0.5], [1.0, 3.0, 1.0])
    assert gaps == pytest.approx([0.22, 0.22])


def test_a_closed_threshold_has_a_bracket() -> None:
    rows = points((0.75, 0.3), (0.80, 0.08), (0.86, 0.05), (0.92, 0.01), (0.99, 0.0))
    found = crossing(rows, [1] * 5, 0.05)
    assert found is not None
    assert (found.lower, found.value, found.upper) == (0.80, 0.86, 0.86)


def test_open_below_where_every_gap_is_within() -> None:
    found = crossing(points((0.75, 0.04), (0.86, 0.0), (0.99, 0.0)), [1] * 3, 0.05)
    assert found is not None
    assert (found.value, found.lower, found.upper) == (-math.inf, -math.inf, 0.75)


def test_open_above_where_the_highest_arm_is_too_far_off() -> None:
    """The baseline's own gap of 0 is no evidence for a threshold below it."""
    found = crossing(points((0.75, 0.3), (0.92, 0.1), (0.99, 0.0)), [1] * 3, 0.05)
    assert found is not None
    assert (found.value, found.lower, found.upper) == (math.inf, 0.92, math.inf)


def test_no_threshold_of_a_baseline_alone() -> None:
    assert crossing(points((0.99, 0.0)), [1], 0.05) is None
    assert find_threshold(points((0.99, 0.0)), 0.05) is None
    assert find_threshold([], 0.05) is None


def test_draws_are_all_there_are_for_few_seeds() -> None:
    found = draws([0, 1, 2])
    assert found.shape == (27, 3)
    assert len({tuple(draw) for draw in found.tolist()}) == 27
    many = draws(range(6))
    assert many.shape == (2000, 6)
    assert np.array_equal(many, draws(range(6)))


def test_quantiles_by_inverse_cdf_may_be_infinite() -> None:
    values = [3.0, 1.0, 2.0, math.inf]
    assert [quantile(values, share) for share in (0.025, 0.25, 0.5, 0.51, 0.975)] == [
        1.0,
        1.0,
        2.0,
        3.0,
        math.inf,
    ]


def test_the_interval_over_two_seeds_by_hand() -> None:
    """Seed 0 is within from 0.82 on, seed 1 from 0.90 on: draws 00, 01, 10, 11.

    01 and 10 pool nothing: at 0.80 gaps 0.2, 0.81 0.2, 0.82 0.0, 0.83 0.1, which rises, so that
    0.82 and 0.83 are both 0.05, within: the threshold is 0.82.
    """
    zero = points((0.80, 0.2), (0.82, 0.0), (0.99, 0.0), seed=0)
    one = points((0.81, 0.2), (0.83, 0.1), (0.90, 0.0), (0.98, 0.0), seed=1)
    found = find_threshold([*zero, *one], 0.05)
    assert found is not None
    assert found.value == 0.82
    assert (found.value_low, found.value_high) == (0.82, 0.90)
    assert (found.low, found.high) == (0.80, 0.90)  # lower ends: 0.80, 0.81, 0.81, 0.83
    assert (found.draws, found.open_below, found.open_above, found.empty) == (4, 0, 0, 0)
    assert found.holds(0.86)
    assert not found.holds(0.91)


def test_open_draws_are_counted_and_open_the_interval() -> None:
    zero = points((0.80, 0.2), (0.99, 0.0), seed=0)  # open above
    one = points((0.80, 0.0), (0.99, 0.0), seed=1)  # open below; both: 0.1, open above
    found = find_threshold([*zero, *one], 0.05)
    assert found is not None
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert (found.open_below, found.open_above) == (1, 3)


def test_draws_without_an_arm_are_counted() -> None:
    lone = [*points((0.8, 0.0), (0.99, 0.0), seed=0), *points((0.98, 0.0), seed=1)]
    found = find_threshold(lone, 0.05)
    assert found is not None
    assert (found.draws, found.empty) == (4, 1)
    assert found.high == 0.8
