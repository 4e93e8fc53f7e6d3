"""Sparse attention of whole sequences with gradients, as decoding would have seen them.

On a CPU and in float32 it is `PackedSparse`, the definition. On a GPU with 16-bit products it is
torch's FlexAttention over the same pages: sequences begin at whole blocks of 128 tokens, a block of
keys that no query of a block keeps is skipped, and within a block a mask leaves the kept pages.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparrow.models.attention import Packed, PackedSparse
from sparrow.models.decoder import Attention
from sparrow.ops.reference.attention import kept_pages
from sparrow.ops.reference.pages import DENSE
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule
from sparrow.training.packing import Pack, packed_attention

BLOCK = 128  # tokens


def sparse_attention(
    pack: Pack,
    starts_B: Tensor,
    schedule: Schedule,
    rule: Rule,
    *,
    layers: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> Attention:
    """The attention of sparse decoding over a pack.

    The first starts[b] tokens of sequence b are its prompt. Later tokens that are not learnt, such
    as the answers of tools, were read densely too.
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
        dense_B=starts_B.cpu(),
        budgets=torch.where(drawn, budgets, DENSE),
        page=schedule.page,
        rule=rule,
    )
    dense = packed_attention(pack, dtype)
    return definition if isinstance(dense, Packed) else FlexSparse.of(definition, dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexSparse:
    """`PackedSparse` by FlexAttention. S are tokens with every sequence padded to whole blocks."""

    definition: PackedSparse
    dense: Attention  # of the layers that the rule leaves dense
    places_T: Tensor  # of the pack's tokens among the S
    begins_S: Tensor  # where the sequence of each begins
    tokens: int

    @classmethod
    def of(cls, definition: PackedSparse, dense: Attention) -> "FlexSparse":
        """Lay the sequences out in whole blocks."""
        lengths = definition.bounds.diff()
        padded = (lengths + BLOCK - 1) // BLOCK * BLOCK
        begins = padded.cumsum(0) - padded
        device = definition.budgets.device
        places_T = torch.arange(int(lengths.sum())) + (
            begins - definition.bounds[:-1]
        ).repeat_interleave(lengths)
        return cls(
            definition=definition,
            dense=dense,
            places_T=places_T.to(device),
            begins_S=begins.repeat_interleave(padded).int().to(device),
            tokens=int(padded.sum()),
        )

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        own = self.definition
        scorer = own.rule.scorer(layer, own.page)
        if scorer is None:
            return self.dense(layer, q_THD, k_TGD, v_TGD, scale=scale)
        kept_TGM = kept_pages(
            *(q_THD.detach(), k_TGD.detach(), v_TGD.detach()),
            *(own.bounds, own.dense_B, own.budgets[layer]),
            page=own.page,
            first=own.rule.first,
            last=own.rule.last,
            mass=own.rule.mass,
            scorer=scorer,
        )
        padded = [self._padded(x).transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD)]
        mask = self._mask(kept_TGM, q_THD.shape[1] // k_TGD.shape[1])
        attend = _attend(q_THD.is_cuda)
        out_1HSD = attend(*padded, block_mask=mask, scale=scale, enable_gqa=True)
        return out_1HSD[0].transpose(0, 1)[self.places_T]

    def _padded(self, x_THD: Tensor) -> Tensor:
        return x_THD.new_zeros(self.tokens, *x_THD.shape[1:]).index_copy(0, self.places_T, x_THD)

    def _mask(self, kept_TGM: Tensor, group: int) -> Any:
        """Which blocks hold a kept page for which block of queries, and the pages within them."""
        from torch.nn.attention.flex_attention import BlockMask

        page, begins_S = self.definition.page, self.begins_S
        per_block = BLOCK // page
        pages = -(-kept_TGM.shape[2] // per_block) * per_block
        kept_SGM = kept_TGM.new_ones(self.tokens, kept_TGM.shape[1], pages)  # padding: anything
        kept_SGM[self.places_T] = torch.nn.functional.pad(kept_TGM, (0, pages - kept_TGM.shape[2]))

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            place = kv - begins_S[q]
            kept = kept_SGM[q, h // group, (place // page).clamp(0, pages - 1)]
            return (kv <= q) & (place >= 0) & kept

        blocks, device = self.tokens // BLOCK, kept_SGM.device
        any_QK = kept_SGM.view(blocks, -1, pages // per_block, per_block).any(3).any(1)
        query_Q = torch.arange(blocks, device=device)
        first_Q = begins_S[::BLOCK] // BLOCK
        local_QB = query_Q - first_Q[:, None]  # [Q, B]: block b counted from the sequence of q
        causal_QB = (local_QB >= 0) & (query_Q <= query_Q[:, None])
        wanted_QB = any_QK.gather(1, local_QB.clamp(0, any_QK.shape[1] - 1).long()) & causal_QB
        order_QB = wanted_QB.int().argsort(dim=1, descending=True, stable=True).int()
        counts_Q = wanted_QB.sum(1, dtype=torch.int32)
        return BlockMask.from_kv_blocks(
            counts_Q[None, None],
            order_QB[None, None],
            BLOCK_SIZE=BLOCK,
            mask_mod=keep,
            seq_lengths=(self.tokens, self.tokens),
        )


@cache
def _attend(compiled: bool) -> Callable[..., Any]:
    """FlexAttention; only compiled it is fast and skips blocks."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=True) if compiled else attend
