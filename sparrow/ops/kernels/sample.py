"""Sampling on a GPU: two passes over the logits, the second over one chunk of them.

The first pass sums up chunks of the vocabulary. The second, a program per row, joins the sums,
finds the chunk in which the cumulative distribution passes the row's uniform number, and the token
inside it. Chunks do not depend on the batch, so neither do a row's bits.
Legend of the dimension letters: sparrow/ops/types.py; J = chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.kernels.overlap import overlaps, wait
from sparrow.ops.reference.sampling import Draws

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 2048
SUM_WARPS = 4
DRAW_WARPS = 4

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of splitmix64
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def fits(_dtype: torch.dtype, _head_size: int) -> bool:
    return True


def supports(
    _op: str,
    logits_BV: Tensor,
    _seeds_B: Tensor,
    _counters_B: Tensor,
    temperature_B: Tensor,
    *cuts: Tensor | None,
    **named: Tensor | None,
) -> bool:
    """The whole vocabulary: cuts need a sort, which the definition does."""
    return (
        all(cut is None for cut in (*cuts, *named.values()))
        and logits_BV.dtype in DTYPES
        and logits_BV.stride(1) == 1
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
    draws = _empty_draws(logits_BV)
    if not rows:
        return draws
    temperature_B = temperature_B.contiguous()
    common = (logits_BV, temperature_B, *sums, logits_BV.stride(0), vocabulary, chunks)
    overlap = {"OVERLAP": overlaps(logits_BV), "launch_pdl": overlaps(logits_BV)}
    _sum_chunks[(chunks, rows)](*common, CHUNK=CHUNK, num_warps=SUM_WARPS, **overlap)
    _draw[(rows,)](
        *common,
        seeds_B.contiguous(),
        counters_B.contiguous(),
        *draws,
        CHUNK=CHUNK,
        WIDE=triton.next_power_of_2(chunks),
        num_warps=DRAW_WARPS,
        **overlap,
    )
    return draws


def _empty_draws(logits_BV: Tensor) -> Draws:
    dtypes = (torch.int64, torch.float32, torch.float32, torch.bool)
    return Draws(*(logits_BV.new_empty(len(logits_BV), dtype=dtype) for dtype in dtypes))


@triton.jit
def _sum_chunks(
    logits_BV: tl.tensor,
    temperature_B: tl.tensor,
    most_BJ: tl.tensor,
    mass_BJ: tl.tensor,
    moment_BJ: tl.tensor,
    broken_BJ: tl.tensor,
    row: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
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
    logits_BV: tl.tensor,
    temperature_B: tl.tensor,
    most_BJ: tl.tensor,
    mass_BJ: tl.tensor,
    moment_BJ: tl.tensor,
    broken_BJ: tl.tensor,
    row: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    seeds_B: tl.tensor,
    counters_B: tl.tensor,
    tokens_B: tl.tensor,
    logprobs_B: tl.tensor,
    entropies_B: tl.tensor,
    ok_B: tl.tensor,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
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
def _join(
    most_J: tl.tensor,
    mass_J: tl.tensor,
    moment_J: tl.tensor,
    j_J: tl.tensor,
    known: tl.tensor,
) -> tl.tensor:
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
def _scaled(
    logits_V: tl.tensor,
    temperature: tl.tensor,
    j: tl.tensor,
    vocabulary: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
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
def _first_above(
    ladder: tl.tensor,
    weight: tl.tensor,
    index: tl.tensor,
    goal: tl.tensor,
) -> tl.tensor:
    """The first place where the ladder exceeds the goal, at most the last one with any weight."""
    passed = tl.sum((ladder <= goal).to(tl.int32), 0)
    return tl.minimum(passed, tl.max(tl.where(weight > 0, index, 0), 0))


@triton.jit
def _first_true(found: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The first place that is true; the last place of all if none is."""
    return tl.min(tl.where(found, index, found.numel - 1), 0)


@triton.jit
def _uniform(seed: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """The definition's uniform number: splitmix64 in unsigned arithmetic, fp64 in [0, 1)."""
    z = seed.to(tl.int64).to(tl.uint64) + (counter.to(tl.int64) + 1).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)
