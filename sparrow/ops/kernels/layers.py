"""Products of a few tokens with a weight matrix.

A program of a product owns some columns of the result for all tokens and walks over the depth, so
each weight is read once; the norm before a product and the residual, bias or gate after it are
fused. Where columns are too few to fill the device, the depth is split: every program writes its
partial sum and the last one adds them in order, so results repeat bit for bit. A
row's result depends on that row and on the number of rows only.

A low-rank update (`LowRank`) takes one kernel more, for A x: of each row the ranks of its own
slot, zeros elsewhere. The product then walks on, from x and the weight to these numbers and B, as
if the depth were longer; what it adds for rows without a slot is zero, which changes no bit. Slots
before the first and behind the last that some row uses are not read.

A weight in 8 bits (`Int8Weight`) is widened on its way to the matrix units; its scales multiply the
sums. It takes no update.

Launch parameters by shape were tuned on an H200 with whole decode steps; they change speed alone.
Every launch overlaps the previous one, which paid only where a program takes more than half of a
processor's shared memory (smaller ones were slower than without overlap, presumably because two of
one launch then share the first free processor).

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

from sparrow.ops.dispatch import needs_gradients, weights_settled
from sparrow.ops.kernels.overlap import let_next_start, overlap_options, wait, when_ready
from sparrow.ops.reference import layers as reference
from sparrow.ops.types import Int8Weight, LowRank, Weight

TOKENS = 64  # most tokens in a call; beyond, cuBLAS is as fast
ARRIVALS = 4096  # most column blocks of a split product
PROCESSORS = 132
LEAST_SPAN = 256  # of the depth, for one of several splits
RANKS = 16  # of a slot: a multiple of it
GATE_COLUMNS = 1024  # of a program


def supports_dtype(op: str, dtype: torch.dtype, head_size: int) -> bool:
    """16-bit numbers."""
    return dtype in (torch.bfloat16, torch.float16)


def supports(
    op: str,
    x_TK: Tensor,
    *others: Weight | None,
    update: LowRank | None = None,
    **options: Any,
) -> bool:
    """No gradients, contiguous rows, one dtype; few tokens of a product, but any of a gated one."""
    tensors = [x_TK, *(tensor for tensor in others if isinstance(tensor, Tensor))]
    eight_bits = [weight for weight in others if isinstance(weight, Int8Weight)]
    if update is not None:
        tensors += update.a_RI, update.b_EQ
    few = len(x_TK) <= TOKENS
    if eight_bits and (update is not None or not few or not _eight_bits_fit(*eight_bits)):
        return False
    fits = (few or op == "norm_gated") and _product_fits(*tensors, **options)
    updates = update is None or not few or _update_fits(op, x_TK, update)
    return fits and updates and not needs_gradients(*tensors)


def _eight_bits_fit(weight: Int8Weight) -> bool:
    data_EI = weight.data_EI
    return data_EI.is_contiguous() and data_EI.numel() < 2**31


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


def _update_fits(op: str, x_TK: Tensor, update: LowRank) -> bool:
    """Whole blocks of ranks, as masks are made of; up to three parts, of a gate two halves."""
    parts = update.parts
    halves = len(parts) == 2 and parts[0] == parts[1]
    return (
        (halves if op == "norm_gated" else len(parts) <= 3)
        and x_TK.shape[1] % RANKS == 0
        and update.rank % RANKS == 0
        and update.rows.slots_T.is_contiguous()
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


def launch_for(
    op: str, tokens: int, width: int, depth: int, *, eight_bits: bool = False
) -> LinearLaunch:
    """The measured launch of a shape, or about one program per processor of a large GPU.

    Of weights in 8 bits none was measured yet: steps are half as deep as registers hold.
    """
    if (op, tile(tokens), width, depth) in LAUNCHES and not eight_bits:
        return LAUNCHES[op, tile(tokens), width, depth]
    rows, programs, gated = tile(tokens), triton.cdiv(width, 64), op == "norm_gated"
    if eight_bits:
        splits = max(1, min(PROCESSORS // programs, depth // LEAST_SPAN))
        return LinearLaunch(columns=64, depth=64 if gated else 128, splits=splits, stages=4)
    if programs > PROCESSORS:  # many rounds: two programs per processor alternate
        return LinearLaunch(columns=64, depth=128, stages=3 if gated or rows > 16 else 4)
    splits = max(1, min(PROCESSORS // programs, depth // LEAST_SPAN))
    if rows == 16 or (rows == 32 and not gated):
        return LinearLaunch(columns=64, depth=256, splits=splits)
    stages = 3 if gated and rows > 32 else 4
    return LinearLaunch(columns=64, depth=128, splits=splits, stages=stages)


def launch_for_ranks(ranks: int, depth: int) -> LinearLaunch:
    """That of A x: programs so small that they fit beside others, and few enough sums to join."""
    programs = triton.cdiv(ranks, 32)
    splits = max(1, min(8, 2 * PROCESSORS // programs, depth // LEAST_SPAN))
    return LinearLaunch(columns=32, depth=128, splits=splits)


def tile(tokens: int) -> int:
    """Rows of the token tile: a power of two that the matrix units take."""
    return max(16, triton.next_power_of_2(tokens))


# Products.


def norm_linear(
    x_TC: Tensor,
    norm_C: Tensor,
    weight_EC: Weight,
    bias_E: Tensor | None = None,
    *,
    eps: float,
    update: LowRank | None = None,
) -> Tensor:
    out_TE = x_TC.new_empty(len(x_TC), len(weight_EC))
    given: dict[str, Any] = {"norm": norm_C, "eps": eps, "bias": bias_E, "update": update}
    return _product("norm_linear", x_TC, weight_EC, out_TE, **given)


def norm_gated(
    x_TC: Tensor,
    norm_C: Tensor,
    weight_FC: Weight,
    *,
    eps: float,
    update: LowRank | None = None,
) -> Tensor:
    if len(x_TC) > TOKENS:
        product = reference.norm_linear.definition
        return gate(product(x_TC, norm_C, weight_FC, eps=eps, update=update))
    out_TF = x_TC.new_empty(len(x_TC), len(weight_FC) // 2)
    return _product("norm_gated", x_TC, weight_FC, out_TF, norm=norm_C, eps=eps, update=update)


def linear_add(
    x_TE: Tensor, weight_CE: Weight, residual_TC: Tensor, *, update: LowRank | None = None
) -> Tensor:
    out_TC = torch.empty_like(residual_TC, memory_format=torch.contiguous_format)
    return _product("linear_add", x_TE, weight_CE, out_TC, residual=residual_TC, update=update)


def logits(hidden_TC: Tensor, head_VC: Weight) -> Tensor:
    out_TV = hidden_TC.new_empty(len(hidden_TC), len(head_VC), dtype=torch.float32)
    return _product("logits", hidden_TC, head_VC, out_TV)


def _product(
    op: str,
    x_TK: Tensor,
    weight: Weight,
    out_TN: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    update: LowRank | None = None,
) -> Tensor:
    (tokens, width), depth = out_TN.shape, weight.shape[1]
    eight_bits = isinstance(weight, Int8Weight)
    launch = launch_for(op, tokens, width, depth, eight_bits=eight_bits)
    grid = triton.cdiv(width, launch.columns), launch.splits
    given: tuple[Tensor | int | None, ...] = (None,) * 7
    if update is not None:
        update.check(tokens, depth, len(weight))
        given = _ranks_of_rows(x_TK, norm, update), *_places(update)
    numbers, scale = weight, None
    if isinstance(weight, Int8Weight):
        numbers, scale = weight.data_EI, weight.scale_E
    _linear_kernel[grid](
        *(x_TK, norm, numbers, scale, bias, residual, out_TN, eps),
        *_room_for_sums(launch, grid[0], tokens, len(weight), x_TK.device),
        *(*given, tokens, width, depth, x_TK.stride(0)),
        GATED=op == "norm_gated",
        **_options(launch, x_TK),
    )
    return out_TN


def _places(update: LowRank) -> tuple[Tensor | int | None, ...]:
    """B, slots, their sizes, and the first outputs of the second and third part, if there are."""
    second, third = (sum(update.parts[:n]) if len(update.parts) > n else None for n in (1, 2))
    return update.b_EQ, update.rows.slots_T, update.b_EQ.shape[1], update.rank, second, third


def _ranks_of_rows(x_TK: Tensor, norm_K: Tensor | None, update: LowRank) -> Tensor:
    """A x of every row's slot and zeros in other slots, [M, T, Q].

    Of normed rows without their division by the root mean square: it is left to the product, which
    divides all it has summed.
    """
    (tokens, depth), ranks = x_TK.shape, update.b_EQ.shape[1]
    low_MTQ = x_TK.new_empty(len(update.parts), tokens, ranks)
    launch = launch_for_ranks(len(update.a_RI), depth)
    grid = len(update.parts) * triton.cdiv(ranks, launch.columns), launch.splits
    _linear_ranks_kernel[grid](
        *(x_TK, norm_K, update.a_RI, update.rows.slots_T, low_MTQ),
        *_room_for_sums(launch, grid[0], tokens, grid[0] * launch.columns, x_TK.device),
        *(tokens, ranks, update.rank, depth, x_TK.stride(0)),
        **_options(launch, x_TK),
    )
    return low_MTQ


def _room_for_sums(
    launch: LinearLaunch, programs: int, tokens: int, width: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Where programs along the depth leave their sums, and count who has arrived."""
    if launch.splits == 1:
        return None, None
    assert programs <= ARRIVALS
    count = launch.splits * tokens * (width + 1)
    return torch.empty(count, dtype=torch.float32, device=device), _arrivals(device)


