"""Advantages: how much better an answer is than a baseline.

Each function takes all groups of a batch and returns each group's advantages, one per answer. Those
that compare answers of a group (grpo, mean_centred, rloo) return exactly 0 if all rewards are equal
up to rounding, so also for a single answer: rounding makes no gradient.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TINY = 1e-6  # added to a standard deviation


class Rewards(NamedTuple):
    """The rewards of a group, one per answer, and that of the greedy answer if there is one."""

    rewards: FloatArray  # [G]
    baseline: float | None


Advantage = Callable[[Sequence[Rewards]], list[FloatArray]]
"""From the groups of a batch to each group's advantages [G]."""


def grpo(groups: Sequence[Rewards]) -> list[FloatArray]:
    """(R - mean) / (std + 1e-6) within the group; the std is the unbiased one."""
    return [_normalised(group.rewards, *_stats(group.rewards)) for group in groups]


def mean_centred(groups: Sequence[Rewards]) -> list[FloatArray]:
    """R - mean within the group (Dr.GRPO): groups of little spread do not count for more."""
    return [_centred(group.rewards, *_stats(group.rewards)) for group in groups]


def rloo(groups: Sequence[Rewards]) -> list[FloatArray]:
    """R - mean of the others, which is G / (G - 1) times R - mean of all."""
    advantages = []
    for group in groups:
        count = len(group.rewards)
        centred = _centred(group.rewards, *_stats(group.rewards))
        advantages.append(centred * (count / max(1, count - 1)))
    return advantages


def remax(groups: Sequence[Rewards]) -> list[FloatArray]:
    """R - reward of the greedy answer to the same prompt (sparse or dense, as the caller chose)."""
    advantages = []
    for place, group in enumerate(groups):
        if group.baseline is None:
            raise ValueError(f"remax: group {place} has no baseline (reward of the greedy answer)")
        advantages.append(np.asarray(group.rewards, np.float64) - group.baseline)
    return advantages


def batch_normalised(groups: Sequence[Rewards]) -> list[FloatArray]:
    """(R - mean) / (std + 1e-6) over all answers of the batch (REINFORCE++).

    A batch of equal rewards gives zeros.
    """
    if not groups:
        return []
    stats = _stats(np.concatenate([group.rewards for group in groups]))
    return [_normalised(group.rewards, *stats) for group in groups]


def overlong_penalty(length: int, *, limit: int, cushion: int) -> float:
    """DAPO's addition to the reward of a long answer.

    0 up to limit - cushion tokens, from there along a line to -1 at the limit, -1 beyond. Without
    a cushion it is a step behind the limit.
    """
    over = length - (limit - cushion)
    if over <= 0:
        return 0.0
    return -min(1.0, over / cushion) if cushion else -1.0


def informative(acc: Sequence[float]) -> bool:
    """Whether a group has both right and wrong answers, for dynamic sampling.

    By accuracy (right from 1 on), not by reward: shaping spreads the rewards of a group in which
    all are right.
    """
    correct = sum(value >= 1 for value in acc)
    return 0 < correct < len(acc)


def _stats(rewards: FloatArray) -> tuple[float, float]:
    """Mean and unbiased std, by exact sums; the std of equal rewards is exactly 0."""
    if not len(rewards):
        raise ValueError("advantages: expected at least one reward in a group, got none")
    values = np.asarray(rewards, np.float64).tolist()
    constant = math.isclose(min(values), max(values))
    return statistics.mean(values), 0.0 if constant else statistics.stdev(values)


def _centred(rewards: FloatArray, mean: float, std: float) -> FloatArray:
    rewards = np.asarray(rewards, np.float64)
    return rewards - mean if std > 0 else np.zeros_like(rewards)


def _normalised(rewards: FloatArray, mean: float, std: float) -> FloatArray:
    return _centred(rewards, mean, std) / (std + TINY)
