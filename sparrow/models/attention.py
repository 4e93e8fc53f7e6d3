"""The attentions that a decoder can be run with, each a few calls of `ops`.

`Packed` and `PackedSparse` see whole sequences and carry gradients; `PagedPrefill` and
`PagedDecode` keep keys and values in a page cache. Legend: sparrow/ops/types.py.
"""

from dataclasses import dataclass

from torch import Tensor

from sparrow import ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Dense causal attention over packed sequences: training, scoring."""

    bounds: Tensor

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        return ops.attend_causal(q_THD, k_TGD, v_TGD, self.bounds, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Which pages are always kept, and which layers stay dense. Budgets are data, given apart."""

    first: int = 1
    last: int = 2
    dense_layers: frozenset[int] = frozenset((0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSparse:
    """What sparse decoding would have seen, for whole sequences at once: calibration, distilling.

    The first dense[b] tokens of sequence b are dense (its prompt); token t keeps budgets[t] tokens.
    """

    bounds: Tensor
    dense_B: Tensor
    budgets_T: Tensor
    page: int
    sparsity: Sparsity = Sparsity()

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        if layer in self.sparsity.dense_layers:
            return ops.attend_causal(q_THD, k_TGD, v_TGD, self.bounds, scale=scale)
        return ops.attend_sparse(
            q_THD,
            k_TGD,
            v_TGD,
            self.bounds,
            self.dense_B,
            self.budgets_T,
            page=self.page,
            first=self.sparsity.first,
            last=self.sparsity.last,
            scale=scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPrefill:
    """Dense attention of prompts, or chunks of them, that writes the cache."""

    cache: ops.PageCache
    table_BM: Tensor
    lengths_B: Tensor
    bounds: Tensor
    slots_T: Tensor

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        k_NGPD, v_NGPD = store(self.cache, layer, k_TGD, v_TGD, self.slots_T)
        return ops.attend_causal_paged(
            q_THD, k_NGPD, v_NGPD, self.table_BM, self.lengths_B, self.bounds, scale=scale
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedDecode:
    """One new token per row; dense without budgets, else over the pages that the rule keeps."""

    cache: ops.PageCache
    table_BM: Tensor
    lengths_B: Tensor
    slots_B: Tensor
    budgets_B: Tensor | None = None
    sparsity: Sparsity = Sparsity()

    def __call__(
        self, layer: int, q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor, *, scale: float
    ) -> Tensor:
        k_NGPD, v_NGPD = store(self.cache, layer, k_BGD, v_BGD, self.slots_B)
        lists = self._choose(layer, q_BHD)
        return ops.attend_decode(
            q_BHD, k_NGPD, v_NGPD, self.table_BM, self.lengths_B, lists, scale=scale
        )

    def _choose(self, layer: int, q_BHD: Tensor) -> ops.PageLists | None:
        if self.budgets_B is None or layer in self.sparsity.dense_layers:
            return None
        page, landmark_NGD = self.cache.page, self.cache.field("landmark", layer)
        score_BGM = ops.score_pages(q_BHD, landmark_NGD, self.table_BM, self.lengths_B, page=page)
        return ops.select_pages(
            score_BGM,
            self.lengths_B,
            self.budgets_B,
            page=page,
            first=self.sparsity.first,
            last=self.sparsity.last,
        )


def store(
    cache: ops.PageCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the tokens into their pages and summarise the pages they finish."""
    k_NGPD, v_NGPD = cache.field("k", layer), cache.field("v", layer)
    ops.write_pages(k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T)
    ops.summarise_pages(k_NGPD, cache.field("landmark", layer), slots_T)
    return k_NGPD, v_NGPD
