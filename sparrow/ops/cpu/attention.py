"""Decode attention on a CPU: every kept page is read once, nothing is copied.

The work of a row is cut into blocks of about BLOCK_TOKENS tokens of its own lists. Each block
gives a partial softmax, and partials are joined in order, so the bits of a row depend on its own
lists alone: not on its neighbours, not on the number of threads.

Decoding is bound by memory, so the kernel follows its layout: pages are visited in the order of the
pool, each is read once for all query heads of its group, and the next page is prefetched (worth a
quarter of the speed for dense lists, half for sparse ones). A block of pages takes three steps:
scores of all its tokens, softmax, weighted values.

Legend: S = items of work (row, block), V = visits of an item (page, KV head), W = width of a row of
scores; the others are in sparrow/ops/types.py. Single letters in the inner functions are flat
positions: i of a query or value row, s and w of a row of scores or weights, d in a head.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.ops.cpu.simd import (
    LANES,
    Array,
    floats,
    fma,
    inline,
    integers,
    kernel,
    load,
    ordered,
    prefetch,
    share,
    splat,
    store,
    store_sums,
    zeros,
)
from sparrow.ops.types import PageLists

FAULTS = {
    1: "a length is negative or does not fit its table",
    2: "a page list exceeds its width or its sequence",
    3: "a table names pages outside the pool",
}
BLOCK_TOKENS = 256  # the scores of a block, for all heads, stay in the first cache
BYTES_PER_THREAD = 1 << 19  # below this a helper costs more than it gives
TILE = 4  # tokens scored together; with three heads their twelve sums just fit AVX2's registers
TILE_LANES = TILE * LANES
CHUNK = 16  # lanes of values summed together: enough registers to keep both FMA units busy

# A page of one KV head: where it lies in the pool, its tokens, where the next one lies, head size.
Span = tuple[int, int, int, int]

_NO_SCORE = np.float32(-np.inf)
_NO_SCORE_KEY = np.int32(-2139095041)  # ordered(-inf)


def supports_dtype(_op: str, dtype: torch.dtype, head_size: int) -> bool:
    """fp32 or bf16, and head sizes of whole vectors."""
    return dtype in (torch.float32, torch.bfloat16) and head_size % CHUNK == 0


def supports(op: str, q_BHD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, *_: Any, **__: Any) -> bool:
    """One dtype that fits, and pools that need no copy."""
    return (
        supports_dtype(op, q_BHD.dtype, q_BHD.shape[2])
        and q_BHD.dtype == k_NGPD.dtype == v_NGPD.dtype
        and k_NGPD.is_contiguous()
        and v_NGPD.is_contiguous()
    )


def attend_decode(
    q_BHD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    lists: PageLists | None = None,
    *,
    scale: float,
) -> Tensor:
    kv_heads, page, size = k_NGPD.shape[1:]
    block = max(1, BLOCK_TOKENS // page)
    lengths = integers(lengths_B, np.int32)
    table = integers(table_BM, np.int32)
    pages, counts = _lists(lists, lengths, page, kv_heads, table.shape[1])
    fault = _find_fault(table, lengths, pages, counts, lists is None, page, len(k_NGPD))
    if fault:
        raise ValueError(f"{FAULTS[fault]} (pool: {len(k_NGPD)} pages, table: {table.shape[1]})")
    start_B = np.zeros(len(counts) + 1, np.int64)  # of each row's blocks among those of all rows
    np.cumsum(-(-counts.max(axis=1, initial=0) // block), out=start_B[1:])
    # Scores are kept in base 2: one multiplication here spares one per exponential.
    q = (q_BHD.detach().float() * (scale * math.log2(math.e))).contiguous().numpy()
    top, total = np.empty((2, start_B[-1], q.shape[1]), np.float32)
    value = np.empty((start_B[-1], *q.shape[1:]), np.float32)
    lookup = (table, lengths, pages, counts, start_B, block)
    arguments = (q, floats(k_NGPD), floats(v_NGPD), *lookup, top, total, value)
    kept_bytes = 2 * int(counts.sum()) * page * size * k_NGPD.itemsize
    share(
        lambda first, last: _attend_blocks(*arguments, first, last),
        int(start_B[-1]),
        most=1 + kept_bytes // BYTES_PER_THREAD,
    )
    out = np.empty_like(q)
    _join_blocks(start_B, top, total, value, out)
    return torch.from_numpy(out).to(q_BHD.dtype)


def _lists(
    lists: PageLists | None, lengths_B: Array, page: int, kv_heads: int, width: int
) -> tuple[Array, Array]:
    """Logical pages [B, G, K] and their counts [B, G]; dense lists are counted, not written.

    Pages of the table that a row has not reached are the last of its list, and do not count.
    """
    if lists is None:
        counts_B = -(-lengths_B // page)
        return np.empty((0, 0, 0), np.int32), np.repeat(counts_B[:, None], kv_heads, axis=1)
    pages_BGK, counts_BG = (integers(part, np.int32) for part in lists)
    reached_B11 = -(-lengths_B[:, None, None] // page)
    listed_BGK = np.arange(pages_BGK.shape[2]) < counts_BG[:, :, None]
    later_BGK = listed_BGK & (pages_BGK >= reached_B11) & (pages_BGK < width)
    return pages_BGK, counts_BG - later_BGK.sum(2, dtype=np.int32)


# The kernels.


@kernel
def _find_fault(
    table_BM: Array,
    lengths_B: Array,
    pages_BGK: Array,
    counts_BG: Array,
    dense: bool,
    page: int,
    pool: int,
) -> int:
    """0, or the first fault found: 1 in a length, 2 in a list, 3 in a table.

    The kernels read wherever these numbers point, so they are checked first.
    """
    rows, kv_heads = counts_BG.shape
    for b in range(rows):
        pages = -(-lengths_B[b] // page)
        if lengths_B[b] < 0 or pages > table_BM.shape[1]:
            return 1
        for g in range(1 if dense else kv_heads):
            if not dense and not 0 <= counts_BG[b, g] <= pages_BGK.shape[2]:
                return 2
            for c in range(counts_BG[b, g]):
                logical = c if dense else pages_BGK[b, g, c]
                if not 0 <= logical < pages:
                    return 2
                if not 0 <= table_BM[b, logical] < pool:
                    return 3
    return 0


@kernel
def _attend_blocks(
    q_BHD: Array,
    k_NGPD: Array,
    v_NGPD: Array,
    table_BM: Array,
    lengths_B: Array,
    pages_BGK: Array,
    counts_BG: Array,
    start_B: Array,
    block: int,
    top_SH: Array,
    sum_SH: Array,
    value_SHD: Array,
    first: int,
    last: int,
) -> None:
    """Attend the items first..last: item s is the block s - start[b] of `block` pages of row b.

    Queries are float32, times scale * log2(e); an empty array of pages stands for dense lists.
    An item leaves for every query head its largest score, in base 2, the sum of its weights
    relative to that score, and its values so weighted.
    """
    kv_heads, page, size = k_NGPD.shape[1:]
    heads = q_BHD.shape[1]
    ratio = heads // kv_heads
    stride = -(-page // TILE) * TILE
    score_HW = np.empty((heads, block * stride), np.float32)
    visit_V4 = np.empty((block * kv_heads + 1, 4), np.int64)
    value_SHD[first:last] = 0
    for s in range(first, last):
        b = np.searchsorted(start_B, s, side="right") - 1
        begin = (s - start_B[b]) * block
        visits = _plan(
            visit_V4, table_BM[b], lengths_B[b], pages_BGK, counts_BG, b, begin, k_NGPD.shape
        )
        _score(q_BHD, b * heads * size, ratio, k_NGPD, visit_V4, visits, score_HW, stride)
        for h in range(heads):
            kept = min(max(counts_BG[b, h // ratio] - begin, 0), block)
            top_SH[s, h], sum_SH[s, h] = _softmax(score_HW, h, kept * stride)
        _weigh(score_HW, stride, v_NGPD, visit_V4, visits, value_SHD, s * heads * size, ratio)


@inline()
def _plan(
    visit_V4: Array,
    table_M: Array,
    length: int,
    pages_BGK: Array,
    counts_BG: Array,
    b: int,
    begin: int,
    pool: tuple[int, int, int, int],
) -> int:
    """List the visits of an item: offset in the pool, tokens, KV head, slot in the block.

    Page by page and head by head, as they lie in the pool, so that dense lists are read in long
    runs. Behind the last visit stands what to prefetch there: the first one of the next block.
    """
    _, kv_heads, page, size = pool
    block = (len(visit_V4) - 1) // kv_heads
    n = 0
    for slot in range(block + 1):
        for g in range(kv_heads):
            if begin + slot >= counts_BG[b, g]:
                continue
            logical = pages_BGK[b, g, begin + slot] if pages_BGK.size else begin + slot
            visit_V4[n, 0] = (np.int64(table_M[logical]) * kv_heads + g) * page * size
            visit_V4[n, 1] = min(page, length - logical * page)
            visit_V4[n, 2] = g
            visit_V4[n, 3] = slot
            if slot == block:
                return n
            n += 1
    visit_V4[n] = visit_V4[n - 1]
    return n


@inline()
def _score(
    q: Array,
    q_at: int,
    ratio: int,
    k: Array,
    visit_V4: Array,
    visits: int,
    score_HW: Array,
    stride: int,
) -> None:
    """score[h, slot * stride + t] = q[h] . k[t], and -inf where a page has no token t."""
    width, size = score_HW.shape[1], k.shape[3]
    for n in range(visits):
        tokens, g, slot = visit_V4[n, 1], visit_V4[n, 2], visit_V4[n, 3]
        span = (visit_V4[n, 0], tokens, visit_V4[n + 1, 0], size)
        h, end = g * ratio, (g + 1) * ratio
        while h < end:
            i, s = q_at + h * size, h * width + slot * stride
            heads = _heads_together(end - h)
            if heads == 1:
                _score1(q, i, k, span, score_HW, s)
            elif heads == 2:
                _score2(q, i, k, span, score_HW, s, width)
            else:
                _score3(q, i, k, span, score_HW, s, width)
            h += heads
        for h in range(g * ratio, end):
            for w in range(slot * stride + tokens, (slot + 1) * stride):
                score_HW[h, w] = _NO_SCORE


@inline()
def _heads_together(left: int) -> int:
    """The number of remaining heads of a group that are processed at once: at most three."""
    return 2 if left == 4 else min(left, 3)


@inline()
def _tile(at: int, t: int, tokens: int, size: int) -> tuple[int, int, int, int]:
    """Offsets of four tokens of a page; a tile beyond the end repeats the last token."""
    t0, end = at + t * size, at + (tokens - 1) * size
    return t0, min(t0 + size, end), min(t0 + 2 * size, end), min(t0 + 3 * size, end)


@inline()
def _score1(q: Array, i: int, k: Array, span: Span, score: Array, s: int) -> None:
    at, tokens, ahead, size = span
    for t in range(0, tokens, TILE):
        t0, t1, t2, t3 = _tile(at, t, tokens, size)
        a0 = a1 = a2 = a3 = zeros(LANES)
        for d in range(0, size, LANES):
            prefetch(k, ahead + t * size + TILE * d, TILE_LANES)
            x = load(q, i + d, LANES)
            a0 = fma(x, load(k, t0 + d, LANES), a0)
            a1 = fma(x, load(k, t1 + d, LANES), a1)
            a2 = fma(x, load(k, t2 + d, LANES), a2)
            a3 = fma(x, load(k, t3 + d, LANES), a3)
        store_sums(score, s + t, a0, a1, a2, a3)


@inline()
def _score2(q: Array, i: int, k: Array, span: Span, score: Array, s: int, width: int) -> None:
    at, tokens, ahead, size = span
    for t in range(0, tokens, TILE):
        t0, t1, t2, t3 = _tile(at, t, tokens, size)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zeros(LANES)
        for d in range(0, size, LANES):
            prefetch(k, ahead + t * size + TILE * d, TILE_LANES)
            x, y = load(q, i + d, LANES), load(q, i + size + d, LANES)
            w = load(k, t0 + d, LANES)
            a0, b0 = fma(x, w, a0), fma(y, w, b0)
            w = load(k, t1 + d, LANES)
            a1, b1 = fma(x, w, a1), fma(y, w, b1)
            w = load(k, t2 + d, LANES)
            a2, b2 = fma(x, w, a2), fma(y, w, b2)
            w = load(k, t3 + d, LANES)
            a3, b3 = fma(x, w, a3), fma(y, w, b3)
        store_sums(score, s + t, a0, a1, a2, a3)
        store_sums(score, s + width + t, b0, b1, b2, b3)


@inline()
def _score3(q: Array, i: int, k: Array, span: Span, score: Array, s: int, width: int) -> None:
    at, tokens, ahead, size = span
    for t in range(0, tokens, TILE):
        t0, t1, t2, t3 = _tile(at, t, tokens, size)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = zeros(LANES)
        for d in range(0, size, LANES):
            prefetch(k, ahead + t * size + TILE * d, TILE_LANES)
            x, y = load(q, i + d, LANES), load(q, i + size + d, LANES)
            z = load(q, i + 2 * size + d, LANES)
            w = load(k, t0 + d, LANES)
            a0, b0, c0 = fma(x, w, a0), fma(y, w, b0), fma(z, w, c0)
            w = load(k, t1 + d, LANES)
            a1, b1, c1 = fma(x, w, a1), fma(y, w, b1), fma(z, w, c1)
            w = load(k, t2 + d, LANES)
            a2, b2, c2 = fma(x, w, a2), fma(y, w, b2), fma(z, w, c2)
            w = load(k, t3 + d, LANES)
            a3, b3, c3 = fma(x, w, a3), fma(y, w, b3), fma(z, w, c3)
        store_sums(score, s + t, a0, a1, a2, a3)
        store_sums(score, s + width + t, b0, b1, b2, b3)
        store_sums(score, s + 2 * width + t, c0, c1, c2, c3)


@inline("reassoc", "contract", "nsz")
def _softmax(score_HW: Array, h: int, width: int) -> tuple[np.float32, np.float32]:
    """Scores of a head to weights, in place; returns the largest score and the sum of weights."""
    key = _NO_SCORE_KEY
    for w in range(width):
        key = max(key, ordered(np.float32(score_HW[h, w]).view(np.int32)))
    top = np.int32(ordered(key)).view(np.float32)
    total = np.float32(0)
    for w in range(width):
        weight = _exp2(score_HW[h, w] - top)
        score_HW[h, w] = weight
        total += weight
    return top, total


@inline("contract")
def _exp2(x: np.float32) -> np.float32:
    """2 ** x for x <= 0 without a branch, to 2e-7; 0 below -126.

    The polynomial of Cephes' exp2f on [-0.5, 0.5]; the whole part goes into the exponent bits.
    """
    whole = np.int32(x - np.float32(0.5))  # x is not positive: truncation rounds to nearest
    f = x - np.float32(whole)
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    bits = np.float32(p).view(np.int32) + (whole << np.int32(23))
    return np.float32(0) if x < np.float32(-126) else np.int32(bits).view(np.float32)


@inline()
def _weigh(
    weight_HW: Array,
    stride: int,
    v: Array,
    visit_V4: Array,
    visits: int,
    value: Array,
    value_at: int,
    ratio: int,
) -> None:
    """value[h] += the weighted values of all visits."""
    width, size = weight_HW.shape[1], v.shape[3]
    for n in range(visits):
        g, slot = visit_V4[n, 2], visit_V4[n, 3]
        span = (visit_V4[n, 0], visit_V4[n, 1], visit_V4[n + 1, 0], size)
        h, end = g * ratio, (g + 1) * ratio
        while h < end:
            w, i = h * width + slot * stride, value_at + h * size
            heads = _heads_together(end - h)
            if heads == 1:
                _weigh1(weight_HW, w, v, span, value, i)
            elif heads == 2:
                _weigh2(weight_HW, w, width, v, span, value, i)
            else:
                _weigh3(weight_HW, w, width, v, span, value, i)
            h += heads


@inline()
def _weigh1(weight: Array, w: int, v: Array, span: Span, value: Array, i: int) -> None:
    at, tokens, ahead, size = span
    for d in range(0, size, CHUNK):
        a = load(value, i + d, CHUNK)
        for t in range(tokens):
            prefetch(v, ahead + t * size + d, CHUNK)
            a = fma(splat(weight, w + t, CHUNK), load(v, at + t * size + d, CHUNK), a)
        store(value, i + d, a)


@inline()
def _weigh2(weight: Array, w: int, width: int, v: Array, span: Span, value: Array, i: int) -> None:
    at, tokens, ahead, size = span
    for d in range(0, size, CHUNK):
        a, b = load(value, i + d, CHUNK), load(value, i + size + d, CHUNK)
        for t in range(tokens):
            prefetch(v, ahead + t * size + d, CHUNK)
            x = load(v, at + t * size + d, CHUNK)
            a = fma(splat(weight, w + t, CHUNK), x, a)
            b = fma(splat(weight, w + width + t, CHUNK), x, b)
        store(value, i + d, a)
        store(value, i + size + d, b)


@inline()
def _weigh3(weight: Array, w: int, width: int, v: Array, span: Span, value: Array, i: int) -> None:
    at, tokens, ahead, size = span
    for d in range(0, size, CHUNK):
        a, b = load(value, i + d, CHUNK), load(value, i + size + d, CHUNK)
        c = load(value, i + 2 * size + d, CHUNK)
        for t in range(tokens):
            prefetch(v, ahead + t * size + d, CHUNK)
            x = load(v, at + t * size + d, CHUNK)
            a = fma(splat(weight, w + t, CHUNK), x, a)
            b = fma(splat(weight, w + width + t, CHUNK), x, b)
            c = fma(splat(weight, w + 2 * width + t, CHUNK), x, c)
        store(value, i + d, a)
        store(value, i + size + d, b)
        store(value, i + 2 * size + d, c)


@kernel
def _join_blocks(
    start_B: Array, top_SH: Array, sum_SH: Array, value_SHD: Array, out_BHD: Array
) -> None:
    """Join the blocks of every row, in order; a head without any page gives zeros."""
    rows, heads, size = out_BHD.shape
    for b in range(rows):
        for h in range(heads):
            top, total = _NO_SCORE, np.float32(0)
            for s in range(start_B[b], start_B[b + 1]):
                top = max(top, top_SH[s, h])
            for d in range(size):
                out_BHD[b, h, d] = 0
            for s in range(start_B[b], start_B[b + 1]):
                if sum_SH[s, h] != 0:
                    share = _exp2(top_SH[s, h] - top)
                    total += share * sum_SH[s, h]
                    for d in range(size):
                        out_BHD[b, h, d] += share * value_SHD[s, h, d]
            if total != 0:
                for d in range(size):
                    out_BHD[b, h, d] /= total
