"""What a comparison of two arms can show with so many seeds, before it runs.

Both arms are assumed normal with the same standard deviation, and Welch's degrees of freedom are
those of equal variances; where they are not equal, there are fewer and it shows less.
"""

import math

from sparrow.schema.base import Record
from sparrow.stats import student

POWER = 0.80


class Power(Record):
    """The power of comparisons with so many seeds. half: half width of the interval.

    non_inferior: the chance to show non-inferiority of an arm that is equal. detectable: the
    smallest difference whose interval excludes 0 with a chance of 80 %. Without two seeds of each
    arm there is no interval.
    """

    comparisons: tuple[str, ...]
    seeds: tuple[int, int]
    sd: float
    half: float | None = None
    non_inferior: float | None = None
    detectable: float | None = None


def power(
    comparisons: tuple[str, ...],
    seeds: tuple[int, int],
    sd: float,
    *,
    margin: float,
    confidence: float,
) -> Power:
    """The power of comparisons of two arms with so many seeds each."""
    from scipy.optimize import brentq
    from scipy.stats import nct  # takes a while to import

    if min(seeds) < 2:
        return Power(comparisons=comparisons, seeds=seeds, sd=sd)
    spread = sum(1 / count for count in seeds)
    freedom = spread**2 / sum(1 / count**2 / (count - 1) for count in seeds)
    error = sd * math.sqrt(spread)
    critical = student(freedom, (1 - confidence) / 2)

    def chance(difference: float) -> float:
        """That the lower end of an interval around this difference is above 0."""
        return float(nct.sf(critical, freedom, difference / error))

    return Power(
        comparisons=comparisons,
        seeds=seeds,
        sd=sd,
        half=critical * error,
        non_inferior=chance(margin),
        detectable=float(brentq(lambda gap: chance(gap) - POWER, 0, 20 * error)),
    )
