"""Weights and adapters that change in flight, engines that sleep: nothing stale, nothing lost."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support import engines
from support.engines import (
    HIDDEN,
    SPARSE,
    changed,
    count_prefill,
    engine_of,
    logp,
    logp_by_hand,
    params,
    prompt,
    run,
    same_bits,
    steps,
    weights_of,
    with_weights,
)
from torch import Tensor

from sparrow import models
from sparrow.engine.engine import Engine
from sparrow.models.deltas import Delta
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight
from sparrow.sparse.flows import library
from sparrow.sparse.rule import Rule

LONG = prompt(300, 9)
EXACT = {"schedule": SPARSE, "speculative": SpeculativeParams(draft_tokens=4)}
SHARED = SpeculativeParams(draft_tokens=4, acceptance="shared_noise", reselect=2)
AVERAGE = library.running_average(0.9)  # a flow with state
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model() -> models.Decoder:
    return engines.tiny()


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).abs().max() < 1e-4)


# Updates.


def test_a_recomputed_sample_goes_on_under_the_new_weights(model) -> None:
    """Its cache is computed anew, that of a sparse one densely, and the record says so."""
    engine = engine_of(model)
    request = engine.add(prompt(40), params(n=2))
    sparse = engine.add(prompt(100), params(), schedule=engines.SPARSE)
    outputs = steps(engine, 9)
    engine.update(changed(model).items(), version=3)
    engine.check_integrity()
    done = run(engine, outputs=outputs)
    assert done[sparse, 0].recomputed == (108,)
    assert np.isfinite(done[sparse, 0].logprobs).all()
    for number in range(2):
        assert done[request, number].weight_versions.tolist() == [0] * 9 + [3] * 15
        assert done[request, number].recomputed == (40 + 9 - 1,)


def test_deltas_do_what_whole_updates_do(model) -> None:
    """Bit for bit, in flight; one from another version is refused, and nothing is changed."""
    old, new = weights_of(model), changed(model)
    later = {**new, NORM: new[NORM] * 1.5}
    deltas = [
        Delta.between(old, new, base_version=0, version=1),
        Delta.between(new, later, base_version=1, version=2),
    ]
    answers = []
    for by_delta in (True, False):
        engine = engine_of(with_weights(old))
        request, outputs = engine.add(prompt(40), params(n=2)), []
        for delta, weights in zip(deltas, (new, later), strict=True):
            outputs += steps(engine, 5)
            if by_delta:
                assert engine.apply_delta(Delta.decode(delta.encode())) > 0
            else:
                engine.update(weights, version=delta.version)
        done = run(engine, outputs=outputs)
        answers.append([done[request, number] for number in range(2)])
        assert all(torch.equal(view, later[n]) for n, view in models.hf_views(engine.model).items())
        with pytest.raises(ValueError, match="not newer"):
            engine.apply_delta(deltas[1])
        with pytest.raises(ValueError, match="made from version 1"):
            engine.apply_delta(dataclasses.replace(deltas[1], version=9))
    same_bits(*answers)
    engine = engine_of(with_weights(new))
    with pytest.raises(ValueError, match="digest"):
        engine.apply_delta(deltas[0])  # the version is right, the weights are not
    engine.apply_delta(Delta.whole(later, version=7))
    assert engine.version == 7


def _under(model: models.Decoder, completion: Completion) -> Tensor:
    return logp(model, engines.dense_hidden(model, completion))


@pytest.mark.parametrize("schedule", [None, engines.SPARSE], ids=["dense", "sparse"])
def test_a_restarted_sample_is_that_of_a_fresh_run(model, schedule) -> None:
    engine, new = engine_of(model), changed(model)
    request = engine.add(prompt(40), params(n=2), schedule=schedule, options=HIDDEN)
    early = engine.add([1], params(max_tokens=3))
    outputs = steps(engine, 9)
    head = ("lm_head.weight", new[EMBEDDING].clone())  # a copy of a tied one is accepted
    engine.update([*new.items(), head], version=1, in_flight="restart")
    engine.check_integrity()
    done = run(engine, outputs=outputs)
    other = engine_of(engines.with_weights(new))
    fresh = other.generate([prompt(40)], params(n=2), schedule=schedule)
    same_bits([done[request, 0], done[request, 1]], fresh)
    for number in range(2):
        completion = done[request, number]
        assert (completion.restarts, completion.recomputed) == (1, ())
        assert set(completion.weight_versions.tolist()) == {1}
        assert len(completion.hidden) == len(completion.token_ids)
    assert done[early, 0].restarts == 0


# Keys and values that are kept.


def by_version(completion: Completion, *decoders: models.Decoder) -> list[models.Decoder]:
    """The decoder that drew each token, where their versions count from 0."""
    return [decoders[version] for version in completion.weight_versions]


def equals_by_hand(
    completion: Completion, decoders: Sequence[models.Decoder], within: float = 1e-5
) -> None:
    """Whole distributions, as the recorded hidden states give them."""
    states = engines.recorded_hidden(completion).split(1)
    given = [logp(decoder, state) for decoder, state in zip(decoders, states, strict=True)]
    assert (torch.cat(given) - logp_by_hand(decoders, completion)).abs().max() < within


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "a_step_late"])
@pytest.mark.parametrize(
    ("how", "temperature"),
    [({}, 0.0), ({}, 1.0), (EXACT, 0.0), (EXACT, 1.0), (EXACT | {"speculative": SHARED}, 1.0)],
    ids=["greedy", "dense", "exact_greedy", "exact", "shared_noise"],
)
def test_kept_samples_equal_a_pass_by_hand(model, how, temperature, late) -> None:
    """New weights read what the older ones computed, which nobody computes again. Results that are
    read a step late, as on a GPU, still name the weights that drew them.
    """
    old, new = with_weights(weights_of(model)), with_weights(changed(model))
    own = params(n=2, temperature=temperature)
    calm = engine_of(old).generate([prompt(40)], own, **how)
    engine = engine_of(model)
    engine.loop.one_step_late = late
    request = engine.add(prompt(40), own, options=HIDDEN, **how)
    outputs = steps(engine, 6)
    passes = count_prefill(engine)
    engine.update(weights_of(new), version=1, in_flight="keep")
    engine.check_integrity()
    drawn = [len(sample.tokens) for sample in engine.loop.requests[request].samples]
    done = run(engine, outputs=outputs)
    assert not passes
    for number, before in enumerate(drawn):
        mine = done[request, number]
        assert 5 < before < 24
        assert mine.weight_versions.tolist() == [0] * before + [1] * (24 - before)
        assert mine.token_ids[:before].tolist() == calm[number].token_ids[:before].tolist()
        assert (mine.recomputed, mine.restarts, mine.swaps) == ((), 0, 0)
        equals_by_hand(mine, by_version(mine, old, new))
        anew = (_under(new, mine) - logp_by_hand(by_version(mine, old, new), mine))[before:]
        assert anew.abs().max() > 0.1  # or it would not matter who computed them


def test_a_sample_may_have_keys_and_values_of_many_versions(model) -> None:
    """Until they are recomputed: from then on they are those of one version again."""
    decoders = [with_weights(changed(model, seed=seed)) for seed in range(5)]
    engine = engine_of(with_weights(weights_of(decoders[0])))
    request = engine.add(prompt(20), params(max_tokens=40), options=HIDDEN)
    outputs = steps(engine, 7)
    for version, way in enumerate(("keep", "keep", "recompute", "keep"), 1):
        engine.update(weights_of(decoders[version]), version=version, in_flight=way)
        outputs += steps(engine, 6)
    mine = run(engine, outputs=outputs)[request, 0]
    assert mine.recomputed == (20 + 19 - 1,)
    assert set(mine.weight_versions.tolist()) == {0, 1, 2, 3, 4}
    equals_by_hand(mine, by_version(mine, *decoders))


@pytest.mark.parametrize(
    ("how", "actor"),
    [
        ({}, False),
        ({"schedule": SPARSE}, False),
        ({"schedule": Schedule.fixed(64, flow=AVERAGE.name)}, False),
        (EXACT, False),
        (EXACT | {"adapter": "one"}, False),
        ({"schedule": SPARSE}, True),
        (EXACT, True),
    ],
    ids=["dense", "sparse", "state", "exact", "exact_adapter", "actor", "exact_actor"],
)
def test_to_keep_is_to_write_weights_and_touch_nothing_else(model, how, actor) -> None:
    """Pages, their summaries and a flow's state stay: bit for bit as if only weights changed."""
    new, done = changed(model), []
    flow = AVERAGE if how.get("schedule", SPARSE).flow == AVERAGE.name else library.block_mean
    for kept in (True, False):
        own = with_weights(weights_of(model))
        engine = engine_of(own, rule=Rule(flow=flow))
        engine.load_adapter("one", Adapter.random(own.spec, 4, b_std=0.3))
        if actor:
            engine.set_actor(Adapter.random(own.spec, 4, b_std=0.3, seed=2))
        request = engine.add(prompt(150), params(n=2), **how)
        outputs = steps(engine, 8)
        if kept:
            engine.update(new, version=1, in_flight="keep")
        else:
            engine._weights.write(new, have=0, base=None)
            engine.version = 1
        completions = run(engine, outputs=outputs)
        done.append([completions[request, number] for number in range(2)])
    same_bits(*done)
    for kept, bare in zip(*done, strict=True):
        assert kept.weight_versions.tolist() == bare.weight_versions.tolist()
        assert set(kept.weight_versions.tolist()) == {0, 1}
        assert (kept.recomputed, kept.swaps, kept.speculation) == ((), 0, bare.speculation)


