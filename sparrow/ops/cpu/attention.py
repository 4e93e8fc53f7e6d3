"""Decode attention on a CPU, reading each kept page once and copying nothing.

The work of a row and KV head is cut into blocks of BLOCK pages of its own list. Each block gives a
partial softmax (largest score, sum of weights, weighted values); partials are joined in order. So
the bits of a row depend on its own list alone, not on its neighbours and not on the threads.

Inner loops handle four tokens at a time, so that a query or an output is loaded once for four keys
or values; numba leaves them to LLVM, which turns them into vector instructions of whatever CPU this
is. bf16 is widened to fp32 on the way, by a shift. Threads are our own and the kernel holds no GIL:
numba's `parallel=True` may abort the process when two threads use it at once.

Legend of the dimension letters: sparrow/ops/types.py; I is a work item, J = J(row, head, block).
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from sparrow.ops.types import PageLists

BLOCK = 16  # pages of a work item: its scores stay in the first-level cache
SMALL = 1 << 18  # elements of K below which a second thread costs more than it gives

# Sums may be reordered into vector lanes and fused, but NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_kernel = numba.njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
_inline = numba.njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy", inline="always")


def supports(q_BHD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, *_: Any, **__: Any) -> bool:
    """fp32 or bf16 throughout, and pools that need no copy."""
    one_dtype = q_BHD.dtype == k_NGPD.dtype == v_NGPD.dtype
    whole = k_NGPD.is_contiguous() and v_NGPD.is_contiguous()
    return one_dtype and whole and q_BHD.dtype in (torch.float32, torch.bfloat16)


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
    rows, heads, head_size = q_BHD.shape
    kv_heads, page = k_NGPD.shape[1:3]
    lengths = lengths_B.numpy().astype(np.int64)
    table = table_BM.numpy().astype(np.int64)
    pages, counts = _lists(lists, lengths, page, kv_heads)
    items = _items(counts)
    # Scores are kept in base 2: one multiplication here spares one per exponential.
    q = q_BHD.detach().float().contiguous().numpy() * np.float32(scale * math.log2(math.e))
    partial = (
        np.empty((len(items), heads // kv_heads, head_size), np.float32),
        np.empty((len(items), heads // kv_heads), np.float32),
        np.empty((len(items), heads // kv_heads), np.float32),
    )
    arguments = (q, _view(k_NGPD), _view(v_NGPD), table, lengths, pages, counts, items, *partial)
    work = int(counts.sum()) * page * head_size
    _spread(_attend_items, arguments, len(items), 1 if work < SMALL else torch.get_num_threads())
    out = np.zeros((rows, heads, head_size), np.float32)
    _join(items, *partial, out)
    return torch.from_numpy(out).to(q_BHD.dtype)


def _lists(
    lists: PageLists | None, lengths: np.ndarray, page: int, kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logical pages [B, G, K] and their counts [B, G]; without lists, all pages of each row."""
    if lists is not None:
        return lists.pages.numpy().astype(np.int64), lists.counts.numpy().astype(np.int64)
    rows, count_B = len(lengths), -(-lengths // page)
    every = np.arange(count_B.max(initial=0))
    return (
        np.broadcast_to(every, (rows, kv_heads, len(every))).copy(),
        np.repeat(count_B[:, None], kv_heads, axis=1),
    )


def _items(counts_BG: np.ndarray) -> np.ndarray:
    """(row, head, first list entry) of every block, in the order in which partials are joined."""
    blocks_BG = -(-counts_BG // BLOCK)
    blocks = blocks_BG.ravel()
    row_I, head_I = (np.repeat(axis.ravel(), blocks) for axis in np.indices(counts_BG.shape))
    number_I = np.arange(len(row_I)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return np.stack([row_I, head_I, number_I * BLOCK], axis=1)


def _view(pool: Tensor) -> np.ndarray:
    """The pool as numpy sees it; bf16, which numpy lacks, as its 16 bits."""
    bits = pool.detach().view(torch.uint16) if pool.dtype == torch.bfloat16 else pool.detach()
    return bits.numpy()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparrow-attention")


def _spread(kernel: Any, arguments: tuple[Any, ...], items: int, threads: int) -> None:
    """Run the kernel over all items, in as many even parts as threads; one part is the caller's."""
    edges = [items * part // threads for part in range(threads + 1)]
    rest = [
        _pool(threads - 1).submit(kernel, *arguments, edges[part], edges[part + 1])
        for part in range(1, threads)
    ]
    kernel(*arguments, 0, edges[1])
    for future in rest:
        future.result()


def _wide(x: Any) -> Any:
    """A stored number as fp32; numba takes the version below that fits the type."""


@overload(_wide, inline="always")
def _wide_by_type(x):
    if x == numba.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@_kernel
def _attend_items(
    q_BHD,
    k_NGPD,
    v_NGPD,
    table_BM,
    lengths_B,
    pages_BGK,
    counts_BG,
    item_I3,
    value_IRD,
    top_IR,
    sum_IR,
    start,
    stop,
):
    page, ratio = k_NGPD.shape[2], value_IRD.shape[1]
    score_RS = np.empty((ratio, BLOCK * page), np.float32)
    for i in range(start, stop):
        row, head, first = item_I3[i]
        q_RD = q_BHD[row, head * ratio : (head + 1) * ratio]
        chosen = pages_BGK[row, head, first : min(first + BLOCK, counts_BG[row, head])]
        tokens = 0
        for logical in chosen:
            here = min(page, lengths_B[row] - logical * page)
            _scores(q_RD, k_NGPD[table_BM[row, logical], head], here, score_RS, tokens)
            tokens += here
        _softmax(score_RS, tokens, top_IR[i], sum_IR[i])
        value_IRD[i] = np.float32(0)
        tokens = 0
        for logical in chosen:
            here = min(page, lengths_B[row] - logical * page)
            _values(score_RS, tokens, v_NGPD[table_BM[row, logical], head], here, value_IRD[i])
            tokens += here


@_kernel
def _scores(q_RD, k_PD, tokens, score_RS, at):
    """score[r, at + t] = q[r] . k[t] for the first tokens of a page."""
    ratio, size = q_RD.shape
    for t in range(0, tokens, 4):
        # Beyond the last token the tile repeats it: what is unwritten is never read.
        t1, t2, t3 = min(t + 1, tokens - 1), min(t + 2, tokens - 1), min(t + 3, tokens - 1)
        for r in range(ratio):
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(size):
                x = q_RD[r, d]
                s0 += x * _wide(k_PD[t, d])
                s1 += x * _wide(k_PD[t1, d])
                s2 += x * _wide(k_PD[t2, d])
                s3 += x * _wide(k_PD[t3, d])
            score_RS[r, at + t3] = s3
            score_RS[r, at + t2] = s2
            score_RS[r, at + t1] = s1
            score_RS[r, at + t] = s0


@_kernel
def _softmax(score_RS, tokens, top_R, sum_R):
    """Scores in base 2 to weights relative to the largest, in place; the largest and the sum."""
    for r in range(score_RS.shape[0]):
        top = score_RS[r, 0]
        for t in range(1, tokens):
            top = max(top, score_RS[r, t])
        total = np.float32(0)
        for t in range(tokens):
            weight = _exp2(score_RS[r, t] - top)
            score_RS[r, t] = weight
            total += weight
        top_R[r], sum_R[r] = top, total


@_kernel
def _values(weight_RS, at, v_PD, tokens, out_RD):
    """out[r] += sum over the tokens of a page of weight * value."""
    ratio, size = out_RD.shape
    whole = tokens - tokens % 4
    for r in range(ratio):
        for t in range(0, whole, 4):
            w0, w1 = weight_RS[r, at + t], weight_RS[r, at + t + 1]
            w2, w3 = weight_RS[r, at + t + 2], weight_RS[r, at + t + 3]
            for d in range(size):
                pair = w0 * _wide(v_PD[t, d]) + w1 * _wide(v_PD[t + 1, d])
                pair += w2 * _wide(v_PD[t + 2, d]) + w3 * _wide(v_PD[t + 3, d])
                out_RD[r, d] += pair
        for t in range(whole, tokens):
            w0 = weight_RS[r, at + t]
            for d in range(size):
                out_RD[r, d] += w0 * _wide(v_PD[t, d])


@_inline
def _exp2(x):
    """2 ** x for x <= 0 without a branch: a polynomial on [-0.5, 0.5] times a power of two."""
    x = max(x, np.float32(-126.0))
    whole = np.rint(x)
    y = (x - whole) * np.float32(0.6931471805599453)
    p = np.float32(1 / 720)
    p = p * y + np.float32(1 / 120)
    p = p * y + np.float32(1 / 24)
    p = p * y + np.float32(1 / 6)
    p = p * y + np.float32(0.5)
    p = p * y + np.float32(1.0)
    p = p * y + np.float32(1.0)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power


@_kernel
def _join(item_I3, value_IRD, top_IR, sum_IR, out_BHD):
    """Join the partial softmaxes of each row and head, in the order of its blocks."""
    items, ratio, _ = value_IRD.shape
    start = 0
    while start < items:
        row, head = item_I3[start, 0], item_I3[start, 1]
        stop = start + 1
        while stop < items and item_I3[stop, 0] == row and item_I3[stop, 1] == head:
            stop += 1
        for r in range(ratio):
            top = top_IR[start:stop, r].max()
            total = np.float32(0)
            for i in range(start, stop):
                total += sum_IR[i, r] * _exp2(top_IR[i, r] - top)
            for i in range(start, stop):
                out_BHD[row, head * ratio + r] += value_IRD[i, r] * (
                    _exp2(top_IR[i, r] - top) / total
                )
        start = stop
