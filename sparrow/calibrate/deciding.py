"""What to measure next: budgets on which the plan still depends, layers that lose the tail.

For every bin of lengths the plan wants the smallest budget that reaches the target. Counting every
budget whose interval crosses the target as a miss gives the careful plan, counting it as a hit the
bold one. Where the two agree, nothing that is still uncertain matters; where they differ, the
budgets between them are measured on.

Layers are made sparse one group at a time, on sequences that are given. What a group loses alone
says how budgets should be shared out. If the loss of a layer falls with its budget as c * b^-g, and
losses add up, then the least total budget for a given loss has b in proportion to c^(1 / (1 + g)).
That is an assumption; the variant with those shares is measured like any other before a plan may
use it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparrow.calibrate.arms import Arm
from sparrow.calibrate.cells import Tokens, tail_of
from sparrow.schema.surface import LEAST_PROMPTS, Cell, LayerLoss

DOUBT = 2.0  # intervals of few prompts are too narrow: they count as so many times as wide
LEAST_SHARE, MOST_SHARE, STEP = 0.25, 4.0, 0.05
SLOPES = (0.25, 3.0)  # of losses against budgets that are believed
NO_LOSS = 1e-4
CLIPPINGS = 8  # after each the mean is brought back to 1


class Seen(NamedTuple):
    """p05 of an arm in a bin so far."""

    p05: float
    low: float
    high: float
    prompts: int


Row = Sequence[Seen | None]  # by bin; None: no token was drawn there


class Open(NamedTuple):
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


# Layers.


def groups_of(layers: int, groups: int, dense: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Layers that are not dense, in order, in so many parts of about equal size."""
    free = [layer for layer in range(layers) if layer not in dense]
    parts = np.array_split(np.array(free), min(groups, len(free))) if free else []
    return [tuple(part.tolist()) for part in parts]


def loss(tokens: Tokens, arm: Arm, group: tuple[int, ...]) -> LayerLoss:
    """The tail of the tokens at which the budget bites."""
    assert arm.budget is not None
    own = tokens.where(tokens.length > arm.budget)
    assert len(own), "sequences are longer than the budget"
    tail = tail_of(own)
    return LayerLoss(
        variant=arm.variant,
        budget=arm.budget,
        layers=group,
        p05=tail.value,
        low=tail.low,
        high=tail.high,
        mean=float(own.alpha.mean(dtype=np.float64)),
        tokens=len(own),
        prompts=len(own.by_prompt()),
    )


def shares(losses: Sequence[LayerLoss], cells: Sequence[Cell], layers: int) -> tuple[float, ...]:
    """By layer, the multiple of the budget that it should get; their mean is 1, but for rounding.

    A group's loss is taken as the sum of its layers', in equal parts.
    """
    power = 1 / (1 + slope(cells))
    weight = np.ones(layers)
    for each in losses:
        weight[list(each.layers)] = max((1 - each.p05) / len(each.layers), NO_LOSS) ** power
    free = [layer for each in losses for layer in each.layers]
    for _ in range(CLIPPINGS):
        weight[free] = np.clip(weight[free] / weight[free].mean(), LEAST_SHARE, MOST_SHARE)
    return tuple(round(float(share), 2) for share in np.rint(weight / STEP) * STEP)


def slope(cells: Sequence[Cell]) -> float:
    """How fast the loss 1 - p05 falls with the budget, on log scales, within bins."""
    above, beside = 0.0, 0.0
    for start in {cell.start for cell in cells}:
        own = [c for c in cells if c.start == start and c.budget and c.budget < c.start]
        if len(own) < 2:
            continue
        x = np.log([c.budget or 1 for c in own])
        y = np.log([max(1 - c.p05, NO_LOSS) for c in own])
        above += float(((x - x.mean()) * (y - y.mean())).sum())
        beside += float(((x - x.mean()) ** 2).sum())
    return float(np.clip(-above / beside, *SLOPES)) if beside else 1.0
