"""mean@k and pass@k with intervals over rows.

Answers to one row are not independent, so rows are what is counted. Both figures are means over
rows of a number from 0 to 1: the share of right answers, or the chance that one of k drawn without
replacement is right, which is an unbiased estimate of pass@k (n answers, c of them right):

    1 - C(n - c, k) / C(n, k)

The interval is Wilson's, with Student's quantile for that many rows, and as many observations as
would give the spread that rows show: at least one a row, at most one an answer. Where all rows are
right or all are wrong there is no spread to see, and each row counts once. How often 95 % intervals
held the truth, in % of 2000 samples (one standard error is 0.5), beside the percentile bootstrap:

    rows                              4      8     16     32     64     bootstrap at 16
    5 % right, 1 answer a row       98.3   94.2   95.3   97.7   95.7    55
    5 % right, 16 answers           99.7   99.4   98.1   96.9   95.4    92
    half right, 1 answer           100.0   99.2   98.0   94.5   93.1    95
    90 % right, 4 answers           99.8   99.1   97.2   96.4   96.5    89
    hard and easy, 1 answer        100.0   99.1   97.7   95.2   94.4    96
    hard and easy, 16 answers       93.2   97.7   95.9   96.0   95.5    93
    mostly hard, 4 answers          99.4   98.5   95.0   95.2   96.0    91

Hard and easy: chances of rows from Beta(0.2, 0.2); mostly hard: from Beta(0.5, 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparrow.calibrate.intervals import student
from sparrow.records import Record

Array = npt.NDArray[np.float64]

TAIL = 0.025  # chance on either side of an interval
NOTHING = 1e-12  # a variance of less is rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate(Record):
    """A figure and its 95 % interval over rows; None: one row says nothing about others."""

    value: float
    low: float | None
    high: float | None


def mean_at_k(acc: Sequence[npt.ArrayLike]) -> Estimate:
    """The mean over rows of how right their answers are on average. acc: of a row's answers."""
    rows = [np.asarray(row, dtype=np.float64) for row in acc]
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not ((row >= 0) & (row <= 1)).all():
            given = np.array2string(row, threshold=8)
            raise ValueError(f"mean_at_k, row {number}: got {given}, allowed: numbers from 0 to 1")
    return _over_rows(np.array([row.mean() for row in rows]), sum(row.size for row in rows))


def pass_at_k(correct: Sequence[int], samples: Sequence[int], k: int) -> Estimate:
    """The chance that one of k answers is right, from how many of a row's samples were."""
    chances = [_chance(c, n, k) for c, n in zip(correct, samples, strict=True)]
    return _over_rows(np.array(chances), sum(samples))


def _chance(correct: int, samples: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), as a product of shares: no factorial, no difference of large."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass_at_k: got {correct} right of {samples} and k {k}, allowed: 0 <= right <= "
            "samples and 1 <= k <= samples"
        )
    if samples - correct < k:
        return 1.0
    others = np.arange(samples - correct + 1, samples + 1, dtype=np.float64)
    return float(1 - np.prod(1 - k / others))


def attempts(samples: int) -> tuple[int, ...]:
    """The k for which pass@k is told: powers of two up to the number of samples, and that."""
    if samples < 1:
        raise ValueError(f"attempts: got {samples} samples, allowed: 1 and more")
    powers = (2**i for i in range(samples.bit_length()))
    return tuple(sorted({*powers, samples}))


def _over_rows(values: Array, answers: int) -> Estimate:
    """The mean of rows' values, each from 0 to 1, and its interval; see the module."""
    rows, value = len(values), float(values.mean()) if len(values) else float("nan")
    if rows == 0:
        raise ValueError("no rows: there is nothing to score")
    if rows == 1:
        return Estimate(value=value, low=None, high=None)
    most, spread = value * (1 - value), float(values.var(ddof=1))
    if most < NOTHING:
        effective = float(rows)
    else:
        effective = float(np.clip(most * rows / max(spread, NOTHING), rows, answers))
    doubt = student(rows - 1, TAIL) ** 2 / effective
    centre = (value + doubt / 2) / (1 + doubt)
    half = float(np.sqrt(doubt * most + doubt**2 / 4)) / (1 + doubt)
    return Estimate(value=value, low=max(0.0, centre - half), high=min(1.0, centre + half))
