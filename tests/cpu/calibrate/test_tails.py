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


def test_sequences_without_tokens_in_the_bin_are_left_out() -> None:
    assert in_bin([of([0.1, 0.2], prompt=10), of([0.3], prompt=30)], 20, 40) != []
    assert len(in_bin([of([0.1, 0.2], prompt=10), of([0.3], prompt=30)], 20, 40)) == 1
    assert in_bin([of([0.1, 0.2], prompt=10)], 12, 40) == []


def test_neighbouring_bins_share_no_token_and_lose_none() -> None:
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


def test_the_fifth_percentile_counts_tokens_and_not_sequences() -> None:
    short, long = np.float32([0.0]), np.ones(99, dtype=np.float32)
    assert tail([short, long]).p05 == 1
    assert tail([short, short, long[:10]]).p05 == 0


def test_the_interval_of_one_sequence_is_degenerate() -> None:
    found = tail([np.linspace(0, 1, 50, dtype=np.float32)])
    assert found.low == found.high == found.p05


def test_the_interval_is_over_sequences() -> None:
    """Of two that differ, draws hold the one, the other or both; equal ones leave no doubt."""
    low, high = np.full(40, 0.25, np.float32), np.full(40, 0.75, np.float32)
    found = tail([low, high])
    assert (found.low, found.high) == (0.25, 0.75)
    equal = tail([low] * 5)
    assert equal.low == equal.high == 0.25


def test_the_interval_is_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    alphas = [rng.random(30).astype(np.float32) for _ in range(8)]
    assert tail(alphas) == tail(alphas)
    assert tail(alphas).low <= tail(alphas).p05 <= tail(alphas).high
    narrow = tail(alphas * 20)
    assert narrow.high - narrow.low < tail(alphas).high - tail(alphas).low


def test_an_empty_bin_is_refused() -> None:
    with pytest.raises(ValueError, match="tail: no token lies in the bin; give longer sequences"):
        tail(in_bin([of([0.5])], 100, 200))


class TestBudgetFor:
    tails = {64: at(0.2), 128: at(0.6), 256: at(0.8), 1024: at(1.0)}  # noqa: RUF012

    def test_measured_budgets(self) -> None:
        for budget, measured in self.tails.items():
            assert budget_for(self.tails, measured.p05) == pytest.approx(budget)

    def test_on_a_log_scale_between(self) -> None:
        assert budget_for(self.tails, 0.4) == pytest.approx((64 * 128) ** 0.5)
        assert budget_for(self.tails, 0.9) == pytest.approx((256 * 1024) ** 0.5)

    def test_rises_with_the_target(self) -> None:
        found = [budget_for(self.tails, target) for target in np.linspace(0.2, 1.0, 41)]
        numbers = [budget for budget in found if budget is not None]
        assert len(numbers) == 41
        assert numbers == sorted(numbers)
        assert len(set(numbers)) == 41

    @pytest.mark.parametrize("target", [0.0, 0.199, 1.001])
    def test_none_beyond_what_was_measured(self, target: float) -> None:
        assert budget_for(self.tails, target) is None

    def test_the_order_in_which_they_were_measured_does_not_matter(self) -> None:
        back = dict(reversed(self.tails.items()))
        assert budget_for(back, 0.7) == budget_for(self.tails, 0.7)

    def test_a_dip_is_levelled(self) -> None:
        """p05 is made to rise: of a plateau the smallest budget counts."""
        dip = {64: at(0.2), 128: at(0.6), 256: at(0.5), 512: at(0.8)}
        assert budget_for(dip, 0.6) == pytest.approx(128)
        assert budget_for(dip, 0.55) == pytest.approx(64 * 2 ** (0.35 / 0.4))
        assert budget_for(dip, 0.7) == pytest.approx((256 * 512) ** 0.5)

    def test_a_level_start_gives_the_smallest(self) -> None:
        assert budget_for({64: at(0.5), 128: at(0.5), 256: at(0.9)}, 0.5) == 64

    def test_one_budget(self) -> None:
        assert budget_for({64: at(0.5)}, 0.5) == 64
        assert budget_for({64: at(0.5)}, 0.6) is None
