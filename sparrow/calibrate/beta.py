"""The Beta distribution of acceptances that are not saturated: fit, distance, and its CDF.

Most tokens have an acceptance above 0.999. The rest, scaled from [0, 0.999] to [0, 1], follows a
Beta distribution well; how well, the Kolmogorov-Smirnov distance says. numpy alone.
"""

from dataclasses import dataclass
from math import lgamma, log, sqrt

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SATURATED = 0.999
"""Acceptance above it counts as none lost."""
LEAST_VALUES = 20
CLIP = 1e-6  # zeros and ones have no likelihood: scaled values are kept this far inside
KS_POINTS = 4096
NEWTON_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaFit:
    """Beta(a, b) of acceptances scaled to [0, 1], and the KS distance between it and them."""

    a: float
    b: float
    ks: float


def fit(values: npt.ArrayLike) -> BetaFit | None:
    """Maximum likelihood over the acceptances at or below SATURATED, whatever else is given.

    None for fewer than 20 of them, or where all are equal. The distance is taken at 4096 ranks of
    the sorted values where there are more: it is then too small by at most 1/4096.
    """
    given = np.asarray(values, dtype=np.float64).ravel()
    if given.size and not (given.min() >= 0 and given.max() <= 1 + CLIP):
        raise ValueError(
            f"acceptances lie in [0, 1], got {given.min():.4g} to {given.max():.4g}; NaN is none"
        )
    scaled = given[given <= SATURATED] / SATURATED
    if len(scaled) < LEAST_VALUES:
        return None
    scaled = np.sort(np.clip(scaled, CLIP, 1 - CLIP))
    if scaled[0] == scaled[-1]:
        return None
    a, b = _likeliest(scaled)
    return BetaFit(a=a, b=b, ks=_ks(scaled, a, b))


def _likeliest(scaled: Array) -> tuple[float, float]:
    """Newton's method on the log-likelihood, which is concave; steps are halved to stay on it."""
    logs = float(np.log(scaled).mean()), float(np.log1p(-scaled).mean())
    a, b = _moments(scaled)
    for _ in range(NEWTON_STEPS):
        both = digamma(a + b)
        slope_a, slope_b = logs[0] - digamma(a) + both, logs[1] - digamma(b) + both
        joint = trigamma(a + b)
        curve_a, curve_b = trigamma(a) - joint, trigamma(b) - joint
        determinant = curve_a * curve_b - joint * joint
        step_a = (curve_b * slope_a + joint * slope_b) / determinant
        step_b = (curve_a * slope_b + joint * slope_a) / determinant
        share = _share(a, b, step_a, step_b, logs)
        a, b = a + share * step_a, b + share * step_b
        if abs(step_a) <= 1e-10 * a and abs(step_b) <= 1e-10 * b:
            break
    return a, b


def _moments(scaled: Array) -> tuple[float, float]:
    """The Beta with the mean and variance of the values: where the search starts."""
    mean = float(scaled.mean())
    total = max(mean * (1 - mean) / float(scaled.var()) - 1, 1e-3)
    return mean * total, (1 - mean) * total


def _share(a: float, b: float, step_a: float, step_b: float, logs: tuple[float, float]) -> float:
    """How much of a step is taken: all of it, or a half as often as the likelihood would fall."""
    before, share = _likelihood(a, b, logs), 1.0
    while share > 1e-9:
        new_a, new_b = a + share * step_a, b + share * step_b
        if min(new_a, new_b) > 0 and _likelihood(new_a, new_b, logs) >= before:
            return share
        share /= 2
    return 0.0


def _likelihood(a: float, b: float, logs: tuple[float, float]) -> float:
    """Mean log-likelihood, from the means of log x and of log(1 - x)."""
    return lgamma(a + b) - lgamma(a) - lgamma(b) + (a - 1) * logs[0] + (b - 1) * logs[1]


def _ks(ordered: Array, a: float, b: float) -> float:
    count = len(ordered)
    ranks = np.unique(np.linspace(0, count - 1, min(count, KS_POINTS)).round().astype(np.int64))
    fitted = betainc(a, b, ordered[ranks])
    return float(max((fitted - ranks / count).max(), ((ranks + 1) / count - fitted).max()))


def digamma(x: float) -> float:
    """d log Gamma / dx for x > 0: recurrence up to 6, then the asymptotic series."""
    total = 0.0
    while x < 6:
        total -= 1 / x
        x += 1
    inverse = 1 / (x * x)
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse / 240)))
    return total + log(x) - 0.5 / x - series


def trigamma(x: float) -> float:
    """d digamma / dx for x > 0."""
    total = 0.0
    while x < 6:
        total += 1 / (x * x)
        x += 1
    inverse = 1 / (x * x)
    series = inverse * (1 / 6 - inverse * (1 / 30 - inverse * (1 / 42 - inverse / 30)))
    return total + 1 / x + inverse / 2 + series / x


def betainc(a: float, b: float, x: npt.ArrayLike) -> Array:
    """The regularised incomplete beta function I_x(a, b): the CDF of Beta(a, b) at each x."""
    points = np.asarray(x, dtype=np.float64)
    if not (a > 0 and b > 0 and bool(np.all((points >= 0) & (points <= 1)))):
        raise ValueError(f"betainc needs a, b > 0 and x in [0, 1], got a={a}, b={b}, x={points}")
    turned = points > (a + 1) / (a + b + 2)  # there the fraction of 1 - I_{1-x}(b, a) is faster
    found = np.empty_like(points)
    found[~turned] = _fraction(a, b, points[~turned])
    found[turned] = 1 - _fraction(b, a, 1 - points[turned])
    return found


def _fraction(a: float, b: float, x: Array) -> Array:
    """The continued fraction of I_x(a, b) by Lentz's method, until nothing changes."""
    inside = np.clip(x, 1e-300, 1 - 1e-16)
    size = a * np.log(inside) + b * np.log1p(-inside) + lgamma(a + b) - lgamma(a) - lgamma(b)
    c, d = np.ones_like(x), 1 / _nonzero(1 - (a + b) * inside / (a + 1))
    value = d.copy()
    for m in range(1, 200 + int(10 * sqrt(max(a, b)))):
        even = m * (b - m) * inside / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * inside / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _nonzero(1 + term * d), _nonzero(1 + term / c)
            value = value * c * d
        if not np.any(np.abs(c * d - 1) > 1e-13):
            break
    return np.where(x > 0, np.exp(size) * value / a, 0.0)


def _nonzero(values: Array) -> Array:
    return np.where(np.abs(values) < 1e-300, 1e-300, values)
