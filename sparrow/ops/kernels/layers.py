"""Products of a few tokens with a weight matrix, and heads out of the fused projection.

A program of a product owns some columns of the result for all tokens and walks over the depth, so
each weight is read once; the norm before a product and the residual, bias or gate after it are
fused. Where columns are too few to fill the device, the depth is split: every program writes its
partial sum and the last one adds them in order, so results repeat bit for bit. A
row's result depends on that row and on the number of rows only.

Launch parameters by shape were tuned on an H200 with whole decode steps; they change speed alone.
Every launch overlaps the previous one, which paid only where a program takes more than half of a
processor's shared memory (smaller ones were slower than without overlap, presumably because two of
one launch then share the first free processor).

`split_heads`: norm per head and rotation in one pass, some heads of one token per program; values
are not copied.

Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection, F the
intermediate size. In kernels K is the depth of the product and N its width, as in any GEMM.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from sparrow.ops.dispatch import needs_gradients, weights_settled
from sparrow.ops.kernels.overlap import let_next_start, overlap_options, wait, when_ready

TOKENS = 64  # most tokens in a call; beyond, cuBLAS is as fast
ARRIVALS = 4096  # most column blocks of a split product
PROCESSORS = 132
LEAST_SPAN = 256  # of the depth, for one of several splits
HEADS = 8  # of a program
GATE_COLUMNS = 1024  # of a program
SIZES = (32, 64, 128, 256)  # of a head


def supports_dtype(op: str, dtype: torch.dtype, head_size: int) -> bool:
    """16-bit numbers; heads of a power of two, where the op splits heads."""
    sized = op != "split_heads" or head_size in SIZES
    return dtype in (torch.bfloat16, torch.float16) and sized


def supports(op: str, x_TK: Tensor, *others: Tensor | None, **options: Any) -> bool:
    """No gradients, contiguous rows, one dtype; few tokens of a product, but any of a gated one."""
    tensors = [x_TK, *(tensor for tensor in others if tensor is not None)]
    fits_op = _heads_fit if op == "split_heads" else _product_fits
    few = op in ("split_heads", "norm_gated") or len(x_TK) <= TOKENS
    return few and not needs_gradients(*tensors) and fits_op(*tensors, **options)


def _heads_fit(qkv_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, *norms: Tensor, **_: Any) -> bool:
    return (
        supports_dtype("split_heads", qkv_TE.dtype, 2 * cos_TD.shape[1])
        and len(qkv_TE) > 0
        and cos_TD.dtype == sin_TD.dtype == torch.float32
        and qkv_TE.stride(1) == 1
        and all(tensor.is_contiguous() for tensor in (cos_TD, sin_TD, *norms))
    )


def _product_fits(x_TK: Tensor, *others: Tensor, eps: float | None = None) -> bool:
    """The norms refuse fp16: they scale rows after the product, and the stream itself times the
    norm's weight may be more than fp16 can hold. 32-bit offsets must reach every weight.
    """
    dtypes = (torch.bfloat16,) if eps is not None else (torch.bfloat16, torch.float16)
    return (
        x_TK.dtype in dtypes
        and len(x_TK) > 0
        and x_TK.stride(-1) == 1
        and all(tensor.dtype == x_TK.dtype for tensor in others)
        and all(tensor.is_contiguous() and tensor.numel() < 2**31 for tensor in others)
    )


# Launches of products.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLaunch:
    """How a product is cut: columns of a program, depth of a step, programs along the depth."""

    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


# (op, tokens of the tile, width, depth) -> what was fastest there. Other shapes go by the rule, of
# which only Qwen3-1.7B's shapes were measured.
LAUNCHES: dict[tuple[str, int, int, int], LinearLaunch] = {
    ("logits", 32, 151_936, 2048): LinearLaunch(columns=64, depth=128, stages=4),
    ("logits", 64, 151_936, 2048): LinearLaunch(columns=128, depth=64, stages=6),
}


def launch_for(op: str, tokens: int, width: int, depth: int) -> LinearLaunch:
    """The measured launch of a shape, or about one program per processor of a large GPU."""
    if (op, tile(tokens), width, depth) in LAUNCHES:
        return LAUNCHES[op, tile(tokens), width, depth]
    rows, programs, gated = tile(tokens), triton.cdiv(width, 64), op == "norm_gated"
    if programs > PROCESSORS:  # many rounds: two programs per processor alternate
        return LinearLaunch(columns=64, depth=128, stages=3 if gated or rows > 16 else 4)
    splits = max(1, min(PROCESSORS // programs, depth // LEAST_SPAN))
    if rows == 16 or (rows == 32 and not gated):
        return LinearLaunch(columns=64, depth=256, splits=splits)
    stages = 3 if gated and rows > 32 else 4
    return LinearLaunch(columns=64, depth=128, splits=splits, stages=stages)


def tile(tokens: int) -> int:
    """Rows of the token tile: a power of two that the matrix units take."""
    return max(16, triton.next_power_of_2(tokens))


# Products.


def norm_linear(
    x_TC: Tensor, norm_C: Tensor, weight_EC: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    out_TE = x_TC.new_empty(len(x_TC), len(weight_EC))
    return _product("norm_linear", x_TC, weight_EC, out_TE, norm=norm_C, eps=eps, bias=bias_E)


def norm_gated(x_TC: Tensor, norm_C: Tensor, weight_FC: Tensor, *, eps: float) -> Tensor:
    if len(x_TC) > TOKENS:
        return gate(F.linear(F.rms_norm(x_TC, norm_C.shape, norm_C, eps), weight_FC))
    out_TF = x_TC.new_empty(len(x_TC), len(weight_FC) // 2)
    return _product("norm_gated", x_TC, weight_FC, out_TF, norm=norm_C, eps=eps)


def linear_add(x_TE: Tensor, weight_CE: Tensor, residual_TC: Tensor) -> Tensor:
    out_TC = torch.empty_like(residual_TC, memory_format=torch.contiguous_format)
    return _product("linear_add", x_TE, weight_CE, out_TC, residual=residual_TC)


def logits(hidden_TC: Tensor, head_VC: Tensor) -> Tensor:
    out_TV = hidden_TC.new_empty(len(hidden_TC), len(head_VC), dtype=torch.float32)
    return _product("logits", hidden_TC, head_VC, out_TV)


def _product(
    op: str,
    x_TK: Tensor,
    weight: Tensor,
    out_TN: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    (tokens, width), depth = out_TN.shape, weight.shape[1]
    launch = launch_for(op, tokens, width, depth)
    grid = triton.cdiv(width, launch.columns), launch.splits
    shares = arrivals = None
    if launch.splits > 1:
        assert grid[0] <= ARRIVALS
        count = launch.splits * tokens * (len(weight) + 1)
        shares = torch.empty(count, dtype=torch.float32, device=x_TK.device)
        arrivals = _arrivals(x_TK.device)
    _linear_kernel[grid](
        *(x_TK, norm, weight, bias, residual, out_TN, eps, shares, arrivals),
        *(tokens, width, depth, x_TK.stride(0)),
        span=triton.cdiv(triton.cdiv(depth, launch.splits), launch.depth) * launch.depth,
        GATED=op == "norm_gated",
        TOKENS=tile(tokens),
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
        SPLITS=launch.splits,
        EVEN=depth % launch.depth == 0,
        **overlap_options(x_TK, weights_settled()),  # weights are read before the wait
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out_TN


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counts of arrived programs, zero between launches; one stream at a time may use them."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "call the op before capturing it"
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["T"])
def _linear_kernel(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    shares,
    arrivals,
    T,
    N,
    K,
    x_stride,
    span,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some columns of a product; norm, bias and residual are None where there are none.

    GATED: the weight's first half is a gate's. Gate and up take turns along the tile: a thread then
    holds both of a column.
    """
    let_next_start(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if GATED:
        turns = tl.arange(0, 2 * COLUMNS)
        places, W = tl.program_id(0) * 2 * COLUMNS + turns, 2 * N
        rows = tl.minimum(places // 2, N - 1) + turns % 2 * N
    else:
        places, W = columns, N
        rows = tl.minimum(columns, N - 1)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    acc, squares = _walk(
        x, norm, weight, rows, first, last, T, K, x_stride, TOKENS, DEPTH, EVEN, OVERLAP
    )
    if SPLITS > 1:
        if not _is_last(shares, arrivals, acc, squares, places, T, W, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, places, T, W, SPLITS, TOKENS)
    if norm is not None:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    if residual is not None:
        acc += _load(residual, columns, T, N, TOKENS)
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (TOKENS, COLUMNS, 2)))
        acc = gate * tl.sigmoid(gate) * up
    _store(out, acc, columns, T, N, TOKENS)


