"""Where the next samples go: to arms on which the plan still depends, and nowhere else.

For every bin of lengths the plan wants the smallest budget that reaches the target. Counting every
budget whose interval crosses the target as a miss gives the careful plan, counting it as a hit the
bold one. Where the two agree, nothing that is still uncertain matters; where they differ, the
budgets between them are measured on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparrow.schema.surface import LEAST_PROMPTS

DOUBT = 2.0  # intervals of few prompts are too narrow: they count as so many times as wide


class Seen(NamedTuple):
    """p05 of an arm in a bin so far."""

    p05: float
    low: float
    high: float
    prompts: int


Row = Sequence[Seen | None]  # by bin; None: no token was drawn there


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Something that the plan still depends on."""

    budget: int
    bin: int
    target: float
    why: str


def open_questions(rows: Mapping[int, Row], targets: Sequence[float]) -> list[Open]:
    """What is uncertain and matters, of one variant's budgets; none: measuring can stop."""
    return [question for target in targets for question in _of_target(rows, target)]


def _of_target(rows: Mapping[int, Row], target: float) -> list[Open]:
    budgets = sorted(rows)
    bins = range(len(rows[budgets[0]])) if budgets else range(0)
    careful, bold = (_choice(rows, target, crossing) for crossing in (False, True))
    found = []
    for place in bins:
        small, large = bold[place], careful[place]
        for budget in budgets:
            seen = rows[budget][place]
            between = small is not None and small <= budget and (large is None or budget < large)
            if seen is None:
                continue
            if between and _hit(seen, target, True) and not _hit(seen, target, False):
                found.append(Open(budget=budget, bin=place, target=target, why="crosses"))
            elif budget == large and seen.prompts < LEAST_PROMPTS:
                found.append(Open(budget=budget, bin=place, target=target, why="few prompts"))
    return found


def _choice(rows: Mapping[int, Row], target: float, crossing: bool) -> list[int | None]:
    """The smallest budget of each bin that reaches the target and does not fall; None: no one."""
    chosen: list[int | None] = []
    least, beyond = 0, False
    for place in range(len(next(iter(rows.values()), ()))):
        seen = {budget: row[place] for budget, row in rows.items()}
        if all(one is None for one in seen.values()):
            chosen.append(None)
            continue
        hits = [b for b, one in seen.items() if b >= least and one and _hit(one, target, crossing)]
        beyond = beyond or not hits
        chosen.append(None if beyond else min(hits))
        least = least if beyond else min(hits)
    return chosen


def _hit(seen: Seen, target: float, crossing: bool) -> bool:
    """Whether the target is reached: surely, or (crossing) possibly."""
    doubt = DOUBT if seen.prompts < LEAST_PROMPTS else 1.0
    if crossing:
        return seen.p05 + doubt * (seen.high - seen.p05) >= target
    return seen.p05 - doubt * (seen.p05 - seen.low) >= target
