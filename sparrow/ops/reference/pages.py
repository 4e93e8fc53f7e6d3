"""Ops of pages: write and select.

Legend of the dimension letters: sparrow/ops/types.py. Integer tensors may be int32 or int64. A page
is P tokens; a *slot* is page * P + offset; a negative slot or a length of 0 is padding and has no
effect.
"""

import torch
from torch import Tensor, nn

from sparrow.ops.dispatch import op
from sparrow.ops.types import PageLists

DENSE = 2**31 - 1  # the budget of a row that keeps everything
WORD = 32  # pages whose bits share a number


@op()
def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    Slots that are not negative must differ from each other.
    """
    page = k_NGPD.shape[2]
    if len(slots_T) and int(slots_T.max()) >= len(k_NGPD) * page:
        raise ValueError(f"slot {int(slots_T.max())} is outside the pool of {len(k_NGPD)} pages")
    real_T = slots_T >= 0
    block_T, offset_T = slots_T[real_T] // page, slots_T[real_T] % page
    k_NGPD[block_T, :, offset_T] = k_TGD[real_T].to(k_NGPD.dtype)
    v_NGPD[block_T, :, offset_T] = v_TGD[real_T].to(v_NGPD.dtype)


def keep_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int,
    last: int,
    mass: float | None = None,
) -> Tensor:
    """Pages that each row and KV head keeps, bool [B, G, M], by the rule of `select_pages`."""
    index_M = torch.arange(score_BGM.shape[2], device=score_BGM.device)
    pages_B1, reserved_B1, count_BG = page_counts(
        lengths_B, budgets, page=page, reserved=first + last
    )
    if len(pages_B1) and int(pages_B1.max()) > len(index_M):
        raise ValueError(f"expected scores of {int(pages_B1.max())} pages, got {len(index_M)}")
    exists_BM = index_M < pages_B1
    reserved_BM = exists_BM & ((index_M < first) | (index_M >= pages_B1 - last))

    if mass is not None:
        score_BGM = page_masses(score_BGM, finished_BM=index_M < lengths_B[:, None] // page)
    order_BGM = rank_pages(score_BGM, reserved_BM, exists_BM)
    if mass is not None and len(index_M):
        enough_BG = pages_for(score_BGM.gather(2, order_BGM), mass)
        enough_BG = torch.minimum(count_BG, torch.maximum(enough_BG, reserved_B1))
        dense_BG = (budgets if budgets.ndim == 2 else budgets[:, None]) == DENSE
        count_BG = torch.where(dense_BG, count_BG, enough_BG)
    chosen_BGM = (index_M < count_BG[:, :, None]).expand_as(order_BGM)
    return torch.zeros_like(chosen_BGM).scatter(2, order_BGM, chosen_BGM)


def page_counts(
    lengths_B: Tensor, budgets: Tensor, *, page: int, reserved: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of each row [B, 1], of these the reserved ones [B, 1], and those kept, [B, G].

    The unfinished page is one of them. Under budgets by row, [B], the last result is [B, 1].
    """
    budgets_BG = budgets if budgets.ndim == 2 else budgets[:, None]
    pages_B1 = (lengths_B[:, None] + page - 1) // page
    tail_B1 = lengths_B[:, None] - (pages_B1 - 1) * page
    reserved_B1 = pages_B1.clamp(max=reserved)
    affordable_BG = (budgets_BG - tail_B1).div(page, rounding_mode="floor") + 1
    return pages_B1, reserved_B1, torch.minimum(torch.maximum(affordable_BG, reserved_B1), pages_B1)


def rank_pages(score_BGM: Tensor, reserved_BM: Tensor, exists_BM: Tensor) -> Tensor:
    """Pages by rank, [B, G, M]: reserved ones first and missing ones last, whatever the scores.

    Ties go to the earlier page.
    """
    most = torch.finfo(score_BGM.dtype).max
    rank_key_BGM = score_BGM.nan_to_num(nan=-most, posinf=most, neginf=-most)
    rank_key_BGM = rank_key_BGM.masked_fill(reserved_BM[:, None], float("inf"))
    rank_key_BGM = rank_key_BGM.masked_fill(~exists_BM[:, None], float("-inf"))
    return rank_key_BGM.argsort(dim=2, descending=True, stable=True)


