"""Causal attention of sequences over the pages that each query keeps, with gradients, on a GPU.

Forward, a program walks over keys with a block of queries of one head. Backward takes two kernels:
the same walk for the gradients of queries, and walks over queries, with all heads of a group, for
those of keys and values; no atomic sums, so the same inputs give the same bits. Which pages of a
tile a query keeps is one word of bits, read a step ahead. Blocks are counted from the first token
of a sequence. Legend of the dimension letters: sparrow/ops/types.py; W words of 32 pages.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.attend_decode import LOWEST, head_mask
from sparrow.ops.kernels.attend_decode import supports_dtype as supports_dtype
from sparrow.ops.kernels.attend_prefill import find_block

MOST_KEYS = 128  # of a tile, whose pages are bits of one word
MOST_SIZE = 128  # numbers of a head: registers hold no more
_PAGES = tl.constexpr(32)  # of a word
_LOG2E = tl.constexpr(math.log2(math.e))


class KeptPlan(NamedTuple):
    """Queries and keys of a tile, and how a step is scheduled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plans(NamedTuple):
    """Of the forward pass, and of the gradients of queries and of keys."""

    forward: KeptPlan
    queries: KeptPlan
    keys: KeptPlan


def plan(head_size: int, itemsize: int) -> Plans:
    """The fastest tiles of bench/tune_kept.py on an H200; fp32 runs without tensor cores."""
    if itemsize == 4:
        small = KeptPlan(queries=32, keys=16, warps=8, stages=1)
        return Plans(small, small, KeptPlan(queries=16, keys=32, warps=8, stages=1))
    return Plans(
        KeptPlan(queries=128, keys=64, warps=8, stages=3),
        KeptPlan(queries=64, keys=64, warps=4, stages=2),
        KeptPlan(queries=64, keys=128, warps=8, stages=1 if head_size > 64 else 2),
    )


def supports(op: str, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *_: Any, **named: Any) -> bool:
    """One dtype and head size that fit, pages of a power of two that fill tiles, places that fit
    32 bits.
    """
    page, furthest = named["page"], max(x.stride(0) for x in (q_THD, k_TGD, v_TGD))
    return (
        len(q_THD) * max(furthest, q_THD.shape[1] * q_THD.shape[2]) < 2**31
        and supports_dtype(op, q_THD.dtype, q_THD.shape[2])
        and q_THD.shape[2] <= MOST_SIZE
        and q_THD.dtype == k_TGD.dtype == v_TGD.dtype
        and page.bit_count() == 1
        and page * _PAGES.value >= MOST_KEYS
    )


def attend_kept(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds: Tensor,
    bits_GWT: Tensor,
    *,
    page: int,
    scale: float,
) -> Tensor:
    rows = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    out: Tensor = _AttendKept.apply(*rows, bounds.contiguous(), bits_GWT.contiguous(), page, scale)
    return out


class _AttendKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        bounds: Tensor,
        bits_GWT: Tensor,
        page: int,
        scale: float,
    ) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        logsum_HT = torch.empty(
            (q_THD.shape[1], len(q_THD)), dtype=torch.float32, device=q_THD.device
        )
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, bounds, bits_GWT, out_THD, logsum_HT)
        ctx.page, ctx.scale = page, scale
        launch = _Launch(q_THD, k_TGD, v_TGD, bounds, bits_GWT, page=page, scale=scale)
        cut = plan(launch.size, q_THD.itemsize).forward
        _attend_queries[launch.grid(launch.heads, cut.queries)](
            *(*launch.tensors, out_THD, logsum_HT), *launch.numbers, **launch.options(cut)
        )
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_THD, logsum_HT = ctx.saved_tensors
        launch = _Launch(*inputs, page=ctx.page, scale=ctx.scale)
        plans = plan(launch.size, grad_THD.itemsize)
        grad_THD = grad_THD.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3]
        )
        shift_HT = torch.empty_like(logsum_HT)  # of the scores' gradients: out * grad, summed
        given = (*launch.tensors, grad_THD, logsum_HT, shift_HT)
        _grad_queries[launch.grid(launch.heads, plans.queries.queries)](
            *(*given, out_THD, grad_q), *launch.numbers, **launch.options(plans.queries)
        )
        _grad_keys[launch.grid(launch.kv_heads, plans.keys.keys)](
            *(*given, grad_k, grad_v), *launch.numbers, **launch.options(plans.keys)
        )
        return grad_q, grad_k, grad_v, None, None, None, None


