"""The lower tail of acceptance: quantiles in a bin of lengths, and the budget that reaches one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparrow.calibrate.replay import Replay
from sparrow.schema.base import Float32Array
from sparrow.stats import DRAWS, quantile_interval

TAIL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The 5th percentile of alpha over the tokens of a bin, and how the rest is spread."""

    p05: float
    low: float  # 95 % interval of p05, by drawing whole sequences anew
    high: float
    mean: float
    between: float  # share of tokens with alpha strictly between 0.05 and 0.95
    lost: float  # share at 0.05 or below
    tokens: int
    sequences: int


def in_bin(replays: Sequence[Replay], start: int, stop: int) -> list[Float32Array]:
    """The alphas of each sequence that were drawn at total lengths from start to stop."""
    parts = [r.alpha[(r.lengths >= start) & (r.lengths < stop)] for r in replays]
    return [part for part in parts if len(part)]


def tail(alphas: Sequence[Float32Array], *, draws: int = DRAWS, seed: int = 0) -> Tail:
    """Tokens of one sequence are not independent, so the interval is over sequences.

    One sequence alone has no interval: both ends are its p05.
    """
    if not alphas:
        raise ValueError("tail: no token lies in the bin; give longer sequences or another bin")
    every = np.concatenate(alphas)
    p05 = float(np.quantile(every, TAIL))
    found = quantile_interval(alphas, TAIL, draws=draws, seed=seed, least=p05, most=p05)
    return Tail(
        p05=p05,
        low=found.low,
        high=found.high,
        mean=float(every.mean()),
        between=float(((every > 0.05) & (every < 0.95)).mean()),
        lost=float((every <= 0.05).mean()),
        tokens=len(every),
        sequences=len(alphas),
    )


def budget_for(tails: Mapping[int, Tail], target: float) -> float | None:
    """The budget at which p05 crosses a target, between measured ones; None beyond them.

    Budgets are interpolated on a log scale, after p05 was made to rise with the budget.
    """
    if not tails:
        raise ValueError("budget_for: no budget was measured")
    budgets = np.array(sorted(tails))
    p05 = np.maximum.accumulate([tails[budget].p05 for budget in budgets])
    if not p05[0] <= target <= p05[-1]:
        return None
    above = int(np.searchsorted(p05, target))
    if above == 0 or p05[above] == p05[above - 1]:
        return float(budgets[above])
    share = (target - p05[above - 1]) / (p05[above] - p05[above - 1])
    low, high = np.log(budgets[above - 1 : above + 1])
    return float(np.exp(low + share * (high - low)))
