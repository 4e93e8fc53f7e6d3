"""Engines with other flows than the paper's: parity, swaps, groups, state, mass, heads."""

from typing import Any

import numpy as np
import pytest
import torch
from support import engines
from support.engines import engine_of, prompt, run, same_bits, tiny

from sparrow import models
from sparrow.engine import generate as readable_loop
from sparrow.engine.requests import sample_seeds
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.formats import D, P, fp8
from sparrow.sparse.rule import Rule

PROMPTS = [[5, 9, 2], prompt(40), prompt(150, 2)]
MASS = Flow(
    name="top-p",
    fields=library.block_mean.fields,
    summarise=library.block_mean.summarise,
    score=library.softmax_sum.score,
    mass=0.8,
)
IN_FP8 = Flow(
    name="fp8-quarters",
    fields={"means": fp8(P // 4, D)},
    summarise=lambda k, v: {"means": k.reshape(k.shape[0] // 4, 4, k.shape[1]).mean(1)},
    score=lambda query, fields, position: (query @ fields.means.T).max(),
)
COUNTING = Flow(
    name="counting",
    state={"seen": 1.0},
    score=lambda query, fields, position: (
        fields.seen * query.mean(),
        {"seen": fields.seen + 0.3 * position.page},
    ),
)
FLOWS = [
    library.fine_means(4),
    library.running_average(0.7),
    library.quest,
    library.window,
    MASS,
    IN_FP8,
    COUNTING,
]
BY_NAME = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def params(**changes: Any) -> SamplingParams:
    return engines.params(**{"max_tokens": 14, **changes})


def keep(flow: Flow, budget: int = 64, **changes: Any) -> Schedule:
    return Schedule.fixed(budget, flow=flow.name, dense_layers=(0,), **changes)


def rule_of(flow: Flow) -> Rule:
    return Rule(flow=flow, dense_layers=frozenset((0,)))


@BY_NAME
def test_the_engine_equals_the_readable_loop(model, flow: Flow) -> None:
    schedule, own = keep(flow), params(n=2)
    wanted = readable_loop(model, PROMPTS, own, schedule=schedule, flow=flow)
    given = engine_of(model, rule=rule_of(flow)).generate(PROMPTS, own, schedule=schedule)
    for mine, other in zip(given, wanted, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        assert mine.attention == other.attention
        assert flow.name in mine.attention
        if flow.mass is None:
            np.testing.assert_array_equal(mine.kept, other.kept)
        else:
            assert mine.kept is other.kept is None
    dense = engine_of(model).generate(PROMPTS, own)
    assert not all(
        np.array_equal(a.logprobs, b.logprobs) for a, b in zip(given, dense, strict=True)
    )


@pytest.mark.parametrize("flow", [*FLOWS[:2], IN_FP8, COUNTING], ids=lambda flow: flow.name)
def test_swapped_equals_not_swapped(model, flow: Flow) -> None:
    schedule, own = keep(flow, 48), params(n=3, max_tokens=90)
    tight = engine_of(model, rule=rule_of(flow), pages=15, max_context=200)
    wide = engine_of(model, rule=rule_of(flow), max_context=200)
    swapped = tight.generate([prompt(30)], own, schedule=schedule)
    same_bits(swapped, wide.generate([prompt(30)], own, schedule=schedule))
    assert sum(each.swaps for each in swapped) > 0


@pytest.mark.parametrize("flow", [FLOWS[1], COUNTING], ids=lambda flow: flow.name)
def test_samples_share_pages_and_no_state(model, flow: Flow, monkeypatch) -> None:
    """A group equals its samples apart; rows are used again, and begin with nothing remembered."""
    own, schedule = params(n=3, max_tokens=30), keep(flow)
    engine = engine_of(model, rule=rule_of(flow), max_running=3)
    group = engine.generate([PROMPTS[2]], own, schedule=schedule)
    assert len({tuple(each.token_ids.tolist()) for each in group}) == 3
    (name,) = flow.state
    assert engine.runner.cache.state(name, 2).any()
    for number, seed in enumerate(sample_seeds(own)):
        with monkeypatch.context() as patch:
            patch.setattr("sparrow.engine.requests.sample_seeds", lambda _, seed=seed: [seed])
            fresh = engine_of(model, rule=rule_of(flow), reuse="none")
            for each in (engine, fresh):  # the first one in rows that others have left
                alone = each.generate([PROMPTS[2]], params(max_tokens=30), schedule=schedule)
                same_bits(alone, [group[number]])


def test_state_counts(model) -> None:
    """Without its memory the same flow draws other tokens, or the tests above would say nothing."""
    flows = [library.running_average(keep) for keep in (0.95, 0.0)]
    with_memory, without = (
        engine_of(model, rule=rule_of(flow)).generate(
            [PROMPTS[2]], params(max_tokens=40), schedule=keep(flow)
        )[0]
        for flow in flows
    )
    assert not np.array_equal(with_memory.logprobs, without.logprobs)
    paper = Schedule.fixed(64, dense_layers=(0,))
    engine = engine_of(model, rule=rule_of(library.block_mean))
    (plain,) = engine.generate([PROMPTS[2]], params(max_tokens=40), schedule=paper)
    assert without.token_ids.tolist() == plain.token_ids.tolist()


def test_sleep_keeps_state(model) -> None:
    flow = library.running_average(0.7)
    own, schedule = params(max_tokens=30), keep(flow)
    wanted = engine_of(model, rule=rule_of(flow)).generate([PROMPTS[2]], own, schedule=schedule)
    engine = engine_of(model, rule=rule_of(flow))
    number = engine.add(PROMPTS[2], own, schedule=schedule)
    outputs = engines.steps(engine, 12)
    engine.sleep(weights="keep")
    engine.wake()
    same_bits([run(engine, outputs=outputs)[number, 0]], wanted)


def test_dense_requests_beside_those_of_a_mass_are_dense(model) -> None:
    engine = engine_of(model, rule=rule_of(MASS))
    dense = engine.add(PROMPTS[2], params(max_tokens=30))
    sparse = engine.add(PROMPTS[2], params(max_tokens=30), schedule=keep(MASS, 512))
    done = run(engine)
    same_bits([done[dense, 0]], engine_of(model).generate([PROMPTS[2]], params(max_tokens=30)))
    assert done[dense, 0].kept is not None
    assert done[sparse, 0].kept is None
    assert not np.array_equal(done[sparse, 0].logprobs, done[dense, 0].logprobs)


def test_the_dense_flow_reads_everything_and_says_so(model) -> None:
    engine = engine_of(model, rule=rule_of(library.dense))
    given = engine.generate(PROMPTS, params(), schedule=keep(library.dense))
    same_bits(given, engine_of(model).generate(PROMPTS, params()))
    assert all((each.kept == 1).all() for each in given)


def test_budgets_by_head_differ_from_common_ones(model) -> None:
    flow = library.fine_means(4)
    engine = engine_of(model, rule=rule_of(flow))
    layers = (LayerBudgets(layer=2, head=1, budgets=[128]),)
    common, own = (
        engine.generate([PROMPTS[2]], params(), schedule=schedule)[0]
        for schedule in (keep(flow, 48), keep(flow, 48, layers=layers))
    )
    assert not np.array_equal(own.logprobs[1:], common.logprobs[1:])
    assert own.logprobs[0] == common.logprobs[0]  # from the prompt, which is dense
    # Layer 0 is dense; of the other two layers one KV head keeps 128 tokens less its rounding.
    length = np.arange(151, 164)
    tail = (length - 1) % 16 + 1
    less, more = (((budget - tail) // 16) * 16 + tail for budget in (48, 128))
    np.testing.assert_allclose(
        own.kept[1:], (length + less + (less + more) / 2) / (3 * length), rtol=1e-6
    )
    wanted = readable_loop(
        model, [PROMPTS[2]], params(), schedule=keep(flow, 48, layers=layers), flow=flow
    )
    assert own.token_ids.tolist() == wanted[0].token_ids.tolist()


def test_memory_holds_what_the_flow_asks_for(model) -> None:
    spec = model.spec
    plain = engines.page_bytes(model, None)
    fine = engines.page_bytes(model, rule_of(library.fine_means(4)))
    assert fine - plain == spec.layers * spec.kv_heads * 4 * (spec.head_size // 2 + 2)
    rule = rule_of(library.running_average())
    engine = engine_of(model, rule=rule, max_running=4, max_context=100)
    state = engine.runner.cache.state("r", 0)
    assert state.shape == (5, spec.kv_heads, 7)
    assert state.dtype == torch.float32
