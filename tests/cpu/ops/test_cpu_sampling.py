"""Sampling in numba against its definition, and the bits that must not depend on others."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops.cpu import sampling
from sparrow.ops.reference import sampling as definition

INF, NAN = math.inf, math.nan
ROUNDING = 1e-6  # of a step of the cumulative distribution, as the definition computes it


def rows_of(rows: int, vocabulary: int, *, spread: float = 3.0, seed: int = 0) -> list[Tensor]:
    """Logits, seeds, counters and temperatures."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    counters = torch.randint(0, 5000, (rows,), generator=generator)
    return [logits, seeds, counters, torch.rand(rows, generator=generator) + 0.3]


def assert_exact_up_to_rounding(arguments: list[Tensor], draws: ops.Draws) -> None:
    """Against fp64: u lies in its token's step of the ladder; log-prob and entropy are near.

    The definition sums in fp32 and is itself off by up to 1e-4 for a large vocabulary.
    """
    logits_BV, seeds_B, counters_B, temperature_B = arguments
    logp_BV = (logits_BV.double() / temperature_B.double()[:, None]).log_softmax(1)
    p_BV, token_B1 = logp_BV.exp(), draws.tokens[:, None]
    above_B = p_BV.cumsum(1).gather(1, token_B1).squeeze(1)
    below_B = above_B - p_BV.gather(1, token_B1).squeeze(1)
    uniform_B = definition.uniforms(seeds_B, counters_B)
    assert (uniform_B >= below_B - ROUNDING).all()
    assert (uniform_B <= above_B + ROUNDING).all()
    near = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(draws.logprobs, logp_BV.gather(1, token_B1).squeeze(1), **near)
    torch.testing.assert_close(draws.entropies, -(p_BV * logp_BV).sum(1), **near)


SHAPES = [
    *((500, 2048, 3.0), (1000, 300, 1.0), (20, 49152, 2.0), (1000, 127, 10.0)),
    *((1000, 129, 30.0), (500, 1, 1.0), (1000, 2, 0.1), (1, 151_936, 1.0)),
]


def test_tokens_are_those_of_the_definition_and_figures_exact() -> None:
    for rows, vocabulary, spread in SHAPES:
        arguments = rows_of(rows, vocabulary, spread=spread)
        assert sampling.supports("sample", *arguments)
        ours, theirs = sampling.sample(*arguments), definition.sample.definition(*arguments)
        for left, right in zip(ours, theirs, strict=True):
            assert left.dtype == right.dtype
            assert left.shape == right.shape
        assert int((ours.tokens != theirs.tokens).sum()) <= 1  # u within rounding of a step
        assert_exact_up_to_rounding(arguments, ours)
        assert ours.ok.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_strides_and_integers(dtype: torch.dtype) -> None:
    logits, seeds, counters, temperature = rows_of(50, 400)
    logits, seeds = logits.to(dtype), seeds % 1000
    plain = sampling.sample(logits, seeds, counters, temperature)
    assert torch.equal(
        plain.tokens, definition.sample.definition(logits, seeds, counters, temperature).tokens
    )
    strided = torch.cat([logits, logits], dim=1)[:, :400]
    columns = logits.T.contiguous().T
    for other in (strided, columns, logits.float()):
        again = sampling.sample(other, seeds.int(), counters.int(), temperature)
        for left, right in zip(plain, again, strict=True):
            assert torch.equal(left, right)


def test_greedy_takes_the_earliest_best() -> None:
    logits, seeds, counters, temperature = rows_of(64, 500)
    logits = logits.round()
    temperature[::2] = 0
    ours = sampling.sample(logits, seeds, counters, temperature)
    theirs = definition.sample.definition(logits, seeds, counters, temperature)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert (ours.logprobs[::2] == 0).all()
    assert (ours.entropies[::2] == 0).all()
    assert (ours.logprobs[1::2] < 0).all()


def test_rows_that_are_not_finite_are_not_ok() -> None:
    for value, place, temperature in product((NAN, -NAN, INF, -INF), (0, 130, 299), (0.0, 0.7)):
        logits, seeds, counters, _ = rows_of(3, 300)
        logits[1, place] = value
        arguments = (logits, seeds, counters, torch.full((3,), temperature))
        draws = sampling.sample(*arguments)
        assert draws.ok.tolist() == [True, False, True]
        assert draws.tokens[1] == draws.logprobs[1] == draws.entropies[1] == 0
        assert torch.equal(draws.tokens, definition.sample.definition(*arguments).tokens)


def test_a_certain_token_has_no_entropy() -> None:
    logits = torch.full((4, 300), -1000.0)
    logits[torch.arange(4), torch.tensor([0, 127, 128, 299])] = 1000.0
    index = torch.arange(4)
    draws = sampling.sample(logits, index, index, torch.tensor([1.0, 0.1, 3.0, 1e-30]))
    assert draws.tokens.tolist() == [0, 127, 128, 299]
    assert draws.logprobs.tolist() == draws.entropies.tolist() == [0.0] * 4


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(threads: int) -> None:
    arguments = rows_of(20, 3001)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        many = sampling.sample(*arguments)
    finally:
        torch.set_num_threads(before)
    for row in range(20):
        alone = sampling.sample(*(argument[row : row + 1] for argument in arguments))
        for left, right in zip(alone, many, strict=True):
            assert left.tolist() == right[row : row + 1].tolist()


def test_goals_at_both_ends_stay_on_tokens_with_weight() -> None:
    scaled = np.full(300, -500, np.float32)
    scaled[[5, 140, 141]] = 0
    ladder = np.empty(3)
    assert sampling._climb(scaled, np.float32(0), ladder) == 0
    assert ladder.tolist() == [1, 3, 3]
    found = [sampling._invert(scaled, np.float32(0), ladder, goal) for goal in (0.0, 1.0, 2.5, 3.0)]
    assert found == [5, 140, 141, 141]


def test_what_is_left_to_the_definition() -> None:
    logits, seeds, counters, temperature = rows_of(4, 50)
    cuts = [torch.full((4,), 3), torch.full((4,), 0.9), torch.full((4, 1), 7)]
    for place in range(3):
        one = [cut if index == place else None for index, cut in enumerate(cuts)]
        assert not sampling.supports("sample", logits, seeds, counters, temperature, *one)
    assert not sampling.supports("sample", logits.double(), seeds, counters, temperature)
    assert not sampling.supports("sample", logits, seeds, counters, temperature.double())
    draws = ops.sample(logits, seeds, counters, temperature, *cuts)
    assert (draws.tokens != 7).all()
