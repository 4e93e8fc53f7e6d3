"""The cheapest budgets that keep a target: exact, for any costs that add up over bins.

A budget is allowed in a bin where its acceptance reaches the target; budgets may not fall with the
length. What remains is a shortest path through bins, found by dynamic programming. Costs need not
rise with the budget (a bin that is dense reads no landmarks), and what is allowed need not either
(measurements are noisy): both are taken as they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """One budget for every bin, as places in the list of budgets, and what they cost together."""

    places: tuple[int, ...]
    cost: float


def cheapest(costs: FloatArray, reached: FloatArray, target: float) -> Choice | None:
    """The cheapest places, none below the one before, at which `reached` is at the target.

    costs, reached: [bins, budgets], budgets rising. None: no such choice. Of equal costs the
    smaller budgets win.
    """
    bins, budgets = costs.shape
    best = np.where(reached[0] >= target, costs[0], np.inf)
    came: list[npt.NDArray[np.int64]] = []
    for place in range(1, bins):
        lead = np.empty(budgets, np.int64)
        least = 0
        for budget in range(budgets):
            least = budget if best[budget] < best[least] else least
            lead[budget] = least
        came.append(lead)
        best = np.where(reached[place] >= target, best[lead] + costs[place], np.inf)
    last = int(np.argmin(best))
    if not np.isfinite(best[last]):
        return None
    places = [last]
    for lead in reversed(came):
        places.append(int(lead[places[-1]]))
    return Choice(tuple(reversed(places)), float(best[last]))


def highest(reached: FloatArray) -> float:
    """The greatest target that can be kept in every bin at all."""
    free = np.zeros_like(reached)
    values = np.unique(reached)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if cheapest(free, reached, float(values[middle])) is None:
            high = middle - 1
        else:
            low = middle
    return float(values[low])


def merged(starts: Sequence[int], budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bins without those that repeat the one before; the first starts at 0."""
    kept = [i for i, budget in enumerate(budgets) if i == 0 or budget != budgets[i - 1]]
    return [0 if i == 0 else starts[i] for i in kept], [budgets[i] for i in kept]
