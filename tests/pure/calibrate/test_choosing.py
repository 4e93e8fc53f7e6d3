"""Cheapest budgets against brute force; the nearest target; merged bins."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparrow.calibration.planning.plan import cheapest, highest, merged

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4))


def tables(values: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=values))


def by_force(costs: np.ndarray, reached: np.ndarray, target: float) -> float | None:
    """The least cost of all rising choices, one by one."""
    bins, budgets = costs.shape
    found = [
        sum(costs[i, place] for i, place in enumerate(places))
        for places in product(range(budgets), repeat=bins)
        if list(places) == sorted(places)
        and all(reached[i, place] >= target for i, place in enumerate(places))
    ]
    return min(found, default=None)


@settings(max_examples=300)
@given(data=st.data(), shape=SHAPES, target=st.sampled_from([0.2, 0.5, 0.8]))
def test_equals_brute_force(data: st.DataObject, shape: tuple[int, int], target: float) -> None:
    costs = data.draw(arrays(np.float64, shape, elements=st.integers(0, 9).map(float)))
    reached = data.draw(arrays(np.float64, shape, elements=st.sampled_from([0.1, 0.3, 0.6, 0.9])))
    places = cheapest(costs, reached, target)
    best = by_force(costs, reached, target)
    assert (places is None) == (best is None)
    if places is not None:
        assert places == sorted(places)
        assert all(reached[i, place] >= target for i, place in enumerate(places))
        assert sum(costs[i, place] for i, place in enumerate(places)) == best


@given(reached=tables(st.sampled_from([0.1, 0.3, 0.6, 0.9])))
def test_highest_is_the_greatest_target_that_has_a_choice(reached: np.ndarray) -> None:
    most = highest(reached)
    free = np.zeros_like(reached)
    above = [value for value in np.unique(reached) if value > most]
    if cheapest(free, reached, most) is None:  # nothing but the least value is left to name
        assert most == reached.min()
    assert all(by_force(free, reached, value) is None for value in above)


def test_choices_by_hand() -> None:
    costs = np.array([[1.0, 2.0, 1.5]])  # the last is dense and reads no landmarks
    assert cheapest(costs, np.array([[0.5, 0.9, 1.0]]), 0.86) == [2]
    costs = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    reached = np.array([[0.9, 0.9], [0.8, 0.9], [0.9, 0.9]])
    assert cheapest(costs, reached, 0.86) == [0, 1, 1]  # what needs much raises all later ones
    assert cheapest(np.ones((2, 3)), np.ones((2, 3)), 0.5) == [0, 0]  # of equal costs the smaller
    assert merged([50, 100, 200], [64, 64, 128]) == ([0, 200], [64, 128])
    assert merged([50, 100, 200], [64, 96, 96]) == ([0, 100], [64, 96])
    assert merged([50], [64]) == ([0], [64])
