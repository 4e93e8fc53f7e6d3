"""Choice of pages on a GPU: the best-scored ones under a budget, as ascending lists.

A program chooses for one row and KV head. Scores become whole numbers of the same order; the
smallest chosen one is found bit by bit, counting how many numbers reach each guess, and the search
ends as soon as a guess divides the pages exactly. What is chosen then takes its place in the list
by one running sum. A row that keeps everything does none of this.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait
from sparrow.ops.types import PageLists

MOST_PAGES = 16384  # two counts of pages share an int32

_TOP_BIT = tl.constexpr(0x80000000)
_ALL_BITS = tl.constexpr(0xFFFFFFFF)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def fits(_dtype: torch.dtype, _head_size: int) -> bool:
    return True


def supports(_op: str, score_BGM: Tensor, *_: Any, width: int | None = None, **__: Any) -> bool:
    """fp32 scores, and few enough pages for one program."""
    return (
        score_BGM.dtype == torch.float32
        and score_BGM.stride(2) == 1
        and 0 < score_BGM.shape[2] <= MOST_PAGES
        and (width is None or 0 < width <= MOST_PAGES)
    )


def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets_B: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    width: int | None = None,
) -> PageLists:
    rows, kv_heads, pages = score_BGM.shape
    width = pages if width is None else width
    list_BGK = score_BGM.new_empty((rows, kv_heads, width), dtype=torch.int32)
    count_BG = score_BGM.new_empty((rows, kv_heads), dtype=torch.int32)
    block = triton.next_power_of_2(pages)
    if rows:
        _select[(rows, kv_heads)](
            list_BGK,
            count_BG,
            score_BGM,
            lengths_B.contiguous(),
            budgets_B.contiguous(),
            pages,
            width,
            score_BGM.stride(0),
            score_BGM.stride(1),
            PAGE=page,
            FIRST=first,
            LAST=last,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(width),
            OVERLAP=overlaps(score_BGM),
            launch_pdl=overlaps(score_BGM),
            num_warps=warps_of(block),
        )
    return PageLists(pages=list_BGK, counts=count_BG)


def warps_of(block: int) -> int:
    """One warp counts without waiting for others; more share the work of long rows."""
    return 1 if block <= 256 else max(4, min(16, block // 256))


@triton.jit(do_not_specialize=["columns", "width"])
def _select(
    list_BGK: tl.tensor,
    count_BG: tl.tensor,
    score_BGM: tl.tensor,
    lengths_B: tl.tensor,
    budgets_B: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    score_row: tl.tensor,
    score_head: tl.tensor,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The list of one row and KV head; what exceeds the width is left out of list and count."""
    wait(OVERLAP)
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_B + b).to(tl.int64)
    budget = tl.load(budgets_B + b).to(tl.int64)
    pages, reserved, count = _counts(length, budget, PAGE, FIRST, LAST)
    item = b * tl.num_programs(1) + g
    target = list_BGK + item * width
    tl.store(count_BG + item, tl.minimum(count, width))
    k = tl.arange(0, BLOCK_K)
    if count == pages:
        tl.store(target + k, tl.where(k < pages, k, -1), k < width)
    else:
        m = tl.arange(0, BLOCK)
        always = (m < pages) & ((m < FIRST) | (m >= pages - LAST))
        free = (m < pages) & (m < columns) & (always == 0)
        score = tl.load(score_BGM + b * score_row + g * score_head + m, free, other=0.0)
        key = tl.where(free, _order_key(score), 0)
        _store_chosen(target, m, always, key, count - reserved, width)
        tl.store(target + k, tl.full((BLOCK_K,), -1, tl.int32), (k >= count) & (k < width))


@triton.jit
def _counts(
    length: tl.tensor,
    budget: tl.tensor,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> tl.tensor:
    """Pages of a row, how many of them are reserved, and how many it keeps, as int32.

    A budget below the last page's tokens pays nothing, and the reserved pages decide.
    """
    pages = (length + PAGE - 1) // PAGE
    reserved = tl.minimum(pages, FIRST + LAST)
    tail = length - (pages - 1) * PAGE
    affordable = tl.maximum(budget - tail, 0) // PAGE + 1
    count = tl.minimum(tl.maximum(affordable, reserved), pages)
    return pages.to(tl.int32), reserved.to(tl.int32), count.to(tl.int32)


@triton.jit
def _order_key(score: tl.tensor) -> tl.tensor:
    """uint32 numbers above 0 in the order of the scores; NaN is the least, both zeros are one."""
    score = tl.where(score != score, -_LARGEST, score)
    score = tl.minimum(tl.maximum(score, -_LARGEST), _LARGEST)
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == _TOP_BIT, 0, bits)
    return tl.where(bits >= _TOP_BIT, bits ^ _ALL_BITS, bits | _TOP_BIT)


@triton.jit
def _threshold(key: tl.tensor, need: tl.tensor) -> tl.tensor:
    """The largest number that `need` keys reach, or an earlier one that exactly so many do."""
    threshold = tl.full((), 0, tl.uint32)
    step = tl.full((), _TOP_BIT, tl.uint32)
    reached = tl.full((), -1, tl.int32)
    while (step != 0) & (reached != need):
        guess = threshold | step
        above = tl.sum((key >= guess).to(tl.int32), 0)
        threshold = tl.where(above >= need, guess, threshold)
        reached = tl.where(above >= need, above, reached)
        step = step >> 1
    return threshold


@triton.jit
def _store_chosen(
    target: tl.tensor,
    m: tl.tensor,
    always: tl.tensor,
    key: tl.tensor,
    need: tl.tensor,
    width: tl.tensor,
) -> None:
    """Store the reserved pages and the `need` best others, ascending; ties go to the earlier.

    One running sum counts two things: what is surely chosen, and (above bit 16) who ties at the
    threshold, of whom only the first few have a place.
    """
    threshold = _threshold(key, need)
    sure = always | (key > threshold)
    tied = (key == threshold) & (key > 0)
    places = need - tl.sum((key > threshold).to(tl.int32), 0)
    running = tl.cumsum(sure.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    tied_before = running >> 16
    position = (running & 0xFFFF) + tl.minimum(tied_before, places) - 1
    chosen = sure | (tied & (tied_before <= places))
    tl.store(target + position, m, chosen & (position < width))
