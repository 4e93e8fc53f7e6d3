"""Writing pages on a GPU: tokens into slots, and the landmarks of the pages they finish.

A program moves the heads of one token. Landmarks are summed key after key, in the order of the
page, so that a page has the same landmark bits whether prefill or decoding finished it.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONGEST_PAGE = 64  # the sum over a page is unrolled
DECODE_HEADS = 1  # heads of one program of append_pages: few tokens, so spread them


def fits(dtype: torch.dtype, _head_size: int) -> bool:
    return dtype in DTYPES


def supports(op: str, k_NGPD: Tensor, *tensors: Tensor) -> bool:
    """Floats up to fp32, pools without gaps, and tokens whose heads lie in one piece each."""
    pools, tokens = {
        "write_pages": (1, 2),
        "summarise_pages": (1, 0),
        "append_pages": (2, 2),
    }[op]
    blocks = (k_NGPD, *tensors[:pools])
    items = tensors[pools : pools + tokens]
    return (
        all(x.dtype in DTYPES for x in (*blocks, *items))
        and all(x.is_contiguous() for x in blocks)
        and all(x.stride(2) == 1 for x in items)
        and k_NGPD.shape[2] <= LONGEST_PAGE
    )


def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    _launch(k_NGPD, v_NGPD, k_NGPD, k_TGD, v_TGD, slots_T, write=True, summarise=False)


def summarise_pages(k_NGPD: Tensor, landmark_NGD: Tensor, slots_T: Tensor) -> None:
    unread = k_NGPD[:, :, 0]
    _launch(k_NGPD, k_NGPD, landmark_NGD, unread, unread, slots_T, write=False, summarise=True)


def append_pages(
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    landmark_NGD: Tensor,
    k_BGD: Tensor,
    v_BGD: Tensor,
    slots_B: Tensor,
) -> None:
    _launch(
        k_NGPD,
        v_NGPD,
        landmark_NGD,
        k_BGD,
        v_BGD,
        slots_B,
        write=True,
        summarise=True,
        heads=DECODE_HEADS,
    )


def _launch(
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    landmark_NGD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    slots_T: Tensor,
    *,
    write: bool,
    summarise: bool,
    heads: int | None = None,
) -> None:
    """One program for each token and each `heads` of its heads (default: all of them)."""
    _, kv_heads, page, size = k_NGPD.shape
    heads = heads or triton.next_power_of_2(kv_heads)
    wide = triton.next_power_of_2(size)
    if not len(slots_T):
        return
    _store[(len(slots_T), triton.cdiv(kv_heads, heads))](
        k_NGPD,
        v_NGPD,
        landmark_NGD,
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
        WRITE=write,
        SUMMARISE=summarise,
        OVERLAP=overlaps(k_NGPD),
        launch_pdl=overlaps(k_NGPD),
        num_warps=max(1, min(8, heads * wide // 256)),
    )


@triton.jit
def _store(
    k_NGPD: tl.tensor,
    v_NGPD: tl.tensor,
    landmark_NGD: tl.tensor,
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
    WRITE: tl.constexpr,
    SUMMARISE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """HEADS heads of one token: write them, and store the landmark if the token ends its page."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // PAGE, slot % PAGE
        g = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, WIDE)[None, :]
        real = (g < KV_HEADS) & (d < SIZE)
        head = block * KV_HEADS + g
        row = head * PAGE * SIZE + d  # the first key of the page
        key = tl.zeros((HEADS, WIDE), tl.float32)
        if WRITE:
            place = row + offset * SIZE
            new_key = tl.load(k_TGD + token * k_token + g * k_head + d, real)
            new_value = tl.load(v_TGD + token * v_token + g * v_head + d, real)
            stored = new_key.to(k_NGPD.dtype.element_ty)
            tl.store(k_NGPD + place, stored, real)
            tl.store(v_NGPD + place, new_value.to(v_NGPD.dtype.element_ty), real)
            key = stored.to(tl.float32)
        if SUMMARISE:
            finishes = real & (offset == PAGE - 1)
            mean = _mean_key(k_NGPD + row, key, finishes, PAGE, SIZE, WRITE)
            target = landmark_NGD + head * SIZE + d
            tl.store(target, mean.to(landmark_NGD.dtype.element_ty), finishes)


@triton.jit
def _mean_key(
    page: tl.tensor,
    last_key: tl.tensor,
    real: tl.tensor,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    IN_HAND: tl.constexpr,
) -> tl.tensor:
    """The mean of a page's keys; the last one is `last_key` if it is in hand, else in memory."""
    IN_MEMORY: tl.constexpr = PAGE - 1 if IN_HAND else PAGE
    total = tl.zeros_like(last_key)
    for p in tl.static_range(IN_MEMORY):
        total += tl.load(page + p * SIZE, real).to(tl.float32)
    if IN_HAND:
        total += last_key
    return tl.div_rn(total, tl.full(total.shape, PAGE, tl.float32))
