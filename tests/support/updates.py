"""Low-rank updates of products for tests: random ones, and what they are by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparrow.ops import LowRank, RowSlots


def make_update(
    draw: Callable[..., Tensor],
    slots: Sequence[int],
    *,
    count: int,
    rank: int,
    inputs: int,
    parts: tuple[int, ...],
) -> LowRank:
    """Random matrices of all slots, large enough that a mistake shows."""
    a_RI = draw(len(parts) * count * rank, inputs) * inputs**-0.5
    b_EQ = draw(sum(parts), count * rank) * rank**-0.5
    rows = RowSlots(slots_T=torch.tensor(slots, device=a_RI.device), count=count)
    return LowRank(a_RI=a_RI, b_EQ=b_EQ, parts=parts, rows=rows)


def in_dtype(update: LowRank, dtype: torch.dtype) -> LowRank:
    return replace(update, a_RI=update.a_RI.to(dtype), b_EQ=update.b_EQ.to(dtype))


def update_of_weight(update: LowRank, slot: int) -> Tensor:
    """What a slot adds to the weight, [E, I]: B A of each part."""
    if slot == 0:
        return update.a_RI.new_zeros(len(update.b_EQ), update.a_RI.shape[1])
    slots = update.rows.count
    a_MSRI = update.a_RI.unflatten(0, (len(update.parts), slots, update.rank))
    outputs = update.b_EQ.unflatten(1, (slots, update.rank))[:, slot - 1].split(update.parts)
    return torch.cat([b_ER @ a_MSRI[m, slot - 1] for m, b_ER in enumerate(outputs)])
