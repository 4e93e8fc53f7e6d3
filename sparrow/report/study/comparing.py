"""Means of arms and their differences, with standard errors over seeds.

The variance of one run is that of its arm's seeds, for an arm with one seed the pooled one of the
other arms, and never less than the binomial variance of its evaluations: few seeds agree by chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparrow.stats import ONE_SIDE, student


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Final accuracies of an arm by seed, and how many answers each is the mean of."""

    finals: Mapping[int, float]
    answers: int

    @property
    def count(self) -> int:
        return len(self.finals)

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.finals.values())))

    @property
    def spread(self) -> float | None:
        """The variance over seeds; None for one."""
        return float(np.var(list(self.finals.values()), ddof=1)) if self.count > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Both ends at 95 %."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Differences between runs of the same seed."""

    by_seed: Mapping[int, float]
    mean: float
    interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One arm's mean less another's. `errors`: how many standard errors it is from 0."""

    value: float
    error: float
    welch: Interval | None
    paired: Paired | None

    @property
    def errors(self) -> float | None:
        return self.value / self.error if self.error > 0 else None

    def above(self, errors: float) -> bool:
        """Whether it is positive by more than so many standard errors."""
        return self.value > errors * self.error + 1e-12

    def below(self, errors: float) -> bool:
        """Whether it is negative by more than so many standard errors."""
        return -self.value > errors * self.error + 1e-12


def pooled(samples: Sequence[Sample]) -> float | None:
    """The common variance over seeds of arms with several; None where there is none."""
    several = [sample for sample in samples if sample.spread is not None]
    freedom = sum(sample.count - 1 for sample in several)
    squares = sum((sample.count - 1) * (sample.spread or 0.0) for sample in several)
    return squares / freedom if freedom else None


def variance(sample: Sample, common: float | None) -> float:
    """The variance of one run of an arm."""
    own = sample.spread if sample.spread is not None else common
    return max(own or 0.0, sample.mean * (1 - sample.mean) / sample.answers)


def difference(first: Sample, second: Sample, common: float | None) -> Difference:
    """The first's mean less the second's."""
    parts = [variance(sample, common) / sample.count for sample in (first, second)]
    return Difference(
        value=first.mean - second.mean,
        error=math.sqrt(sum(parts)),
        welch=_welch(first, second),
        paired=_paired(first.finals, second.finals),
    )


def _welch(first: Sample, second: Sample) -> Interval | None:
    """Student's interval for two means with variances of their own; needs two seeds each."""
    if first.spread is None or second.spread is None:
        return None
    a, b = first.spread / first.count, second.spread / second.count
    if a + b == 0:
        return None
    freedom = (a + b) ** 2 / (a**2 / (first.count - 1) + b**2 / (second.count - 1))
    value, half = first.mean - second.mean, student(freedom, ONE_SIDE) * math.sqrt(a + b)
    return Interval(low=value - half, high=value + half)


def _paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """By the seeds that both have."""
    by_seed = {seed: first[seed] - second[seed] for seed in sorted(first) if seed in second}
    if not by_seed:
        return None
    found = np.array(list(by_seed.values()))
    value, interval = float(found.mean()), None
    if len(found) > 1:
        half = student(len(found) - 1, ONE_SIDE) * float(found.std(ddof=1)) / math.sqrt(len(found))
        interval = Interval(low=value - half, high=value + half)
    return Paired(by_seed=by_seed, mean=value, interval=interval)
