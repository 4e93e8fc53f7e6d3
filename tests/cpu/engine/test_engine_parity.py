"""The parity ladder of the engine: readable loop, prefill, batches, groups, swaps, budgets; with
the paper's flow and with others, that have state, a mass, or formats of their own.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from support import engines
from support.engines import SPARSE, alone, count_prefill, engine_of, prompt, run, same_bits
from support.flows import COUNTING, IN_FP8, mean_flow

from sparrow.engine import generate as readable_loop
from sparrow.engine.pool import EXACT_BATCH
from sparrow.engine.requests import sample_seeds
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule

params = partial(engines.params, max_tokens=14)
PROMPTS = [[5, 9, 2], prompt(40), prompt(16, 1), prompt(150, 2)]
LONGEST = PROMPTS[3]
WAYS = pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
MASS = mean_flow("top-p", library.softmax_sum.score, mass=0.8)
AVERAGE, FINE = library.running_average(0.7), library.fine_means(4)


def keep(flow: Flow, budget: int = 64, **changes: Any) -> Schedule:
    return Schedule.fixed(budget, flow=flow.name, dense_layers=(0,), **changes)


def rule_of(flow: Flow) -> Rule:
    return Rule(flow=flow, dense_layers=frozenset((0,)))


def assert_close(given: list[Completion], wanted: list[Completion]) -> None:
    for mine, other in zip(given, wanted, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(mine.entropies, other.entropies, atol=1e-4)
        np.testing.assert_array_equal(mine.kept, other.kept)
        assert (mine.finish_reason, mine.seed) == (other.finish_reason, other.seed)
        assert mine.attention == other.attention


@WAYS
def test_the_engine_equals_the_readable_loop(model, schedule) -> None:
    for changes in (
        {"n": 2},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 12},
        {"stop_token_ids": tuple(range(0, 60, 2)), "min_tokens": 9},
    ):
        own = params(**changes)
        wanted = readable_loop(model, PROMPTS, own, schedule=schedule)
        assert_close(engine_of(model).generate(PROMPTS, own, schedule=schedule), wanted)


@pytest.mark.parametrize(
    "flow",
    [FINE, AVERAGE, library.quest, library.window, MASS, IN_FP8, COUNTING],
    ids=lambda flow: flow.name,
)
def test_with_any_flow_it_equals_the_readable_loop(model, flow: Flow) -> None:
    schedule, own, prompts = keep(flow), params(n=2), [PROMPTS[1], LONGEST]
    wanted = readable_loop(model, prompts, own, schedule=schedule, flow=flow)
    given = engine_of(model, rule=rule_of(flow)).generate(prompts, own, schedule=schedule)
    assert_close(given, wanted)
    assert all((each.kept is None) == (flow.mass is not None) for each in given)
    assert flow.name in given[0].attention
    dense = engine_of(model).generate(prompts, own)
    assert not np.array_equal(given[-1].logprobs, dense[-1].logprobs)


def test_one_equals_many_bit_for_bit(model) -> None:
    """Beside more neighbours than the padded batch, of other lengths and kinds: truncation, minimum
    and greedy rows run the wider sampler for the whole batch; others are sparse, or adapted.
    """
    engine = engine_of(model, pages=320)
    engine.load_adapter("one", Adapter.random(model.spec, 4, b_std=0.5))
    ways = [(ids, way) for ids in PROMPTS for way in (None, SPARSE, Schedule.fixed(64))]
    numbers = [engine.add(ids, params(seed=i), schedule=w) for i, (ids, w) in enumerate(ways)]
    engine.add(PROMPTS[0], params(n=EXACT_BATCH - 9, max_tokens=12, top_k=5, top_p=0.5))
    engine.add(PROMPTS[0], params(temperature=0.0))
    engine.add(PROMPTS[2], params(min_tokens=10, stop_token_ids=tuple(range(20))))
    adapted = engine.add(PROMPTS[0], params(seed=0), adapter="one")
    together = run(engine)
    for seed, (number, (ids, way)) in enumerate(zip(numbers, ways, strict=True)):
        mine = together[number, 0]
        same_bits([mine], [alone(model, ids, params(seed=seed), schedule=way)])
        assert mine.attention == ("dense" if way is None else way.describe())
    assert together[adapted, 0].token_ids.tolist() != together[0, 0].token_ids.tolist()


@pytest.mark.parametrize("flow", [None, AVERAGE, COUNTING], ids=["paper", "average", "counting"])
def test_a_group_equals_separate_requests(model, flow, monkeypatch) -> None:
    """Samples share pages and no state; rows are used again, and begin with nothing remembered."""
    schedule = SPARSE if flow is None else keep(flow)
    rule = Rule() if flow is None else rule_of(flow)
    own = params(n=3, max_tokens=30)
    engine = engine_of(model, rule=rule, max_running=3)
    group = engine.generate([LONGEST], own, schedule=schedule)
    assert len({tuple(each.token_ids.tolist()) for each in group}) == 3
    assert flow is None or engine.runner.cache.state(next(iter(flow.state)), 2).any()
    for number, seed in enumerate(sample_seeds(own)):
        with monkeypatch.context() as patch:
            patch.setattr("sparrow.engine.requests.sample_seeds", lambda _, seed=seed: [seed])
            fresh = engine_of(model, rule=rule, reuse="none")
            for each in (engine, fresh):  # the first one in rows that others have left
                apart = each.generate([LONGEST], params(max_tokens=30), schedule=schedule)
                same_bits(apart, [group[number]])


@pytest.mark.parametrize(
    "flow", [None, library.block_mean, FINE, AVERAGE, IN_FP8, COUNTING], ids=lambda f: f and f.name
)
def test_swapped_equals_not_swapped(model, flow) -> None:
    schedule = None if flow is None else keep(flow, 48)
    rule = rule_of(flow or library.block_mean)
    own = params(n=3, max_tokens=70)
    tight = engine_of(model, rule=rule, pages=14, max_context=200)
    swapped = tight.generate([prompt(30)], own, schedule=schedule)
    wide = engine_of(model, rule=rule, max_context=200)
    same_bits(swapped, wide.generate([prompt(30)], own, schedule=schedule))
    assert sum(each.swaps for each in swapped) > 0
    assert all(each.recomputed == () for each in swapped)


def test_a_budget_of_the_length_and_the_dense_flow_are_dense_bit_for_bit(model) -> None:
    own = params(n=2, max_tokens=40)
    dense = engine_of(model).generate(PROMPTS, own)
    whole = engine_of(model).generate(PROMPTS, own, schedule=Schedule.fixed(200))
    same_bits(dense, whole)
    assert all("budget 200" in each.attention for each in whole)
    engine = engine_of(model, rule=rule_of(library.dense))
    same_bits(dense, engine.generate(PROMPTS, own, schedule=keep(library.dense)))


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
    chunks = [(chunk[0].start, chunk[0].stop) for chunk in passes]
    assert chunks == [(0, 128), (128, 256), (256, 384), (384, 400)]
    done = run(engine)
    same_bits([done[late, 0]], [alone(model, long, params())])
    same_bits([done[short, 0]], [alone(model, [1, 2, 3], params())])


# State, mass, heads.


def test_state_counts(model) -> None:
    """Without its memory the same flow draws other tokens, or tests of state would say nothing.
    That it outlives a sleep is shown by samples that are swapped: they take the same way.
    """
    own = params(max_tokens=40)

    def under(flow: Flow) -> Completion:
        return engine_of(model, rule=rule_of(flow)).generate([LONGEST], own, schedule=keep(flow))[0]

    remembers, forgets = (under(library.running_average(share)) for share in (0.95, 0.0))
    assert not np.array_equal(remembers.logprobs, forgets.logprobs)
    plain = under(library.block_mean)
    assert forgets.token_ids.tolist() == plain.token_ids.tolist()


def test_dense_requests_beside_those_of_a_mass_are_dense(model) -> None:
    engine = engine_of(model, rule=rule_of(MASS))
    dense = engine.add(LONGEST, params(max_tokens=30))
    sparse = engine.add(LONGEST, params(max_tokens=30), schedule=keep(MASS, 512))
    done = run(engine)
    same_bits([done[dense, 0]], [alone(model, LONGEST, params(max_tokens=30))])
    assert done[dense, 0].kept is not None
    assert done[sparse, 0].kept is None
    assert not np.array_equal(done[sparse, 0].logprobs, done[dense, 0].logprobs)


def test_budgets_by_head_differ_from_common_ones(model) -> None:
    engine = engine_of(model, rule=rule_of(FINE))
    by_head = keep(FINE, 48, layers=(LayerBudgets(layer=2, head=1, budgets=[128]),))
    ways = keep(FINE, 48), by_head
    common, own = (engine.generate([LONGEST], params(), schedule=way)[0] for way in ways)
    assert not np.array_equal(own.logprobs[1:], common.logprobs[1:])
    assert own.logprobs[0] == common.logprobs[0]  # from the prompt, which is dense
    # Layer 0 is dense; of the other two layers one KV head keeps 128 tokens less its rounding.
    length = np.arange(151, 164)
    tail = (length - 1) % 16 + 1
    less, more = (((budget - tail) // 16) * 16 + tail for budget in (48, 128))
    kept = (length + less + (less + more) / 2) / (3 * length)
    np.testing.assert_allclose(own.kept[1:], kept, rtol=1e-6)
    assert_close([own], readable_loop(model, [LONGEST], params(), schedule=by_head, flow=FINE))
