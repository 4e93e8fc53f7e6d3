"""Sampling: what holds for every row, whatever its logits and cuts."""

import math

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from sparrow import ops

VOCABULARY = 6
numbers = st.integers(-30, 30).map(lambda tenths: tenths / 10)


@given(
    logits=st.lists(numbers, min_size=VOCABULARY, max_size=VOCABULARY),
    seed=st.integers(-(2**63), 2**63 - 1),
    counter=st.integers(0, 2**31),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    forbidden=st.lists(st.integers(-2, VOCABULARY - 1), min_size=1, max_size=4),
)
def test_a_draw_is_allowed_and_its_logprob_is_of_what_is_left(
    logits, seed, counter, temperature, top_k, top_p, forbidden
) -> None:
    draws = ops.sample(
        torch.tensor([logits]),
        torch.tensor([seed]),
        torch.tensor([counter]),
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([forbidden]),
    )
    token, logprob = int(draws.tokens), float(draws.logprobs)
    assert bool(draws.ok)
    assert token not in forbidden
    allowed = [logit for index, logit in enumerate(logits) if index not in forbidden]
    better = sum(logit > logits[token] for logit in allowed)
    assert better < (top_k or VOCABULARY)
    mass = math.exp(logits[token] / temperature) / sum(
        math.exp(logit / temperature) for logit in allowed
    )
    assert math.log(mass) - 1e-4 <= logprob <= 1e-6  # cuts only raise it
    assert -1e-6 <= float(draws.entropies) <= math.log(len(allowed)) + 1e-5
