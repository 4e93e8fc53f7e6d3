"""Which layers lose the tail: one group of them sparse at a time, on sequences that are given.

What a group loses alone says how budgets should be shared out. If the loss of a layer falls with
its budget as c * b^-g, and losses add up, then the least total budget for a given loss has
b in proportion to c^(1 / (1 + g)). That is an assumption; the variant with those shares is
measured like any other before a plan may use it.
"""

from collections.abc import Sequence

import numpy as np

from sparrow.calibrate.arms import Arm, schedule_of
from sparrow.calibrate.cells import Tokens, tail_of
from sparrow.schema.surface import Cell, LayerLoss, Variant
from sparrow.sparse.flows.flow import Flow

LEAST_SHARE, MOST_SHARE, STEP = 0.25, 4.0, 0.05
SLOPES = (0.25, 3.0)  # of losses against budgets that are believed
NO_LOSS = 1e-4
CLIPPINGS = 8  # after each the mean is brought back to 1


def groups_of(layers: int, groups: int, dense: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Layers that are not dense, in order, in so many parts of about equal size."""
    free = [layer for layer in range(layers) if layer not in dense]
    parts = np.array_split(np.array(free), min(groups, len(free))) if free else []
    return [tuple(part.tolist()) for part in parts]


def only(variant: Variant, flow: Flow, budget: int, group: Sequence[int], layers: int) -> Arm:
    """The variant with every layer dense but these."""
    dense = tuple(layer for layer in range(layers) if layer not in group)
    alone = variant.replace(dense_layers=dense, shares=())
    return Arm(
        name=f"layers {group[0]} to {group[-1]} alone, {budget} tokens",
        flow=flow,
        variant=variant.name,
        budget=budget,
        schedule=schedule_of(alone, [0], [budget]),
        digest=variant.digest,
        given=True,
    )


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
