"""The attention implementations of a decoder, each a few calls of `ops`.

`Packed`, `PackedSparse` and its fast version `KernelSparse` see whole sequences and carry
gradients; `PagedPrefill`, `PagedDecode` and `PagedVerify` keep keys and values in a page cache.
Legend: sparrow/ops/types.py.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.models.decoder import Attention
from sparrow.ops.reference.attention import kept_pages
from sparrow.ops.reference.logprob import chunks
from sparrow.ops.reference.pages import DENSE, pack_bits
from sparrow.sparse.rule import Rule

SCORES = 2**25  # of pages, at a time
MOST_ROWS = 2**15  # of a kernel's grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Dense causal attention over packed sequences: training, scoring."""

    bounds: Tensor

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        return ops.attend_causal(q_THD, k_TGD, v_TGD, self.bounds, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSparse:
    """What sparse decoding would have seen, for whole sequences at once: calibration, distilling.

    For one forward pass, as layers may use the choice of one before them (`Flow.layers`).

    The first dense[b] tokens of sequence b are dense (its prompt). Budgets are [layers, T], or
    [layers, T, G] by KV head; token t keeps so many tokens.
    """

    bounds: Tensor
    dense_B: Tensor
    budgets: Tensor
    page: int
    rule: Rule
    chosen: dict[int, Tensor] = field(default_factory=dict)  # bits by layer, where several use them

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        scorer = self.rule.scorer(layer, self.page)
        if scorer is None:
            return ops.attend_causal(q_THD, k_TGD, v_TGD, self.bounds, scale=scale)
        if self.rule.flow.layers > 1:
            chooser = self.rule.chooser(layer)
            if chooser not in self.chosen:
                self.chosen[chooser] = self.bits(layer, q_THD, k_TGD, v_TGD)
            kept = self.bounds, self.chosen[chooser]
            return ops.attend_kept(q_THD, k_TGD, v_TGD, *kept, page=self.page, scale=scale)
        return ops.attend_sparse(
            q_THD,
            k_TGD,
            v_TGD,
            self.bounds,
            self.dense_B,
            self.budgets[layer],
            page=self.page,
            first=self.rule.first,
            last=self.rule.last,
            scale=scale,
            mass=self.rule.mass,
            scorer=scorer,
        )

    def bits(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """The pages that each token keeps in a layer that chooses, as `ops.page_bits`."""
        scorer = self.rule.scorer(layer, self.page)
        assert scorer is not None
        kept_TGM = kept_pages(
            *(q_THD, k_TGD, v_TGD, self.bounds, self.dense_B, self.budgets[layer]),
            page=self.page,
            first=self.rule.first,
            last=self.rule.last,
            mass=self.rule.mass,
            scorer=scorer,
        )
        return pack_bits(kept_TGM).contiguous()


def fastest_sparse(definition: PackedSparse, dense: Attention, dtype: torch.dtype) -> Attention:
    """By kernels where 16-bit products run on a GPU, otherwise by definition: the same function.

    dense: the attention of layers that the rule leaves dense.
    """
    fast = definition.budgets.is_cuda and dtype in (torch.bfloat16, torch.float16)
    return KernelSparse.of(definition, dense) if fast else definition


class _SingleLayerCache(ops.PageCache):
    """Pages of one layer at a time: all layers of a model have the same memory."""

    def field(self, name: str, layer: int) -> Tensor:
        return super().field(name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSparse:
    """`PackedSparse` by kernels: those of decoding choose pages, `ops.attend_kept` attends to them.

    For one forward pass: each layer chooses once, and recomputation for gradients finds the pages.
    """

    definition: PackedSparse
    dense: Attention  # of the layers that the rule leaves dense
    bounds: Tensor
    budgets: Tensor  # of the definition, prompts included
    lengths_T: Tensor  # tokens of the sequence up to each
    begins_T: Tensor  # page at which the sequence of each begins
    slots_T: Tensor  # sequences begin at whole pages
    ends: Tensor  # those slots that finish a page
    pool: int  # pages of all sequences
    pages: int  # of the longest
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by layer

    @classmethod
    def of(cls, definition: PackedSparse, dense: Attention) -> "KernelSparse":
        """Lay the sequences out in whole pages."""
        device, page = definition.budgets.device, definition.page
        bounds = definition.bounds.cpu()
        sizes = bounds.diff()
        pages = -(-sizes // page)
        begins_T = (pages.cumsum(0) - pages).repeat_interleave(sizes)
        lengths_T = torch.arange(1, int(sizes.sum()) + 1)
        lengths_T -= bounds[:-1].repeat_interleave(sizes)
        slots_T = begins_T * page + lengths_T - 1
        prompt_T = (lengths_T <= definition.dense_B.cpu().repeat_interleave(sizes)).to(device)
        prompts = prompt_T.reshape(1, -1, *(1,) * (definition.budgets.ndim - 2))
        return cls(
            definition=definition,
            dense=dense,
            bounds=bounds.int().to(device),
            budgets=torch.where(prompts, DENSE, definition.budgets),
            lengths_T=lengths_T.int().to(device),
            begins_T=begins_T.int().to(device),
            slots_T=slots_T.to(device),
            ends=slots_T[lengths_T % page == 0].to(device),
            pool=int(pages.sum()),
            pages=int(pages.max()),
        )

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        own = self.definition
        if own.rule.is_dense(layer):
            return self.dense(layer, q_THD, k_TGD, v_TGD, scale=scale)
        with ops.using("fastest"):
            chooser = own.rule.chooser(layer)
            if chooser not in self.chosen:
                states = (q_THD.detach(), k_TGD.detach(), v_TGD.detach())
                # State changes from token to token: it goes by definition.
                choose = own.bits if own.rule.flow.state else self._bits
                self.chosen[chooser] = choose(layer, *states)
            bits_GWT = self.chosen[chooser]
            return ops.attend_kept(
                q_THD, k_TGD, v_TGD, self.bounds, bits_GWT, page=own.page, scale=scale
            )

    @torch.no_grad()
    def _bits(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """The pages that each token keeps, as `ops.page_bits`, by the kernels of decoding."""
        own, device = self.definition, q_THD.device
        tokens, kv_heads, head_size = k_TGD.shape
        sizes: dict[str, Any] = {"page": own.page, "head_size": head_size, "dtype": k_TGD.dtype}
        cache = _SingleLayerCache(
            layers=1,
            kv_heads=kv_heads,
            page=own.page,
            pages=self.pool,
            page_fields=(*ops.kv_fields(**sizes), *own.rule.fields(**sizes)),
            device=device,
        )
        pool = cache.field("k", layer), cache.field("v", layer)
        ops.write_pages(*pool, k_TGD, v_TGD, self.slots_T)
        own.rule.summarise(cache, layer, self.ends)
        index_M = torch.arange(self.pages, dtype=torch.int32, device=device)
        parts = []
        for part in chunks(tokens, max(1, min(MOST_ROWS, SCORES // (kv_heads * self.pages)))):
            lengths_n, budgets = self.lengths_T[part], self.budgets[layer, part]
            table_nM = (self.begins_T[part, None] + index_M).clamp(max=self.pool - 1)
            lists = own.rule.select(cache, layer, q_THD[part], table_nM, lengths_n, budgets)
            assert lists is not None
            parts.append(ops.page_bits(*lists, pages=self.pages))
        return torch.cat(parts, dim=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPrefill:
    """Dense attention of prompts, or chunks of them, that writes the cache."""

    cache: ops.PageCache
    table_BM: Tensor
    lengths_B: Tensor
    bounds: Tensor
    slots_T: Tensor
    rule: Rule | None = None

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        pool = _store(self.cache, self.rule, layer, k_TGD, v_TGD, self.slots_T)
        where = self.table_BM, self.lengths_B, self.bounds
        return ops.attend_causal_paged(q_THD, *pool, *where, scale=scale)


def _store(
    cache: ops.PageCache,
    rule: Rule | None,
    layer: int,
    k_TGD: Tensor,
    v_TGD: Tensor,
    slots_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write keys and values, summarise the pages that they finish; return the layer's pools."""
    k_NGPD, v_NGPD = cache.field("k", layer), cache.field("v", layer)
    ops.write_pages(k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T)
    if rule is not None:
        rule.summarise(cache, layer, slots_T)
    return k_NGPD, v_NGPD


class HeldLists:
    """The page lists of a decode step, layer by layer, which later drafts of a round read again.

    These steps have the same rows and tables of the same width.
    """

    def __init__(
        self, layers: int, batch: int, kv_heads: int, pages: int, device: torch.device
    ) -> None:
        self.kv_heads = kv_heads
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self.pages, self.counts = (zeros(layers, batch * kv_heads * n) for n in (pages, 1))

    def of(self, layer: int, batch: int, width: int) -> ops.PageLists:
        """The lists of a layer, for so many rows and tables of so many pages."""
        lists = batch * self.kv_heads
        pages, counts = self.pages[layer, : lists * width], self.counts[layer, :lists]
        shape = (batch, self.kv_heads)
        return ops.PageLists(pages.view(*shape, width), counts.view(shape))

    def store(self, layer: int, lists: ops.PageLists, width: int) -> None:
        """Keep the lists of a layer."""
        held = self.of(layer, len(lists.pages), width)
        held.pages[:, :, : lists.pages.shape[2]].copy_(lists.pages)
        held.counts.copy_(lists.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedDecode:
    """A step, one new token per row; dense without budgets, else over pages that the rule keeps.

    budgets are [layers, B], or [layers, B, G] by KV head; a row whose budget is at least its length
    is dense, bit for bit. Where summary slots are given, only they finish pages: summaries are made
    of verified keys, so drafts do not. Lists that are held are selected for the lengths that rows
    have when they are last read, unless reuse: then they are those of an earlier step.
    """

    cache: ops.PageCache
    table_BM: Tensor
    lengths_B: Tensor
    slots_B: Tensor
    rule: Rule | None = None
    budgets: Tensor | None = None
    rows_B: Tensor | None = None
    summary_slots_B: Tensor | None = None
    held: HeldLists | None = None
    held_lengths_B: Tensor | None = None
    reuse: bool = False
    chosen: dict[int, ops.PageLists] = field(default_factory=dict)  # by layer that chose

    def __call__(
        self, layer: int, q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor, *, scale: float
    ) -> Tensor:
        k_NGPD, v_NGPD = self.cache.field("k", layer), self.cache.field("v", layer)
        if self.rule is not None and self.summary_slots_B is None:
            self.rule.append(self.cache, layer, k_BGD, v_BGD, self.slots_B)
        else:
            ops.write_pages(k_NGPD, v_NGPD, k_BGD, v_BGD, self.slots_B)
        if self.rule is not None and self.summary_slots_B is not None:
            self.rule.summarise(self.cache, layer, self.summary_slots_B)
        lists = self._choose(layer, q_BHD)
        return ops.attend_decode(
            q_BHD, k_NGPD, v_NGPD, self.table_BM, self.lengths_B, lists, scale=scale
        )

    def _choose(self, layer: int, q_BHD: Tensor) -> ops.PageLists | None:
        if self.rule is None or self.budgets is None:
            return None
        select, budgets = self.rule.select, self.budgets[layer]
        batch, width = self.table_BM.shape
        if self.reuse and self.held is not None:
            return None if self.rule.is_dense(layer) else self.held.of(layer, batch, width)
        lists = None if self.rule.is_dense(layer) else self.chosen.get(self.rule.chooser(layer))
        if lists is None:
            lengths_B = self.lengths_B if self.held_lengths_B is None else self.held_lengths_B
            where = (self.table_BM, lengths_B, budgets, self.rows_B)
            lists = select(self.cache, layer, q_BHD, *where)
        if self.rule.flow.layers > 1 and lists is not None:
            self.chosen[self.rule.chooser(layer)] = lists
        if self.held is not None and lists is not None:
            self.held.store(layer, lists, width)
        return lists


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedVerify:
    """The newest tokens of each row at once, densely: verification of drafts.

    Their keys and values replace those of the drafts, and page summaries are made of them.
    """

    cache: ops.PageCache
    table_BM: Tensor
    lengths_T: Tensor
    slots_T: Tensor
    rule: Rule | None = None

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        pool = _store(self.cache, self.rule, layer, k_TGD, v_TGD, self.slots_T)
        return ops.attend_verify(q_THD, *pool, self.table_BM, self.lengths_T, scale=scale)
