"""Tails of acceptance: quantiles, bins, intervals, and the budget that reaches a target."""

import numpy as np
import pytest

from sparrow.calibrate.cells import Tail, budget_for, in_bin, tail
from sparrow.calibrate.replay import Replay


def of(alpha: list[float], prompt: int = 10) -> Replay:
    array = np.array(alpha, dtype=np.float32)
    return Replay(prompt=prompt, alpha=array, entropy=np.zeros_like(array))


def at(p05: float) -> Tail:
    return Tail(p05=p05, low=p05, high=p05, mean=1.0, between=0.0, lost=0.0, tokens=1, sequences=1)


def test_a_bin_holds_its_start_and_not_its_stop() -> None:
    """Lengths are totals: the first sampled token has that of the prompt."""
    first, second = of([0.1, 0.2, 0.3, 0.4], prompt=10), of([0.5, 0.6], prompt=12)
    found = in_bin([first, second], 11, 13)
    assert [part.tolist() for part in found] == [
        np.float32([0.2, 0.3]).tolist(),
        np.float32([0.5]).tolist(),
    ]

    assert in_bin([of([0.1, 0.2], prompt=10)], 12, 40) == []  # no token there: left out
    one = of(list(np.linspace(0, 1, 20)), prompt=5)
    parts = [in_bin([one], start, start + 5) for start in range(0, 30, 5)]
    assert np.concatenate([part[0] for part in parts if part]).tolist() == one.alpha.tolist()


def test_quantile_and_shares() -> None:
    alphas = np.float32([0.0, 0.02, 0.5, 0.94, 0.96, *[1.0] * 15])
    found = tail([alphas[:7], alphas[7:]])
    assert found.p05 == pytest.approx(np.quantile(alphas, 0.05))
    assert found.mean == pytest.approx(alphas.mean())
    assert found.lost == pytest.approx(2 / 20)
    assert found.between == pytest.approx(2 / 20)
    assert (found.tokens, found.sequences) == (20, 2)

    short, long = np.float32([0.0]), np.ones(99, dtype=np.float32)
    assert tail([short, long]).p05 == 1  # tokens count, not sequences


def test_the_interval_is_over_sequences() -> None:
    """Of two that differ, draws hold the one, the other or both; equal ones leave no doubt."""
    low, high = np.full(40, 0.25, np.float32), np.full(40, 0.75, np.float32)
    found = tail([low, high])
    assert (found.low, found.high) == (0.25, 0.75)
    alone = tail([np.linspace(0, 1, 50, dtype=np.float32)])
    for equal in (tail([low] * 5), alone):
        assert equal.low == equal.high == equal.p05


def test_the_interval_is_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    alphas = [rng.random(30).astype(np.float32) for _ in range(8)]
    assert tail(alphas) == tail(alphas)
    assert tail(alphas).low <= tail(alphas).p05 <= tail(alphas).high
    narrow = tail(alphas * 20)
    assert narrow.high - narrow.low < tail(alphas).high - tail(alphas).low


def test_budgets_that_reach_a_target() -> None:
    tails = {64: at(0.2), 128: at(0.6), 256: at(0.8), 1024: at(1.0)}
    for budget, measured in tails.items():
        assert budget_for(tails, measured.p05) == pytest.approx(budget)
    assert budget_for(tails, 0.4) == pytest.approx((64 * 128) ** 0.5)  # on a log scale between
    found = [budget_for(tails, target) or 0 for target in np.linspace(0.2, 1.0, 41)]
    assert found == sorted(set(found))
    assert [budget_for(tails, target) for target in (0.0, 0.199, 1.001)] == [None] * 3
    assert budget_for(dict(reversed(tails.items())), 0.7) == budget_for(tails, 0.7)
    dip = {64: at(0.2), 128: at(0.6), 256: at(0.5), 512: at(0.8)}  # is levelled
    assert budget_for(dip, 0.6) == pytest.approx(128)
    assert budget_for(dip, 0.55) == pytest.approx(64 * 2 ** (0.35 / 0.4))
    assert budget_for(dip, 0.7) == pytest.approx((256 * 512) ** 0.5)
    assert budget_for({64: at(0.5), 128: at(0.5), 256: at(0.9)}, 0.5) == 64
    assert (budget_for({64: at(0.5)}, 0.5), budget_for({64: at(0.5)}, 0.6)) == (64, None)
    with pytest.raises(ValueError, match="bin"):
        tail(in_bin([of([0.5])], 100, 200))
