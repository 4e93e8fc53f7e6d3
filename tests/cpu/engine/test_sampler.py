"""Sampling draws from the distribution whose log-prob it reports."""

import math

import pytest
import torch

from sparrow.engine.sampler import Draw, sample
from sparrow.records import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def draw_many(count: int = 4000, **changes) -> list[Draw]:
    generator = torch.Generator().manual_seed(0)
    return [sample(LOGITS, SamplingParams(**changes), generator) for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}],
)
def test_frequencies_are_the_reported_probabilities(changes) -> None:
    draws = draw_many(**changes)
    reported = {draw.token: math.exp(draw.logprob) for draw in draws}
    assert sum(reported.values()) == pytest.approx(1, abs=1e-3)  # the rarest may be missing
    for token, probability in reported.items():
        share = sum(draw.token == token for draw in draws) / len(draws)
        assert share == pytest.approx(probability, abs=4 * math.sqrt(0.25 / len(draws)))
    entropy = -sum(p * math.log(p) for p in reported.values())
    assert draws[0].entropy == pytest.approx(entropy, abs=1e-2)


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    p = LOGITS.softmax(0)
    assert {draw.token for draw in draw_many(top_p=float(p[0]) - 1e-3)} == {0}
    assert {draw.token for draw in draw_many(top_p=float(p[0]) + 1e-3)} == {0, 1}


def test_greedy_is_a_point_mass() -> None:
    assert set(draw_many(50, temperature=0)) == {Draw(token=0, logprob=0.0, entropy=0.0)}


def test_forbidden_tokens_are_not_drawn_and_not_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    forbidden = torch.tensor([0, 2])
    draws = [sample(LOGITS, SamplingParams(), generator, forbidden) for _ in range(500)]
    assert {draw.token for draw in draws} == {1, 3, 4}
    reported = {draw.token: math.exp(draw.logprob) for draw in draws}
    assert sum(reported.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        sample(torch.tensor([0.0, bad]), SamplingParams(), torch.Generator())


def test_some_token_must_be_allowed() -> None:
    with pytest.raises(ValueError, match="every token is forbidden"):
        sample(LOGITS, SamplingParams(), torch.Generator(), torch.arange(5))
