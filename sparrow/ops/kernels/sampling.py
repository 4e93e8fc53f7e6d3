"""Sampling on a GPU, and inputs and outputs of a decode step in one kernel each.

`sample` makes two passes over the logits, the second over one chunk of them. The first pass sums up
chunks of the vocabulary. The second, a program per row, joins the sums, finds the chunk in which
the cumulative distribution passes the row's uniform number, and the token inside it. Chunks do not
depend on the batch, so neither do a row's bits. `step_inputs` and `step_outputs` replace some
thirty small kernels.
Legend of the dimension letters: sparrow/ops/types.py; J = chunks of the vocabulary, R = rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlap_options, wait
from sparrow.ops.reference.sampling import Draws
from sparrow.ops.types import RowState, StepInputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 2048
SUM_WARPS = 4
DRAW_WARPS = 4
PAGES = 1024  # table entries that one program copies

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of splitmix64
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def supports_dtype(_op: str, _dtype: torch.dtype, _head_size: int) -> bool:
    return True


def supports(op: str, first: Tensor, *others: Any, **named: Any) -> bool:
    """Rows by int64 numbers; draws from the whole vocabulary: cuts need a sort, which the
    definition does.
    """
    if op != "sample":
        return first.dtype == torch.int64 and first.is_contiguous()
    _seeds_B, _counters_B, temperature_B, *cuts = others
    return (
        all(cut is None for cut in (*cuts, *named.values()))
        and first.dtype in DTYPES
        and first.stride(1) == 1
        and temperature_B.dtype == torch.float32
    )


def sample(
    logits_BV: Tensor,
    seeds_B: Tensor,
    counters_B: Tensor,
    temperature_B: Tensor,
    *_: None,
    **__: None,
) -> Draws:
    rows, vocabulary = logits_BV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    sums = logits_BV.new_empty((4, rows, chunks), dtype=torch.float32)
    dtypes = (torch.int64, torch.float32, torch.float32, torch.bool)
    draws = Draws(*(logits_BV.new_empty(rows, dtype=dtype) for dtype in dtypes))
    if not rows:
        return draws
    temperature_B = temperature_B.contiguous()
    common = (logits_BV, temperature_B, *sums, logits_BV.stride(0), vocabulary, chunks)
    options = {"CHUNK": CHUNK, **overlap_options(logits_BV)}
    _sum_chunks[(chunks, rows)](*common, num_warps=SUM_WARPS, **options)
    _draw[(rows,)](
        *common,
        seeds_B.contiguous(),
        counters_B.contiguous(),
        *draws,
        WIDE=triton.next_power_of_2(chunks),
        num_warps=DRAW_WARPS,
        **options,
    )
    return draws


@triton.jit
def _sum_chunks(
    logits_BV,
    temperature_B,
    most_BJ,
    mass_BJ,
    moment_BJ,
    broken_BJ,
    row,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Per chunk, with e = exp(x - max): max, sum of e, sum of (x - max) e, is any not finite."""
    wait(OVERLAP)
    j, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x, broken = _scaled(logits_BV + b * row, temperature_B + b, j, vocabulary, CHUNK)
    most = tl.maximum(tl.max(x, 0), _LOWEST)  # a difference to -inf would be NaN
    below = x - most
    weight = tl.exp(below)
    place = b * chunks + j
    tl.store(most_BJ + place, most)
    tl.store(mass_BJ + place, tl.sum(weight, 0))
    tl.store(moment_BJ + place, tl.sum(tl.where(weight > 0, weight * below, 0.0), 0))
    tl.store(broken_BJ + place, tl.max(broken.to(tl.int32), 0).to(tl.float32))


