"""Products of a few tokens with a weight matrix, bound by the reading of the weights.

A program owns some columns of the result for all tokens and walks over the depth, so each weight
is read once; the norm before a product and the residual, bias or gate after it ride along. Columns
too few to fill the device are helped by splitting the depth: every program writes its share and the
last to arrive adds all shares in their order, so results repeat bit for bit. A row's result depends
on that row and on the number of rows only.

Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection, F the
intermediate size. In kernels K is the depth of the product and N its width, as in any GEMM.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.dispatch import weights_settled
from sparrow.ops.kernels.launches import launch_for, tile
from sparrow.ops.kernels.overlap import let_next_start, overlaps, wait, when_ready

TOKENS = 64  # most tokens in a call; beyond, cuBLAS is as fast
ARRIVALS = 4096  # most column blocks of a split product


def fits(dtype: torch.dtype, head_size: int) -> bool:
    """16-bit numbers; the head size does not matter here."""
    return dtype in (torch.bfloat16, torch.float16)


def supports(op: str, x_TK: Tensor, *others: Tensor | None, eps: float | None = None) -> bool:
    """Few tokens, no gradients, one dtype, rows without gaps.

    The norms refuse fp16: they scale rows after the product, and the stream itself times the norm's
    weight may be more than fp16 can hold.
    """
    tensors = [x_TK, *(tensor for tensor in others if tensor is not None)]
    dtypes = (torch.bfloat16,) if eps is not None else (torch.bfloat16, torch.float16)
    return (
        x_TK.dtype in dtypes
        and 1 <= len(x_TK) <= TOKENS
        and all(tensor.dtype == x_TK.dtype and tensor.stride(-1) == 1 for tensor in tensors)
        and all(_dense(tensor) for tensor in others)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def norm_linear(
    x_TC: Tensor, norm_C: Tensor, weight_EC: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    out_TE = x_TC.new_empty(len(x_TC), len(weight_EC))
    grid, options = _launch("norm_linear", x_TC, weight_EC, out_TE)
    _norm_linear_kernel[grid](x_TC, norm_C, weight_EC, bias_E, out_TE, eps, **options)
    return out_TE


def norm_gated(x_TC: Tensor, norm_C: Tensor, weight_FC: Tensor, *, eps: float) -> Tensor:
    out_TF = x_TC.new_empty(len(x_TC), len(weight_FC) // 2)
    grid, options = _launch("norm_gated", x_TC, weight_FC, out_TF)
    _norm_gated_kernel[grid](x_TC, norm_C, weight_FC, out_TF, eps, **options)
    return out_TF


def linear_add(x_TE: Tensor, weight_CE: Tensor, residual_TC: Tensor) -> Tensor:
    out_TC = torch.empty_like(residual_TC, memory_format=torch.contiguous_format)
    grid, options = _launch("linear_add", x_TE, weight_CE, out_TC)
    stride = residual_TC.stride(0)
    _linear_add_kernel[grid](x_TE, weight_CE, residual_TC, out_TC, stride, **options)
    return out_TC


def logits(hidden_TC: Tensor, head_VC: Tensor) -> Tensor:
    out_TV = hidden_TC.new_empty(len(hidden_TC), len(head_VC), dtype=torch.float32)
    grid, options = _launch("logits", hidden_TC, head_VC, out_TV)
    _linear_add_kernel[grid](hidden_TC, head_VC, None, out_TV, 0, **options)
    return out_TV


def _launch(
    op: str, x_TK: Tensor, weight: Tensor, out_TN: Tensor
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid of a product, and the arguments that all products have."""
    (tokens, width), depth = out_TN.shape, weight.shape[1]
    launch = launch_for(op, tokens, width, depth)
    grid = triton.cdiv(width, launch.columns), launch.splits
    overlap = overlaps(x_TK) and weights_settled()  # weights are read before the wait
    arguments = {
        "shares": None,
        "arrivals": None,
        "T": tokens,
        "N": width,
        "K": depth,
        "x_stride": x_TK.stride(0),
        "span": triton.cdiv(triton.cdiv(depth, launch.splits), launch.depth) * launch.depth,
        "TOKENS": tile(tokens),
        "EVEN": depth % launch.depth == 0,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
    }
    if launch.splits > 1:
        assert grid[0] <= ARRIVALS
        count = launch.splits * tokens * (len(weight) + 1)
        arguments["shares"] = torch.empty(count, dtype=torch.float32, device=x_TK.device)
        arguments["arrivals"] = _arrivals(x_TK.device)
    return grid, arguments | launch.options


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counts of arrived programs, zero between launches; one stream at a time may use them."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "call the op before capturing it"
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


def _dense(tensor: Tensor | None) -> bool:
    """As it is stored, of a size that 32-bit offsets reach."""
    return tensor is None or (tensor.is_contiguous() and tensor.numel() < 2**31)