class _Launch:
    """What the three kernels have in common."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        bounds: Tensor,
        bits_GWT: Tensor,
        *,
        page: int,
        scale: float,
    ) -> None:
        self.tokens, self.heads, self.size = q_THD.shape
        self.kv_heads, self.page, self.rows = k_TGD.shape[1], page, len(bounds) - 1
        self.tensors = (q_THD, k_TGD, v_TGD, bits_GWT, bounds)
        strides = (stride for x in (q_THD, k_TGD, v_TGD) for stride in x.stride()[:2])
        self.numbers = (scale, self.rows, self.tokens, bits_GWT.shape[1], *strides)

    def grid(self, heads: int, block: int) -> tuple[int, int]:
        """Enough programs for blocks counted by sequence."""
        return heads, triton.cdiv(self.tokens, block) + self.rows

    def options(self, cut: KeptPlan) -> dict[str, Any]:
        return {
            "ROWS": triton.next_power_of_2(self.rows),
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "SIZE": self.size,
            "WIDE": triton.next_power_of_2(self.size),
            "PAGE": self.page,
            "QUERIES": cut.queries,
            "KEYS": cut.keys,
            "num_warps": cut.warps,
            "num_stages": cut.stages,
        }


@triton.jit
def _word(bits, key, words, tokens, real_n, PAGE: tl.constexpr):
    """The bits of the pages about a key, of some queries; none beyond the last word."""
    word = key // (PAGE * _PAGES)
    return tl.load(bits + word.to(tl.int64) * tokens, real_n & (word < words), other=0)


@triton.jit
def _rows(tensor, token_n, stride, real_n, lane_d, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of a head; WHOLE: all of them are real."""
    place_nd = tensor + token_n[:, None] * stride + lane_d[None, :]
    if WHOLE and lane_d.shape[0] == SIZE:
        rows_nd = tl.load(place_nd)
    else:
        rows_nd = tl.load(place_nd, head_mask(real_n, lane_d, SIZE), other=0.0)
    return rows_nd


@triton.jit
def _walk_keys(
    q_nd,
    position_n,
    real_n,
    sequence,
    begin,
    end,
    scale,
    softmax,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax over the keys begin..end; MASKED where some of them lie after some queries.

    sequence: where its keys, values and bits lie, their strides, and how many tokens it has.
    """
    k, v, bits, k_token, v_token, words, tokens, length = sequence
    top_n, total_n, value_nd = softmax
    lane_d = tl.arange(0, q_nd.shape[1])
    word_n = _word(bits, begin, words, tokens, real_n, PAGE)
    for start in range(begin, end, KEYS):
        key_t = start + tl.arange(0, KEYS)
        k_td = _rows(k, key_t, k_token, key_t < length, lane_d, SIZE, not MASKED)
        v_td = _rows(v, key_t, v_token, key_t < length, lane_d, SIZE, not MASKED)
        score_nt = tl.dot(q_nd, tl.trans(k_td), input_precision="ieee") * scale
        kept_nt = ((word_n[:, None] >> (key_t // PAGE % _PAGES)[None, :]) & 1) != 0
        if MASKED:
            kept_nt &= key_t[None, :] <= position_n[:, None]
        score_nt = tl.where(kept_nt, score_nt, float("-inf"))
        word_n = _word(bits, start + KEYS, words, tokens, real_n, PAGE)
        higher_n = tl.maximum(top_n, tl.max(score_nt, 1))
        weight_nt = tl.exp2(score_nt - higher_n[:, None])
        shrink_n = tl.exp2(top_n - higher_n)
        total_n = total_n * shrink_n + tl.sum(weight_nt, 1)
        value_nd = value_nd * shrink_n[:, None]
        value_nd = tl.dot(weight_nt.to(v_td.dtype), v_td, value_nd, input_precision="ieee")
        top_n = higher_n
    return top_n, total_n, value_nd


@triton.jit(do_not_specialize=["rows", "words"])
def _attend_queries(
    q,
    k,
    v,
    bits,
    bounds,
    out,
    logsum,
    scale,
    rows,
    tokens,
    words,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of queries of one head, and the logarithm of each query's sum of weights (base 2)."""
    head = tl.program_id(0)
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    _, first, start, end = find_block(bounds, rows, program, ROWS, QUERIES)
    length = end - start
    if first >= length:
        return
    kv_head = head // (HEADS // KV_HEADS)
    position_n = first + tl.arange(0, QUERIES)
    real_n = position_n < length
    token_n = (start + position_n).to(tl.int64)
    lane_d = tl.arange(0, WIDE)
    q_nd = _rows(q + head * q_head, token_n, q_token, real_n, lane_d, SIZE, False)
    k += start.to(tl.int64) * k_token + kv_head * k_head
    v += start.to(tl.int64) * v_token + kv_head * v_head
    bits += kv_head.to(tl.int64) * words * tokens + token_n
    sequence = (k, v, bits, k_token, v_token, words, tokens, length)
    base = scale * _LOG2E
    top_n = tl.full([QUERIES], LOWEST, tl.float32)
    softmax = (top_n, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32))
    whole = first // KEYS * KEYS
    stop = tl.minimum(first + QUERIES, length)
    softmax = _walk_keys(
        q_nd, position_n, real_n, sequence, 0, whole, base, softmax, SIZE, PAGE, KEYS, False
    )
    top_n, total_n, value_nd = _walk_keys(
        q_nd, position_n, real_n, sequence, whole, stop, base, softmax, SIZE, PAGE, KEYS, True
    )
    value_nd = value_nd / total_n[:, None]
    out += (token_n[:, None] * HEADS + head) * SIZE + lane_d[None, :]
    tl.store(out, value_nd.to(out.dtype.element_ty), head_mask(real_n, lane_d, SIZE))
    tl.store(logsum + head.to(tl.int64) * tokens + token_n, top_n + tl.log2(total_n), real_n)


