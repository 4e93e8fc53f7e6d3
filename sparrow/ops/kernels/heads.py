"""Heads out of the fused projection: norm per head and rotation in one pass.

Some heads of one token per program; values are not copied.
Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.dispatch import needs_gradients
from sparrow.ops.kernels.overlap import overlap_options, wait

HEADS = 8  # of a program
SIZES = (32, 64, 128, 256)  # of a head


def supports_dtype(op: str, dtype: torch.dtype, head_size: int) -> bool:
    """16-bit numbers; heads of a power of two."""
    return dtype in (torch.bfloat16, torch.float16) and head_size in SIZES


def supports(
    op: str, qkv_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, *norms: Tensor | None, **_: Any
) -> bool:
    """No gradients, contiguous rows."""
    others = [cos_TD, sin_TD, *(norm for norm in norms if norm is not None)]
    return (
        supports_dtype(op, qkv_TE.dtype, 2 * cos_TD.shape[1])
        and not needs_gradients(qkv_TE, *others)
        and len(qkv_TE) > 0
        and cos_TD.dtype == sin_TD.dtype == torch.float32
        and qkv_TE.stride(1) == 1
        and all(tensor.is_contiguous() for tensor in others)
    )


def split_heads(
    qkv_TE: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    *,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, half = cos_TD.shape
    heads = qkv_TE.shape[1] // (2 * half) - 2 * kv_heads
    if q_norm_D is None or k_norm_D is None:
        q_norm_D = k_norm_D = None
    q_THD = qkv_TE.new_empty(tokens, heads, 2 * half)
    k_TGD = qkv_TE.new_empty(tokens, kv_heads, 2 * half)
    _split_heads_kernel[(tokens, triton.cdiv(heads + kv_heads, HEADS))](
        *(qkv_TE, cos_TD, sin_TD, q_norm_D, k_norm_D, q_THD, k_TGD),
        *(qkv_TE.stride(0), eps),
        H=heads,
        G=kv_heads,
        HALF=half,
        HEADS=HEADS,
        **overlap_options(qkv_TE),
        num_warps=max(1, HEADS * half // 256),  # 16 bytes of each half a thread
    )
    return q_THD, k_TGD, qkv_TE.unflatten(1, (-1, 2 * half))[:, heads + kv_heads :]


@triton.jit
def _split_heads_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k,
    stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channels = tl.arange(0, HALF)
    is_q = (heads < H)[:, None]
    is_k = ((heads >= H) & (heads < H + G))[:, None]
    places = heads[:, None] * (2 * HALF) + channels[None, :]
    first = tl.load(qkv + token * stride + places, is_q | is_k, 0.0).to(tl.float32)
    second = tl.load(qkv + token * stride + places + HALF, is_q | is_k, 0.0).to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(first * first + second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first *= scale * _factor(q_norm + channels, k_norm + channels, is_q)
        second *= scale * _factor(q_norm + channels + HALF, k_norm + channels + HALF, is_q)
    c = tl.load(cos + token * HALF + channels)[None, :]
    s = tl.load(sin + token * HALF + channels)[None, :]
    q_at, k_at = q + token * (H * 2 * HALF) + places, k + token * (G * 2 * HALF) + places
    k_at -= H * 2 * HALF
    turned = (first * c - second * s).to(q.dtype.element_ty)
    tl.store(q_at, turned, mask=is_q)
    tl.store(k_at, turned, mask=is_k)
    turned = (second * c + first * s).to(q.dtype.element_ty)
    tl.store(q_at + HALF, turned, mask=is_q)
    tl.store(k_at + HALF, turned, mask=is_k)


@triton.jit
def _factor(q_norm, k_norm, is_q):
    """The norm's weight of each head's kind."""
    return tl.where(is_q, tl.load(q_norm)[None, :], tl.load(k_norm)[None, :]).to(tl.float32)
