"""Definitions of what a decode step reads from the rows of resident sequences, and writes back.

R rows; other letters as in sparrow/ops/types.py.
"""

import torch
from torch import Tensor

from sparrow.ops.reference.sampling import Draws
from sparrow.ops.types import RowState, StepInputs


def step_inputs(at_B: Tensor, rows: RowState, *, page: int, width: int) -> StepInputs:
    length_B = rows.length_R[at_B]
    position_B = length_B.clamp(min=0)
    table_BM = rows.table_RM[:, :width].index_select(0, at_B)
    block_B = table_BM.gather(1, position_B[:, None] // page).squeeze(1)
    slot_B = torch.where(length_B >= 0, block_B * page + position_B % page, -1)
    return StepInputs(
        ids_B=rows.token_R[at_B],
        positions_B=position_B,
        lengths_B=length_B + 1,
        slots_B=slot_B,
        table_BM=table_BM,
        seeds_B=rows.seed_R[at_B],
        counters_B=rows.drawn_R[at_B],
        temperature_B=rows.temperature_R[at_B],
    )


def step_outputs(at_B: Tensor, draws: Draws, rows: RowState, *, advance: bool) -> Tensor:
    rows.token_R.index_copy_(0, at_B, draws.tokens)
    rows.drawn_R.index_copy_(0, at_B, rows.drawn_R[at_B] + 1)
    if advance:
        length_B = rows.length_R[at_B]
        rows.length_R.index_copy_(0, at_B, torch.where(length_B >= 0, length_B + 1, length_B))
    parts = (
        draws.tokens.int(),
        draws.logprobs.view(torch.int32),
        draws.entropies.view(torch.int32),
        draws.ok.int(),
    )
    return torch.stack(parts)
