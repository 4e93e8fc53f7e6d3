"""The parity ladder of the engine: readable loop, prefill, batches, groups, swaps, budgets."""

from typing import Any

import numpy as np
import pytest
import torch
from support import engines
from support.engines import (
    HIDDEN,
    SPARSE,
    count_prefill,
    dense_hidden,
    engine_of,
    logp,
    prompt,
    recorded_hidden,
    run,
    same_bits,
    tiny,
)

from sparrow import models, ops
from sparrow.engine import generate as readable_loop
from sparrow.engine.engine import EXACT_BATCH
from sparrow.engine.requests import sample_seeds
from sparrow.models.attention import PackedSparse
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

PROMPTS = [[5, 9, 2], prompt(40), prompt(16, 1), prompt(150, 2)]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def params(**changes: Any) -> SamplingParams:
    return engines.params(**{"max_tokens": 14, **changes})


def alone(model: models.Decoder, ids: list[int], own: SamplingParams, **how: Any) -> Completion:
    (completion,) = engine_of(model).generate([ids], own, **how)
    return completion


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 12},
        {"stop_token_ids": tuple(range(0, 60, 2)), "min_tokens": 9},
    ],
    ids=["plain", "truncated", "greedy", "minimum"],
)
def test_the_engine_equals_the_readable_loop(model, schedule, changes) -> None:
    own = params(**changes)
    wanted = readable_loop(model, PROMPTS, own, schedule=schedule)
    given = engine_of(model).generate(PROMPTS, own, schedule=schedule)
    for mine, other in zip(given, wanted, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(mine.entropies, other.entropies, atol=1e-4)
        np.testing.assert_array_equal(mine.kept, other.kept)
        assert (mine.finish_reason, mine.seed) == (other.finish_reason, other.seed)
        assert mine.attention == other.attention


def test_decode_equals_prefill(model) -> None:
    """Logits of every step are those of one dense pass over the same tokens."""
    for completion in engine_of(model).generate(PROMPTS, params(), options=HIDDEN):
        left = model.logits(recorded_hidden(completion)).detach()
        right = model.logits(dense_hidden(model, completion)).detach()
        assert (left - right).abs().max() < 1e-5 * max(1.0, float(right.abs().max()))


def test_sparse_decode_equals_one_sparse_pass(model) -> None:
    """And differs from a dense one, or the comparison would say nothing."""
    (completion,) = engine_of(model).generate([PROMPTS[3]], params(), schedule=SPARSE)
    ids = torch.tensor([*completion.prompt_ids.tolist(), *completion.token_ids.tolist()])
    attention = PackedSparse(
        bounds=torch.tensor([0, len(ids)]),
        dense_B=torch.tensor([150]),
        budgets=torch.full((model.spec.layers, len(ids)), 48),
        page=16,
        rule=Rule(),
    )
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attention)[149:-1]
    stats = ops.token_stats(hidden, model.head, ids[150:])
    np.testing.assert_allclose(completion.logprobs, stats.logprob.detach(), atol=1e-4)
    exact = ops.token_stats(dense_hidden(model, completion), model.head, ids[150:])
    assert not np.allclose(completion.logprobs, exact.logprob.detach(), atol=1e-2)


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_one_equals_many_bit_for_bit(model, schedule) -> None:
    """Beside fewer and more neighbours than the padded batch, of other lengths, come and gone."""
    crowd = engine_of(model, pages=320)
    ids = [crowd.add(each, params(), schedule=schedule) for each in PROMPTS]
    crowd.add([1, 2, 3], params(n=EXACT_BATCH + 3, max_tokens=12, seed=5))
    together = run(crowd)
    for number, each in zip(ids, PROMPTS, strict=True):
        same_bits([together[number, 0]], [alone(model, each, params(), schedule=schedule)])


def test_settings_of_neighbours_change_nothing(model) -> None:
    """Truncation, minimum and greedy rows run the wider sampler for the whole batch."""
    engine = engine_of(model)
    plain = engine.add(PROMPTS[1], params())
    engine.add(PROMPTS[0], params(top_k=5, top_p=0.5))
    engine.add(PROMPTS[0], params(temperature=0.0))
    engine.add(PROMPTS[2], params(min_tokens=10, stop_token_ids=tuple(range(20))))
    same_bits([run(engine)[plain, 0]], [alone(model, PROMPTS[1], params())])


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_a_group_equals_separate_requests(model, schedule, monkeypatch) -> None:
    own = params(n=3)
    engine = engine_of(model)
    group = engine.generate([PROMPTS[3]], own, schedule=schedule)
    apart = engine_of(model, reuse="none")
    for seed in sample_seeds(own):
        monkeypatch.setattr("sparrow.engine.requests.sample_seeds", lambda _, seed=seed: [seed])
        apart.add(PROMPTS[3], params(), schedule=schedule)
    separate = run(apart)
    same_bits(group, [separate[number, 0] for number in range(3)])


