"""The first rungs of the parity ladder: decode == prefill, one == many, whole budget == dense."""

from typing import Any

import numpy as np
import pytest
import torch

from sparrow import models, ops
from sparrow.engine import generate
from sparrow.models.attention import Packed, PackedSparse
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

PROMPTS = [[5, 9, 2], list(range(40)), list(range(16)), [7] * 33]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> models.Decoder:
    spec = models.ModelSpec(
        family=request.param,
        layers=3,
        hidden=48,
        intermediate=64,
        heads=6,
        kv_heads=2,
        head_size=16,
        vocabulary=61,
        max_positions=256,
        eos_ids=(60,),
    )
    model = models.random(spec, seed=3)
    with torch.no_grad():
        for name, view in models.hf_views(model).items():
            if "norm" not in name:
                view.mul_(8)  # logits with a spread, as a trained model's
    return model


def keep(budget: int) -> Schedule:
    return Schedule.fixed(budget, dense_layers=(0,))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 11, "ignore_eos": True, **changes})


def replay(model: models.Decoder, completion: Completion, attention: Any) -> ops.TokenStats:
    """Log-probs of the sampled tokens from one pass over the whole sequence."""
    ids = torch.tensor([*completion.prompt_ids.tolist(), *completion.token_ids.tolist()])
    start = len(completion.prompt_ids)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attention(len(ids)))
        return ops.token_stats(hidden[start - 1 : -1], model.head, ids[start:])


def dense(length: int) -> Packed:
    return Packed(bounds=torch.tensor([0, length]))


def test_decode_equals_prefill(model: models.Decoder) -> None:
    for completion in generate(model, PROMPTS, params()):
        stats = replay(model, completion, dense)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=2e-4)
        np.testing.assert_allclose(completion.entropies, stats.entropy, atol=2e-4)


@pytest.mark.parametrize("budget", [48, 64, 70])
def test_sparse_decode_equals_one_sparse_pass(model: models.Decoder, budget: int) -> None:
    """What calibration and distillation compute is what the rollout did, token by token."""
    completions = generate(model, PROMPTS, params(max_tokens=60), schedule=keep(budget))
    differs = False
    for completion in completions:

        def sparse(length: int, prompt: int = len(completion.prompt_ids)) -> PackedSparse:
            return PackedSparse(
                bounds=torch.tensor([0, length]),
                dense_B=torch.tensor([prompt]),
                budgets=torch.full((model.spec.layers, length), budget),
                page=16,
                rule=Rule(dense_layers=frozenset((0,))),
            )

        stats = replay(model, completion, sparse)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=2e-4)
        exact = replay(model, completion, dense).logprob
        differs |= not np.allclose(completion.logprobs, exact, atol=1e-2)
        assert f"budget {budget} tokens" in completion.attention
    assert differs  # the budget bites, so the comparison says something


def test_a_budget_of_the_length_is_dense_bit_for_bit(model: models.Decoder) -> None:
    plain = generate(model, PROMPTS, params())
    whole = generate(model, PROMPTS, params(), schedule=keep(80))
    for left, right in zip(plain, whole, strict=True):
        assert left.attention == "dense"
        assert np.array_equal(left.token_ids, right.token_ids)
        assert np.array_equal(left.logprobs, right.logprobs)


def test_a_sample_does_not_depend_on_the_other_prompts(model: models.Decoder) -> None:
    """Tokens are equal; log-probs up to rounding, since products of one row and of many differ."""
    together = generate(model, PROMPTS, params())
    for completion, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = generate(model, [prompt], params())
        assert np.array_equal(completion.token_ids, alone.token_ids)
        np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-4)


def test_neighbouring_seeds_are_unrelated(model: models.Decoder) -> None:
    samples = [
        tuple(sample.token_ids)
        for seed in range(4)
        for sample in generate(model, PROMPTS[:1], params(n=4, seed=seed))
    ]
    assert len(set(samples)) == 16


def test_without_a_seed_samples_differ_and_the_global_one_is_left_alone(model) -> None:
    torch.manual_seed(0)
    first, second = generate(model, [PROMPTS[0]] * 2, params(seed=None))
    assert first != second
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), after)


def test_samples_of_one_prompt_differ(model: models.Decoder) -> None:
    samples = generate(model, PROMPTS[:2], params(n=3))
    assert [len(sample.prompt_ids) for sample in samples] == [3, 3, 3, 40, 40, 40]
    assert len({tuple(sample.token_ids) for sample in samples[:3]}) == 3
    again = generate(model, PROMPTS[:2], params(n=3))
    assert all(a == b for a, b in zip(samples, again, strict=True))


def test_stops_and_minimum(model: models.Decoder) -> None:
    (free,) = generate(model, PROMPTS[:1], params())
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    (ended,) = generate(model, PROMPTS[:1], params(stop_token_ids=(stop,)))
    assert ended.finish_reason == "stop"
    assert ended.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    (longer,) = generate(model, PROMPTS[:1], params(stop_token_ids=(stop,), min_tokens=20))
    assert stop not in longer.token_ids[:20]
    (limited,) = generate(model, PROMPTS[:1], params(max_tokens=7))
    assert limited.finish_reason == "length"
    assert len(limited.token_ids) == 7


def test_bad_logits_fail_their_row_and_no_other() -> None:
    spec = models.SHAPES["qwen3-0.6b"]
    small = {"layers": 1, "hidden": 16, "intermediate": 16, "heads": 2, "kv_heads": 1}
    model = models.random(spec, **small, head_size=8, vocabulary=20, eos_ids=(), tied=True)
    with torch.no_grad():
        model.embed.weight[13] = float("nan")
        model.lm_head = torch.nn.Linear(16, 20, bias=False)
    bad, good = generate(model, [[13], [2]], SamplingParams(temperature=0, max_tokens=3))
    assert bad.finish_reason == "error"
    assert "NaN" in str(bad.error)
    assert good.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([61], {}, r"token 61 is not a whole number in 0\.\.60"),
        ([-1], {}, r"token -1 is not"),
        ([1], {"stop_token_ids": (99,)}, r"stop_token_ids \(99,\)"),
        ([1] * 200, {"max_tokens": 57}, "200 tokens and may grow by 57.*context is 256"),
    ],
)
def test_impossible_prompts_are_refused(model, prompt, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, [prompt], params(**changes))


def test_a_schedule_without_a_sparse_layer_is_refused(model) -> None:
    with pytest.raises(ValueError, match="nothing would be sparse"):
        generate(model, PROMPTS, params(), schedule=Schedule.fixed(64, dense_layers=(0, 1, 2)))