@triton.jit
def _draw(
    logits_BV,
    temperature_B,
    most_BJ,
    mass_BJ,
    moment_BJ,
    broken_BJ,
    row,
    vocabulary,
    chunks,
    seeds_B,
    counters_B,
    tokens_B,
    logprobs_B,
    entropies_B,
    ok_B,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: join its chunks, find the chunk that is drawn from, and the token inside it."""
    wait(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    start, j_J = b * chunks, tl.arange(0, WIDE)
    most, total, moment, most_J, mass_J = _join(
        most_BJ + start, mass_BJ + start, moment_BJ + start, j_J, j_J < chunks
    )
    greedy = tl.load(temperature_B + b) == 0
    ladder_J = tl.cumsum(mass_J.to(tl.float64), 0)
    goal = _uniform(tl.load(seeds_B + b), tl.load(counters_B + b)) * tl.max(ladder_J, 0)
    drawn = _first_above(ladder_J, mass_J, j_J, goal)
    j = tl.where(greedy, _first_true(most_J == most, j_J), drawn)
    goal -= tl.sum(tl.where(j_J == j - 1, ladder_J, 0.0), 0)

    x, _ = _scaled(logits_BV + b * row, temperature_B + b, j, vocabulary, CHUNK)
    v = tl.arange(0, CHUNK)
    top = tl.max(x, 0)
    weight = tl.exp(x - top)
    ladder = tl.cumsum(weight.to(tl.float64), 0)
    drawn = _first_above(ladder, weight, v, goal / tl.exp(top - most))
    chosen = tl.where(greedy, _first_true(x == top, v), drawn)
    logprob = tl.sum(tl.where(v == chosen, x, 0.0), 0) - most - tl.log(total)

    broken_J = tl.load(broken_BJ + start + j_J, j_J < chunks, other=0.0)
    ok = tl.max(broken_J, 0) == 0
    uncertain = ok & (greedy == 0)
    tl.store(tokens_B + b, tl.where(ok, j.to(tl.int64) * CHUNK + chosen, 0))
    tl.store(logprobs_B + b, tl.where(uncertain, logprob, 0.0))
    tl.store(entropies_B + b, tl.where(uncertain, tl.log(total) - moment / total, 0.0))
    tl.store(ok_B + b, ok)


@triton.jit
def _join(most_J, mass_J, moment_J, j_J, known):
    """Sums of a row from sums of its chunks, relative to the row's max.

    The max, sum of exp(x - max), and sum of (x - max) exp(x - max); then, of each chunk, its own
    max and its share of the first sum.
    """
    most_J = tl.load(most_J + j_J, known, other=_LOWEST)
    mass_J = tl.load(mass_J + j_J, known, other=0.0)
    moment_J = tl.load(moment_J + j_J, known, other=0.0)
    most = tl.max(most_J, 0)
    below_J = most_J - most
    scale_J = tl.exp(below_J)
    moment_J = tl.where(scale_J > 0, scale_J * (moment_J + below_J * mass_J), 0.0)
    mass_J = scale_J * mass_J
    return most, tl.sum(mass_J, 0), tl.sum(moment_J, 0), most_J, mass_J


@triton.jit
def _scaled(logits_V, temperature, j, vocabulary, CHUNK: tl.constexpr):
    """Chunk j of a row over its temperature (0 divides by 1), and which logits are not finite.

    What lies beyond the vocabulary is -inf, which has no weight.
    """
    v = j * CHUNK + tl.arange(0, CHUNK)
    real = v < vocabulary
    t = tl.load(temperature)
    x = tl.load(logits_V + v, real, other=float("-inf")).to(tl.float32)
    broken = real & ((tl.abs(x) < float("inf")) == 0)
    return x / tl.where(t == 0, 1.0, t), broken


@triton.jit
def _first_above(ladder, weight, index, goal):
    """The first index where the ladder exceeds the goal, at most the last one with any weight."""
    passed = tl.sum((ladder <= goal).to(tl.int32), 0)
    return tl.minimum(passed, tl.max(tl.where(weight > 0, index, 0), 0))


@triton.jit
def _first_true(mask, index):
    """The first index that is true; the last index of all if none is."""
    return tl.min(tl.where(mask, index, mask.numel - 1), 0)


@triton.jit
def _uniform(seed, counter):
    """The definition's uniform number: splitmix64 in unsigned arithmetic, fp64 in [0, 1)."""
    z = seed.to(tl.int64).to(tl.uint64) + (counter.to(tl.int64) + 1).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)


# Rows of a decode step.


