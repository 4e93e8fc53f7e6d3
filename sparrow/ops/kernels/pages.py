"""Ops of pages on a GPU: write tokens into slots, select the best-scored pages under a budget.

`write_pages`: a program moves the heads of one token. `select_pages`: a program chooses for one row
and KV head. Scores become whole numbers of the same order; the smallest chosen one is found bit by
bit, counting how many numbers reach each guess (or how much mass they hold), and the search ends as
soon as a guess separates the pages. A prefix sum then places the selected pages in the list. A row
that keeps everything skips all this, and a short row in a wide table works on its own pages only:
the kernel has the same code for several sizes.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlap_options, wait
from sparrow.ops.reference.pages import WORD
from sparrow.ops.types import PageLists

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_PAGES = 32768  # what the registers of one program hold

SMALLEST = tl.constexpr(512)  # pages: sizes of rows start here and grow fourfold
_CHUNK = tl.constexpr(2048)  # pages that are listed at once
_DENSE = tl.constexpr(2**31 - 1)  # the budget of a row that keeps everything
NONE, BEYOND = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # below and above all keys
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def supports_dtype(op: str, dtype: torch.dtype, _head_size: int) -> bool:
    """Floats up to fp32, where the op writes them."""
    return op in ("select_pages", "page_bits") or dtype in DTYPES


def supports(op: str, *tensors: Tensor, **_: Any) -> bool:
    """Scores: fp32, and few enough pages for one program. Tokens: pools without gaps, and heads
    that lie in one piece each.
    """
    if op == "page_bits":
        return all(lists.is_contiguous() for lists in tensors)
    if op == "select_pages":
        score_BGM = tensors[0]
        aligned = score_BGM.dtype == torch.float32 and score_BGM.stride(2) == 1
        return aligned and 0 < score_BGM.shape[2] <= MOST_PAGES
    k_NGPD, v_NGPD, k_TGD, v_TGD, _slots_T = tensors
    return (
        all(x.dtype in DTYPES for x in (k_NGPD, v_NGPD, k_TGD, v_TGD))
        and all(x.is_contiguous() for x in (k_NGPD, v_NGPD))
        and all(x.stride(2) == 1 for x in (k_TGD, v_TGD))
    )


def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    _, kv_heads, page, size = k_NGPD.shape
    heads, wide = triton.next_power_of_2(kv_heads), triton.next_power_of_2(size)
    if not len(slots_T):
        return
    _store[(len(slots_T),)](
        *(k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T.contiguous()),
        *(*k_TGD.stride()[:2], *v_TGD.stride()[:2]),
        KV_HEADS=kv_heads,
        PAGE=page,
        SIZE=size,
        HEADS=heads,
        WIDE=wide,
        **overlap_options(k_NGPD),
        num_warps=max(1, min(8, heads * wide // 256)),
    )


@triton.jit
def _store(
    k_NGPD,
    v_NGPD,
    k_TGD,
    v_TGD,
    slots_T,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The heads of one token into its slot; a negative slot is padding."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    if slot >= 0:
        g = tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, WIDE)[None, :]
        real = (g < KV_HEADS) & (d < SIZE)
        head = slot // PAGE * KV_HEADS + g
        place = (head * PAGE + slot % PAGE) * SIZE + d
        key = tl.load(k_TGD + token * k_token + g * k_head + d, real)
        value = tl.load(v_TGD + token * v_token + g * v_head + d, real)
        tl.store(k_NGPD + place, key.to(k_NGPD.dtype.element_ty), real)
        tl.store(v_NGPD + place, value.to(v_NGPD.dtype.element_ty), real)


# Choice.


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
    rows, kv_heads, pages = score_BGM.shape
    list_BGK = score_BGM.new_empty(score_BGM.shape, dtype=torch.int32)
    count_BG = score_BGM.new_empty((rows, kv_heads), dtype=torch.int32)
    budgets_BG = budgets if budgets.ndim == 2 else budgets[:, None].expand(rows, kv_heads)
    block = triton.next_power_of_2(pages)
    if rows:
        _select[(rows, kv_heads)](
            *(list_BGK, count_BG, score_BGM, lengths_B.contiguous(), budgets_BG, pages),
            *(*score_BGM.stride()[:2], *budgets_BG.stride()),
            PAGE=page,
            FIRST=first,
            LAST=last,
            MASS=mass,
            BLOCK=block,
            **overlap_options(score_BGM),
            num_warps=warps_of(block),
        )
    return PageLists(pages=list_BGK, counts=count_BG)


def warps_of(block: int) -> int:
    """One warp counts without waiting for others; more share the work of long rows."""
    return 1 if block <= 256 else max(4, min(16, block // 256))


@triton.jit(do_not_specialize=["width", "score_row", "budget_row"])
def _select(
    list_BGK,
    count_BG,
    score_BGM,
    lengths_B,
    budgets_BG,
    width,
    score_row,
    score_head,
    budget_row,
    budget_head,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The list of one row and KV head; a length beyond the scores counts as all of them."""
    wait(OVERLAP)
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_B + b).to(tl.int64)
    length = tl.minimum(length, width.to(tl.int64) * PAGE)
    budget = tl.load(budgets_BG + b * budget_row + g * budget_head)
    item = b * tl.num_programs(1) + g
    score_M = score_BGM + b * score_row + g * score_head
    list_K = list_BGK + item * width
    select_row(
        list_K, count_BG + item, score_M, length, budget, width, PAGE, FIRST, LAST, MASS, BLOCK
    )


