"""Statistics: intervals over prompts and rows, pass@k, Beta fits. On numpy and scipy.special.

**Quantiles over tokens** (`quantile_interval`).
Tokens of one prompt are not independent, so prompts are resampled. The interval of a
quantile holds every threshold t at which the share of tokens below t is compatible with q: with
d = (tokens of a prompt below t) - q * (its tokens), the mean of d over prompts must not differ from
0 by more than c standard errors. c is the quantile of the same statistic over bootstrap draws (the
studentised bootstrap), and at least Student's, with as many degrees of freedom as prompts of equal
length would leave: the effective number (sum N)^2 / sum N^2. The bootstrap sees that d is skewed
(few prompts have most of the bad tokens), Student sees that few prompts show too little variance.

How often 95 % intervals of p05 held the truth, in % of 600 samples (one standard error is 0.9),
beside the plain percentile bootstrap; tests/support/prompts.py has the designs:

    prompts                          8     16     32     48     96     percentile at 48, 96
    independent tokens             96.5   96.2   95.8   95.3   96.0    93.5   93.7
    mild effects of prompts        95.7   95.3   94.2   94.2   96.0    90.5   92.8
    middle, lengths of a bin       92.5   92.7   94.3   95.0   96.5    92.3   93.5
    the same in runs of tokens     92.5   94.0   96.3   95.7   96.8    91.8   93.2
    heavy, lengths of a bin        89.8   91.7   92.3   95.0   95.8    89.7   91.5
    heavy, lognormal lengths       88.3   90.8   92.2   94.3   93.3    89.3   87.8
    longer prompts are worse       93.3   94.8   92.8   96.3   96.5    92.7   92.7
    15 % of prompts are bad        79.8   82.3   90.5   93.0   95.8    86.2   91.2
    extreme lengths (of 48, 22
      effective), heavy            94.8   94.3   90.2   90.7   89.3    85.5   86.2
      longer are worse             89.0   88.7   87.8   92.2   92.3    87.5   88.7

Where prompts differ, nearly all misses have the truth below the interval: the sample lacks the bad
prompts. So below 48 prompts (effective ones, where lengths differ this much) it is too optimistic.

**Rates of rare tokens** (`rate_interval`), such as hard misses: tokens of which the dense policy is
sure (entropy under 0.1 nats) and the sparse actor is not (acceptance under 0.5).
The interval is Poisson's of as many independent events as would spread like those of the prompts do
(at most those there are), with Student's quantile for few prompts. Without an event its upper end
is 3.7 in all tokens. How often 95 % intervals held the truth, in % of 2000 samples:

    prompts                          8     16     32     48     96
    independent, 0.2 a prompt      99.8   99.3   97.6   97.3   97.3
    independent, 2 a prompt        99.5   98.5   97.7   96.4   96.5
    rates from Gamma(1)            98.0   96.5   96.6   94.5   96.3
    rates from Gamma(0.3)          94.7   93.2   93.4   93.2   93.6
    15 % of prompts are bad        82.3   87.7   94.2   94.7   95.3
    Gamma(0.5), lognormal lengths  96.2   93.7   92.4   92.2   93.2

**Accuracy over rows** (`mean_at_k`, `pass_at_k`).
Answers to one row are not independent, so rows are counted. Both figures are means over
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

**Beta fits** (`fit_beta`). Most tokens have an acceptance above 0.999. The rest, scaled from
[0, 0.999] to [0, 1], follows a Beta distribution well; the Kolmogorov-Smirnov distance says how
well.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from sparrow.schema.evaluation import Estimate

Array = npt.NDArray[np.float64]
Values = npt.NDArray[np.floating]
Ranks = npt.NDArray[np.int64]
Rejects = Callable[[Array, bool], npt.NDArray[np.bool_]]

TAIL = 0.05
"""The quantile of acceptance that targets are about: p05."""

FAR_TAIL = 0.001
"""That of the worst tokens: p0.1."""

UNCERTAIN = 0.1
"""Nats of dense entropy above which a token is uncertain: either choice may be right."""

MISS = 0.5
"""Acceptance below which a token that is not uncertain is a hard miss."""

DRAWS = 999
STEPS = 32  # thresholds tested at once
NOTHING = 1e-9  # standard errors below this share of the largest d are rounding
ONE_SIDE = 0.025  # probability beyond either end of a 95 % interval
NO_VARIANCE = 1e-12  # variances below are rounding

SATURATED = 0.999
"""Acceptance above it counts as lossless."""
LEAST_VALUES = 20
CLIP = 1e-6  # zeros and ones have no likelihood: scaled values are kept this far inside
KS_POINTS = 4096


# Quantiles over tokens.


class Interval(NamedTuple):
    """A statistic over all tokens with its interval."""

    value: float
    low: float
    high: float

    def estimate(self) -> Estimate:
        """Return it as a record."""
        return Estimate(**self._asdict())


def quantile_interval(
    groups: Sequence[Values], q: float = TAIL, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """The q-quantile of all tokens with its 95 % interval over groups (tokens of one prompt each).

    Empty groups are left out. One group alone says nothing about others, so its interval is 0 to
    1. Ends of intervals are values of tokens.
    """
    ordered = [np.sort(np.asarray(group).ravel()) for group in groups if len(group)]
    if not ordered:
        raise ValueError(f"an interval needs tokens, got {len(groups)} empty groups")
    tokens = np.sort(np.concatenate(ordered))
    if np.isnan(tokens[-1]):
        raise ValueError("an interval needs finite values, got NaN")
    sizes = np.array([len(group) for group in ordered], dtype=np.float64)
    place = q * (len(tokens) - 1)
    value = float(np.quantile(tokens, q))
    if len(ordered) == 1:
        return Interval(value=value, low=0.0, high=1.0)
    rejects = _test(sizes, draws, seed)

    def outside(side: Literal["left", "right"], ranks: Ranks) -> npt.NDArray[np.bool_]:
        """Whether thresholds are too low (right: count tokens at them too) or too high (left)."""
        below = [np.searchsorted(group, tokens[ranks], side=side) for group in ordered]
        return rejects(np.array(below, np.float64) - q * sizes[:, None], side == "left")

    low = tokens[_farthest(partial(outside, "right"), int(np.floor(place)), 0)]
    high = tokens[_farthest(partial(outside, "left"), int(np.ceil(place)), len(tokens) - 1)]
    return Interval(value=value, low=float(low), high=float(high))


def hard_misses(alpha: Values, entropy: Values) -> npt.NDArray[np.bool_]:
    """Which tokens the dense policy is sure of, and the sparse actor is not."""
    return (np.asarray(entropy) < UNCERTAIN) & (np.asarray(alpha) < MISS)


def rate_interval(groups: Sequence[npt.NDArray[np.bool_]], per: float = 1000.0) -> Interval:
    """How many of `per` tokens are true, with its 95 % interval over groups (of a prompt each).

    Empty groups are left out. One group alone says nothing about others: its upper end is `per`.
    """
    groups = [np.asarray(group).ravel() for group in groups if len(group)]
    if not groups:
        raise ValueError("an interval needs tokens, got none")
    counts, sizes = (np.array([f(g) for g in groups], np.float64) for f in (np.sum, len))
    events, tokens = counts.sum(), sizes.sum()
    value = float(events / tokens * per)
    effective = float(tokens**2 / (sizes**2).sum())
    if effective - 1 < NOTHING:
        return Interval(value=value, low=0.0, high=per)
    spread = 1.0  # variance, in that of independent events
    if events:
        left = counts - events / tokens * sizes
        observed = (left**2).sum() * len(groups) / (len(groups) - 1) / events
        few = student(effective - 1, ONE_SIDE) / student(np.inf, ONE_SIDE)
        spread = max(1.0, float(observed)) * few**2
    low = special.gammaincinv(events / spread, ONE_SIDE) if events else 0.0
    high = special.gammaincinv(events / spread + 1, 1 - ONE_SIDE)
    scale = spread / tokens * per
    return Interval(value=value, low=float(low * scale), high=min(per, float(high * scale)))


def _farthest(rejects: Callable[[Ranks], npt.NDArray[np.bool_]], inside: int, outside: int) -> int:
    """The last number from inside (not rejected) towards outside before a rejection."""
    while inside != outside:
        candidates = np.linspace(inside, outside, STEPS + 1).round().astype(np.int64)
        candidates = candidates[1:][np.diff(candidates) != 0]
        rejected = rejects(candidates)
        if not rejected.any():
            return outside
        first = int(rejected.argmax())
        inside = int(candidates[first - 1]) if first else inside
        outside = int(candidates[first])
        if abs(outside - inside) == 1:
            return inside
    return inside


def _test(sizes: Array, draws: int, seed: int) -> Rejects:
    """The test whether column means of d [groups, columns] are significantly above (below) 0."""
    groups, random = len(sizes), np.random.default_rng(seed)
    share = random.multinomial(groups, np.full(groups, 1 / groups), size=draws) / groups
    # How many prompts of equal length would weigh as much as these of unequal length.
    effective, least = float(sizes.sum() ** 2 / (sizes**2).sum()), np.inf
    if effective - 1 >= NOTHING:  # Student's, scaled to the errors that all groups gave
        scale = np.sqrt((1 - 1 / groups) / (1 - 1 / effective))
        least = student(effective - 1, ONE_SIDE) * scale
    rank = min(draws, int(np.ceil((1 - ONE_SIDE) * (draws + 1)))) - 1

    def rejects(d: Array, above: bool) -> npt.NDArray[np.bool_]:
        signed = (d if above else -d) / np.maximum(np.abs(d).max(0), 1e-300)
        mean = signed.mean(0)
        error = signed.std(0) / np.sqrt(groups - 1)
        drawn = share @ signed
        spread = np.sqrt(np.maximum(share @ signed**2 - drawn**2, 0) / (groups - 1))
        chance = np.partition(_ratio(drawn - mean, spread), rank, axis=0)[rank]
        return _ratio(mean, error) > np.maximum(chance, least)

    return rejects


def _ratio(difference: Array, error: Array) -> Array:
    """Differences in standard errors; without error, infinite or 0."""
    without = np.where(np.abs(difference) < NOTHING, 0.0, np.copysign(np.inf, difference))
    return np.where(error < NOTHING, without, difference / np.maximum(error, NOTHING))


def student(freedom: float, tail: float) -> float:
    """The critical value that Student's t exceeds with probability `tail`."""
    return float(special.stdtrit(freedom, 1 - tail))