STATES = ("running", "half_a_prompt", "half_a_group", "being_recomputed", "swapped_out")


def bring_into(state: str, engine: Engine, **how: Any) -> list[Any]:
    """A request for LONG in this state, its first one."""
    samples = 2 if state == "half_a_group" else 1
    number = engine.add(LONG, params(n=samples), options=HIDDEN, **how)
    outputs = steps(engine, 2 if state == "half_a_prompt" else 12)
    if state == "being_recomputed":
        engine.update(weights_of(engine.model), version=1, in_flight="recompute")
        outputs += steps(engine, 2)
    elif state == "swapped_out":
        engine.sleep(weights="keep")
        engine.wake()
    request = engine.loop.requests[number]
    first = request.samples[0]
    assert (first.row is not None) == (state in ("running", "half_a_group"))
    assert (first.swapped is not None) == (state == "swapped_out")
    assert (0 < first.context.computed < 300) == (state == "being_recomputed")
    assert (0 < request.context.computed < 300) == (state == "half_a_prompt")
    assert bool(request.unstarted) == state.startswith("half")
    assert (request.logits_V is not None) == (state == "half_a_group")
    return outputs


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapter"])
def test_nobody_shares_what_older_weights_computed(model, state, adapter) -> None:
    """Requests with the same prefix, while kept samples run and after, are those of an engine that
    had no other weights; so is the prompt that was only half computed.
    """
    one, two = (Adapter.random(model.spec, 4, b_std=0.3, seed=seed) for seed in (1, 2))
    old, new = with_weights(weights_of(model)), with_weights(changed(model))
    engine = engine_of(model, max_running=1 if state == "half_a_group" else 8, pages=200)
    fresh = engine_of(with_weights(weights_of(old if adapter else new)))
    how = {"adapter": "one"} if adapter else {}
    engine.load_adapter("one", one)
    fresh.load_adapter("one", two if adapter else one)
    outputs = bring_into(state, engine, **how)
    first = engine.loop.requests[0]
    passes, kept = count_prefill(engine), list(first.samples[0].tokens)
    if adapter:
        engine.load_adapter("one", two, in_flight="keep")
    else:
        engine.update(weights_of(new), version=2, in_flight="keep")
    engine.check_integrity()
    assert not engine.pool.cached or adapter
    asked = [LONG, LONG[:256] + prompt(20, 1), LONG[:128]]
    numbers = [engine.add(ids, params(), **how) for ids in asked]
    done = run(engine, outputs=outputs)
    late = engine.generate(asked, params(), **how)
    wanted = fresh.generate(asked, params(), **how)
    same_bits([done[number, 0] for number in numbers], wanted)
    same_bits(late, wanted)
    assert late[0].cached_tokens == 256
    _check_first(state, done, wanted[0], kept)
    again = {chunk.owner for chunks in passes for chunk in chunks} & {first, *first.samples}
    anew = {"being_recomputed": set(first.samples)}
    assert again == anew.get(state, {first} if state.startswith("half") else set())
    before, after = (merged(model, each) for each in (one, two)) if adapter else (old, new)
    decoders = [before] * len(kept) + [after] * (24 - len(kept))
    equals_by_hand(done[0, 0], decoders, within=1e-4 if adapter else 1e-5)


