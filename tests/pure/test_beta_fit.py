"""Beta fits: parameters and distances."""

import math

import numpy as np
import pytest
from scipy.special import betainc
from scipy.stats import FitError, beta

from sparrow.stats import LEAST_VALUES, SATURATED, fit_beta


def test_known_parameters_are_found_whatever_is_saturated() -> None:
    for a, b in ((2, 3), (0.5, 0.5), (8, 1), (6, 2), (300, 20), (1, 1)):
        values = SATURATED * np.random.default_rng(1).beta(a, b, 20_000)
        fit = fit_beta(values.astype(np.float32))
        assert (fit.a, fit.b) == pytest.approx((a, b), rel=0.03)
        assert fit.ks < 1.36 / math.sqrt(20_000)  # 95 % of fits to the true one stay below
    assert fit_beta(values) == fit_beta([*values, *np.ones(5000), 0.9995])


def test_the_distance_by_hand() -> None:
    """Two heaps, far from any Beta with one mode: the CDF of the fit runs between them."""
    values = np.repeat([0.25, 0.75], 50) * SATURATED
    fit = fit_beta(values)
    assert fit.a == pytest.approx(fit.b)
    below = float(betainc(fit.a, fit.b, 0.25))
    assert fit.ks == pytest.approx(max(below, 0.5 - below), abs=1e-9)


def test_many_values_are_measured_at_some_ranks() -> None:
    values = SATURATED * np.random.default_rng(4).beta(6, 2, 100_000)
    fit = fit_beta(values)
    ordered, ranks = np.sort(values) / SATURATED, np.arange(100_000)
    cdf = betainc(fit.a, fit.b, ordered)
    exact = max((cdf - ranks / 1e5).max(), ((ranks + 1) / 1e5 - cdf).max())
    assert exact - 1 / 4096 <= fit.ks <= exact


def test_zeros_and_the_upper_end_are_kept_inside() -> None:
    values = np.concatenate([np.zeros(5), np.full(5, SATURATED), np.linspace(0.1, 0.9, 90)])
    fit = fit_beta(values)
    assert np.isfinite([fit.a, fit.b, fit.ks]).all()


def test_few_or_equal_values_have_no_fit_and_others_are_refused() -> None:
    values = np.linspace(0.1, 0.9, LEAST_VALUES)
    assert fit_beta(values) is not None
    assert fit_beta(values[1:]) is None
    assert fit_beta([]) is None
    assert fit_beta(np.full(100, 0.5)) is None
    assert fit_beta(np.ones(100)) is None
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="acceptances"):
            fit_beta([0.5] * 30 + [wrong])


def test_a_fit_that_does_not_converge_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FitError("the solver gave up")

    monkeypatch.setattr(type(beta), "fit", fails)
    assert fit_beta(np.linspace(0.1, 0.9, 100)) is None
