"""Statistics of a study: means of arms and their differences.

The variance of one run is that of its arm's seeds, for an arm with one seed the pooled one of the
other arms, and never less than the binomial variance of its evaluations: few seeds agree by chance.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparrow.schema.base import Record
from sparrow.stats import ONE_SIDE, student

Interval = tuple[float, float]  # at 95 %, unless said otherwise
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