def _check_first(state: str, done: engines.Done, wanted: Completion, kept: list[int]) -> None:
    """Samples that had begun go on, with the tokens they had; others begin under new weights."""
    mine = done[0, 0]
    assert mine.token_ids[: len(kept)].tolist() == kept
    assert len(mine.recomputed) == (state == "being_recomputed")
    assert mine.swaps == (state == "swapped_out")
    if state == "half_a_prompt":
        same_bits(mine, wanted)
    elif state == "half_a_group":
        assert len(set(done[0, 1].weight_versions.tolist())) == 1
        assert done[0, 1].recomputed == ()


def test_kept_samples_that_are_swapped_out_later_come_back_as_they_were(model) -> None:
    """And the pages that they leave are nobody's prefix."""
    new, tight = changed(model), {"pages": 14, "max_context": 200}
    done = []
    for settings in (tight, {}):
        engine = engine_of(with_weights(weights_of(model)), **settings)
        request = engine.add(prompt(30), params(n=3, max_tokens=70))
        outputs = steps(engine, 10)
        engine.update(new, version=1, in_flight="keep")
        completions = run(engine, outputs=outputs)
        done.append([completions[request, number] for number in range(3)])
    same_bits(*done)
    assert sum(each.swaps for each in done[0]) > 0
    assert all(each.recomputed == () for each in done[0])


