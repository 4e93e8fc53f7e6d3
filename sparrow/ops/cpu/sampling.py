"""Sampling on a CPU: two passes over a row's logits, and a walk to the drawn token.

The first pass divides by the temperature and finds the largest logit; the second turns the row
into weights and sums them in fp64, block by block. The sums of the blocks tell where the cumulative
distribution passes the row's uniform number, so only one block is walked token by token. A row is
processed by one thread: its bits depend on itself alone.
Legend of the dimension letters: sparrow/ops/types.py; J = blocks of the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from sparrow.ops.cpu.simd import Array, inline, integers, kernel, ordered, share
from sparrow.ops.reference.sampling import Draws

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 128  # tokens summed at once: the walk is as long as this at most
BYTES_PER_THREAD = 1 << 18  # of logits; below this a helper costs more than it gives

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the constants of splitmix64
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_INFINITE = np.int32(0x7F800000)  # the bits of infinity; those of NaN are larger
_LOWEST = np.int32(-2147483648)
_LEAST = np.float32(-87)  # where e ** x is taken as 0


def supports_dtype(_op: str, dtype: torch.dtype, _head_size: int) -> bool:
    """Whether logits of this dtype can be sampled here, not by the reference."""
    return dtype in DTYPES


def supports(
    _op: str,
    logits_BV: Tensor,
    _seeds_B: Tensor,
    _counters_B: Tensor,
    temperature_B: Tensor,
    *cuts: Tensor | None,
    **named: Tensor | None,
) -> bool:
    """Without top-k and top-p: these need a sort, which the definition does."""
    return (
        all(cut is None for cut in (*cuts, *named.values()))
        and logits_BV.dtype in DTYPES
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
    logits = np.ascontiguousarray(logits_BV.detach().float().numpy())
    streams = integers(seeds_B), integers(counters_B)
    temperature = np.ascontiguousarray(temperature_B.detach().numpy())
    rows = len(logits)
    draws = [np.empty(rows, dtype) for dtype in (np.int64, np.float32, np.float32, np.bool_)]
    share(
        lambda first, last: _draw_rows(logits, *streams, temperature, *draws, first, last),
        rows,
        most=1 + logits.nbytes // BYTES_PER_THREAD,
    )
    return Draws(*(torch.from_numpy(values) for values in draws))


@kernel
def _draw_rows(
    logits_BV: Array,
    seeds_B: Array,
    counters_B: Array,
    temperature_B: Array,
    tokens_B: Array,
    logprobs_B: Array,
    entropies_B: Array,
    ok_B: Array,
    first: int,
    last: int,
) -> None:
    vocabulary = logits_BV.shape[1]
    scaled_V = np.empty(vocabulary, np.float32)
    ladder_J = np.empty(-(-vocabulary // BLOCK), np.float64)
    for b in range(first, last):
        greedy = temperature_B[b] == 0
        top, ok_B[b] = _scale(logits_BV[b], np.float32(1) if greedy else temperature_B[b], scaled_V)
        tokens_B[b], logprobs_B[b], entropies_B[b] = 0, 0, 0
        if ok_B[b] and greedy:
            tokens_B[b] = np.argmax(scaled_V == top)
        elif ok_B[b]:
            uniform = _uniform(np.uint64(seeds_B[b]), np.uint64(counters_B[b]))
            moment = _climb(scaled_V, top, ladder_J)
            total = ladder_J[-1]
            tokens_B[b] = _invert(scaled_V, top, ladder_J, uniform * total)
            logprobs_B[b] = np.float64(scaled_V[tokens_B[b]] - top) - np.log(total)
            entropies_B[b] = max(np.log(total) - moment / total, 0.0)  # against rounding


@inline()
def _scale(
    logits_V: Array, temperature: np.float32, scaled_V: Array
) -> tuple[np.float32, np.bool_]:
    """Logits over temperature; returns the largest, and whether all logits are finite.

    Maxima are taken of integers that have the order of the floats: LLVM vectorises those.
    """
    largest, most = _LOWEST, _LOWEST
    for v in range(len(logits_V)):
        scaled = np.float32(logits_V[v] / temperature)
        scaled_V[v] = scaled
        largest = max(largest, ordered(np.float32(scaled).view(np.int32)))
        magnitude = np.float32(logits_V[v]).view(np.int32) & np.int32(0x7FFFFFFF)
        most = max(most, np.int32(magnitude))
    return np.int32(ordered(largest)).view(np.float32), most < _INFINITE


@inline()
def _climb(scaled_V: Array, top: np.float32, ladder_J: Array) -> float:
    """The running sum of weights e ** (scaled - top) after each block; returns sum(w * log w)."""
    total = moment = 0.0
    for j in range(len(ladder_J)):
        mass, part = _sum_block(scaled_V[j * BLOCK : (j + 1) * BLOCK], top)
        total += mass
        moment += part
        ladder_J[j] = total
    return moment


@inline("reassoc", "contract", "nsz")
def _sum_block(scaled_V: Array, top: np.float32) -> tuple[float, float]:
    """Sums over a block of w, in fp64 as the draw depends on it, and of w * log w."""
    mass, moment = 0.0, np.float32(0)
    for v in range(len(scaled_V)):
        below = np.float32(scaled_V[v] - top)
        weight = _exp(below)
        mass += np.float64(weight)
        moment += weight * max(below, _LEAST)  # 0 * -inf would be NaN
    return mass, np.float64(moment)


@inline("contract")
def _exp(x: np.float32) -> np.float32:
    """e ** x for x <= 0 without a branch, to 1e-7; 0 below -87.

    Adding 1.5 * 2**23 rounds to a whole number and leaves it in the low bits, from where it goes
    into the exponent; the rest, at most ln(2) / 2, goes through the polynomial of Cephes' expf.
    """
    shifted = np.float32(x * np.float32(1.44269504088896341) + np.float32(12582912))
    whole = np.float32(shifted - np.float32(12582912))
    f = np.float32(x - whole * np.float32(0.693359375))
    f = np.float32(f - whole * np.float32(-2.12194440e-4))
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * (f * f) + f + np.float32(1)
    exponent = np.int32(np.float32(shifted).view(np.int32) << np.int32(23))
    bits = np.int32(np.float32(p).view(np.int32) + exponent)
    return np.float32(0) if x < _LEAST else np.int32(bits).view(np.float32)


@inline()
def _invert(scaled_V: Array, top: np.float32, ladder_J: Array, goal: float) -> int:
    """The first token at which the running sum exceeds the goal.

    Where rounding lets none do so, it is the last one with any weight.
    """
    j = 0
    while ladder_J[j] <= goal and ladder_J[j] < ladder_J[-1]:
        j += 1
    reached = ladder_J[j - 1] if j else 0.0
    token = 0
    for v in range(j * BLOCK, min((j + 1) * BLOCK, len(scaled_V))):
        weight = _exp(np.float32(scaled_V[v] - top))
        reached += weight
        if weight > 0:
            token = v
        if reached > goal:
            break
    return token


@inline()
def _uniform(seed: np.uint64, counter: np.uint64) -> float:
    """In [0, 1): the splitmix64 stream of the seed, at the counter."""
    z = np.uint64(seed + (counter + np.uint64(1)) * _GOLDEN)
    z = np.uint64((z ^ (z >> np.uint64(30))) * _MIX_1)
    z = np.uint64((z ^ (z >> np.uint64(27))) * _MIX_2)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53
