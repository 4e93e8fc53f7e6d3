"""Where the gap to the baseline begins: a monotone fit over the realised tail, and its interval.

Each cell gives a point: its realised p05 in the worst bin, and how far its final accuracy is below
that of the baseline with the same seed. The gap is fitted as a function that never rises with p05.
The threshold is the smallest observed p05 from which on the fitted gap is within the tolerance. It
is open below where every fitted gap is, and open above where that of the arm with the highest p05
is not.

The data only say that the gap begins between that p05 and the next lower one, whose fitted gap is
too large. So the interval, from drawing seeds again (the same for all arms), is that of this
bracket: from the low quantile of its lower ends to the high quantile of its upper ends. Quantiles
of the estimate alone, the upper end, would claim to know more than was measured; they are given
beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

ENUMERATED = 5  # seeds up to which every draw is made
DRAWS, SEED = 2000, 0
QUANTILES = (0.025, 0.975)
BELOW, ABOVE = -math.inf, math.inf
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cell: realised p05 in the worst bin, and the gap to the baseline of its seed."""

    arm: str
    seed: int
    p05: float
    gap: float
    baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted gap at every observed p05, from low to high."""

    p05: tuple[float, ...]
    gap: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Where a fit comes within the tolerance: its estimate, and the bracket around the truth.

    The estimate is -inf where it is open below, inf where it is open above.
    """

    value: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The threshold with its interval; -inf is open below, inf open above.

    low, high: of the bracket, over draws of seeds. value_low, value_high: of the estimate alone.
    open_below and open_above count draws whose estimate was; empty: draws without an arm.
    """

    at: Crossing
    low: float
    high: float
    value_low: float
    value_high: float
    draws: int
    open_below: int
    open_above: int
    empty: int
    fit: Fit

    @property
    def value(self) -> float:
        return self.at.value

    def holds(self, p05: float) -> bool:
        """Whether the interval has this value in it."""
        return self.low <= p05 <= self.high


def isotonic(x: Array, y: Array, weights: Array) -> Fit:
    """Weighted least squares among functions that never rise."""
    from scipy.optimize import isotonic_regression  # takes a while to import

    places, inverse = np.unique(x, return_inverse=True)
    weight = np.bincount(inverse, weights)
    level = np.bincount(inverse, weights * y) / weight
    fitted = isotonic_regression(level, weights=weight, increasing=False).x
    return Fit(p05=tuple(places.tolist()), gap=tuple(fitted.tolist()))


def crossing(points: Sequence[Point], weights: Sequence[int], tolerance: float) -> Crossing | None:
    """The threshold of weighted points; None without a point besides the baseline's."""
    chosen = [(point, weight) for point, weight in zip(points, weights, strict=True) if weight]
    if all(point.baseline for point, _ in chosen):
        return None
    fit = _fit(chosen)
    within = [place for place, gap in zip(fit.p05, fit.gap, strict=True) if _ok(gap, tolerance)]
    over = fit.p05[: len(fit.p05) - len(within)]
    highest = max(point.p05 for point, _ in chosen if not point.baseline)
    if highest in over:
        return Crossing(value=ABOVE, lower=highest, upper=ABOVE)
    if not over:
        return Crossing(value=BELOW, lower=BELOW, upper=within[0])
    return Crossing(value=within[0], lower=over[-1], upper=within[0])


def find_threshold(points: Sequence[Point], tolerance: float) -> Threshold | None:
    """The threshold and its interval; None without a point besides the baseline's."""
    found = crossing(points, [1] * len(points), tolerance)
    if found is None:
        return None
    seeds = sorted({point.seed for point in points})
    drawn = [
        crossing(points, [int(np.sum(draw == point.seed)) for point in points], tolerance)
        for draw in draws(seeds)
    ]
    known = [each for each in drawn if each is not None]
    values = [each.value for each in known]
    return Threshold(
        at=found,
        low=quantile([each.lower for each in known], QUANTILES[0]),
        high=quantile([each.upper for each in known], QUANTILES[1]),
        value_low=quantile(values, QUANTILES[0]),
        value_high=quantile(values, QUANTILES[1]),
        draws=len(drawn),
        open_below=values.count(BELOW),
        open_above=values.count(ABOVE),
        empty=len(drawn) - len(known),
        fit=_fit([(point, 1) for point in points]),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; may be infinite."""
    return sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]


def draws(seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Seeds drawn with replacement: each possible draw once, or for many seeds 2000 random ones."""
    if len(seeds) <= ENUMERATED:
        return np.array(list(product(seeds, repeat=len(seeds))), np.int64)
    random = np.random.default_rng(SEED)
    return random.choice(np.array(seeds, np.int64), (DRAWS, len(seeds)))


def _fit(chosen: Sequence[tuple[Point, int]]) -> Fit:
    columns = [(point.p05, point.gap, weight) for point, weight in chosen]
    x, y, weights = (np.array(column, np.float64) for column in zip(*columns, strict=True))
    return isotonic(x, y, weights)


def _ok(gap: float, tolerance: float) -> bool:
    """Within the tolerance, up to rounding."""
    return gap <= tolerance + 1e-12
