"""Choice of pages on a GPU: the best-scored ones under a budget, as ascending lists.

A program chooses for one row and KV head. Scores become whole numbers of the same order; the
smallest chosen one is found bit by bit, counting how many numbers reach each guess (or how much
mass they hold), and the search ends as soon as a guess divides the pages. What is chosen then takes
its place in the list by a running sum. A row that keeps everything does none of this, and a short
row in a wide table does the work of its own pages only: the kernel holds the same code for several
sizes. Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait
from sparrow.ops.kernels.ranking import (
    BEYOND,
    NONE,
    held_mass,
    mass_threshold,
    page_keys,
    reserved_mass,
    threshold_of,
    ties_for,
)
from sparrow.ops.types import PageLists

MOST_PAGES = 32768  # what the registers of one program hold

_SMALLEST = tl.constexpr(512)  # pages: sizes of rows start here and grow fourfold
_CHUNK = tl.constexpr(2048)  # pages that are listed at once
_DENSE = tl.constexpr(2**31 - 1)  # the budget of a row that keeps everything


def fits(_dtype: torch.dtype, _head_size: int) -> bool:
    return True


def supports(_op: str, score_BGM: Tensor, *_: Any, **__: Any) -> bool:
    """fp32 scores, and few enough pages for one program."""
    return (
        score_BGM.dtype == torch.float32
        and score_BGM.stride(2) == 1
        and 0 < score_BGM.shape[2] <= MOST_PAGES
    )


def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    width: int | None = None,
    mass: float | None = None,
) -> PageLists:
    rows, kv_heads, pages = score_BGM.shape
    width = pages if width is None else width
    list_BGK = score_BGM.new_empty((rows, kv_heads, width), dtype=torch.int32)
    count_BG = score_BGM.new_empty((rows, kv_heads), dtype=torch.int32)
    budgets_BG = budgets if budgets.ndim == 2 else budgets[:, None].expand(rows, kv_heads)
    block = triton.next_power_of_2(pages)
    if rows:
        _select[(rows, kv_heads)](
            list_BGK,
            count_BG,
            score_BGM,
            lengths_B.contiguous(),
            budgets_BG,
            pages,
            width,
            score_BGM.stride(0),
            score_BGM.stride(1),
            budgets_BG.stride(0),
            budgets_BG.stride(1),
            PAGE=page,
            FIRST=first,
            LAST=last,
            MASS=mass,
            BLOCK=block,
            OVERLAP=overlaps(score_BGM),
            launch_pdl=overlaps(score_BGM),
            num_warps=warps_of(block),
        )
    return PageLists(pages=list_BGK, counts=count_BG)


def warps_of(block: int) -> int:
    """One warp counts without waiting for others; more share the work of long rows."""
    return 1 if block <= 256 else max(4, min(16, block // 256))


@triton.jit(do_not_specialize=["columns", "width", "score_row", "budget_row"])
def _select(
    list_BGK: tl.tensor,
    count_BG: tl.tensor,
    score_BGM: tl.tensor,
    lengths_B: tl.tensor,
    budgets_BG: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    score_row: tl.tensor,
    score_head: tl.tensor,
    budget_row: tl.tensor,
    budget_head: tl.tensor,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The list of one row and KV head; a length beyond the scores counts as all of them."""
    wait(OVERLAP)
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_B + b).to(tl.int64)
    length = tl.minimum(length, columns.to(tl.int64) * PAGE)
    budget = tl.load(budgets_BG + b * budget_row + g * budget_head)
    item = b * tl.num_programs(1) + g
    score_M = score_BGM + b * score_row + g * score_head
    list_K = list_BGK + item * width
    select_row(
        list_K, count_BG + item, score_M, length, budget, width, PAGE, FIRST, LAST, MASS, BLOCK
    )


