"""Decode attention on a GPU: kept pages are read once, long rows are split over programs.

The pages of a row and KV head (its list, or all of them) are cut into splits. One program attends
over one split; where there may be several, a second kernel joins their partial softmaxes in order.
The maximum number of splits follows from the shapes of queries, pool and table (`plan`), the pages
of a split from the number of pages of the row and head (`_split_pages`): few kept pages of a long
row are split like all pages of a short one. So nothing synchronises with the GPU, a CUDA graph can
hold the call, the list of all pages gives the bits of no list, and other rows change no bit of a
row. Verification of drafts is the same with several queries for each row and head, which share the
keys and values that are read. Legend of the dimension letters: sparrow/ops/types.py; X = splits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlap_options, wait
from sparrow.ops.types import PageLists

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_SIZE, MOST_SIZE = 32, 256  # numbers of a head
PROGRAMS = 256  # target of a call: two on each of 132 multiprocessors
ENOUGH = 192  # programs without splits: from here on splits only even out the work
MOST_PROGRAMS = 8192  # so that partial results stay small
MOST_SPLITS = 64  # of a row
LEAST_SPLIT = 128  # tokens of one program, where there are few
EVEN_SPLIT = 1024  # tokens of one program, where there are enough
LONG_SPLIT = 2048  # maximum tokens of one program: more splits instead of longer ones
MOST_JOINED = 16  # splits that are joined per step
JOIN_WARPS = 1
VERIFY_STAGES = 3  # of several queries: 524 us instead of 653 with 4 (H200, 32 heads, 32 x 16K)
MOST_GROUP = 64  # query heads of a KV head
LOWEST = tl.constexpr(-1e30)  # a maximum of no scores
MOST_QUERIES = 128  # of a KV head: query heads, each with all tokens that are verified


class DecodePlan(NamedTuple):
    """How a call is cut: tokens per step, splits of a row (at most), tokens of a split (at least),
    and how a step is scheduled.
    """

    tile: int
    splits: int
    least: int
    warps: int
    stages: int


def plan(rows: int, kv_heads: int, tokens: int, head_size: int, itemsize: int) -> DecodePlan:
    """A plan from shapes; `tokens` is the room of a row of the table.

    A tile of K takes 16 KB, so that the tiles in flight of two programs fit a multiprocessor.
    """
    tile = max(16, min(128, 16384 // (triton.next_power_of_2(head_size) * itemsize)))
    pairs = rows * kv_heads
    few = triton.next_power_of_2(4 * pairs)
    least = EVEN_SPLIT if pairs >= ENOUGH else max(tile, LEAST_SPLIT, few)
    target = max(PROGRAMS // pairs, -(-tokens // LONG_SPLIT))
    most = min(MOST_SPLITS, MOST_PROGRAMS // pairs, -(-tokens // least))
    return DecodePlan(tile, max(1, min(target, most)), least, warps=4, stages=4)


def supports_dtype(_op: str, dtype: torch.dtype, head_size: int) -> bool:
    """bf16, fp16 or fp32, and head sizes from 32 to 256 that are multiples of 8."""
    return dtype in DTYPES and LEAST_SIZE <= head_size <= MOST_SIZE and head_size % 8 == 0


def supports(
    op: str, q_BHD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, *others: Any, **_: Any
) -> bool:
    """One dtype that fits, contiguous pools of pages of a power of two; decoding: groups not too
    large, as a program has all heads of one.
    """
    kv_heads, page = k_NGPD.shape[1:3]
    return (
        supports_dtype(op, q_BHD.dtype, q_BHD.shape[2])
        and q_BHD.dtype == k_NGPD.dtype == v_NGPD.dtype
        and k_NGPD.is_contiguous()
        and v_NGPD.is_contiguous()
        and page.bit_count() == 1
        and (op != "attend_decode" or q_BHD.shape[1] <= MOST_GROUP * kv_heads)
        and (op != "attend_verify" or _verifiable(q_BHD, kv_heads, others[0]))
    )


def _verifiable(q_THD: Tensor, kv_heads: int, table_BM: Tensor) -> bool:
    rows = max(1, len(table_BM))
    return q_THD.shape[0] // rows * q_THD.shape[1] <= MOST_QUERIES * kv_heads


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
    return _attend(q_BHD, k_NGPD, v_NGPD, table_BM, lengths_B, lists, 1, scale)


def attend_verify(
    q_THD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_T: Tensor,
    *,
    scale: float,
) -> Tensor:
    queries = len(q_THD) // max(1, len(table_BM))
    return _attend(q_THD, k_NGPD, v_NGPD, table_BM, lengths_T, None, queries, scale)


def _attend(
    q_BHD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    lists: PageLists | None,
    queries: int,
    scale: float,
) -> Tensor:
    """Attention of `queries` tokens of each row of the table; other arguments are by token."""
    kv_heads, page, size = k_NGPD.shape[1:]
    out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    if not out_BHD.numel():
        return out_BHD
    # The numbers of a head must be contiguous; rows and heads may have any strides.
    q_BHD = q_BHD if q_BHD.stride(2) == 1 else q_BHD.contiguous()
    cut = plan(len(table_BM), kv_heads, table_BM.shape[1] * page, size, q_BHD.itemsize)
    width = table_BM.shape[1] if lists is None else lists.pages.shape[2]
    least = max(1, cut.least // page)
    splits = max(1, min(cut.splits, -(-width // least)))  # a narrow list cannot fill more
    partials = _partials(out_BHD, splits)
    lengths_B = lengths_B.contiguous()
    # Without lists the kernels read no list: any pointer will do.
    pages, counts = (lengths_B, lengths_B) if lists is None else (t.contiguous() for t in lists)
    group = q_BHD.shape[1] // kv_heads
    shape = {  # what both kernels are compiled for
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "SIZE": size,
        "WIDE": triton.next_power_of_2(size),
        "PAGE": page,
        "TILE": cut.tile,
        "LISTED": lists is not None,
        **overlap_options(q_BHD),
    }
    sizes = width, splits, cut.splits, least
    padded = max(16, triton.next_power_of_2(group * queries))
    _attend_split[kv_heads, len(table_BM), splits](
        *(q_BHD, k_NGPD, v_NGPD, table_BM, lengths_B, pages, counts),
        *(out_BHD, *partials, scale * math.log2(math.e), *sizes),
        *(*q_BHD.stride()[:2], *table_BM.stride()),
        **shape,
        PADDED=padded,
        DIRECT=splits == 1,
        num_warps=max(cut.warps, padded // 16),
        num_stages=cut.stages if queries == 1 else VERIFY_STAGES,
    )
    if splits > 1:
        _join[q_BHD.shape[1], len(q_BHD)](
            *(out_BHD, *partials, lengths_B, counts, *sizes),
            **shape,
            JOINED=min(MOST_JOINED, triton.next_power_of_2(cut.splits)),
            num_warps=JOIN_WARPS,
        )
    return out_BHD


def _partials(out_BHD: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers of partial results: values [B, H, X, D], tops and totals [B, H, X], in fp32."""
    if splits == 1:
        return out_BHD, out_BHD, out_BHD  # not read
    rows, heads, size = out_BHD.shape
    value, weight = (
        torch.empty(shape, dtype=torch.float32, device=out_BHD.device)
        for shape in ((rows, heads, splits, size), (2, rows, heads, splits))
    )
    return value, weight[0], weight[1]


