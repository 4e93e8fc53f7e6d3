"""Intervals over prompts: what they are made of, and how often they hold the truth."""

import numpy as np
import pytest
from support.prompts import DESIGNS, truth

from sparrow.stats import Interval, hard_misses, quantile_interval, rate_interval


def coverage(name: str, prompts: int, repetitions: int, draws: int = 999) -> float:
    """The share of samples of a design whose 95 % interval of p05 holds the truth."""
    true_value, held = truth(name), 0
    for number in range(repetitions):
        groups = DESIGNS[name].sample(np.random.default_rng((number, prompts)), prompts)
        interval = quantile_interval(groups, draws=draws, seed=number)
        held += interval.low <= true_value <= interval.high
    return held / repetitions


def test_at_48_prompts_intervals_hold_the_truth() -> None:
    assert 0.92 <= coverage("heavy", 48, 200, draws=299) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [48, 96])
@pytest.mark.parametrize("name", DESIGNS)
def test_under_every_design_intervals_hold_the_truth(name: str, prompts: int) -> None:
    assert 0.92 <= coverage(name, prompts, 600) <= 0.98


def test_few_prompts_make_intervals_that_are_too_narrow() -> None:
    """What the product warns of: prompts that are rare and bad are not in the sample."""
    assert coverage("few", 8, 120, draws=299) < 0.9


def test_tokens_of_a_prompt_are_not_counted_as_independent() -> None:
    groups = DESIGNS["heavy"].sample(np.random.default_rng(5), 48)
    shuffled = np.random.default_rng(6).permutation(np.concatenate(groups))
    mixed = np.split(shuffled, np.cumsum([len(group) for group in groups])[:-1])
    by_prompt, by_chance = quantile_interval(groups), quantile_interval(mixed)
    assert by_prompt.value == by_chance.value
    assert by_prompt.high - by_prompt.low > 3 * (by_chance.high - by_chance.low)


def test_known_distributions_have_known_tails() -> None:
    """A tenth of all tokens is uniform below 0.8: p05 is 0.4."""
    rng = np.random.default_rng(0)
    groups = [np.where(rng.random(2000) < 0.1, 0.8 * rng.random(2000), 1.0) for _ in range(64)]
    p05 = quantile_interval(groups)
    assert p05.value == np.quantile(np.concatenate(groups), 0.05)
    assert p05.low < 0.4 < p05.high
    assert p05.high - p05.low < 0.04


def test_ends_by_hand() -> None:
    """Of 48 prompts k are lost. Above them the share below is k / 48, which must be over q by
    c errors of sqrt(s (1 - s) / 47): 6 of 48 are not (T = 1.55), 12 are (T = 3.2)."""
    for lost, high in ((6, 1.0), (12, 0.3)):
        groups = [np.full(10, 0.3 if number < lost else 1.0) for number in range(48)]
        interval = quantile_interval(groups)
        assert (interval.value, interval.high) == (0.3, high)
    # Twenty equal prompts: any draw is the sample, so nothing is in doubt.
    equal = [np.array([0.2, 0.5, 0.8])] * 20
    assert quantile_interval(equal, 0.4) == Interval(value=0.5, low=0.5, high=0.5)
    # At 1 there is a heap: a tail that reaches it ends there.
    groups = [np.ones(100)] * 10 + [np.r_[np.full(3, 0.5), np.ones(97)]] * 10
    assert quantile_interval(groups) == Interval(value=1, low=1, high=1)
    groups[-1] = np.r_[np.full(90, 0.5), np.ones(10)]
    interval = quantile_interval(groups)
    assert (interval.low, interval.high) == (0.5, 1)
    interval = quantile_interval([np.full(40, 0.25), np.full(40, 0.75)])
    assert (interval.low, interval.high) == (0.25, 0.75)
    single = quantile_interval([np.linspace(0, 1, 101), np.array([])])
    assert single == Interval(value=pytest.approx(0.05), low=0.0, high=1.0)


def test_the_same_every_time_in_fp32_and_with_empty_groups() -> None:
    groups = DESIGNS["middle"].sample(np.random.default_rng(3), 20)
    assert quantile_interval(groups) == quantile_interval([*groups, np.array([])])
    small = quantile_interval([group.astype(np.float32) for group in groups])
    assert small.low == pytest.approx(quantile_interval(groups).low, abs=1e-6)


def test_ends_are_found_to_the_token() -> None:
    """Many tokens are tried in steps; the ends are where single tokens decide."""
    rng = np.random.default_rng(4)
    groups = [rng.beta(2 + 4 * rng.random(), 2, 5000) for _ in range(24)]
    fine, coarse = quantile_interval(groups), [np.sort(group)[::50] for group in groups]
    assert quantile_interval(coarse).low == pytest.approx(fine.low, abs=0.02)
    every = np.concatenate(groups)
    assert fine.low in every
    assert fine.high in every


def test_one_long_prompt_among_short_ones_widens() -> None:
    rng = np.random.default_rng(7)
    equal = [rng.random(50) for _ in range(12)]
    wide, narrow = quantile_interval([rng.random(10_000), *equal]), quantile_interval(equal)
    assert wide.high - wide.low > narrow.high - narrow.low


def test_without_numbers_there_is_none() -> None:
    nothing, none = [np.array([]), np.array([])], [np.array([0.1, np.nan]), np.ones(3)]
    for groups, word in ((nothing, "tokens"), (none, "NaN")):
        with pytest.raises(ValueError, match=word):
            quantile_interval(groups)


# Rates of rare tokens.


def test_hard_misses_are_sure_for_the_policy_and_not_for_the_actor() -> None:
    alpha, entropy = np.array([0.4, 0.4, 0.6, 0.49]), np.array([0.05, 0.2, 0.05, 0.0999])
    assert hard_misses(alpha, entropy).tolist() == [True, False, False, True]


def test_a_rate_without_events_or_with_one_prompt() -> None:
    none = np.zeros(500, bool)
    assert rate_interval([none] * 10).high == pytest.approx(1000 * 3.689 / 5000, rel=1e-3)
    assert rate_interval([none | True]) == (1000, 0, 1000)
    with pytest.raises(ValueError, match="tokens"):
        rate_interval([none[:0]])


def test_events_of_one_prompt_say_less_than_those_of_many() -> None:
    some, none = np.arange(500) < 4, np.zeros(500, bool)
    even, lumped = rate_interval([some] * 8), rate_interval([np.arange(500) < 32, *[none] * 7])
    assert even.value == lumped.value == 8
    # Poisson's interval of 32 events, widened for 8 prompts.
    assert 5 < even.low < 5.5
    assert 11.3 < even.high < 12.5
    assert lumped.low < 0.5
    assert lumped.high > 20


@pytest.mark.parametrize("shape", [1.0, 0.3])
def test_rates_hold_the_truth(shape: float) -> None:
    held, random = 0, np.random.default_rng(1)
    for _ in range(400):
        rates = 0.002 * random.gamma(shape, 1 / shape, 32)
        sizes = random.integers(100, 700, 32)
        groups = [random.random(size) < rate for rate, size in zip(rates, sizes, strict=True)]
        interval = rate_interval(groups)
        held += interval.low <= 2 <= interval.high
    assert held >= 0.9 * 400
