"""Beta fits: the incomplete beta function against known values, parameters and distances."""

import math

import numpy as np
import pytest

from sparrow.calibrate.beta import LEAST_VALUES, SATURATED, betainc, digamma, fit, trigamma


@pytest.mark.parametrize(
    ("a", "b", "x", "expected"),
    [
        (2, 3, 0.5, 0.6875),
        (0.5, 0.5, 0.5, 0.5),
        (5, 1, 0.3, 0.3**5),
        (1, 4, 0.2, 1 - 0.8**4),
        (0.5, 0.5, 0.1, 2 / math.pi * math.asin(math.sqrt(0.1))),
        (2, 2, 0.3, 3 * 0.3**2 - 2 * 0.3**3),
        (7, 7, 0.5, 0.5),
        (3, 2, 0.0, 0.0),
        (3, 2, 1.0, 1.0),
    ],
)
def test_the_incomplete_beta_function(a: float, b: float, x: float, expected: float) -> None:
    assert float(betainc(a, b, x)) == pytest.approx(expected, abs=1e-12)


def test_it_is_a_sum_of_binomials_for_whole_numbers() -> None:
    """I_x(a, n - a + 1) is the chance of a or more successes in n."""
    x = np.linspace(0, 1, 41)
    for n, a in ((10, 3), (40, 39), (25, 1)):
        chance = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
        np.testing.assert_allclose(betainc(a, n - a + 1, x), chance, atol=1e-12)


def test_large_parameters_approach_a_normal_distribution() -> None:
    a, b = 40_000.0, 10_000.0
    sd = math.sqrt(a * b / (a + b) ** 2 / (a + b + 1))
    found = betainc(a, b, 0.8 + sd * np.array([-1.0, 0.0, 1.0]))
    np.testing.assert_allclose(found, [0.158655, 0.5, 0.841345], atol=2e-3)


def test_outside_of_its_domain_is_refused() -> None:
    for a, b, x in ((0, 1, 0.5), (1, -1, 0.5), (1, 1, 1.5), (1, 1, -0.1), (1, 1, math.nan)):
        with pytest.raises(ValueError, match="betainc needs a, b > 0 and x in"):
            betainc(a, b, x)


def test_digamma_and_trigamma() -> None:
    euler = 0.5772156649015329
    assert digamma(1) == pytest.approx(-euler, abs=1e-9)
    assert digamma(0.5) == pytest.approx(-euler - 2 * math.log(2), abs=1e-9)
    assert digamma(10) == pytest.approx(sum(1 / k for k in range(1, 10)) - euler, abs=1e-9)
    assert trigamma(1) == pytest.approx(math.pi**2 / 6, abs=1e-8)
    assert trigamma(0.5) == pytest.approx(math.pi**2 / 2, abs=1e-8)


@pytest.mark.parametrize(("a", "b"), [(2, 3), (0.5, 0.5), (8, 1), (6, 2), (300, 20), (1, 1)])
def test_known_parameters_are_found(a: float, b: float) -> None:
    values = SATURATED * np.random.default_rng(1).beta(a, b, 20_000)
    found = fit(values.astype(np.float32))
    assert found is not None
    assert (found.a, found.b) == pytest.approx((a, b), rel=0.03)
    assert found.ks < 1.36 / math.sqrt(20_000)  # what 95 % of fits to the true one stay below


def test_the_fit_is_where_the_likelihood_is_largest() -> None:
    values = np.random.default_rng(2).beta(3, 2, 50) * SATURATED
    scaled = values / SATURATED
    found = fit(values)
    assert found is not None

    def likelihood(a: float, b: float) -> float:
        whole = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        return float(whole + ((a - 1) * np.log(scaled) + (b - 1) * np.log1p(-scaled)).mean())

    best = likelihood(found.a, found.b)
    for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert likelihood(found.a * a, found.b * b) < best


def test_saturated_values_are_left_out() -> None:
    low = SATURATED * np.random.default_rng(3).beta(4, 2, 500)
    assert fit(low) == fit(np.concatenate([low, np.ones(5000), np.full(10, 0.9995)]))


def test_the_distance_by_hand() -> None:
    """Two heaps, far from any Beta with one mode: the CDF of the fit runs between them."""
    values = np.repeat([0.25, 0.75], 50) * SATURATED
    found = fit(values)
    assert found is not None
    assert found.a == pytest.approx(found.b)
    below = float(betainc(found.a, found.b, 0.25))
    assert found.ks == pytest.approx(max(below, 0.5 - below), abs=1e-9)


def test_many_values_are_measured_at_some_ranks() -> None:
    values = SATURATED * np.random.default_rng(4).beta(6, 2, 100_000)
    found = fit(values)
    assert found is not None
    ordered, ranks = np.sort(values) / SATURATED, np.arange(100_000)
    cdf = betainc(found.a, found.b, ordered)
    exact = max((cdf - ranks / 1e5).max(), ((ranks + 1) / 1e5 - cdf).max())
    assert exact - 1 / 4096 <= found.ks <= exact


def test_zeros_and_the_upper_end_are_kept_inside() -> None:
    values = np.concatenate([np.zeros(5), np.full(5, SATURATED), np.linspace(0.1, 0.9, 90)])
    found = fit(values)
    assert found is not None
    assert np.isfinite([found.a, found.b, found.ks]).all()


def test_few_or_equal_values_have_no_fit() -> None:
    values = np.linspace(0.1, 0.9, LEAST_VALUES)
    assert fit(values) is not None
    assert fit(values[1:]) is None
    assert fit([]) is None
    assert fit(np.full(100, 0.5)) is None
    assert fit(np.ones(100)) is None


@pytest.mark.parametrize("wrong", [-0.1, 1.5, math.nan])
def test_what_is_no_acceptance_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"acceptances lie in \[0, 1\]"):
        fit([0.5] * 30 + [wrong])
