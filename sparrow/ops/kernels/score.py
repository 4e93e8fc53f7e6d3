"""Scores of pages on a GPU: the mean query of a group times every landmark.

All that counts is reading landmarks fast. A program takes a block of pages for one KV head; the
heads of a block run side by side, because their landmarks lie side by side in memory.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 32
WARPS = 1


def fits(dtype: torch.dtype, _head_size: int) -> bool:
    return dtype in DTYPES


def supports(
    _op: str,
    q_BHD: Tensor,
    landmark_NGD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    *,
    page: int,
) -> bool:
    """Floats up to fp32, and landmarks without gaps."""
    return (
        q_BHD.dtype in DTYPES
        and landmark_NGD.dtype in DTYPES
        and q_BHD.stride(2) == 1
        and landmark_NGD.is_contiguous()
    )


def score_pages(
    q_BHD: Tensor, landmark_NGD: Tensor, table_BM: Tensor, lengths_B: Tensor, *, page: int
) -> Tensor:
    rows, width = table_BM.shape
    _, kv_heads, size = landmark_NGD.shape
    group = q_BHD.shape[1] // kv_heads
    score_BGM = q_BHD.new_empty((rows, kv_heads, width), dtype=torch.float32)
    if not score_BGM.numel():
        return score_BGM
    _score[(kv_heads, triton.cdiv(width, BLOCK), rows)](
        score_BGM,
        q_BHD,
        landmark_NGD,
        table_BM,
        lengths_B.contiguous(),
        width,
        q_BHD.stride(0),
        q_BHD.stride(1),
        table_BM.stride(0),
        table_BM.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        WIDE_GROUP=triton.next_power_of_2(group),
        PAGE=page,
        SIZE=size,
        WIDE=triton.next_power_of_2(size),
        BLOCK=BLOCK,
        OVERLAP=overlaps(q_BHD),
        launch_pdl=overlaps(q_BHD),
        num_warps=WARPS,
    )
    return score_BGM


@triton.jit(do_not_specialize=["width", "table_row"])
def _score(
    score_BGM: tl.tensor,
    q_BHD: tl.tensor,
    landmark_NGD: tl.tensor,
    table_BM: tl.tensor,
    lengths_B: tl.tensor,
    width: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    table_row: tl.tensor,
    table_column: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE_GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The scores of BLOCK pages of one row for one KV head; nothing is read beyond its length."""
    wait(OVERLAP)
    g = tl.program_id(0)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(2).to(tl.int64)
    finished = tl.load(lengths_B + b).to(tl.int32) // PAGE
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    if tl.program_id(1) * BLOCK < finished:
        d = tl.arange(0, WIDE)
        q_RD = q_BHD + b * q_row + g * GROUP * q_head
        query = _mean_query(q_RD, q_head, d, GROUP, WIDE_GROUP, SIZE)
        real = m < tl.minimum(finished, width)
        block = tl.load(table_BM + b * table_row + m * table_column, real, other=0).to(tl.int64)
        landmark = tl.load(
            landmark_NGD + (block[:, None] * KV_HEADS + g) * SIZE + d[None, :],
            real[:, None] & (d < SIZE)[None, :],
            other=0.0,
        )
        product = tl.sum(landmark.to(tl.float32) * query[None, :], 1)
        score = tl.where(real, product, float("-inf"))
    tl.store(score_BGM + (b * KV_HEADS + g) * width + m, score, m < width)


@triton.jit
def _mean_query(
    q_RD: tl.tensor,
    q_head: tl.tensor,
    d: tl.tensor,
    GROUP: tl.constexpr,
    WIDE_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The mean query of one group, fp32 [D]."""
    r = tl.arange(0, WIDE_GROUP)[:, None]
    real = (r < GROUP) & (d < SIZE)[None, :]
    query = tl.load(q_RD + r * q_head + d[None, :], real, other=0.0)
    return tl.sum(query.to(tl.float32), 0) / GROUP
