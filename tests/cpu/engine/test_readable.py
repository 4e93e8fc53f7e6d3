"""The first rungs of the parity ladder: decode == prefill, one == many, whole budget == dense.

What samples, seeds and stops do is shown of the engine, which is compared with this loop.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import engines
from support.engines import tiny

from sparrow import models, ops
from sparrow.engine import generate
from sparrow.models.attention import Packed, PackedSparse
from sparrow.schema.sampling import Completion
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

params = partial(engines.params, max_tokens=40)
PROMPTS = [[5, 9, 2], list(range(40)), list(range(16)), [7] * 33]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> models.Decoder:
    return tiny(family=request.param)


def keep(budget: int) -> Schedule:
    return Schedule.fixed(budget, dense_layers=(0,))


def replay(model: models.Decoder, completion: Completion, budget: int | None) -> ops.TokenStats:
    """Log-probs of the sampled tokens from one pass over the whole sequence."""
    ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    start, bounds = len(completion.prompt_ids), torch.tensor([0, len(ids)])
    attention: Any = Packed(bounds=bounds)
    if budget is not None:
        budgets = torch.full((model.spec.layers, len(ids)), budget)
        rows = {"bounds": bounds, "dense_B": torch.tensor([start]), "budgets": budgets}
        attention = PackedSparse(**rows, page=16, rule=Rule(dense_layers=frozenset((0,))))
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attention)
        return ops.token_stats(hidden[start - 1 : -1], model.head, ids[start:])


def test_decode_equals_prefill_and_one_equals_many(model) -> None:
    """Tokens are equal; log-probs up to rounding, since products of one row and of many differ.
    A budget of the whole length is dense bit for bit.
    """
    together = generate(model, PROMPTS, params())
    whole = generate(model, PROMPTS, params(), schedule=keep(80))
    for completion, other in zip(together, whole, strict=True):
        stats = replay(model, completion, None)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=2e-4)
        np.testing.assert_allclose(completion.entropies, stats.entropy, atol=2e-4)
        assert completion.attention == "dense"
        assert np.array_equal(completion.token_ids, other.token_ids)
        assert np.array_equal(completion.logprobs, other.logprobs)
    (alone,) = generate(model, PROMPTS[1:2], params())
    assert np.array_equal(together[1].token_ids, alone.token_ids)
    np.testing.assert_allclose(together[1].logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize("budget", [48, 70])
def test_sparse_decode_equals_one_sparse_pass(model, budget: int) -> None:
    """What calibration and distillation compute is what the rollout did, token by token."""
    differs = False
    for completion in generate(model, PROMPTS, params(max_tokens=60), schedule=keep(budget)):
        stats = replay(model, completion, budget)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=2e-4)
        exact = replay(model, completion, None).logprob
        differs |= not np.allclose(completion.logprobs, exact, atol=1e-2)
        assert f"budget {budget} tokens" in completion.attention
    assert differs  # the budget bites, so the comparison says something


def test_bad_logits_fail_their_row_and_no_other() -> None:
    """The bad token is one that the good row does not draw."""
    model, own = tiny(tied=False), params(max_tokens=3)
    (alone,) = generate(model, [[2]], own)
    poison = next(token for token in range(3, 20) if token not in alone.token_ids)
    with torch.no_grad():
        model.embed.weight[poison] = float("nan")
    bad, good = generate(model, [[poison], [2]], own)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "NaN" in str(bad.error)
    assert np.array_equal(good.token_ids, alone.token_ids)