# Updates that are refused.


def _whole(model: models.Decoder, **changes: Any) -> list[tuple[str, Any]]:
    return list({**changed(model), **changes}.items())


def test_a_refused_update_changes_nothing(model) -> None:
    engine = engine_of(model)
    engine.version = 2
    request = engine.add([1, 2, 3], params(max_tokens=6))
    outputs = steps(engine, 3)
    before, new = engines.weights_of(model), changed(model)
    head = "lm_head.weight"
    cases: list[tuple[list[tuple[str, Any]], dict[str, Any], str]] = [
        ([(DOWN, new[DOWN])], {"base_version": 4}, "version"),
        ([(DOWN, new[DOWN])], {}, "base_version"),
        ([*_whole(model), ("model.nothing", torch.zeros(1))], {}, "model.nothing"),
        ([*_whole(model), (NORM, torch.ones(64))], {}, NORM),
        (_whole(model, **{NORM: torch.ones(63)}), {}, NORM),
        ([(DOWN, new[DOWN].T)], {"base_version": 2}, DOWN),
        (_whole(model, **{NORM: torch.ones(64).long()}), {}, NORM),
        (_whole(model, **{NORM: torch.ones(64).to("meta")}), {}, NORM),
        (_whole(model, **{NORM: torch.ones(64).to_sparse()}), {}, NORM),
        (_whole(model, **{NORM: torch.ones(64).numpy()}), {}, NORM),
        (_whole(model, **{head: torch.zeros(211, 64)}), {}, head),
        ([(head, new[EMBEDDING])], {"base_version": 2}, head),
        (_whole(model), {"in_flight": "stop"}, "in_flight"),
        *((_whole(model), {"version": wrong}, "version") for wrong in (2, 1.5, 2**31, -1, "2")),
    ]
    for items, settings, field in cases:
        with pytest.raises(ValueError, match=field):
            engine.update(iter(items), **{"version": 3, **settings})
        assert engine.version == 2
        views = models.hf_views(model).items()
        assert all(torch.equal(view, before[name]) for name, view in views)
    completion = run(engine, outputs=outputs)[request, 0]
    assert completion.recomputed == ()
    same_bits(completion, engines.alone(model, [1, 2, 3], params(max_tokens=6)))
    engine.update([(DOWN, new[DOWN].double())], version=3, base_version=2)  # a part over its base
    assert engine.version == 3
    for name, view in models.hf_views(model).items():
        assert torch.equal(view, (new if name == DOWN else before)[name])