@triton.jit
def _page_count(
    lengths,
    counts,
    row,
    kv_head,
    width,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The length of a row, and the number of pages of a KV head, at most the width."""
    length = tl.load(lengths + row * QUERIES).to(tl.int32)
    for query in tl.static_range(1, QUERIES):
        length = tl.maximum(length, tl.load(lengths + row * QUERIES + query).to(tl.int32))
    count = tl.cdiv(length, PAGE)
    if LISTED:
        count = tl.load(counts + row * KV_HEADS + kv_head).to(tl.int32)
        count = tl.where(length > 0, count, 0)
    return length, tl.minimum(count, width)


@triton.jit
def _split_pages(count, shares, least, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Pages of a split of `count` pages: even shares in whole tiles, with a minimum size."""
    even = tl.cdiv(count, shares)
    if TILE > PAGE:
        even = tl.cdiv(even, TILE // PAGE) * (TILE // PAGE)
    return tl.maximum(even, least)


@triton.jit
def head_mask(real_r, lane_d, SIZE: tl.constexpr):
    """The mask of existing numbers of heads; where heads fill their lanes, of rows alone."""
    mask = real_r[:, None]
    if lane_d.shape[0] != SIZE:
        mask = mask & (lane_d < SIZE)[None, :]
    return mask


@triton.jit
def _look_up(
    table, pages, token, count, length, table_column, PAGE: tl.constexpr, LISTED: tl.constexpr
):
    """The physical page of each token of the list, and whether there is such a token."""
    logical = token // PAGE
    inside = logical < count
    if LISTED:
        logical = tl.load(pages + logical, inside, other=0).to(tl.int32)
    block = tl.load(table + logical * table_column, inside, other=0).to(tl.int64)
    return block, inside & (logical * PAGE + token % PAGE < length)


@triton.jit(do_not_specialize=["width", "splits", "shares", "least", "table_row"])
def _attend_split(
    q,
    k,
    v,
    table,
    lengths,
    pages,
    counts,
    out,
    value,
    top,
    total,
    scale,
    width,
    splits,
    shares,
    least,
    q_row,
    q_head,
    table_row,
    table_column,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
    PADDED: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Softmax attention of one group of query heads over one split of its pages.

    r counts the query heads of the first token, then those of the next. Page numbers of a tile come
    from the step before: looked up in the same step, they would take the place of K and V in the
    compiler's pipeline. Scores are in base 2 (`scale` holds log2 e).
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    table += row * table_row
    pages += (row * KV_HEADS + kv_head) * width
    query_r, lane_d, lane_t = tl.arange(0, PADDED), tl.arange(0, WIDE), tl.arange(0, TILE)
    real_r = query_r < GROUP * QUERIES
    token_r, head_r = row * QUERIES + query_r // GROUP, kv_head * GROUP + query_r % GROUP
    q += (token_r * q_row + head_r * q_head)[:, None] + lane_d[None, :]
    wait(OVERLAP)
    length, count = _page_count(
        lengths, counts, row, kv_head, width, KV_HEADS, QUERIES, PAGE, LISTED
    )
    if QUERIES > 1:
        length_r = tl.load(lengths + token_r, real_r, other=0).to(tl.int32)
    split_pages = _split_pages(count, shares, least, PAGE, TILE)
    first = split * split_pages
    if first >= tl.maximum(count, 1 if DIRECT else 0):  # the only split also writes a row of zeros
        return
    begin, end = first * PAGE, tl.minimum(first + split_pages, count) * PAGE
    token_t = begin + lane_t
    block_t, real_t = _look_up(table, pages, token_t, count, length, table_column, PAGE, LISTED)
    q_rd = tl.load(q, head_mask(real_r, lane_d, SIZE), other=0.0)
    top_r = tl.full([PADDED], float("-inf"), tl.float32)
    total_r = tl.zeros([PADDED], tl.float32)
    value_rd = tl.zeros([PADDED, WIDE], tl.float32)

    for _ in range(begin, end, TILE):
        place_t = (block_t * KV_HEADS + kv_head) * (PAGE * SIZE) + token_t % PAGE * SIZE
        place_td = place_t[:, None] + lane_d[None, :]
        real_td = head_mask(real_t, lane_d, SIZE)
        k_td = tl.load(k + place_td, real_td, other=0.0)
        v_td = tl.load(v + place_td, real_td, other=0.0)
        score_rt = tl.dot(q_rd, tl.trans(k_td), input_precision="ieee") * scale
        if QUERIES > 1:
            score_rt = tl.where(token_t[None, :] < length_r[:, None], score_rt, float("-inf"))
        else:
            score_rt = tl.where(real_t[None, :], score_rt, float("-inf"))
        token_t += TILE
        block_t, real_t = _look_up(table, pages, token_t, count, length, table_column, PAGE, LISTED)
        higher_r = tl.maximum(top_r, tl.max(score_rt, 1))
        higher_r = tl.maximum(higher_r, LOWEST)  # a token may see nothing of a tile
        weight_rt = tl.exp2(score_rt - higher_r[:, None])
        shrink_r = tl.exp2(top_r - higher_r)
        total_r = total_r * shrink_r + tl.sum(weight_rt, 1)
        value_rd = value_rd * shrink_r[:, None]
        value_rd = tl.dot(weight_rt.to(v_td.dtype), v_td, value_rd, input_precision="ieee")
        top_r = higher_r

    place_r = token_r * KV_HEADS * GROUP + head_r
    if DIRECT:
        value_rd = value_rd / tl.where(total_r == 0, 1.0, total_r)[:, None]
        place_rd = place_r[:, None] * SIZE + lane_d[None, :]
        tl.store(out + place_rd, value_rd.to(out.dtype.element_ty), head_mask(real_r, lane_d, SIZE))
    else:
        place_r = place_r * splits + split
        tl.store(top + place_r, top_r, real_r)
        tl.store(total + place_r, total_r, real_r)
        place_rd = place_r[:, None] * SIZE + lane_d[None, :]
        tl.store(value + place_rd, value_rd, head_mask(real_r, lane_d, SIZE))


@triton.jit(do_not_specialize=["width", "splits", "shares", "least"])
def _join(
    out,
    value,
    top,
    total,
    lengths,
    counts,
    width,
    splits,
    shares,
    least,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Join the partial softmaxes of one query head of one token."""
    wait(OVERLAP)
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = token // QUERIES
    _, count = _page_count(
        lengths, counts, row, head // GROUP, width, KV_HEADS, QUERIES, PAGE, LISTED
    )
    used = tl.cdiv(count, _split_pages(count, shares, least, PAGE, TILE))
    place = token * KV_HEADS * GROUP + head
    lane_d = tl.arange(0, WIDE)
    top_so_far = tl.full([], float("-inf"), tl.float32)
    total_so_far = tl.zeros([], tl.float32)
    value_d = tl.zeros([WIDE], tl.float32)
    for start in range(0, used, JOINED):
        split_x = start + tl.arange(0, JOINED)
        real_x = split_x < used
        place_x = place * splits + split_x
        top_x = tl.load(top + place_x, real_x, other=float("-inf"))
        total_x = tl.load(total + place_x, real_x, other=0.0)
        place_xd = place_x[:, None] * SIZE + lane_d[None, :]
        value_xd = tl.load(value + place_xd, head_mask(real_x, lane_d, SIZE), other=0.0)
        higher = tl.maximum(top_so_far, tl.max(top_x, 0))
        grow_x = tl.exp2(top_x - higher)
        shrink = tl.exp2(top_so_far - higher)
        total_so_far = total_so_far * shrink + tl.sum(total_x * grow_x, 0)
        value_d = value_d * shrink + tl.sum(value_xd * grow_x[:, None], 0)
        top_so_far = higher
    value_d = value_d / tl.where(total_so_far == 0, 1.0, total_so_far)
    tl.store(out + place * SIZE + lane_d, value_d.to(out.dtype.element_ty), lane_d < SIZE)