@triton.jit
def select_row(
    list_K: tl.tensor,
    count: tl.tensor,
    score_M: tl.tensor,
    length: tl.tensor,
    budget: tl.tensor,
    width: tl.tensor,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`ops.select_pages` for one row and KV head, by all threads of a program.

    list_K, count: pointers to int32, what is written: `width` pages and one number. What exceeds
    the width is left out of both.
    score_M: a pointer to the row's fp32 scores, side by side. Those of reserved pages are read only
    with MASS, those of unfinished pages and of pages beyond the length never. A program that has
    written them itself must see to it that all its threads can see them (`tl.debug_barrier`).
    length, budget: whole numbers; the pages of the length must not exceed BLOCK.
    MASS: the share of the mass, or None. BLOCK: a power of two, at most MOST_PAGES; a program of
    `warps_of(BLOCK)` warps holds it in registers.
    """
    pages, reserved, most = row_counts(length, budget, PAGE, FIRST, LAST)
    sure = sure_pages(reserved, most, budget, MASS)
    kept = pages
    if sure == pages:  # all of them
        for start in range(0, tl.minimum(pages, width), _SMALLEST):
            k = start + tl.arange(0, _SMALLEST)
            tl.store(list_K + k, k, k < tl.minimum(pages, width))
    else:
        finished = (length // PAGE).to(tl.int32)
        need = most - reserved
        kept = reserved + _choose(
            list_K, score_M, pages, finished, need, width, FIRST, LAST, MASS, _SMALLEST, BLOCK
        )
    kept = tl.minimum(kept, width).to(tl.int32)
    tl.store(count, kept)
    for start in range(kept, width, _SMALLEST):
        k = start + tl.arange(0, _SMALLEST)
        tl.store(list_K + k, tl.full((_SMALLEST,), -1, tl.int32), k < width)


@triton.jit
def sure_pages(
    reserved: tl.tensor, most: tl.tensor, budget: tl.tensor, MASS: tl.constexpr
) -> tl.tensor:
    """How many pages are kept whatever the scores are; all of a dense row, by mass too."""
    sure = most
    if MASS is not None:
        sure = tl.where(budget == _DENSE, most, reserved)
    return sure


@triton.jit
def row_counts(
    length: tl.tensor,
    budget: tl.tensor,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> tl.tuple:
    """Pages of a row, how many of them are reserved, and how many its budget pays, as int32.

    A budget below the last page's tokens pays nothing, and the reserved pages decide.
    """
    length, budget = length.to(tl.int64), budget.to(tl.int64)
    pages = (length + PAGE - 1) // PAGE
    reserved = tl.minimum(pages, FIRST + LAST)
    tail = length - (pages - 1) * PAGE
    affordable = tl.maximum(budget - tail, 0) // PAGE + 1
    most = tl.minimum(tl.maximum(affordable, reserved), pages)
    return pages.to(tl.int32), reserved.to(tl.int32), most.to(tl.int32)


@triton.jit
def _choose(
    list_K: tl.tensor,
    score_M: tl.tensor,
    pages: tl.tensor,
    finished: tl.tensor,
    need: tl.tensor,
    width: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """List a row by the code for the least size that holds it; how many free pages it keeps."""
    if SIZE >= BLOCK:
        kept = _choose_of(list_K, score_M, pages, finished, need, width, FIRST, LAST, MASS, BLOCK)
    else:
        if pages <= SIZE:
            kept = _choose_of(
                list_K, score_M, pages, finished, need, width, FIRST, LAST, MASS, SIZE
            )
        else:
            kept = _choose(
                list_K, score_M, pages, finished, need, width, FIRST, LAST, MASS, 4 * SIZE, BLOCK
            )
    return kept


@triton.jit
def _choose_of(
    list_K: tl.tensor,
    score_M: tl.tensor,
    pages: tl.tensor,
    finished: tl.tensor,
    need: tl.tensor,
    width: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """List the reserved pages of a row and its best others, ascending; ties go to the earlier.

    `need` others, or with MASS as many as the share of the mass takes, if these are fewer.
    """
    m = tl.arange(0, SIZE)
    key = page_keys(score_M, m, pages, FIRST, LAST, MASS)
    if MASS is None:
        threshold = threshold_of(key, need)
        above = tl.sum((key > threshold).to(tl.int32), 0)
        places, kept = need - above, need
    else:
        reserved = reserved_mass(score_M, pages, finished, FIRST, LAST)
        goal = MASS * (reserved + held_mass(key, 0))
        threshold = mass_threshold(key, need, reserved, goal, pages - FIRST - LAST)
        above = tl.sum((key > threshold).to(tl.int32), 0)
        held = reserved + tl.where(threshold == BEYOND, 0.0, held_mass(key, threshold + 1))
        tied = tl.sum(((key == threshold) & (key > NONE)).to(tl.int32), 0)
        places = tl.minimum(need - above, ties_for(held, goal, threshold, tied))
        kept = above + places
    if SIZE <= _CHUNK:
        _list(list_K, m, key, pages, threshold, places, 0, 0, width)
    else:
        certain, equal = 0, 0
        for start in range(0, pages, _CHUNK):
            c = start + tl.arange(0, _CHUNK)
            again = page_keys(score_M, c, pages, FIRST, LAST, MASS)
            certain, equal = _list(
                list_K, c, again, pages, threshold, places, certain, equal, width
            )
    return kept


@triton.jit
def _list(
    list_K: tl.tensor,
    m: tl.tensor,
    key: tl.tensor,
    pages: tl.tensor,
    threshold: tl.tensor,
    places: tl.tensor,
    certain: tl.tensor,
    equal: tl.tensor,
    width: tl.tensor,
) -> tl.tuple:
    """Store the chosen ones of some pages behind those chosen before; returns the new counts.

    One running sum counts two things: what is certainly chosen, and (above bit 16) who ties at the
    threshold, of whom only the first few have a place.
    """
    reserved = (m < pages) & (key == NONE)
    sure = reserved | (key > threshold)
    tied = (key == threshold) & (key > NONE)
    running = tl.cumsum(sure.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    all_ties = equal + (running >> 16)
    position = certain + (running & 0xFFFF) + tl.minimum(all_ties, places) - 1
    chosen = sure | (tied & (all_ties <= places))
    tl.store(list_K + position, m, chosen & (position < width))
    certain += tl.sum(sure.to(tl.int32), 0)
    equal += tl.sum(tied.to(tl.int32), 0)
    return certain, equal