# Adapters.


def merged(model: models.Decoder, adapter: Adapter) -> models.Decoder:
    """Another model whose weights hold what the adapter adds."""
    weights = engines.weights_of(model)
    for place, pair in adapter.pairs.items():
        delta = pair.b_ER @ pair.a_RI * adapter.scale(pair.rank)
        weights[f"model.{place.path}.weight"] += delta
    return engines.with_weights(weights)


def test_adapted_requests_equal_merged_weights(model) -> None:
    one = Adapter.random(model.spec, 4, b_std=0.3, seed=1)
    two = Adapter.random(model.spec, 8, b_std=0.3, seed=2, modules=("q_proj", "down_proj"))
    engine = engine_of(model)
    engine.load_adapter("one", one)
    engine.load_adapter("two", two)
    names = ["one", None, "two"]
    for name in names:
        engine.add(prompt(40), params(), adapter=name, options=HIDDEN)
    done = run(engine)
    for number, other in enumerate((merged(model, one), model, merged(model, two))):
        completion = done[number, 0]
        assert completion.adapter == names[number]
        assert close(logp(model, engines.recorded_hidden(completion)), _under(other, completion))
    assert len({tuple(done[number, 0].token_ids) for number in range(3)}) == 3


@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_an_adapter_may_be_replaced_in_flight(model, in_flight) -> None:
    """Its users keep what they have, are computed anew or restart, pages of the old one are not
    shared; plain ones do not notice.
    """
    engine = engine_of(model)
    first, other = (Adapter.random(model.spec, 4, b_std=0.3, seed=seed) for seed in (1, 2))
    engine.load_adapter("one", first)
    adapted = engine.add(LONG, params(), adapter="one", options=HIDDEN)
    plain = engine.add(LONG, params())
    outputs = steps(engine, 12)
    drawn = engine.loop.requests[adapted].samples[0].drawn
    engine.load_adapter("one", other, in_flight=in_flight)
    done = run(engine, outputs=outputs)
    same_bits(done[plain, 0], engines.alone(model, LONG, params()))
    assert done[plain, 0].recomputed == ()
    mine = done[adapted, 0]
    assert mine.recomputed == ((299 + drawn,) if in_flight == "recompute" else ())
    assert mine.restarts == (in_flight == "restart")
    before = 0 if in_flight == "restart" else drawn
    decoders = [merged(model, first)] * before + [merged(model, other)] * (24 - before)
    equals_by_hand(mine, decoders, within=1e-4)


def test_adapters_in_use_stay(model) -> None:
    engine = engine_of(model, adapters=1, adapter_rank=4)
    engine.load_adapter("one", Adapter.random(model.spec, 4))
    request = engine.add([1], params(max_tokens=3), adapter="one")
    outputs = steps(engine, 1)
    with pytest.raises(ValueError, match="'one'"):
        engine.drop_adapter("one")
    with pytest.raises(ValueError, match="'two'"):
        engine.load_adapter("two", Adapter.random(model.spec, 4))
    with pytest.raises(ValueError, match="rank 8"):
        engine.load_adapter("one", Adapter.random(model.spec, 8))
    assert run(engine, outputs=outputs)[request, 0].recomputed == ()
    engine.drop_adapter("one")
    with pytest.raises(ValueError, match="'one'"):
        engine.add([1], params(), adapter="one")
    engine.load_adapter("two", Adapter.random(model.spec, 4))