@pytest.mark.parametrize("reuse", ["prompts", "all"])
def test_reused_prefixes_change_no_bit(model, reuse) -> None:
    """Three prompts that begin alike but end elsewhere: pages come from different passes."""
    long = prompt(460, 8)
    plain, shared = engine_of(model, reuse="none"), engine_of(model, reuse=reuse)
    passes = count_prefill(shared)
    for length in (290, 420, 440, 300):
        (wanted,) = plain.generate([long[:length]], params(max_tokens=6))
        (given,) = shared.generate([long[:length]], params(max_tokens=6))
        same_bits([given], [wanted])
    assert [chunks[0].start for chunks in passes if chunks[0].start == 0] == [0]


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_swapped_equals_not_swapped(model, schedule) -> None:
    tight = engine_of(model, pages=14, max_context=200)
    wide = engine_of(model, max_context=200)
    own = params(n=3, max_tokens=60)
    swapped = tight.generate([prompt(30)], own, schedule=schedule)
    same_bits(swapped, wide.generate([prompt(30)], own, schedule=schedule))
    assert sum(each.swaps for each in swapped) > 0
    assert all(each.recomputed == () for each in swapped)


def test_a_budget_of_the_length_is_dense_bit_for_bit(model) -> None:
    own = params(n=2, max_tokens=40)
    dense = engine_of(model).generate(PROMPTS, own)
    whole = engine_of(model).generate(PROMPTS, own, schedule=Schedule.fixed(200))
    same_bits(dense, whole)
    assert all("budget 200" in each.attention for each in whole)


def test_dense_and_sparse_in_one_batch_equal_each_alone(model) -> None:
    engine, small = engine_of(model), Schedule.fixed(64)
    ways = [None, SPARSE, small, None]
    ids = [engine.add(PROMPTS[3], params(seed=i), schedule=w) for i, w in enumerate(ways)]
    together = run(engine)
    for seed, (number, way) in enumerate(zip(ids, ways, strict=True)):
        lonely = alone(model, PROMPTS[3], params(seed=seed), schedule=way)
        same_bits([together[number, 0]], [lonely])
    assert together[0, 0].attention == "dense"
    assert "budget 48" in together[1, 0].attention
    assert "budget 64" in together[2, 0].attention


def test_long_prompts_do_not_hold_up_the_others(model) -> None:
    """At most a chunk of prompt tokens a step, a token for the running one in each of them."""
    engine, long = engine_of(model), prompt(400, 4)
    short = engine.add([1, 2, 3], params())
    engine.step()
    late = engine.add(long, params())
    passes = count_prefill(engine)
    for begun in range(1, 5):
        came = [output.request for output in engine.step()]
        assert came.count(short) == 1
        assert (late in came) == (begun == 4)
        assert len(passes) == begun
    assert [(c[0].start, c[0].stop) for c in passes] == [
        (0, 128),
        (128, 256),
        (256, 384),
        (384, 400),
    ]
    done = run(engine)
    same_bits([done[late, 0]], [alone(model, long, params())])
    same_bits([done[short, 0]], [alone(model, [1, 2, 3], params())])


def test_recompute_finishes_and_says_so(model) -> None:
    engine = engine_of(model, pages=14, max_context=200, preempt="recompute")
    own = params(n=3, max_tokens=60)
    given = engine.generate([prompt(30)], own, options=HIDDEN)
    assert any(each.recomputed for each in given)
    assert all(each.swaps == 0 for each in given)
    wanted = engine_of(model).generate([prompt(30)], own)
    for mine, other in zip(given, wanted, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        assert all(30 <= length < 90 for length in mine.recomputed)


def test_exact_acceptance_from_recorded_hidden_states(model) -> None:
    """alpha = sum of min(p, q) of the dense policy and the sparse actor, on the actor's tokens."""
    own = params(max_tokens=40)
    engine = engine_of(model)
    (sparse,) = engine.generate([PROMPTS[3]], own, schedule=SPARSE, options=HIDDEN)
    p, q = dense_hidden(model, sparse), recorded_hidden(sparse)
    alpha = ops.acceptance(p, q, model.head.detach())
    by_hand = torch.minimum(logp(model, p).exp(), logp(model, q).exp()).sum(1)
    torch.testing.assert_close(alpha, by_hand, atol=1e-5, rtol=0)
    assert alpha[0] > 1 - 1e-5  # the first token comes from the prompt, which is dense
    assert alpha[1:].min() < 0.999
    (dense,) = engine.generate([PROMPTS[3]], own, options=HIDDEN)
    exact = ops.acceptance(dense_hidden(model, dense), recorded_hidden(dense), model.head.detach())
    assert exact.min() > 1 - 1e-5


def test_plain_requests_are_the_same_beside_adapted_ones(model) -> None:
    engine = engine_of(model)
    engine.load_adapter("one", Adapter.random(model.spec, 4, b_std=0.5))
    plain = [engine.add(each, params()) for each in PROMPTS]
    adapted = engine.add(PROMPTS[1], params(), adapter="one")
    done = run(engine)
    wanted = engine_of(model).generate(PROMPTS, params())
    same_bits([done[number, 0] for number in plain], wanted)
    assert done[adapted, 0].token_ids.tolist() != wanted[1].token_ids.tolist()
