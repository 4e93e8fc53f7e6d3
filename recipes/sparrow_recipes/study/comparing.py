"""Statistics of a study: means of arms and their differences, and where the gap begins.

The variance of one run is that of its arm's seeds, for an arm with one seed the pooled one of the
other arms, and never less than the binomial variance of its evaluations: few seeds agree by chance.

The threshold: each cell gives a point, its realised p05 in the worst bin and how far its final
accuracy is below that of the baseline with the same seed. The gap is fitted as a function that
never rises with p05; the threshold is the smallest observed p05 from which on the fitted gap is
within the tolerance. It is open below where every fitted gap is, and open above where that of the
arm with the highest p05 is not. The data only say that the gap begins between that p05 and the next
lower one, whose fitted gap is too large. So the interval, from drawing seeds again (the same for
all arms), is that of this bracket: from the low quantile of its lower ends to the high quantile of
its upper ends. Quantiles of the estimate alone, the upper end, would claim to know more than was
measured; they are given beside it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from sparrow.schema.base import Record
from sparrow.stats import ONE_SIDE, student

PUBLISHED = 0.86  # the realised p05 that was published as sufficient
Interval = tuple[float, float]  # at 95 %, unless said otherwise
End = float | Literal["open below", "open above"]  # of an interval
ENUMERATED = 5  # seeds up to which all draws are enumerated
DRAWS, SEED = 2000, 0
LOW, HIGH = 0.025, 0.975
BELOW, ABOVE = -math.inf, math.inf
ROUNDING = 1e-12


class FinalAccuracies(Record):
    """Final accuracies of an arm by seed, and the number of answers behind each."""

    finals: Mapping[int, float]
    answers: int
    mean: float
    variance: float | None  # over seeds; None for one


class Difference(Record):
    """The difference of two arms' means, with Welch's interval; and paired by seed."""

    value: float
    error: float
    errors: float | None  # how many standard errors it is from 0
    interval: Interval | None
    by_seed: Mapping[int, float]
    paired: float | None
    paired_interval: Interval | None


class GapPoint(Record):
    """One cell: realised p05 in the worst bin, and the gap to the baseline of its seed."""

    arm: str
    seed: int
    p05: float
    gap: float
    baseline: bool = False


class Threshold(Record):
    """The realised p05 at which the fitted gap comes within the tolerance, with its intervals.

    value lies in the bracket lower to upper. low, high: of the bracket, over draws of seeds;
    value_low, value_high: of the estimate alone. open_below and open_above count draws whose
    estimate was; empty: draws without an arm. fit: the gap at every observed p05.
    """

    value: End
    lower: End
    upper: End
    low: End
    high: End
    value_low: End
    value_high: End
    draws: int
    open_below: int
    open_above: int
    empty: int
    fit: tuple[tuple[float, float], ...]
    published: float
    holds_published: bool


def interval_text(low: End, high: End) -> str:
    """An interval as text; a round bracket is an open end."""
    ends = [end if isinstance(end, str) else f"{end:.3f}" for end in (low, high)]
    left, right = "[" if isinstance(low, float) else "(", "]" if isinstance(high, float) else ")"
    return f"{left}{', '.join(ends)}{right}"


def sample(finals: Mapping[int, float], answers: int) -> FinalAccuracies:
    """Make the sample of final accuracies by seed."""
    values = list(finals.values())
    spread = float(np.var(values, ddof=1)) if len(values) > 1 else None
    return FinalAccuracies(
        finals=finals, answers=answers, mean=float(np.mean(values)), variance=spread
    )


def pooled(samples: Sequence[FinalAccuracies]) -> float | None:
    """The pooled variance over seeds of arms with several; None without any."""
    freedom = sum(len(sample.finals) - 1 for sample in samples)
    squares = sum((len(sample.finals) - 1) * (sample.variance or 0.0) for sample in samples)
    return squares / freedom if freedom else None


def variance_of_run(sample: FinalAccuracies, common: float | None) -> float:
    """The variance of a run of an arm; common: used for an arm with one seed."""
    variance = sample.variance if sample.variance is not None else common
    return max(variance or 0.0, sample.mean * (1 - sample.mean) / sample.answers)


def difference(first: FinalAccuracies, second: FinalAccuracies, common: float | None) -> Difference:
    """The mean of the first arm minus that of the second."""
    value = first.mean - second.mean
    parts = [variance_of_run(arm, common) / len(arm.finals) for arm in (first, second)]
    error = math.sqrt(sum(parts))
    seeds = sorted(first.finals.keys() & second.finals.keys())
    by_seed = {seed: first.finals[seed] - second.finals[seed] for seed in seeds}
    pairs = sample(by_seed, 1) if by_seed else None
    return Difference(
        value=value,
        error=error,
        errors=value / error if error > 0 else None,
        interval=interval_around(value, first, second),
        by_seed=by_seed,
        paired=None if pairs is None else pairs.mean,
        paired_interval=None if pairs is None else interval_around(pairs.mean, pairs),
    )


def exceeds(value: float, error: float, errors: float) -> bool:
    """Whether a value is positive by more than a number of standard errors."""
    return value > errors * error + ROUNDING


def interval_around(
    value: float, *samples: FinalAccuracies, confidence: float = 1 - 2 * ONE_SIDE
) -> Interval | None:
    """Student's interval of a mean, or Welch's of two means; needs two seeds of each."""
    parts = [
        (sample.variance / len(sample.finals), len(sample.finals) - 1)
        for sample in samples
        if sample.variance is not None
    ]
    whole = sum(part for part, _ in parts)
    if len(parts) < len(samples) or whole == 0:
        return None
    freedom = whole**2 / sum(part**2 / free for part, free in parts)
    half = student(freedom, (1 - confidence) / 2) * math.sqrt(whole)
    return value - half, value + half


def fitted_gap(points: Sequence[GapPoint], weights: Sequence[int]) -> list[tuple[float, float]]:
    """p05 and gap of weighted least squares among functions that never rise."""
    from scipy.optimize import isotonic_regression  # takes a while to import

    rows = [(p.p05, p.gap, w) for p, w in zip(points, weights, strict=True) if w]
    x, y, mass = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    places, inverse = np.unique(x, return_inverse=True)
    weight = np.bincount(inverse, mass)
    level = np.bincount(inverse, mass * y) / weight
    fitted = isotonic_regression(level, weights=weight, increasing=False).x
    return list(zip(places.tolist(), fitted.tolist(), strict=True))


def crossing(
    points: Sequence[GapPoint], weights: Sequence[int], tolerance: float
) -> tuple[float, float, float] | None:
    """The estimate of weighted points and its bracket; None without a point of an arm.

    Open ends are infinite.
    """
    arms = [p.p05 for p, w in zip(points, weights, strict=True) if w and not p.baseline]
    if not arms:
        return None
    fit = fitted_gap(points, weights)
    within = [p05 for p05, gap in fit if gap <= tolerance + ROUNDING]
    over = [p05 for p05, _ in fit[: len(fit) - len(within)]]
    if max(arms) in over:
        return ABOVE, max(arms), ABOVE
    return (within[0], over[-1], within[0]) if over else (BELOW, BELOW, within[0])


def find_threshold(points: Sequence[GapPoint], tolerance: float) -> Threshold | None:
    """The threshold and its interval; None without a point besides the baseline's."""
    once = [1] * len(points)
    estimate = crossing(points, once, tolerance)
    if estimate is None:
        return None
    seeds = sorted({point.seed for point in points})
    drawn = [
        crossing(points, [int(np.sum(draw == point.seed)) for point in points], tolerance)
        for draw in draws(seeds)
    ]
    values, lowers, uppers = zip(*(draw for draw in drawn if draw is not None), strict=True)
    low, high = quantile(lowers, LOW), quantile(uppers, HIGH)
    ends = (*estimate, low, high, quantile(values, LOW), quantile(values, HIGH))
    names = ("value", "lower", "upper", "low", "high", "value_low", "value_high")
    kinds: dict[float, End] = {BELOW: "open below", ABOVE: "open above"}
    return Threshold(
        **{name: kinds.get(end, end) for name, end in zip(names, ends, strict=True)},
        draws=len(drawn),
        open_below=values.count(BELOW),
        open_above=values.count(ABOVE),
        empty=len(drawn) - len(values),
        fit=tuple(fitted_gap(points, once)),
        published=PUBLISHED,
        holds_published=low <= PUBLISHED <= high,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; may be infinite."""
    return sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]


def draws(seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Bootstrap draws of seeds: every possible draw once, or 2000 random ones for many seeds."""
    if len(seeds) <= ENUMERATED:
        return np.array(list(product(seeds, repeat=len(seeds))), np.int64)
    random = np.random.default_rng(SEED)
    return random.choice(np.array(seeds, np.int64), (DRAWS, len(seeds)))
