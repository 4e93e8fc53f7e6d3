"""Scores in order: whole numbers of the same order, and the least of those that are chosen.

Device functions of `select`: by count, or by the mass that the chosen ones hold.
"""

import torch
import triton
import triton.language as tl

NONE, BEYOND = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # below and above all keys
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def page_keys(
    score_M: tl.tensor,
    m: tl.tensor,
    pages: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
) -> tl.tensor:
    """The order keys of some pages; NONE for those that are reserved or do not exist."""
    free = (m >= FIRST) & (m < pages - LAST)
    score = tl.load(score_M + m, free, other=0.0)
    if MASS is not None:
        score = clean_mass(score)
    return tl.where(free, order_key(score), NONE)


@triton.jit
def order_key(score: tl.tensor) -> tl.tensor:
    """int32 numbers in the order of the scores; NaN is the least, both zeros are one.

    For masses they are the bits themselves, so that no second copy of either need be held.
    """
    score = tl.where(score != score, -LARGEST, score)
    score = tl.minimum(tl.maximum(score, -LARGEST), LARGEST)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, tl.where(bits == NONE, 0, bits ^ BEYOND))


@triton.jit
def threshold_of(key: tl.tensor, need: tl.tensor) -> tl.tensor:
    """The largest number that `need` keys reach, or an earlier one that exactly so many do."""
    threshold = tl.where(need > 0, NONE, BEYOND)
    step = tl.full((), 0x80000000, tl.uint32)
    reached = tl.where(need > 0, -1, 0)
    while (step != 0) & (reached != need):
        guess = threshold ^ step.to(tl.int32, bitcast=True)
        above = tl.sum((key >= guess).to(tl.int32), 0)
        threshold = tl.where(above >= need, guess, threshold)
        reached = tl.where(above >= need, above, reached)
        step = step >> 1
    return threshold


@triton.jit
def clean_mass(score: tl.tensor) -> tl.tensor:
    """Scores as masses: what is negative or NaN is none."""
    return tl.where(score > 0, tl.minimum(score, LARGEST), 0.0)


@triton.jit
def held_mass(key: tl.tensor, least: tl.tensor) -> tl.tensor:
    """The mass of the pages whose key is at least so large."""
    return tl.sum(tl.where(key >= least, key.to(tl.float32, bitcast=True), 0.0), 0)


@triton.jit
def reserved_mass(
    score_M: tl.tensor,
    pages: tl.tensor,
    finished: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
) -> tl.tensor:
    r = tl.arange(0, triton.next_power_of_2(FIRST + LAST))
    m = tl.where(r < FIRST, r, r + (pages - LAST - FIRST))
    return tl.sum(clean_mass(tl.load(score_M + m, m < finished, other=0.0)), 0)


@triton.jit
def mass_threshold(
    key: tl.tensor,
    need: tl.tensor,
    reserved: tl.tensor,
    goal: tl.tensor,
    free: tl.tensor,
) -> tl.tensor:
    """The largest number such that the keys that reach it are `need`, or hold what is missing.

    Or an earlier one that the same keys reach: the search ends when only one page can be the last.
    `low` keys reach the threshold and are enough, `high` reach a number above it and are not.
    """
    some = (need > 0) & (reserved < goal)
    threshold, step = tl.where(some, 0, BEYOND), tl.full((), 1 << 30, tl.int32)
    low, high = tl.where(some, free, 0), tl.full((), 0, tl.int32)
    while (step != 0) & (low - high > 1):
        guess = threshold | step
        above = tl.sum((key >= guess).to(tl.int32), 0)
        enough = (above >= need) | (reserved + held_mass(key, guess) >= goal)
        threshold = tl.where(enough, guess, threshold)
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, above)
        step = step >> 1
    return threshold


@triton.jit
def ties_for(held: tl.tensor, goal: tl.tensor, threshold: tl.tensor, tied: tl.tensor) -> tl.tensor:
    """How many of the pages that tie at the threshold bring the mass that is missing.

    The quotient may be off by one; its check is not. Without ties the threshold is nobody's mass.
    """
    each = tl.where(tied > 0, threshold.to(tl.float32, bitcast=True), 1.0)
    few = tl.ceil(tl.minimum((goal - held) / tl.maximum(each, 1e-37), 65536.0)).to(tl.int32)
    few = tl.where(held + (few - 1) * each >= goal, few - 1, few)
    few = tl.where(held + few * each < goal, few + 1, few)
    return tl.minimum(tl.maximum(few, 0), tied)
