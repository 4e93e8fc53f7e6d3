"""Sparse attention of whole sequences with gradients, as decoding would have seen them.

On a CPU and in float32 it is `PackedSparse`, the definition. On a GPU with 16-bit products the
kernels of decoding choose the pages and torch's FlexAttention attends to them: sequences begin at
whole blocks of 128 tokens, a block of keys that no query of a block keeps is skipped, and within a
block a mask leaves the kept pages.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.models.attention import Packed, PackedSparse
from sparrow.models.decoder import Attention
from sparrow.ops.reference.attention import kept_pages
from sparrow.ops.reference.logprob import chunks
from sparrow.ops.reference.pages import DENSE
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule
from sparrow.training.packing import Pack, packed_attention

BLOCK = 128  # tokens
BITS = 32  # of a number that holds the pages of a block
SCORES = 2**25  # of pages, at a time
MOST_ROWS = 2**15  # of a kernel's grid


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
    dense = packed_attention(pack, dtype)
    whole = BLOCK % schedule.page == 0 and BLOCK // schedule.page < BITS
    fast = whole and not isinstance(dense, Packed)
    return FlexSparse.of(definition, dense) if fast else definition


def _prompt_lengths(pack: Pack) -> Tensor:
    """Tokens of each sequence before the first that is learnt, [B], in host memory."""
    bounds, sources_R = pack.bounds.cpu().long(), pack.sources_R.cpu()
    first_B = torch.searchsorted(sources_R, bounds[:-1])
    ends = torch.cat((sources_R + 1, bounds[-1:]))[first_B]  # none is learnt: all are
    return torch.minimum(ends, bounds[1:]) - bounds[:-1]


class _SingleLayerCache(ops.PageCache):
    """Pages of one layer at a time: all layers of a model have the same memory."""

    def field(self, name: str, layer: int) -> Tensor:
        return super().field(name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexSparse:
    """`PackedSparse` by FlexAttention. S are tokens with every sequence padded to whole blocks.

    Pages are chosen by the kernels of decoding. Padding keeps the pages that are always kept.
    """

    definition: PackedSparse
    dense: Attention  # of the layers that the rule leaves dense
    places_T: Tensor  # of the pack's tokens among the S
    begins_S: Tensor  # where the sequence of each begins
    lengths_S: Tensor  # tokens of the sequence up to each
    budgets: Tensor  # of the definition, [layers, S, G]
    pages: int  # of the longest sequence

    @classmethod
    def of(cls, definition: PackedSparse, dense: Attention) -> "FlexSparse":
        """Lay the sequences out in whole blocks."""
        lengths, device = definition.bounds.diff(), definition.budgets.device
        padded = (lengths + BLOCK - 1) // BLOCK * BLOCK
        begins = padded.cumsum(0) - padded
        shifts = begins - definition.bounds[:-1]
        places_T = (torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)).to(device)
        begins_S = begins.repeat_interleave(padded).int().to(device)
        prompts_S = definition.dense_B.repeat_interleave(padded).to(device)
        lengths_S = torch.arange(1, len(begins_S) + 1, device=device, dtype=torch.int32) - begins_S
        given = definition.budgets
        budgets = given.new_zeros(len(given), len(begins_S), *given.shape[2:])
        budgets[:, places_T] = given
        budgets[:, lengths_S <= prompts_S] = DENSE
        return cls(
            definition=definition,
            dense=dense,
            places_T=places_T,
            begins_S=begins_S,
            lengths_S=lengths_S,
            budgets=budgets,
            pages=int(padded.max()) // definition.page,
        )

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        if self.definition.rule.is_dense(layer):
            return self.dense(layer, q_THD, k_TGD, v_TGD, scale=scale)
        kept_SGM = self.kept(layer, q_THD.detach(), k_TGD.detach(), v_TGD.detach())
        mask = self._mask(kept_SGM, q_THD.shape[1] // k_TGD.shape[1])
        q, k, v = (self._padded(x).transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        out_1HSD = _attend(q_THD.is_cuda)(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        return out_1HSD[0].transpose(0, 1)[self.places_T]

    def _padded(self, x_THD: Tensor) -> Tensor:
        padded = x_THD.new_zeros(len(self.begins_S), *x_THD.shape[1:])
        return padded.index_copy(0, self.places_T, x_THD)

    @torch.no_grad()
    def kept(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """The pages that each of the S tokens keeps, bool [S, G, M]."""
        own, kv_heads = self.definition, k_TGD.shape[1]
        if own.rule.flow.state:  # changes from token to token: by definition
            return self._kept_by_definition(layer, q_THD, k_TGD, v_TGD)
        q_SHD, k_SGD, v_SGD = (self._padded(x) for x in (q_THD, k_TGD, v_TGD))
        tokens, head_size = len(q_SHD), q_THD.shape[2]
        sizes: dict[str, Any] = {"page": own.page, "head_size": head_size, "dtype": k_SGD.dtype}
        cache = _SingleLayerCache(
            layers=1,
            kv_heads=kv_heads,
            page=own.page,
            pages=tokens // own.page,
            page_fields=(*ops.kv_fields(**sizes), *own.rule.fields(**sizes)),
            device=q_THD.device,
        )
        for name, x_SGD in ("k", k_SGD), ("v", v_SGD):
            cache.field(name, layer).copy_(x_SGD.unflatten(0, (-1, own.page)).transpose(1, 2))
        kept_SGM = torch.empty(
            (tokens, kv_heads, self.pages), dtype=torch.bool, device=q_THD.device
        )
        index_M = torch.arange(self.pages, dtype=torch.int32, device=q_THD.device)
        ends = torch.arange(own.page - 1, tokens, own.page, device=q_THD.device)
        with ops.using("fastest"):
            own.rule.summarise(cache, layer, ends)
            for part in chunks(tokens, max(1, min(MOST_ROWS, SCORES // (kv_heads * self.pages)))):
                lengths_n, budgets = self.lengths_S[part], self.budgets[layer, part]
                table_nM = self.begins_S[part, None] // own.page + index_M
                lists = own.rule.select(cache, layer, q_SHD[part], table_nM, lengths_n, budgets)
                assert lists is not None
                kept_SGM[part] = _listed(lists, self.pages)
        return kept_SGM

    def _kept_by_definition(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        own = self.definition
        scorer = own.rule.scorer(layer, own.page)
        assert scorer is not None
        kept_TGM = kept_pages(
            *(q_THD, k_TGD, v_TGD, own.bounds, own.dense_B, own.budgets[layer]),
            page=own.page,
            first=own.rule.first,
            last=own.rule.last,
            mass=own.rule.mass,
            scorer=scorer,
        )
        shape = len(self.begins_S), kept_TGM.shape[1], self.pages
        kept_SGM = torch.ones(shape, dtype=torch.bool, device=q_THD.device)
        rest = self.pages - kept_TGM.shape[2]
        kept_SGM[self.places_T] = torch.nn.functional.pad(kept_TGM, (0, rest))
        return kept_SGM

    def _mask(self, kept_SGM: Tensor, group: int) -> Any:
        """Which blocks hold a kept page for which block of queries, and the pages within them."""
        from torch.nn.attention.flex_attention import BlockMask

        page, begins_S, device = self.definition.page, self.begins_S, kept_SGM.device
        per_block = BLOCK // page
        kept_SGEP = kept_SGM.unflatten(2, (-1, per_block))  # E blocks of a sequence, P their pages
        shifts_P = torch.arange(per_block, dtype=torch.int32, device=device)
        bits_SGE = (kept_SGEP << shifts_P).sum(3, dtype=torch.int32)
        most = bits_SGE.shape[2] - 1

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            place = kv - begins_S[q]
            bits = bits_SGE[q, h // group, (place // BLOCK).clamp(0, most)]
            return (kv <= q) & (place >= 0) & (((bits >> (place % BLOCK // page)) & 1) == 1)

        bits_QnE = bits_SGE.unflatten(0, (-1, BLOCK)).flatten(1, 2)
        query_Q = torch.arange(len(bits_QnE), device=device)
        local_QB = query_Q - begins_S[::BLOCK, None] // BLOCK  # block b counted from q's sequence
        inside_QB = (local_QB >= 0) & (query_Q <= query_Q[:, None])
        local_QB = local_QB.clamp(0, most).long()
        some_QB = (bits_QnE != 0).any(1).gather(1, local_QB) & inside_QB
        whole_QE = (bits_QnE == (1 << per_block) - 1).all(1)
        full_QB = whole_QE.gather(1, local_QB) & inside_QB & (query_Q < query_Q[:, None])
        tokens = len(begins_S)
        return BlockMask.from_kv_blocks(
            *_ordered(some_QB & ~full_QB),
            *_ordered(full_QB),
            BLOCK_SIZE=BLOCK,
            mask_mod=keep,
            seq_lengths=(tokens, tokens),
        )


def _listed(lists: ops.PageLists, pages: int) -> Tensor:
    """Page lists as a mask, bool [B, G, M]."""
    index_K = torch.arange(lists.pages.shape[2], device=lists.pages.device)
    void_BGK = index_K >= lists.counts[:, :, None]
    where_BGK = lists.pages.long().masked_fill(void_BGK, pages)
    mask = void_BGK.new_zeros(*lists.counts.shape, pages + 1)
    return mask.scatter_(2, where_BGK, True)[:, :, :pages]


def _ordered(wanted_QB: Tensor) -> tuple[Tensor, Tensor]:
    """By block of queries the number of wanted blocks, and blocks in order, these first."""
    order_QB = wanted_QB.int().argsort(dim=1, descending=True, stable=True).int()
    return wanted_QB.sum(1, dtype=torch.int32)[None, None], order_QB[None, None]


@cache
def _attend(compiled: bool) -> Callable[..., Any]:
    """FlexAttention; only compiled it is fast and skips blocks."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=True) if compiled else attend