@triton.jit
def _walk(
    x,
    norm,
    weight,
    rows,
    first,
    last,
    T,
    K,
    x_stride,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """fp32 products [TOKENS, ROWS] of x, times the norm's weight, and sums of squares of x.

    Where there are rows enough the transpose is computed, weights first: Hopper's wide products
    take 64 rows or more there. EVEN says that the depth is a whole number of blocks, so nothing
    needs a mask along it. The first weights are asked for before the kernel ahead has ended.
    """
    ROWS: tl.constexpr = rows.shape[0]
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
    wait(OVERLAP)  # also where a split was empty
    return acc.T if SWAP else acc, tl.sum(squares, 1)


@triton.jit
def _is_last(
    shares, arrivals, acc, squares, places, T, W, SPLITS: tl.constexpr, TOKENS: tl.constexpr
):
    """Store a partial sum; true for the last program of these columns, which can read all of them.

    Shares are [SPLITS, T, W] and, behind, the squares [SPLITS, T], where programs of other columns
    write the same. The last program sets the count back to zero for the next launch.
    """
    split, tokens = tl.program_id(1), tl.arange(0, TOKENS)
    _store(shares + split * T * W, acc, places, T, W, TOKENS)
    tl.store(shares + SPLITS * T * W + split * T + tokens, squares, mask=tokens < T)
    tl.debug_barrier()  # all threads have stored before one of them signals
    count = arrivals + tl.program_id(0)
    last = tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def _join(shares, places, T, W, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """The sum of all partial sums, always in the same order."""
    tokens = tl.arange(0, TOKENS)
    squares_at = shares + SPLITS * T * W + tokens
    acc = _load(shares, places, T, W, TOKENS)
    squares = tl.load(squares_at, mask=tokens < T, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += _load(shares + split * T * W, places, T, W, TOKENS)
        squares += tl.load(squares_at + split * T, tokens < T, 0.0, cache_modifier=".cg")
    return acc, squares


@triton.jit
def _load(source, columns, T, N, TOKENS: tl.constexpr):
    """Load some columns of all tokens in fp32, bypassing L1: other programs wrote them."""
    tokens = tl.arange(0, TOKENS)
    mask = (tokens < T)[:, None] & (columns < N)[None, :]
    at = source + tokens[:, None] * N + columns[None, :]
    return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _store(out, values, columns, T, N, TOKENS: tl.constexpr):
    tokens = tl.arange(0, TOKENS)
    mask = (tokens < T)[:, None] & (columns < N)[None, :]
    at = out + tokens[:, None] * N + columns[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)


# Gates, where the product is cuBLAS's.


def gate(gate_up_TF: Tensor) -> Tensor:
    tokens, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty(tokens, width)
    _gate_kernel[(tokens, triton.cdiv(width, GATE_COLUMNS))](
        gate_up_TF.contiguous(), out_TF, width, COLUMNS=GATE_COLUMNS
    )
    return out_TF


@triton.jit
def _gate_kernel(gate_up, out, width, COLUMNS: tl.constexpr):
    """Both factors are rounded before they are multiplied, as in the definition."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    x = tl.load(gate_up + token * 2 * width + column, real, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, real, 0.0)
    gated = (x / (1 + tl.exp(-x))).to(up.dtype)
    tl.store(out + token * width + column, gated * up, real)


# Heads.


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