@triton.jit(do_not_specialize=["T"])
def _norm_linear_kernel(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    span: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    let_next_start(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.minimum(columns, N - 1)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    acc, squares = _walk(
        x, norm, weight, rows, first, last, T, K, x_stride, TOKENS, COLUMNS, DEPTH, EVEN, OVERLAP
    )
    if SPLITS > 1:
        if not _is_last(shares, arrivals, acc, squares, columns, T, N, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, columns, T, N, SPLITS, TOKENS)
    acc *= tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    _store(out, acc, columns, T, N, TOKENS)


@triton.jit(do_not_specialize=["T"])
def _norm_gated_kernel(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    span: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    let_next_start(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Gate and up take turns along the tile: a thread then holds both of a column.
    turns = tl.arange(0, 2 * COLUMNS)
    places = tl.program_id(0) * 2 * COLUMNS + turns
    rows = tl.minimum(places // 2, N - 1) + turns % 2 * N
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    acc, squares = _walk(
        x,
        norm,
        weight,
        rows,
        first,
        last,
        T,
        K,
        x_stride,
        TOKENS,
        2 * COLUMNS,
        DEPTH,
        EVEN,
        OVERLAP,
    )
    if SPLITS > 1:
        if not _is_last(shares, arrivals, acc, squares, places, T, 2 * N, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, places, T, 2 * N, SPLITS, TOKENS)
    acc *= tl.rsqrt(squares / K + eps)[:, None]
    gate, up = tl.split(tl.reshape(acc, (TOKENS, COLUMNS, 2)))
    _store(out, gate * tl.sigmoid(gate) * up, columns, T, N, TOKENS)


@triton.jit(do_not_specialize=["T"])
def _linear_add_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    residual_stride: tl.tensor,
    shares: tl.tensor,
    arrivals: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    span: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    let_next_start(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.minimum(columns, N - 1)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    acc, squares = _walk(
        x, None, weight, rows, first, last, T, K, x_stride, TOKENS, COLUMNS, DEPTH, EVEN, OVERLAP
    )
    if SPLITS > 1:
        if not _is_last(shares, arrivals, acc, squares, columns, T, N, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, columns, T, N, SPLITS, TOKENS)
    if residual is not None:
        acc += _load(residual, residual_stride, columns, T, N, TOKENS)
    _store(out, acc, columns, T, N, TOKENS)


@triton.jit
def _walk(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """fp32 products [TOKENS, ROWS] of x, times the norm's weight, and sums of squares of x.

    Where there are rows enough the transpose is computed, weights first: Hopper's wide products
    take 64 rows or more there. EVEN says that the depth is a whole number of blocks, so nothing
    needs a mask along it. The first weights are asked for before the kernel ahead has ended.
    """
    SWAP: tl.constexpr = ROWS >= 64
    tokens, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    x_at = x + tokens[:, None] * x_stride + depth[None, :]
    weight_at = weight + rows[:, None] * K + depth[None, :]
    acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), dtype=tl.float32)
    squares = tl.zeros((TOKENS, DEPTH), dtype=tl.float32)
    if norm is not None:
        factor = tl.load(norm + first + depth, mask=depth < last - first, other=0.0)
    for k in range(first, last, DEPTH):
        mask = (tokens < T)[:, None]
        if EVEN:
            block = tl.load(weight_at + k, eviction_policy="evict_first")
        else:
            inside = (depth < last - k)[None, :]
            mask &= inside
            block = tl.load(weight_at + k, inside, 0.0, eviction_policy="evict_first")
        values = tl.load(x_at + when_ready(k, OVERLAP), mask=mask, other=0.0)
        if norm is not None:
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * factor.to(tl.float32)[None, :]).to(values.dtype)
            # Too narrow for an asynchronous copy, so a step ahead by hand.
            factor = tl.load(norm + k + DEPTH + depth, mask=depth < last - k - DEPTH, other=0.0)
        acc = tl.dot(block, values.T, acc) if SWAP else tl.dot(values, block.T, acc)
    wait(OVERLAP)  # also where a split had nothing to do
    return acc.T if SWAP else acc, tl.sum(squares, 1)


@triton.jit
def _is_last(
    shares: tl.tensor,
    arrivals: tl.tensor,
    acc: tl.tensor,
    squares: tl.tensor,
    places: tl.tensor,
    T: tl.tensor,
    W: tl.tensor,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Leave a share; true for the last program of these columns, which finds all shares there.

    Shares are [SPLITS, T, W] and, behind, the squares [SPLITS, T], where programs of other columns
    write the same. The last program sets the count back to zero for the next launch.
    """
    split, tokens = tl.program_id(1), tl.arange(0, TOKENS)
    _store(shares + split * T * W, acc, places, T, W, TOKENS)
    tl.store(shares + SPLITS * T * W + split * T + tokens, squares, mask=tokens < T)
    tl.debug_barrier()  # all threads have stored before one of them tells
    count = arrivals + tl.program_id(0)
    last = tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def _join(
    shares: tl.tensor,
    places: tl.tensor,
    T: tl.tensor,
    W: tl.tensor,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sums of all shares, always in the same order."""
    tokens = tl.arange(0, TOKENS)
    squares_at = shares + SPLITS * T * W + tokens
    acc = _load(shares, W, places, T, W, TOKENS)
    squares = tl.load(squares_at, mask=tokens < T, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += _load(shares + split * T * W, W, places, T, W, TOKENS)
        squares += tl.load(squares_at + split * T, tokens < T, 0.0, cache_modifier=".cg")
    return acc, squares


@triton.jit
def _load(
    source: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Some columns of all tokens in fp32, past the first cache: other programs may have written."""
    tokens = tl.arange(0, TOKENS)
    mask = (tokens < T)[:, None] & (columns < N)[None, :]
    at = source + tokens[:, None] * stride + columns[None, :]
    return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _store(
    out: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    tokens = tl.arange(0, TOKENS)
    mask = (tokens < T)[:, None] & (columns < N)[None, :]
    at = out + tokens[:, None] * N + columns[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)
