"""The actor's adapter: on under sparse attention alone, and never in what exact decoding emits."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.engines import (
    HIDDEN,
    SPARSE,
    changed,
    count_prefill,
    dense_hidden,
    engine_of,
    logp,
    logp_by_hand,
    params,
    prompt,
    recorded_hidden,
    run,
    same_bits,
    steps,
    tiny,
    tokens_of,
    weights_of,
    with_weights,
)

from sparrow import models
from sparrow.dataflow.backend import EngineBackend
from sparrow.engine import Engine
from sparrow.models.lora import Adapter, MergedDecoder
from sparrow.schema.sampling import Completion, SpeculationStats, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight

PROMPTS = [prompt(40), prompt(150, 2)]
EXACT = {"schedule": SPARSE, "speculative": SpeculativeParams(draft_tokens=4)}
SHARED = SpeculativeParams(draft_tokens=4, acceptance="shared_noise")


@pytest.fixture
def model() -> models.Decoder:
    return tiny()


def actor(model: models.Decoder, b_std: float = 0.3, **changes: Any) -> Adapter:
    return Adapter.random(model.spec, 4, b_std=b_std, **{"seed": 1, **changes})


def acting(model: models.Decoder, adapter: Adapter | None, **settings: Any) -> Engine:
    engine = engine_of(model, **settings)
    engine.set_actor(adapter)
    return engine


def by_hand(model: models.Decoder, adapter: Adapter) -> models.Decoder:
    """Another model whose weights hold what the adapter adds."""
    weights = weights_of(model)
    for place, pair in adapter.pairs.items():
        delta = pair.b_ER @ pair.a_RI * adapter.scale(pair.rank)
        weights[f"model.{place.path}.weight"] += delta
    return with_weights(weights)


def sparse(model: models.Decoder, adapter: Adapter | None = None) -> list[Completion]:
    return acting(model, adapter).generate(PROMPTS, params(n=2), schedule=SPARSE)


def close(left: list[Completion], right: list[Completion]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)


def accepted(completions: list[Completion]) -> tuple[int, ...]:
    return SpeculationStats.total(one.speculation for one in completions).accepted_by_position


@pytest.mark.parametrize("how", [{"schedule": SPARSE}, EXACT], ids=["sparse", "exact"])
def test_a_zero_actor_changes_nothing(model, how: dict[str, Any]) -> None:
    plain = engine_of(model).generate(PROMPTS, params(n=2), **how)
    zero = acting(model, actor(model, 0.0)).generate(PROMPTS, params(n=2), **how)
    same_bits(zero, plain)
    if how is EXACT:
        assert accepted(zero) == accepted(plain)


def test_sparse_batches_run_the_merged_weights(model) -> None:
    for adapter in (actor(model), actor(model, modules=("q_proj", "up_proj"), layers=[0, 2])):
        engine = acting(model, adapter)
        mine = engine.generate(PROMPTS, params(n=2), schedule=SPARSE)
        same_bits(mine, sparse(by_hand(model, adapter)))
        assert {completion.adapter for completion in mine} == {"actor"}
        assert "actor of rank 4" in engine.header()
    assert "actor" not in engine_of(model).header()


def test_in_mixed_batches_dense_rows_keep_their_bits(model) -> None:
    adapter = actor(model)
    engine = acting(model, adapter)
    dense = [engine.add(ids, params()) for ids in PROMPTS]
    acts = [engine.add(ids, params(), schedule=SPARSE) for ids in PROMPTS]
    done = run(engine)
    same_bits([done[each, 0] for each in dense], engine_of(model).generate(PROMPTS, params()))
    merged = engine_of(by_hand(model, adapter)).generate(PROMPTS, params(), schedule=SPARSE)
    close([done[each, 0] for each in acts], merged)
    assert {done[each, 0].adapter for each in dense} == {None}


def test_dense_requests_never_use_it(model) -> None:
    plain = engine_of(model).generate(PROMPTS, params(n=2))
    same_bits(acting(model, actor(model)).generate(PROMPTS, params(n=2)), plain)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "mixed"])
def test_exact_decoding_drafts_with_it_and_emits_the_dense_policy(model, company: bool) -> None:
    engine = acting(model, actor(model), pages=400)
    numbers = [engine.add(ids, params(max_tokens=40), **EXACT) for ids in PROMPTS]
    shared = [
        engine.add(ids, params(max_tokens=40), schedule=SPARSE, speculative=SHARED)
        for ids in PROMPTS
    ]
    for how in ({}, {"schedule": SPARSE}) if company else ():
        engine.add(PROMPTS[1], params(), **how)
    done = run(engine)
    mine = [done[number, 0] for number in numbers]
    for one in mine:
        logp_TV, tokens_T = logp(model, dense_hidden(model, one)), torch.tensor(one.token_ids)
        dense_T = logp_TV[range(len(tokens_T)), tokens_T]
        np.testing.assert_allclose(one.logprobs, dense_T, atol=1e-4)
        assert one.adapter is None
    own = params(max_tokens=40)
    same_bits([done[number, 0] for number in shared], engine_of(model).generate(PROMPTS, own))
    plain = engine_of(model).generate(PROMPTS, own, **EXACT)
    assert accepted(mine) != accepted(plain)


# Changes.


@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_it_comes_changes_and_goes_in_flight(model, in_flight: Any) -> None:
    """Sparse samples go on, are computed anew or restart, and end under what came last."""
    first, second = actor(model), actor(model, seed=2)
    narrow = actor(model, seed=3, modules=("o_proj",))
    engine = engine_of(model)
    acts = engine.add(PROMPTS[1], params(), schedule=SPARSE)
    exact = engine.add(PROMPTS[0], params(), schedule=SPARSE, speculative=SHARED)
    dense = engine.add(PROMPTS[1], params())
    outputs = steps(engine, 5)
    for adapter in (first, second, narrow, None, second):
        engine.set_actor(adapter, in_flight=in_flight)
        engine.check_integrity()
        outputs += steps(engine, 2)
    done = run(engine, outputs=outputs)
    plain = engine_of(model).generate(PROMPTS, params())
    same_bits([done[exact, 0], done[dense, 0]], plain)
    for number in (exact, dense):
        assert (done[number, 0].recomputed, done[number, 0].restarts) == ((), 0)
    mine = done[acts, 0]
    if in_flight == "restart":
        assert mine.restarts == 5
        other = engine_of(by_hand(model, second)).generate(PROMPTS[1:], params(), schedule=SPARSE)
        close([mine], other)
    else:
        assert (len(mine.recomputed), mine.restarts) == (5 if in_flight == "recompute" else 0, 0)


def test_kept_samples_go_on_over_what_other_actors_computed(model) -> None:
    """Nobody else gets to see that, nor is a prompt gone on with that was half computed."""
    whole, long = Schedule.fixed(512), prompt(300, 9)
    engine = engine_of(model, pages=400)
    acts = engine.add(PROMPTS[1], params(max_tokens=40), schedule=whole, options=HIDDEN)
    sample, decoders = engine.loop.requests[acts].samples[0], [model]
    outputs = steps(engine, 8)
    half = -1
    for adapter in (actor(model), actor(model, seed=2), None):
        if adapter is None:
            half = engine.add(long, params(), schedule=whole)
            outputs += steps(engine, 2)
            assert 0 < engine.loop.requests[half].context.computed < 300
        decoders += decoders[-1:] * (len(sample.tokens) - len(decoders))
        engine.set_actor(adapter, in_flight="keep")
        engine.check_integrity()
        outputs += steps(engine, 8)
        decoders.append(model if adapter is None else by_hand(model, adapter))
    dense = [engine.add(ids, params()) for ids in (long, PROMPTS[1])]
    done = run(engine, outputs=outputs)
    plain = engine_of(model).generate([long, long, PROMPTS[1]], params())
    same_bits([done[half, 0], *(done[each, 0] for each in dense)], plain)
    mine = done[acts, 0]
    assert (mine.recomputed, mine.restarts, mine.swaps) == ((), 0, 2)  # one is replaced in place
    decoders += decoders[-1:] * (40 - len(decoders))
    given, wanted = logp(model, recorded_hidden(mine)), logp_by_hand(decoders, mine)
    assert (given - wanted).abs().max() < 1e-4


def test_new_weights_and_a_new_actor_are_merged_in_place_and_once(model, monkeypatch) -> None:
    backend, new = EngineBackend(acting(model, actor(model))), changed(model)
    engine, second = backend.engine, actor(model, seed=2)
    sparse_before = engine.generate(PROMPTS, params(), schedule=SPARSE)
    runner = engine.runner
    places = [weight.data_ptr() for weight in runner.merged.parameters()]
    merges = []
    views = models.lora.hf_views
    monkeypatch.setattr(models.lora, "hf_views", lambda model: merges.append(model) or views(model))
    backend.sync_weights(new, version=1, adapter=second)
    mine = engine.generate(PROMPTS, params(), schedule=SPARSE)
    assert len(merges) == 2  # of the model and of the merged decoder
    assert engine.runner is runner
    assert [weight.data_ptr() for weight in runner.merged.parameters()] == places
    other = by_hand(with_weights(new), second)
    same_bits(mine, engine_of(other).generate(PROMPTS, params(), schedule=SPARSE))
    assert mine[0].token_ids.tolist() != sparse_before[0].token_ids.tolist()
    backend.sync_weights(new, version=2)
    mine = engine.generate(PROMPTS, params(), schedule=SPARSE)
    same_bits(mine, engine_of(with_weights(new)).generate(PROMPTS, params(), schedule=SPARSE))
    assert engine.runner.merged is None


@pytest.mark.parametrize("weights", ["keep", "host", "drop"])
def test_sleep_frees_it_and_it_comes_back(model, weights: Any) -> None:
    adapter, copy = actor(model), weights_of(model)
    calm = sparse(model, adapter)
    engine = acting(model, adapter)
    merged = engine._actor.decoder
    engine.add(PROMPTS[0], params(n=2), schedule=SPARSE)
    engine.add(PROMPTS[1], params(n=2), schedule=SPARSE)
    outputs = steps(engine, 9)
    engine.sleep(weights=weights)
    assert (sum(weight.nbytes for weight in merged.parameters()) > 0) == (weights == "keep")
    engine.wake()
    if weights == "drop":
        with pytest.raises(ValueError, match="dropped"):
            engine.step()
        engine.update(copy, version=1, in_flight="restart")
    done = [one for _, one in sorted(run(engine, outputs=outputs).items())]
    same_bits(done, calm)


@pytest.mark.parametrize("asleep", [False, True])
def test_a_rescheduled_request_changes_its_adapter_with_the_schedule(model, asleep: bool) -> None:
    adapter = actor(model)
    engine = acting(model, adapter)
    number = engine.add(PROMPTS[1], params(), schedule=SPARSE, options=HIDDEN)
    outputs = steps(engine, 9)
    drawn = engine.loop.requests[number].samples[0].drawn
    if asleep:
        engine.sleep()
    engine.reschedule(number, None)
    if asleep:
        engine.wake()
    done = run(engine, outputs=outputs)[number, 0]
    dense = logp(model, dense_hidden(model, done))[drawn:]
    assert (logp(model, torch.tensor(done.hidden))[drawn:] - dense).abs().max() < 1e-4
    assert done.recomputed == (149 + drawn,)
    early = engine.add(PROMPTS[1], params())  # sparse before anything is computed
    engine.reschedule(early, SPARSE)
    same_bits(run(engine)[early, 0], sparse(by_hand(model, adapter))[2])


def test_keys_and_values_are_not_shared_with_the_plain_weights(model) -> None:
    """But those of exact decoding are the plain weights' own."""
    long = prompt(300, 9)
    engine = acting(model, actor(model), pages=400, speculative=EXACT["speculative"])
    passes = count_prefill(engine)
    computed = []
    for how in ({}, {"schedule": SPARSE}, EXACT, {"schedule": SPARSE}):
        engine.generate([long], params(max_tokens=2), **how)
        computed.append(tokens_of(passes))
        passes.clear()
    assert computed == [300, 300, 44, 44]
    engine.set_actor(actor(model, seed=2))
    engine.generate([long], params(max_tokens=2), schedule=SPARSE)
    assert tokens_of(passes) == 300


