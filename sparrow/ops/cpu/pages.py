"""Ops of pages on a CPU: loops over rows, heads and pages without copies.

`write_pages` and `select_pages` are ops; `summarise_pages` and `score_pages` are the kernels of the
block-mean flow, whose definition is the flow itself (see sparrow/sparse/rule.py).

A row's bits depend on the row alone: sums run in an order that only the shapes fix. Landmarks are
summed key after key, in the order of the page, so that a page has the same landmark bits whether
prefill or decoding finished it. bf16, which numpy lacks, is handled as its 16 bits. The kernels
read wherever their numbers point, so slots and tables are checked first.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
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
    share,
    store_sums,
    zeros,
)
from sparrow.ops.types import PageLists

DTYPES = {torch.float32, torch.bfloat16}
BYTES_PER_THREAD = 1 << 21  # below this a helper costs more than it gives
TILE = 4  # pages scored together


def supports_dtype(op: str, dtype: torch.dtype, head_size: int) -> bool:
    """fp32 or bf16; scores: heads of whole vectors."""
    return dtype in DTYPES and (op == "write_pages" or head_size % LANES == 0)


def supports(op: str, *tensors: Tensor, mass: float | None = None, **_: Any) -> bool:
    """fp32 scores; or one dtype that fits, and pools without gaps (tokens may have any strides)."""
    if op == "select_pages":
        return tensors[0].dtype == torch.float32 and mass is None
    k_NGPD, v_NGPD, k_TGD, v_TGD, _slots_T = tensors
    dtypes = {x.dtype for x in (k_NGPD, v_NGPD, k_TGD, v_TGD)}
    pools = k_NGPD.is_contiguous() and v_NGPD.is_contiguous()
    return len(dtypes) == 1 and dtypes <= DTYPES and pools


def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    k_pool, slots = floats(k_NGPD), integers(slots_T)
    _refuse_outside(slots, k_pool)
    arguments = (k_pool, floats(v_NGPD), floats(k_TGD), floats(v_TGD), slots)
    share(
        lambda first, last: _write(*arguments, first, last),
        slots.size,
        most=1 + 2 * k_TGD.nbytes // BYTES_PER_THREAD,
    )


def summarise_pages(k_NGPD: Tensor, landmark_NGD: Tensor, slots_T: Tensor) -> None:
    """Store the landmark, the mean key, of every page that one of these slots finishes, in place.

    Call after `write_pages` with the same slots. Pages fill from the front, so a token in a page's
    last slot finishes it; other pages keep what landmark they had. A negative slot is padding.
    """
    k_pool, landmark, slots = floats(k_NGPD), floats(landmark_NGD), integers(slots_T)
    _refuse_outside(slots, k_pool)
    token_bytes = k_pool.strides[0] // max(1, k_pool.shape[2])
    share(
        lambda first, last: _summarise(k_pool, landmark, slots, first, last),
        slots.size,
        most=1 + slots.size * token_bytes // BYTES_PER_THREAD,
    )


def score_pages(
    q_BHD: Tensor, landmark_NGD: Tensor, table_BM: Tensor, lengths_B: Tensor, *, page: int
) -> Tensor:
    """Mean query of the group times landmark of every finished page, fp32 [B, G, M].

    An unfinished page, and a table entry beyond the sequence, scores -inf.
    """
    landmark, table = floats(landmark_NGD), integers(table_BM)
    pool, kv_heads, _ = landmark.shape
    rows, width = table.shape
    finished = np.empty(rows, np.int64)
    pages = _finish(integers(lengths_B), table, page, pool, finished)
    if pages < 0:
        raise ValueError(f"a table names pages outside the pool of {pool} pages")
    score = np.empty((rows, kv_heads, width), np.float32)
    arguments = (floats(q_BHD), landmark, table, finished, score)
    share(
        lambda first, last: _score(*arguments, first, last),
        rows,
        most=1 + pages * landmark.strides[0] // BYTES_PER_THREAD,
    )
    return torch.from_numpy(score)


def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    mass: None = None,
) -> PageLists:
    score = np.ascontiguousarray(score_BGM.detach().numpy())
    rows, kv_heads, scores = score.shape
    budgets_BG = integers(budgets if budgets.ndim == 2 else budgets[:, None].expand(-1, kv_heads))
    plan_BG2 = np.empty((rows, kv_heads, 2), np.int64)
    pages = _plan(integers(lengths_B), budgets_BG, page, first + last, plan_BG2)
    if pages > scores:
        raise ValueError(f"{pages} pages of a sequence, but {scores} scores")
    list_BGK = np.empty(score.shape, np.int32)
    count_BG = np.empty((rows, kv_heads), np.int32)
    share(
        lambda begin, end: _list(score, plan_BG2, first, last, list_BGK, count_BG, begin, end),
        rows,
        most=1 + score.nbytes // BYTES_PER_THREAD,
    )
    return PageLists(pages=torch.from_numpy(list_BGK), counts=torch.from_numpy(count_BG))


def _refuse_outside(slots: Array, k_NGPD: Array) -> None:
    pages, _, page, _ = k_NGPD.shape
    highest = slots.max(initial=-1)
    if highest >= pages * page:
        raise ValueError(f"slot {highest} is outside the pool of {pages} pages")


def _widen(number: Any) -> Any:
    """A float32 as it is, or the bits of a bfloat16 as the float32 they mean."""


@overload(_widen, strict=False)
def _widen_of(number: Any) -> Any:
    if number == types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


def _put(array: Array, index: int, value: np.float32) -> None:
    """array[index] = value, rounded to nearest even where the array holds bits of bfloat16."""


@overload(_put, strict=False)
def _put_of(array: Any, index: Any, value: Any) -> Any:
    def put_bits(array: Array, index: int, value: np.float32) -> None:
        bits = np.int64(np.float32(value).view(np.uint32))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        array[index] = np.uint16(rounded if value == value else 0x7FC0)

    def put_float(array: Array, index: int, value: np.float32) -> None:
        array[index] = value

    return put_bits if array.dtype == types.uint16 else put_float


@kernel
def _write(k_NGPD: Array, v_NGPD: Array, k: Array, v: Array, slots: Array, a: int, z: int) -> None:
    """The tokens a..z, [T, G, D], into their slots."""
    _, heads, page, size = k_NGPD.shape
    for t in range(a, z):
        if slots[t] >= 0:
            n, p = slots[t] // page, slots[t] % page
            for g in range(heads):
                for d in range(size):
                    k_NGPD[n, g, p, d] = k[t, g, d]
                    v_NGPD[n, g, p, d] = v[t, g, d]


@kernel
def _summarise(k_NGPD: Array, landmark_NGD: Array, slots_T: Array, first: int, last: int) -> None:
    """The landmarks of the pages that the tokens first..last finish."""
    _, heads, page, size = k_NGPD.shape
    total_D = np.empty(size, np.float32)
    for t in range(first, last):
        if slots_T[t] >= 0 and slots_T[t] % page == page - 1:
            block = slots_T[t] // page
            for g in range(heads):
                _mean(k_NGPD[block, g], total_D, landmark_NGD[block, g])


@inline()
def _mean(k_PD: Array, total_D: Array, mean_D: Array) -> None:
    """The mean of some rows, summed in their order."""
    total_D[:] = 0
    for p in range(len(k_PD)):
        k_D = k_PD[p]
        for d in range(len(total_D)):
            total_D[d] += _widen(k_D[d])
    for d in range(len(total_D)):
        _put(mean_D, d, total_D[d] / np.float32(len(k_PD)))


@kernel
def _finish(lengths_B: Array, table_BM: Array, page: int, pool: int, finished_B: Array) -> int:
    """The finished pages of each row, and of all; -1 if a table puts one outside the pool."""
    total = 0
    for b in range(len(lengths_B)):
        finished_B[b] = min(max(lengths_B[b] // page, 0), table_BM.shape[1])
        for m in range(finished_B[b]):
            if not 0 <= table_BM[b, m] < pool:
                return -1
        total += finished_B[b]
    return total


@kernel
def _score(
    q_BHD: Array,
    landmark_NGD: Array,
    table_BM: Array,
    finished_B: Array,
    score_BGM: Array,
    first: int,
    last: int,
) -> None:
    """The rows first..last."""
    _, heads, size = landmark_NGD.shape
    query_GD = np.empty((heads, size), np.float32)
    tiled_GM = np.empty((heads, -(-score_BGM.shape[2] // TILE) * TILE), np.float32)
    for b in range(first, last):
        finished = finished_B[b]
        _mean_queries(q_BHD, b, query_GD)
        _score_row(query_GD, landmark_NGD, table_BM[b, :finished], tiled_GM)
        for g in range(heads):
            for m in range(score_BGM.shape[2]):
                score_BGM[b, g, m] = tiled_GM[g, m] if m < finished else -np.inf


@inline()
def _mean_queries(q_BHD: Array, b: int, mean_GD: Array) -> None:
    """The mean query of each group, summed in the order of the heads."""
    heads, size = mean_GD.shape
    ratio = q_BHD.shape[1] // heads
    mean_GD[:] = 0
    for h in range(heads * ratio):
        for d in range(size):
            mean_GD[h // ratio, d] += _widen(q_BHD[b, h, d])
    for g in range(heads):
        for d in range(size):
            mean_GD[g, d] /= np.float32(ratio)


@inline()
def _score_row(query_GD: Array, landmark_NGD: Array, table_M: Array, score_GM: Array) -> None:
    """Query times landmark, four pages at once; a last tile that is too long repeats a page.

    Page by page and then head by head, as the landmarks lie in the pool.
    """
    _, heads, size = landmark_NGD.shape
    step, end = heads * size, len(table_M) - 1
    for m in range(0, len(table_M), TILE):
        n0, n1 = table_M[m] * step, table_M[min(m + 1, end)] * step
        n2, n3 = table_M[min(m + 2, end)] * step, table_M[min(m + 3, end)] * step
        for g in range(heads):
            a0 = a1 = a2 = a3 = zeros(LANES)
            for i in range(g * size, (g + 1) * size, LANES):
                x = load(query_GD, i, LANES)
                a0 = fma(x, load(landmark_NGD, n0 + i, LANES), a0)
                a1 = fma(x, load(landmark_NGD, n1 + i, LANES), a1)
                a2 = fma(x, load(landmark_NGD, n2 + i, LANES), a2)
                a3 = fma(x, load(landmark_NGD, n3 + i, LANES), a3)
            store_sums(score_GM, g * score_GM.shape[1] + m, a0, a1, a2, a3)


@kernel
def _plan(
    lengths_B: Array, budgets_BG: Array, page: int, reserved: int, plan_BG2: Array
) -> np.int64:
    """Per row and head, how many pages it has and how many it keeps; returns the most it has."""
    most_pages = np.int64(0)
    for b in range(len(lengths_B)):
        pages = max((lengths_B[b] + page - 1) // page, np.int64(0))
        tail = lengths_B[b] - (pages - 1) * page
        most_pages = max(most_pages, pages)
        for g in range(budgets_BG.shape[1]):
            affordable = (budgets_BG[b, g] - tail) // page + 1
            kept = min(max(affordable, min(pages, np.int64(reserved))), pages)
            plan_BG2[b, g, 0], plan_BG2[b, g, 1] = pages, kept
    return most_pages


@kernel
def _list(
    score_BGM: Array,
    plan_BG2: Array,
    first: int,
    last: int,
    list_BGK: Array,
    count_BG: Array,
    begin: int,
    end: int,
) -> None:
    """The lists of the rows begin..end; a row that keeps everything needs no scores."""
    key_M = np.empty(score_BGM.shape[2], np.uint32)
    for b in range(begin, end):
        for g in range(score_BGM.shape[1]):
            list_K = list_BGK[b, g]
            pages, kept = plan_BG2[b, g, 0], plan_BG2[b, g, 1]
            count_BG[b, g] = kept
            if kept == pages:
                list_K[:kept] = np.arange(kept)
            else:
                _best(score_BGM[b, g], pages, kept, first, last, key_M, list_K)
            list_K[kept:] = -1


@inline()
def _best(
    score_M: Array, pages: int, kept: int, first: int, last: int, key_M: Array, list_K: Array
) -> None:
    """Reserved pages and the best others, ascending; of equals the earlier ones."""
    others = key_M[: pages - last - first]
    for m in range(len(others)):
        others[m] = _key(score_M[first + m])
    threshold, equals = _threshold(others, kept - first - last)
    list_K[:first] = np.arange(first)
    n = first
    for m in range(len(others)):
        tied = others[m] == threshold and equals > 0
        if others[m] > threshold or tied:
            list_K[n] = first + m
            n += 1
            equals -= tied
    list_K[n : n + last] = np.arange(pages - last, pages)


@inline()
def _key(score: np.float32) -> np.uint32:
    """A number of the same order; NaN and infinities count as the last finite numbers."""
    most = np.float32(3.4028234663852886e38)
    finite = min(max(score, -most), most) if score == score else -most
    bits = np.float32(finite + np.float32(0)).view(np.uint32)  # -0 + 0 is 0: they are equal
    return np.uint32(~bits if bits >> 31 else bits | 0x80000000)


@inline()
def _threshold(key_M: Array, count: int) -> tuple[np.uint32, int]:
    """The key such that those above it, and as many equals as the second result, are `count`.

    Found bit by bit: 32 counts at most, each a loop without a branch, beat a sort by far.
    """
    threshold = np.uint32(0)
    for bit in range(31, -1, -1):
        trial = np.uint32(threshold | np.uint32(1 << bit))
        reached = _count(key_M, trial)
        if reached >= count:
            threshold = trial
        if reached == count:
            break
    return threshold, count - _count(key_M, np.uint32(threshold + 1))  # keys end far below 2**32


@inline()
def _count(key_M: Array, least: np.uint32) -> int:
    count = 0
    for key in key_M:
        count += key >= least
    return count