@triton.jit
def select_row(
    list_K,
    count,
    score_M,
    length,
    budget,
    width,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        for start in range(0, tl.minimum(pages, width), SMALLEST):
            k = start + tl.arange(0, SMALLEST)
            tl.store(list_K + k, k, k < tl.minimum(pages, width))
    else:
        finished = (length // PAGE).to(tl.int32)
        need = most - reserved
        row = (list_K, score_M, pages, finished, need, width)
        kept = reserved + _choose(row, FIRST, LAST, MASS, SMALLEST, BLOCK)
    kept = tl.minimum(kept, width).to(tl.int32)
    tl.store(count, kept)
    for start in range(kept, width, SMALLEST):
        k = start + tl.arange(0, SMALLEST)
        tl.store(list_K + k, tl.full((SMALLEST,), -1, tl.int32), k < width)


@triton.jit
def sure_pages(reserved, most, budget, MASS: tl.constexpr):
    """The number of pages kept whatever the scores; all pages of a dense row, by mass too."""
    sure = most
    if MASS is not None:
        sure = tl.where(budget == _DENSE, most, reserved)
    return sure


@triton.jit
def row_counts(length, budget, PAGE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Pages of a row, its reserved pages, and the pages that its budget allows, as int32.

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
    row,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List a row by the code for the least size that holds it; how many free pages it keeps.

    row: where its list and its scores lie, its pages, how many of them are finished, how many free
    ones it may keep, and the width of its list.
    """
    if SIZE >= BLOCK:
        kept = _choose_of(row, FIRST, LAST, MASS, BLOCK)
    else:
        if row[2] <= SIZE:
            kept = _choose_of(row, FIRST, LAST, MASS, SIZE)
        else:
            kept = _choose(row, FIRST, LAST, MASS, 4 * SIZE, BLOCK)
    return kept


@triton.jit
def _choose_of(
    row, FIRST: tl.constexpr, LAST: tl.constexpr, MASS: tl.constexpr, SIZE: tl.constexpr
):
    """List the reserved pages of a row and its best others, ascending; ties go to the earlier.

    `need` others, or with MASS as many as the share of the mass takes, if these are fewer.
    """
    list_K, score_M, pages, finished, need, width = row
    m = tl.arange(0, SIZE)
    key = page_keys(score_M, m, pages, FIRST, LAST, MASS)
    if MASS is None:
        threshold = threshold_of(key, need)
        above = tl.sum((key > threshold).to(tl.int32), 0)
        places, kept = need - above, need
    else:
        reserved = reserved_pages_mass(score_M, pages, finished, FIRST, LAST)
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
def _list(list_K, m, key, pages, threshold, places, certain, equal, width):
    """Append the selected ones of some pages to the list; returns the new counts.

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


@triton.jit
def best_free(
    score_M,
    pages,
    count,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the `count` best free pages of a row end, by the code for the least size that holds it.

    The least key among them, and the last of the pages of this key that are among them (-1: none):
    pages of a greater key are too. The row is stored where all threads see it.
    """
    if SIZE >= BLOCK:
        least, until = _best_free_of(score_M, pages, count, FIRST, LAST, BLOCK)
    else:
        if pages <= SIZE:
            least, until = _best_free_of(score_M, pages, count, FIRST, LAST, SIZE)
        else:
            least, until = best_free(score_M, pages, count, FIRST, LAST, 4 * SIZE, BLOCK)
    return least, until


@triton.jit
def _best_free_of(
    score_M, pages, count, FIRST: tl.constexpr, LAST: tl.constexpr, SIZE: tl.constexpr
):
    m = tl.arange(0, SIZE)
    key = page_keys(score_M, m, pages, FIRST, LAST, None)
    least = threshold_of(key, count)
    above = tl.sum((key > least).to(tl.int32), 0)
    tied = (key == least) & (key > NONE)
    running = tl.cumsum(tied.to(tl.int32), 0)
    until = tl.max(tl.where(tied & (running <= count - above), m, -1), 0)
    return least, until


def page_bits(pages_BGK: Tensor, counts_BG: Tensor, *, pages: int) -> Tensor:
    rows, kv_heads, width = pages_BGK.shape
    words = triton.cdiv(pages, WORD)
    bits_GWB = torch.empty((kv_heads, words, rows), dtype=torch.int32, device=pages_BGK.device)
    if rows:
        block = triton.next_power_of_2(words)
        _pack[(rows, kv_heads)](
            *(bits_GWB, pages_BGK, counts_BG, width, words, rows),
            PAGES=WORD,
            WORDS=block,
            LISTED=max(16, min(64, 2048 // block)),
            num_warps=1,
        )
    return bits_GWB


@triton.jit(do_not_specialize=["width", "words", "rows"])
def _pack(
    bits_GWB,
    pages_BGK,
    counts_BG,
    width,
    words,
    rows,
    PAGES: tl.constexpr,
    WORDS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The bits of one row and KV head; no page is listed twice, so sums are unions."""
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    item = b * tl.num_programs(1) + g
    count = tl.load(counts_BG + item)
    w = tl.arange(0, WORDS)
    bits = tl.zeros([WORDS], tl.int32)
    for start in range(0, count, LISTED):
        k = start + tl.arange(0, LISTED)
        page = tl.load(pages_BGK + item * width + k, k < count, other=-1)
        bit = tl.where(page >= 0, 1 << (page % PAGES), 0)
        bits += tl.sum(tl.where((page // PAGES)[:, None] == w[None, :], bit[:, None], 0), 0)
    tl.store(bits_GWB + (g.to(tl.int64) * words + w) * rows + b, bits, w < words)


# Scores in order: whole numbers of the same order, and the least of those that are chosen.


@triton.jit
def page_keys(score_M, m, pages, FIRST: tl.constexpr, LAST: tl.constexpr, MASS: tl.constexpr):
    """The order keys of some pages; NONE for those that are reserved or do not exist."""
    free = (m >= FIRST) & (m < pages - LAST)
    score = tl.load(score_M + m, free, other=0.0)
    if MASS is not None:
        score = clean_mass(score)
    return tl.where(free, order_key(score), NONE)


@triton.jit
def order_key(score):
    """int32 numbers in the order of the scores; NaN is the least, both zeros are one.

    For masses they are the bits themselves, so that no second copy of either need be held.
    """
    score = tl.where(score != score, -LARGEST, score)
    score = tl.minimum(tl.maximum(score, -LARGEST), LARGEST)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, tl.where(bits == NONE, 0, bits ^ BEYOND))


@triton.jit
def threshold_of(key, need):
    """The largest number that `need` keys reach, or an earlier one that exactly so many do."""
    threshold = tl.where(need > 0, NONE, BEYOND)
    step = tl.full((), 0x80000000, tl.uint32)
    reached = tl.where(need > 0, -1, 0)
    while (step != 0) & (reached != need):
        guess = threshold ^ step.to(tl.int32, bitcast=True)
        above = tl.sum((key >= guess).to(tl.int32), 0)
        threshold = tl.where(above >= need, guess, threshold)
        reached = tl.where(above >= need, above, reached)
        step = step >> 1
    return threshold


@triton.jit
def clean_mass(score):
    """Scores as masses: negative and NaN scores are 0."""
    return tl.where(score > 0, tl.minimum(score, LARGEST), 0.0)


@triton.jit
def held_mass(key, least):
    """The mass of the pages whose key is at least so large."""
    return tl.sum(tl.where(key >= least, key.to(tl.float32, bitcast=True), 0.0), 0)


@triton.jit
def reserved_pages_mass(score_M, pages, finished, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Sum the attention mass of the pages that are always kept: the first and the last ones."""
    r = tl.arange(0, triton.next_power_of_2(FIRST + LAST))
    m = tl.where(r < FIRST, r, r + (pages - LAST - FIRST))
    return tl.sum(clean_mass(tl.load(score_M + m, m < finished, other=0.0)), 0)


@triton.jit
def mass_threshold(key, need, reserved, goal, free):
    """The largest number such that the keys that reach it are `need`, or hold what is missing.

    Or an earlier one that the same keys reach: the search ends when only one page can be the last.
    `low` keys reach the threshold and are enough, `high` reach a number above it and are not.
    """
    some = (need > 0) & (reserved < goal)
    threshold, step = tl.where(some, 0, BEYOND), tl.full((), 1 << 30, tl.int32)
    low, high = tl.where(some, free, 0), tl.full((), 0, tl.int32)
    while (step != 0) & (low - high > 1):
        guess = threshold | step
        above = tl.sum((key >= guess).to(tl.int32), 0)
        enough = (above >= need) | (reserved + held_mass(key, guess) >= goal)
        threshold = tl.where(enough, guess, threshold)
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, above)
        step = step >> 1
    return threshold


@triton.jit
def ties_for(held, goal, threshold, tied):
    """How many of the pages that tie at the threshold bring the mass that is missing.

    The quotient may be off by one; its check is not. Without ties the threshold is nobody's mass.
    """
    piece = tl.where(tied > 0, threshold.to(tl.float32, bitcast=True), 1.0)
    few = tl.ceil(tl.minimum((goal - held) / tl.maximum(piece, 1e-37), 65536.0)).to(tl.int32)
    few = tl.where(held + (few - 1) * piece >= goal, few - 1, few)
    few = tl.where(held + few * piece < goal, few + 1, few)
    return tl.minimum(tl.maximum(few, 0), tied)