def _options(launch: LinearLaunch, x_TK: Tensor) -> dict[str, Any]:
    """A launch by the names of a kernel's arguments."""
    tokens, depth = x_TK.shape
    return {
        "span": triton.cdiv(triton.cdiv(depth, launch.splits), launch.depth) * launch.depth,
        "TOKENS": tile(tokens),
        "COLUMNS": launch.columns,
        "DEPTH": launch.depth,
        "SPLITS": launch.splits,
        "EVEN": depth % launch.depth == 0,
        **overlap_options(x_TK, weights_settled()),  # weights are read before the wait
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


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
    scale,
    bias,
    residual,
    out,
    eps,
    shares,
    arrivals,
    low,
    b,
    slots,
    Q,
    rank,
    second,
    third,
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
    """Some columns of a product; norm, scale (of 8 bits), bias, residual, update: or None.

    GATED: the weight's first half is a gate's. Gate and up take turns along the tile: a thread then
    holds both of a column. Of an update: low is A x by part, rank that of a slot, Q all of a part;
    further parts of the weight begin at second and third.
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
    update = None
    if low is not None:
        if GATED:
            lowest, highest, part = 0, 1, turns % 2
        else:
            lowest = _part_of(tl.program_id(0) * COLUMNS, second, third)
            highest = _part_of(
                tl.minimum(tl.program_id(0) * COLUMNS + COLUMNS, N) - 1, second, third
            )
            part = _part_of(rows, second, third)
        start, stop = _used(slots, T, Q, rank, TOKENS)
        update = low, b, Q, start, stop, part, lowest, highest
    sizes = first, last, T, K, x_stride
    acc, squares = _walk(
        x, norm, weight, rows, sizes, update, norm is not None, TOKENS, DEPTH, EVEN, OVERLAP
    )
    if SPLITS > 1:
        if not _is_last(shares, arrivals, acc, squares, places, T, W, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, places, T, W, SPLITS, TOKENS)
    if norm is not None:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    if scale is not None:
        acc *= tl.load(scale + rows)[None, :]
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
    sizes,
    update,
    SQUARES: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """fp32 products [TOKENS, ROWS] of x, times the norm's weight; if asked, sums of squares of x.

    Where there are rows enough the transpose is computed, weights first: Hopper's wide products
    take 64 rows or more there. EVEN says that the depth is a whole number of blocks, so nothing
    needs a mask along it. The first weights are asked for before the kernel ahead has ended.
    Blocks of an update follow in the same loop: loads go on without a pause.
    """
    first, last, T, K, x_stride = sizes
    ROWS: tl.constexpr = rows.shape[0]
    SWAP: tl.constexpr = ROWS >= 64
    tokens, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    x_at = x + tokens[:, None] * x_stride + depth[None, :]
    weight_at = weight + rows[:, None] * K + depth[None, :]
    acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), dtype=tl.float32)
    squares = tl.zeros((TOKENS, DEPTH), dtype=tl.float32)
    if norm is not None:
        factor = tl.load(norm + first + depth, mask=depth < last - first, other=1.0)
    end = last
    if update is not None:
        low, b, Q, start, stop, part, lowest, highest = update
        width = tl.cdiv(stop - start, DEPTH) * DEPTH  # of a part, in whole blocks
        whole = (highest - lowest + 1) * width
        share = tl.cdiv(whole, tl.num_programs(1) * DEPTH) * DEPTH
        begin = tl.minimum(tl.program_id(1) * share, whole)
        turn = first + tl.cdiv(tl.maximum(last - first, 0), DEPTH) * DEPTH
        end = turn + tl.minimum(share, whole - begin)
    for k in range(first, end, DEPTH):
        mask = (tokens < T)[:, None]
        if update is not None:
            main = k < turn
            at = begin + k - turn
            nth = (at >= width).to(tl.int32) + (at >= 2 * width).to(tl.int32)
            at += start - nth * width
            inside = (depth < tl.multiple_of(tl.where(main, last - k, stop - at), 16))[None, :]
            own = main | (part == lowest + nth)
            weight_at = tl.where(main, weight + k, b + at) + depth[None, :]
            weight_at += (rows * tl.where(main, K, Q))[:, None]
            block = tl.load(weight_at, inside & own[:, None], 0.0, eviction_policy="evict_first")
            place = when_ready(tl.where(main, k, (lowest + nth) * T * Q + at), OVERLAP)
            x_at = tl.where(main, x, low) + place + depth[None, :]
            x_at += (tokens * tl.where(main, x_stride, Q))[:, None]
            values = tl.load(x_at, inside & mask, 0.0)
        else:
            if EVEN:
                block = tl.load(weight_at + k, eviction_policy="evict_first")
            else:
                inside = (depth < last - k)[None, :]
                mask &= inside
                block = tl.load(weight_at + k, inside, 0.0, eviction_policy="evict_first")
            values = tl.load(x_at + when_ready(k, OVERLAP), mask=mask, other=0.0)
        if norm is not None:
            wide = values.to(tl.float32)
            if SQUARES and update is None:
                squares += wide * wide
            elif SQUARES:
                squares = tl.where(main, squares + wide * wide, squares)
            values = (wide * factor.to(tl.float32)[None, :]).to(values.dtype)
            # Too narrow for an asynchronous copy, so a step ahead by hand. Of an update it is 1.
            factor = tl.load(norm + k + DEPTH + depth, mask=depth < last - k - DEPTH, other=1.0)
        block = block.to(values.dtype)
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


# Updates.


@triton.jit
def _used(slots, T, Q, rank, TOKENS: tl.constexpr):
    """From the first rank of the lowest slot in use to behind the last rank of the highest one."""
    tokens = tl.arange(0, TOKENS)
    slots_T = tl.load(slots + tokens, mask=tokens < T, other=0).to(tl.int32)
    stop = tl.minimum(tl.maximum(tl.max(slots_T, 0), 0) * rank, Q)
    start = (tl.min(tl.where(slots_T > 0, slots_T, Q), 0) - 1) * rank
    return tl.minimum(start, stop), stop


@triton.jit
def _part_of(rows, second, third):
    """The part that rows of the weight belong to."""
    part = rows * 0
    if second is not None:
        part += (rows >= second).to(tl.int32)
    if third is not None:
        part += (rows >= third).to(tl.int32)
    return part


@triton.jit(do_not_specialize=["T"])
def _linear_ranks_kernel(
    x,
    norm,
    a,
    slots,
    low,
    shares,
    arrivals,
    T,
    Q,
    rank,
    K,
    x_stride,
    span,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some ranks of A x, of one part; where no row uses their slots, only the zeros are written."""
    let_next_start(OVERLAP)
    blocks = tl.cdiv(Q, COLUMNS)
    part = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    low += part * T * Q
    tokens = tl.arange(0, TOKENS)
    slots_T = tl.load(slots + tokens, mask=tokens < T, other=0).to(tl.int32)
    own = slots_T[:, None] == (columns // rank + 1)[None, :]
    if tl.max(tl.max(own.to(tl.int32), 1), 0) == 0:
        wait(OVERLAP)
        if tl.program_id(1) == 0:
            _store(low, tl.zeros((TOKENS, COLUMNS), tl.float32), columns, T, Q, TOKENS)
        return
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, K)
    rows = part * Q + tl.minimum(columns, Q - 1)
    sizes = first, last, T, K, x_stride
    acc, squares = _walk(x, norm, a, rows, sizes, None, False, TOKENS, DEPTH, EVEN, OVERLAP)
    if SPLITS > 1:
        places, W = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.num_programs(0) * COLUMNS
        if not _is_last(shares, arrivals, acc, squares, places, T, W, SPLITS, TOKENS):
            return
        acc, squares = _join(shares, places, T, W, SPLITS, TOKENS)
    _store(low, tl.where(own, acc, 0.0), columns, T, Q, TOKENS)


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