# Accuracy over rows.


def mean_at_k(acc: Sequence[npt.ArrayLike]) -> Estimate:
    """mean@k: the mean over rows of the mean accuracy of their answers, with its interval."""
    rows = [np.asarray(row, dtype=np.float64) for row in acc]
    for number, row in enumerate(rows):
        if not row.size or not ((row >= 0) & (row <= 1)).all():
            raise ValueError(f"mean_at_k, row {number}: expected numbers from 0 to 1, got {row}")
    return _over_rows(np.array([row.mean() for row in rows]), sum(row.size for row in rows))


def mean_over_rows(values: npt.ArrayLike) -> Estimate:
    """The mean of a number from 0 to 1 that rows have, with its interval by their spread."""
    return _over_rows(np.asarray(values, dtype=np.float64), sys.maxsize)


def pass_at_k(correct: Sequence[int], samples: Sequence[int], k: int) -> Estimate:
    """pass@k: the chance that one of k answers is right, with its interval over rows."""
    chances = [_chance(c, n, k) for c, n in zip(correct, samples, strict=True)]
    return _over_rows(np.array(chances), sum(samples))


def _chance(correct: int, samples: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), as a product: no factorials, no cancellation."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass_at_k: expected 0 <= correct <= samples and 1 <= k <= samples, "
            f"got correct {correct}, samples {samples}, k {k}"
        )
    if samples - correct < k:
        return 1.0
    others = np.arange(samples - correct + 1, samples + 1, dtype=np.float64)
    return float(1 - np.prod(1 - k / others))