def page_masses(score_BGM: Tensor, finished_BM: Tensor) -> Tensor:
    """Scores as masses: none where a score is negative or NaN, or its page is not finished."""
    return score_BGM.nan_to_num(nan=0.0).clamp(min=0).masked_fill(~finished_BM[:, None], 0)


def pages_for(ranked_BGM: Tensor, mass: float) -> Tensor:
    """The number of pages, in order of rank, that hold the share `mass` of the total, [B, G]."""
    held_BGM = ranked_BGM.cumsum(2, dtype=accumulator(ranked_BGM.dtype))
    return (held_BGM < mass * held_BGM[:, :, -1:]).sum(2) + 1


@op()
def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    mass: float | None = None,
) -> PageLists:
    """Select the pages that each row and KV head keeps under a budget of tokens.

    budgets are per row, [B], or per row and KV head, [B, G].

    **The budget counts every kept token**: reserved pages and the unfinished page included. The
    `first` pages and the `last` pages (the unfinished one is the very last) are always kept, even
    under a smaller budget; of the others the best-scored ones, as many whole pages as the budget
    still pays. Kept tokens therefore never exceed max(budget, reserved tokens), and a budget of
    at least the length keeps everything. Equal scores go to the earlier page; NaN scores last.
    Lists are ascending and padded with -1.

    With `mass`, a share above 0 and up to 1, scores are masses (a negative or NaN score is none,
    and an unfinished page has none), and the choice may end earlier: after the reserved pages, the
    best others are added until what is kept, reserved pages included, holds at least that share of
    the mass of all finished pages, or the budget is spent. A budget of 2**31 - 1 (DENSE) is that of
    a dense row in a batch of sparse ones: it keeps everything, whatever the mass. Sums are in fp32,
    so versions may differ by a page where the share is met within rounding.
    """
    keep_BGM = keep_pages(
        score_BGM, lengths_B, budgets, page=page, first=first, last=last, mass=mass
    )
    pages = keep_BGM.shape[2]
    index_M = torch.arange(pages, device=keep_BGM.device)
    list_BGM = torch.where(keep_BGM, index_M, pages).sort(dim=2).values
    list_BGM = list_BGM.masked_fill(list_BGM == pages, -1)
    return PageLists(pages=list_BGM.int(), counts=keep_BGM.sum(2).int())


@op()
def page_bits(pages_BGK: Tensor, counts_BG: Tensor, *, pages: int) -> Tensor:
    """Page lists as bits, int32 [G, W, B]: page m of a row is bit m % 32 of its word m // 32.

    pages: of the longest row, which W words hold.
    """
    void_BGK = torch.arange(pages_BGK.shape[2], device=pages_BGK.device) >= counts_BG[:, :, None]
    where_BGK = pages_BGK.long().masked_fill(void_BGK, pages)
    keep_BGM = void_BGK.new_zeros(*counts_BG.shape, pages + 1).scatter_(2, where_BGK, True)
    return pack_bits(keep_BGM[:, :, :pages])


def pack_bits(keep_BGM: Tensor) -> Tensor:
    """A mask of pages as `page_bits`."""
    spare = -keep_BGM.shape[2] % WORD
    keep_BGWI = nn.functional.pad(keep_BGM, (0, spare)).unflatten(2, (-1, WORD))
    shifts_I = torch.arange(WORD, device=keep_BGM.device)
    bits_BGW = (keep_BGWI.long() << shifts_I).sum(3)
    return torch.where(bits_BGW < 2**31, bits_BGW, bits_BGW - 2**32).int().permute(1, 2, 0)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)