def step_inputs(at_B: Tensor, rows: RowState, *, page: int, width: int) -> StepInputs:
    count, device = len(at_B), at_B.device
    whole = torch.empty(6, count, dtype=torch.int64, device=device)
    temperature_B = torch.empty(count, dtype=torch.float32, device=device)
    table_BM = torch.empty(count, width, dtype=rows.table_RM.dtype, device=device)
    if count:
        _read_rows[count, triton.cdiv(width, PAGES)](
            *(at_B, rows.token_R, rows.length_R, rows.seed_R, rows.drawn_R, rows.temperature_R),
            *(rows.table_RM, whole, temperature_B, table_BM, count, width),
            rows.table_RM.stride(0),
            PAGE=page,
            PAGES=PAGES,
            num_warps=4,
        )
    ids_B, positions_B, lengths_B, slots_B, seeds_B, counters_B = whole.unbind(0)
    places = (ids_B, positions_B, lengths_B, slots_B, table_BM)
    return StepInputs(*places, seeds_B, counters_B, temperature_B)


def step_outputs(at_B: Tensor, draws: Draws, rows: RowState, *, advance: bool) -> Tensor:
    packed_4B = torch.empty(4, len(at_B), dtype=torch.int32, device=at_B.device)
    if len(at_B):
        _write_rows[(1,)](
            *(at_B, *draws, rows.token_R, rows.drawn_R, rows.length_R, packed_4B, len(at_B)),
            ADVANCE=advance,
            BLOCK=triton.next_power_of_2(len(at_B)),
            num_warps=1,
        )
    return packed_4B


@triton.jit
def _read_rows(
    at,
    token,
    length,
    seed,
    drawn,
    temperature,
    table,
    whole,
    out_temperature,
    out_table,
    count,
    width,
    table_stride,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Program (b, j): a stretch of row b's table; the first also its scalars."""
    b, stretch = tl.program_id(0), tl.program_id(1)
    row = tl.load(at + b)
    page_M = stretch * PAGES + tl.arange(0, PAGES)
    inside = page_M < width
    entry_M = tl.load(table + row * table_stride + page_M, mask=inside)
    tl.store(out_table + b.to(tl.int64) * width + page_M, entry_M, mask=inside)
    if stretch == 0:
        tokens = tl.load(length + row)
        position = tl.maximum(tokens, 0)
        block = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
        slot = tl.where(tokens >= 0, block * PAGE + position % PAGE, -1)
        tl.store(whole + b, tl.load(token + row))
        tl.store(whole + count + b, position)
        tl.store(whole + 2 * count + b, tokens + 1)
        tl.store(whole + 3 * count + b, slot)
        tl.store(whole + 4 * count + b, tl.load(seed + row))
        tl.store(whole + 5 * count + b, tl.load(drawn + row))
        tl.store(out_temperature + b, tl.load(temperature + row))


@triton.jit
def _write_rows(
    at,
    tokens,
    logprobs,
    entropies,
    ok,
    token,
    drawn,
    length,
    packed,
    count,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all rows: a batch is small. Padding rows may repeat; all write the same."""
    b = tl.arange(0, BLOCK)
    real = b < count
    row = tl.load(at + b, mask=real, other=0)
    token_B = tl.load(tokens + b, mask=real)
    tl.store(packed + b, token_B.to(tl.int32), mask=real)
    logprob_B = tl.load(logprobs + b, mask=real)
    tl.store(packed + count + b, logprob_B.to(tl.int32, bitcast=True), mask=real)
    entropy_B = tl.load(entropies + b, mask=real)
    tl.store(packed + 2 * count + b, entropy_B.to(tl.int32, bitcast=True), mask=real)
    tl.store(packed + 3 * count + b, tl.load(ok + b, mask=real).to(tl.int32), mask=real)
    drawn_B = tl.load(drawn + row, mask=real)
    length_B = tl.load(length + row, mask=real)
    tl.debug_barrier()  # a repeated padding row is read before it is written
    tl.store(token + row, token_B, mask=real)
    tl.store(drawn + row, drawn_B + 1, mask=real)
    if ADVANCE:
        grown_B = tl.where(length_B >= 0, length_B + 1, length_B)
        tl.store(length + row, grown_B, mask=real)