def attempts(samples: int) -> tuple[int, ...]:
    """The k of reported pass@k: powers of two up to the number of samples, and that number."""
    powers = (2**i for i in range(samples.bit_length()))
    return tuple(sorted({*powers, samples}))


def _over_rows(values: Array, answers: int) -> Estimate:
    """The mean of the values of rows, each from 0 to 1, with its interval; see the module."""
    rows = len(values)
    if rows == 0:
        raise ValueError("expected at least one row, got none")
    value = float(values.mean())
    if rows == 1:
        return Estimate(value=value, low=None, high=None)
    most, spread = value * (1 - value), float(values.var(ddof=1))
    effective = float(rows)
    if most >= NO_VARIANCE:
        effective = float(np.clip(most * rows / max(spread, NO_VARIANCE), rows, answers))
    doubt = student(rows - 1, ONE_SIDE) ** 2 / effective
    centre = (value + doubt / 2) / (1 + doubt)
    half = float(np.sqrt(doubt * most + doubt**2 / 4)) / (1 + doubt)
    return Estimate(value=value, low=max(0.0, centre - half), high=min(1.0, centre + half))


# Beta fits.


class BetaFit(NamedTuple):
    """Beta(a, b) of acceptances scaled to [0, 1], with its KS distance."""

    a: float
    b: float
    ks: float


def fit_beta(values: npt.ArrayLike) -> BetaFit | None:
    """Fit a Beta distribution to the acceptances at or below SATURATED (maximum likelihood).

    None for fewer than 20 of them, where all are equal, or where no fit is found. The distance is
    taken at 4096 ranks of the sorted values where there are more: it is then too small by at most
    1/4096.
    """
    acceptances = np.asarray(values, dtype=np.float64).ravel()
    if acceptances.size and not (acceptances.min() >= 0 and acceptances.max() <= 1 + CLIP):
        raise ValueError(
            "acceptances must be in [0, 1] and not NaN, "
            f"got {acceptances.min():.4g} to {acceptances.max():.4g}"
        )
    scaled = acceptances[acceptances <= SATURATED] / SATURATED
    if len(scaled) < LEAST_VALUES:
        return None
    scaled = np.sort(np.clip(scaled, CLIP, 1 - CLIP))
    if scaled[0] == scaled[-1]:
        return None
    from scipy.stats import FitError, beta  # takes a while to import

    try:
        a, b, _, _ = beta.fit(scaled, floc=0, fscale=1)
    except FitError:  # the solver did not converge
        return None
    return BetaFit(a=float(a), b=float(b), ks=_ks_distance(scaled, a, b))


def _ks_distance(ordered: Array, a: float, b: float) -> float:
    count = len(ordered)
    ranks = np.unique(np.linspace(0, count - 1, min(count, KS_POINTS)).round().astype(np.int64))
    fitted = special.betainc(a, b, ordered[ranks])
    return float(max((fitted - ranks / count).max(), ((ranks + 1) / count - fitted).max()))
