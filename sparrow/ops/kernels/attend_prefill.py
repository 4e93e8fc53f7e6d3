"""Causal attention of prompts, or chunks of them, over pages, on a GPU.

One program attends with a block of queries of one sequence and one head, in one pass over the keys
that they may see. Blocks are counted from the first query of each sequence, so neighbours in a
pack change nothing. A program finds its block in the bounds on the device, without synchronisation.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.attend_decode import head_mask
from sparrow.ops.kernels.attend_decode import supports as supports
from sparrow.ops.kernels.attend_decode import supports_dtype as supports_dtype


class PrefillPlan(NamedTuple):
    """Queries of a block, keys per step, and how a step is scheduled."""

    queries: int
    keys: int
    warps: int
    stages: int


def plan(head_size: int, itemsize: int) -> PrefillPlan:
    """The largest blocks whose registers do not spill; fp32 runs without tensor cores."""
    if itemsize == 4:
        return PrefillPlan(queries=32, keys=16, warps=8, stages=2)
    return PrefillPlan(queries=128, keys=64 if head_size <= 128 else 32, warps=8, stages=3)


def attend_causal_paged(
    q_THD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    bounds: Tensor,
    *,
    scale: float,
) -> Tensor:
    tokens, heads, size = q_THD.shape
    kv_heads, page = k_NGPD.shape[1:3]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if not out_THD.numel():
        return out_THD
    cut = plan(size, q_THD.itemsize)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    _attend_block[heads, triton.cdiv(tokens, cut.queries) + len(lengths_B)](
        *(q_THD, k_NGPD, v_NGPD, table_BM, lengths_B.contiguous(), bounds.contiguous(), out_THD),
        *(scale * math.log2(math.e), len(lengths_B)),
        *(*q_THD.stride()[:2], *table_BM.stride()),
        ROWS=triton.next_power_of_2(len(lengths_B)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        WIDE=triton.next_power_of_2(size),
        PAGE=page,
        QUERIES=cut.queries,
        KEYS=cut.keys,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out_THD


@triton.jit
def find_block(bounds, rows, program, ROWS: tl.constexpr, QUERIES: tl.constexpr):
    """The row of a program, its first query in the row, and where the row's queries start and end.

    Row b gets the programs from bounds[b] // QUERIES + b on, which are never too few; those to
    spare get a first query beyond the end.
    """
    row_b = tl.arange(0, ROWS)
    bound_b = tl.load(bounds + row_b, row_b < rows, other=0).to(tl.int32)
    program_b = tl.where(row_b < rows, bound_b // QUERIES + row_b, program + 1)
    row = tl.sum((program_b <= program).to(tl.int32), 0) - 1
    start = tl.load(bounds + row).to(tl.int32)
    end = tl.load(bounds + row + 1).to(tl.int32)
    return row, (program - (start // QUERIES + row)) * QUERIES, start, end


@triton.jit
def _look_up(table, key, length, table_column, PAGE: tl.constexpr):
    """The physical page of each key of a sequence."""
    place = table + key // PAGE * table_column
    return tl.load(place, key < length, other=0).to(tl.int64)


@triton.jit
def _walk(
    q_nd,
    position_n,
    pages,
    begin,
    end,
    scale,
    softmax,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One pass over the keys begin..end; MASKED where some of them lie after some queries.

    pages: pools of keys and values, the row of the table, its stride, and how many keys there are.
    softmax: of each query the top score, the sum of weights and the weighted values, so far.
    Page numbers of a tile come from the step before: looked up in the same step, they would take
    the place of K and V in the compiler's pipeline.
    """
    k, v, table, table_column, length = pages
    top_n, total_n, value_nd = softmax
    lane_d = tl.arange(0, q_nd.shape[1])
    key_t = begin + tl.arange(0, KEYS)
    block_t = _look_up(table, key_t, length, table_column, PAGE)
    for _ in range(begin, end, KEYS):
        place_t = block_t * (KV_HEADS * PAGE * SIZE) + key_t % PAGE * SIZE
        place_td = place_t[:, None] + lane_d[None, :]
        if MASKED or q_nd.shape[1] != SIZE:
            real_td = head_mask(key_t < length, lane_d, SIZE)
            k_td = tl.load(k + place_td, real_td, other=0.0)
            v_td = tl.load(v + place_td, real_td, other=0.0)
        else:
            k_td = tl.load(k + place_td)
            v_td = tl.load(v + place_td)
        score_nt = tl.dot(q_nd, tl.trans(k_td), input_precision="ieee") * scale
        if MASKED:
            seen_nt = key_t[None, :] <= position_n[:, None]
            score_nt = tl.where(seen_nt, score_nt, float("-inf"))
        key_t += KEYS
        block_t = _look_up(table, key_t, length, table_column, PAGE)
        higher_n = tl.maximum(top_n, tl.max(score_nt, 1))
        weight_nt = tl.exp2(score_nt - higher_n[:, None])
        shrink_n = tl.exp2(top_n - higher_n)
        total_n = total_n * shrink_n + tl.sum(weight_nt, 1)
        value_nd = value_nd * shrink_n[:, None]
        value_nd = tl.dot(weight_nt.to(v_td.dtype), v_td, value_nd, input_precision="ieee")
        top_n = higher_n
    return top_n, total_n, value_nd


@triton.jit(do_not_specialize=["rows", "table_row"])
def _attend_block(
    q,
    k,
    v,
    table,
    lengths,
    bounds,
    out,
    scale,
    rows,
    q_token,
    q_head,
    table_row,
    table_column,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of queries of one head: whole tiles of keys first, then those under the causal mask.

    Heads of a group run side by side and share their keys in cache; blocks with the most keys run
    first. Scores are in base 2 (`scale` holds log2 e).
    """
    head = tl.program_id(0)
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    row, first, start, end = find_block(bounds, rows, program, ROWS, QUERIES)
    if first >= end - start:
        return
    length = tl.load(lengths + row).to(tl.int32)
    query_n = first + tl.arange(0, QUERIES)
    real_n = query_n < end - start
    position_n = length - (end - start) + query_n
    token_n = (start + query_n).to(tl.int64)
    lane_d = tl.arange(0, WIDE)
    q += token_n[:, None] * q_token + head * q_head + lane_d[None, :]
    q_nd = tl.load(q, head_mask(real_n, lane_d, SIZE), other=0.0)

    kv_head = head // (HEADS // KV_HEADS)
    k += kv_head * (PAGE * SIZE)
    v += kv_head * (PAGE * SIZE)
    table += row.to(tl.int64) * table_row
    position = length - (end - start) + first
    whole = (position + 1) // KEYS * KEYS
    stop = tl.minimum(position + QUERIES, length)
    pages = (k, v, table, table_column, length)
    top_n = tl.full([QUERIES], float("-inf"), tl.float32)
    softmax = (top_n, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDE], tl.float32))
    softmax = _walk(
        q_nd, position_n, pages, 0, whole, scale, softmax, KV_HEADS, SIZE, PAGE, KEYS, False
    )
    _, total_n, value_nd = _walk(
        q_nd, position_n, pages, whole, stop, scale, softmax, KV_HEADS, SIZE, PAGE, KEYS, True
    )
    value_nd = value_nd / total_n[:, None]
    out += (token_n[:, None] * HEADS + head) * SIZE + lane_d[None, :]
    tl.store(out, value_nd.to(out.dtype.element_ty), head_mask(real_n, lane_d, SIZE))