def test_refused(model) -> None:
    engine, adapter = engine_of(model, adapter_rank=4), actor(model)
    for action in (
        lambda: engine.load_adapter("actor", adapter),
        lambda: engine.drop_adapter("actor"),
        lambda: engine.add([1], params(), adapter="actor"),
    ):
        with pytest.raises(ValueError, match="set_actor"):
            action()
    engine.load_adapter("own", adapter)
    number = engine.add([1], params(max_tokens=4), schedule=SPARSE, adapter="own")
    with pytest.raises(ValueError, match=r"requests \[0\]"):
        engine.set_actor(adapter)
    engine.reschedule(number, None)
    with pytest.raises(ValueError, match="rank 8"):
        engine.set_actor(Adapter.random(model.spec, 8))
    assert engine.runner.merged is None
    engine.set_actor(adapter)
    for action in (
        lambda: engine.reschedule(number, SPARSE),
        lambda: engine.add([1], params(), schedule=SPARSE, adapter="own"),
    ):
        with pytest.raises(ValueError, match="'own' with a schedule"):
            action()
    assert run(engine)[number, 0].adapter == "own"


def test_no_room_for_it_leaves_the_engine_without(model, monkeypatch) -> None:
    engine = engine_of(model)
    number = engine.add(PROMPTS[0], params(), schedule=SPARSE)
    outputs = steps(engine, 5)

    def full(_: MergedDecoder) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(MergedDecoder, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.set_actor(actor(model))
    done = run(engine, outputs=outputs)[number, 0]
    close([done], engine_of(model).generate(PROMPTS[:1], params(), schedule=SPARSE))
