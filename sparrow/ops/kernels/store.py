"""Writing pages on a GPU: tokens into slots. A program moves the heads of one token.

Legend of the dimension letters: sparrow/ops/types.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fits(dtype: torch.dtype, _head_size: int) -> bool:
    return dtype in DTYPES


def supports(
    _op: str, k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> bool:
    """Floats up to fp32, pools without gaps, and tokens whose heads lie in one piece each."""
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
        k_NGPD,
        v_NGPD,
        k_TGD,
        v_TGD,
        slots_T.contiguous(),
        k_TGD.stride(0),
        k_TGD.stride(1),
        v_TGD.stride(0),
        v_TGD.stride(1),
        KV_HEADS=kv_heads,
        PAGE=page,
        SIZE=size,
        HEADS=heads,
        WIDE=wide,
        OVERLAP=overlaps(k_NGPD),
        launch_pdl=overlaps(k_NGPD),
        num_warps=max(1, min(8, heads * wide // 256)),
    )


@triton.jit
def _store(
    k_NGPD: tl.tensor,
    v_NGPD: tl.tensor,
    k_TGD: tl.tensor,
    v_TGD: tl.tensor,
    slots_T: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
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
