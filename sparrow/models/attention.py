"""The attention implementations of a decoder, each a few calls of `ops`.

`Packed` and `PackedSparse` see whole sequences and carry gradients; `PagedPrefill`, `PagedDecode`
and `PagedVerify` keep keys and values in a page cache. Legend: sparrow/ops/types.py.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse.rule import Rule


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

    The first dense[b] tokens of sequence b are dense (its prompt). Budgets are [layers, T], or
    [layers, T, G] by KV head; token t keeps so many tokens.
    """

    bounds: Tensor
    dense_B: Tensor
    budgets: Tensor
    page: int
    rule: Rule

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        scorer = self.rule.scorer(layer, self.page)
        if scorer is None:
            return ops.attend_causal(q_THD, k_TGD, v_TGD, self.bounds, scale=scale)
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
    """One new token per row; dense without budgets, else over the pages that the rule keeps.

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
        lengths_B = self.lengths_B if self.held_lengths_B is None else self.held_lengths_B
        where = (self.table_BM, lengths_B, budgets, self.rows_B)
        lists = select(self.cache, layer, q_BHD, *where)
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