# Sleep.


def _in_flight(engine: Engine) -> list[Any]:
    """A group, a sparse sample and a prompt between its chunks."""
    engine.add(prompt(40), params(n=2))
    engine.add(prompt(100), params(), schedule=engines.SPARSE)
    outputs = steps(engine, 6)
    engine.add(LONG, params(max_tokens=4))
    return outputs + steps(engine, 1)


def _calm(model: models.Decoder) -> list[Completion]:
    engine = engine_of(model)
    outputs = _in_flight(engine)
    return [each for _, each in sorted(run(engine, outputs=outputs).items())]


@pytest.mark.parametrize("weights", ["keep", "host"])
def test_after_sleep_everything_goes_on_bit_for_bit(model, weights) -> None:
    calm = _calm(model)
    engine = engine_of(model)
    outputs = _in_flight(engine)
    with pytest.raises(ValueError, match="weights"):
        engine.sleep(weights="disk")
    engine.sleep(weights=weights)
    for action in (
        engine.step,
        engine.sleep,
        lambda: engine.update([], version=1),
        lambda: engine.load_adapter("one", Adapter.random(model.spec, 4)),
    ):
        with pytest.raises(ValueError, match="wake"):
            action()
    gone, late = (engine.add([1], params(max_tokens=3)) for _ in range(2))
    engine.abort(gone)
    for attribute in ("runner", "pool"):
        assert not hasattr(engine, attribute)
        assert not hasattr(engine.scheduler, attribute)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert (size > 0) == (weights == "keep")
    engine.check_integrity()
    engine.wake()
    with pytest.raises(ValueError, match="awake"):
        engine.wake()
    done = run(engine, outputs=outputs)
    assert [done.pop((each, 0)).finish_reason for each in (gone, late)] == ["abort", "length"]
    same_bits([each for _, each in sorted(done.items())], calm)
    assert all(each.recomputed == () for each in done.values())


def test_sleep_lets_go_of_memory_at_once(model) -> None:
    """A cycle of references, as through captured steps, would hold it until it is collected."""
    engine = engine_of(model)
    engine._graphs = True  # as on a GPU; nothing is captured before the first step
    engine.sleep()
    engine.wake()
    assert engine.runner.graphs is not None
    cache = weakref.ref(engine.runner.cache)
    engine.sleep()
    assert cache() is None


def test_dropped_weights_come_back_by_an_update(model) -> None:
    calm, copy = _calm(model), engines.weights_of(model)
    engine = engine_of(model)
    outputs = _in_flight(engine)
    engine.sleep(weights="drop")
    assert sum(parameter.nbytes for parameter in model.parameters()) == 0
    engine.wake()
    for way in ("keep", "host"):  # another sleep does not bring them back
        engine.sleep(weights=way)
        engine.wake()
    with pytest.raises(ValueError, match="dropped"):
        engine.step()
    with pytest.raises(ValueError, match="dropped"):
        engine.update([(DOWN, copy[DOWN])], version=1, base_version=0)
    engine.update(copy.items(), version=1)
    done = [each for _, each in sorted(run(engine, outputs=outputs).items())]
    for mine, other in zip((done[0], done[1], done[3]), (calm[0], calm[1], calm[3]), strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
    assert [len(each.recomputed) for each in done] == [1, 1, 1, 0]
    assert done[0].weight_versions.tolist() == [0] * 7 + [1] * 17


def test_with_the_weights_that_were_dropped_kept_samples_go_on_bit_for_bit(model) -> None:
    calm, copy = _calm(model), weights_of(model)
    engine = engine_of(model)
    outputs = _in_flight(engine)
    engine.sleep(weights="drop")
    engine.wake()
    engine.update(copy, version=1, in_flight="keep")
    done = [each for _, each in sorted(run(engine, outputs=outputs).items())]
    same_bits(done, calm)
    assert all(each.recomputed == () for each in done)
    assert done[0].weight_versions.tolist() == [0] * 7 + [1] * 17