@triton.jit
def _grad_walk_keys(
    block,
    sequence,
    begin,
    end,
    scale,
    grad_q_nd,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what the keys begin..end contribute to the gradients of a block of queries.

    block: queries, gradients of their outputs, their sums and shifts, positions, which are real.
    """
    q_nd, grad_nd, logsum_n, shift_n, position_n, real_n = block
    k, v, bits, k_token, v_token, words, tokens, length = sequence
    lane_d = tl.arange(0, q_nd.shape[1])
    word_n = _word(bits, begin, words, tokens, real_n, PAGE)
    for start in range(begin, end, KEYS):
        key_t = start + tl.arange(0, KEYS)
        k_td = _rows(k, key_t, k_token, key_t < length, lane_d, SIZE, not MASKED)
        v_td = _rows(v, key_t, v_token, key_t < length, lane_d, SIZE, not MASKED)
        score_nt = tl.dot(q_nd, tl.trans(k_td), input_precision="ieee") * scale
        kept_nt = ((word_n[:, None] >> (key_t // PAGE % _PAGES)[None, :]) & 1) != 0
        if MASKED:
            kept_nt &= key_t[None, :] <= position_n[:, None]
        word_n = _word(bits, start + KEYS, words, tokens, real_n, PAGE)
        weight_nt = tl.where(kept_nt, tl.exp2(score_nt - logsum_n[:, None]), 0.0)
        slope_nt = tl.dot(grad_nd, tl.trans(v_td), input_precision="ieee")
        slope_nt = weight_nt * (slope_nt - shift_n[:, None])
        grad_q_nd = tl.dot(slope_nt.to(k_td.dtype), k_td, grad_q_nd, input_precision="ieee")
    return grad_q_nd


@triton.jit(do_not_specialize=["rows", "words"])
def _grad_queries(
    q,
    k,
    v,
    bits,
    bounds,
    grad,
    logsum,
    shift,
    out,
    grad_q,
    scale,
    rows,
    tokens,
    words,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Gradients of a block of queries of one head; writes the shifts that `_grad_keys` reads."""
    head = tl.program_id(0)
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    _, first, start, end = find_block(bounds, rows, program, ROWS, QUERIES)
    length = end - start
    if first >= length:
        return
    kv_head = head // (HEADS // KV_HEADS)
    position_n = first + tl.arange(0, QUERIES)
    real_n = position_n < length
    token_n = (start + position_n).to(tl.int64)
    lane_d = tl.arange(0, WIDE)
    q_nd = _rows(q + head * q_head, token_n, q_token, real_n, lane_d, SIZE, False)
    grad_nd = _rows(grad + head * SIZE, token_n, HEADS * SIZE, real_n, lane_d, SIZE, False)
    out_nd = _rows(out + head * SIZE, token_n, HEADS * SIZE, real_n, lane_d, SIZE, False)
    shift_n = tl.sum(grad_nd.to(tl.float32) * out_nd.to(tl.float32), 1)
    place_n = head.to(tl.int64) * tokens + token_n
    tl.store(shift + place_n, shift_n, real_n)
    logsum_n = tl.load(logsum + place_n, real_n, other=0.0)

    k += start.to(tl.int64) * k_token + kv_head * k_head
    v += start.to(tl.int64) * v_token + kv_head * v_head
    bits += kv_head.to(tl.int64) * words * tokens + token_n
    sequence = (k, v, bits, k_token, v_token, words, tokens, length)
    base = scale * _LOG2E
    whole = first // KEYS * KEYS
    stop = tl.minimum(first + QUERIES, length)
    grad_q_nd = tl.zeros([QUERIES, WIDE], tl.float32)
    block = (q_nd, grad_nd, logsum_n, shift_n, position_n, real_n)
    grad_q_nd = _grad_walk_keys(block, sequence, 0, whole, base, grad_q_nd, SIZE, PAGE, KEYS, False)
    grad_q_nd = _grad_walk_keys(
        block, sequence, whole, stop, base, grad_q_nd, SIZE, PAGE, KEYS, True
    )
    grad_q += (token_n[:, None] * HEADS + head) * SIZE + lane_d[None, :]
    grad_q_nd = (grad_q_nd * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q, grad_q_nd, head_mask(real_n, lane_d, SIZE))


@triton.jit
def _grad_walk_queries(
    k_td,
    v_td,
    key_t,
    head,
    begin,
    end,
    scale,
    grads,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what the queries begin..end of a head contribute to the gradients of keys and values.

    head: where its queries, their gradients, sums, shifts and bits lie, the stride of queries, and
    how many tokens the sequence has. Tiles are transposed: keys by queries.
    """
    q, grad, logsum, shift, bits, q_token, length = head
    grad_k_td, grad_v_td = grads
    lane_d = tl.arange(0, k_td.shape[1])
    bit_t = key_t // PAGE % _PAGES
    for start in range(begin, end, QUERIES):
        query_n = start + tl.arange(0, QUERIES)
        real_n = query_n < length
        q_nd = _rows(q, query_n, q_token, real_n, lane_d, SIZE, False)
        grad_nd = _rows(grad, query_n, HEADS * SIZE, real_n, lane_d, SIZE, False)
        word_n = tl.load(bits + query_n, real_n, other=0)
        logsum_n = tl.load(logsum + query_n, real_n, other=0.0)
        shift_n = tl.load(shift + query_n, real_n, other=0.0)
        score_tn = tl.dot(k_td, tl.trans(q_nd), input_precision="ieee") * scale
        kept_tn = ((word_n[None, :] >> bit_t[:, None]) & 1) != 0
        if MASKED:
            kept_tn &= key_t[:, None] <= query_n[None, :]
        weight_tn = tl.where(kept_tn, tl.exp2(score_tn - logsum_n[None, :]), 0.0)
        grad_v_td = tl.dot(weight_tn.to(grad_nd.dtype), grad_nd, grad_v_td, input_precision="ieee")
        slope_tn = tl.dot(v_td, tl.trans(grad_nd), input_precision="ieee")
        slope_tn = weight_tn * (slope_tn - shift_n[None, :])
        grad_k_td = tl.dot(slope_tn.to(q_nd.dtype), q_nd, grad_k_td, input_precision="ieee")
    return grad_k_td, grad_v_td


@triton.jit(do_not_specialize=["rows", "words"])
def _grad_keys(
    q,
    k,
    v,
    bits,
    bounds,
    grad,
    logsum,
    shift,
    grad_k,
    grad_v,
    scale,
    rows,
    tokens,
    words,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Gradients of a block of keys and values of one KV head, over all its query heads."""
    kv_head = tl.program_id(0)
    _, first, start, end = find_block(bounds, rows, tl.program_id(1), ROWS, KEYS)
    length = end - start
    if first >= length:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    key_t = first + tl.arange(0, KEYS)
    real_t = key_t < length
    token_t = (start + key_t).to(tl.int64)
    lane_d = tl.arange(0, WIDE)
    k_td = _rows(k + kv_head * k_head, token_t, k_token, real_t, lane_d, SIZE, False)
    v_td = _rows(v + kv_head * v_head, token_t, v_token, real_t, lane_d, SIZE, False)
    base = scale * _LOG2E
    word = kv_head.to(tl.int64) * words + first // (PAGE * _PAGES)
    bits += word * tokens + start
    begin = first // QUERIES * QUERIES
    whole = tl.cdiv(first + KEYS, QUERIES) * QUERIES
    grad_k_td = tl.zeros([KEYS, WIDE], tl.float32)
    grad_v_td = tl.zeros([KEYS, WIDE], tl.float32)
    for number in range(group):
        one = (kv_head * group + number).to(tl.int64)
        query = start.to(tl.int64)
        head = (
            q + query * q_token + one * q_head,
            grad + (query * HEADS + one) * SIZE,
            logsum + one * tokens + query,
            shift + one * tokens + query,
            bits,
            q_token,
            length,
        )
        end = tl.minimum(whole, length)
        grads = (grad_k_td, grad_v_td)
        grads = _grad_walk_queries(
            k_td, v_td, key_t, head, begin, end, base, grads, SIZE, HEADS, PAGE, QUERIES, True
        )
        grad_k_td, grad_v_td = _grad_walk_queries(
            k_td, v_td, key_t, head, whole, length, base, grads, SIZE, HEADS, PAGE, QUERIES, False
        )
    place_td = (token_t[:, None] * KV_HEADS + kv_head) * SIZE + lane_d[None, :]
    mask_td = head_mask(real_t, lane_d, SIZE)
    tl.store(grad_k + place_td, (grad_k_td * scale).to(grad_k.dtype.element_ty), mask_td)
    tl.store(grad_v + place_td, grad_v_td.to(grad_v.dtype.element_ty), mask_td)
