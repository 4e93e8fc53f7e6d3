"""Sparse attention of whole sequences with gradients, as decoding would have seen them.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow.models.attention import PackedSparse, fastest_sparse
from sparrow.models.decoder import Attention
from sparrow.ops.reference.pages import DENSE
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule
from sparrow.training.packing import Pack, packed_attention


class SparseDecoding(NamedTuple):
    """A schedule, with its rule."""

    schedule: Schedule
    rule: Rule


def sparse_attention(
    pack: Pack,
    schedule: Schedule,
    rule: Rule,
    *,
    layers: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> Attention:
    """The attention of sparse decoding over a pack: learnt tokens were sampled under the schedule.

    Others, such as prompts and the answers of tools, were read densely.
    """
    sizes: dict[str, Any] = {"layers": layers, "kv_heads": kv_heads, "schedules": 1}
    table = BudgetTable(**sizes, bins=len(schedule.lengths), device=pack.ids_T.device)
    lengths_T = pack.positions_T + 1
    budgets = table.lookup(torch.full_like(lengths_T, table.add(schedule)), lengths_T)
    drawn_T = torch.zeros_like(pack.ids_T, dtype=torch.bool)
    drawn_T[pack.sources_R + 1] = True
    drawn = drawn_T.reshape(1, -1, *(1,) * (budgets.ndim - 2))
    definition = PackedSparse(
        bounds=pack.bounds.cpu(),  # read on the host, once
        dense_B=_prompt_lengths(pack),
        budgets=torch.where(drawn, budgets, DENSE),
        page=schedule.page,
        rule=rule,
    )
    return fastest_sparse(definition, packed_attention(pack, dtype), dtype)


def _prompt_lengths(pack: Pack) -> Tensor:
    """Tokens of each sequence before the first that is learnt, [B], in host memory."""
    bounds, sources_R = pack.bounds.cpu().long(), pack.sources_R.cpu()
    first_B = torch.searchsorted(sources_R, bounds[:-1])
    ends = torch.cat((sources_R + 1, bounds[-1:]))[first_B]  # none is learnt: all are
    return torch.minimum(ends, bounds[1:]) - bounds[:-1]
