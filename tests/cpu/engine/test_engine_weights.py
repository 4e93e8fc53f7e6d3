"""Weights and adapters that change in flight, engines that sleep: nothing stale, nothing lost."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support import engines
from support.engines import HIDDEN, changed, engine_of, logp, params, prompt, run, same_bits, steps
from torch import Tensor

from sparrow import models
from sparrow.engine.engine import Engine
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion

LONG = prompt(300, 9)
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model() -> models.Decoder:
    return engines.tiny()


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).abs().max() < 1e-4)


# Updates.


def test_a_continuing_sample_goes_on_under_the_new_weights(model) -> None:
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


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_an_adapter_may_be_replaced_in_flight(model, in_flight) -> None:
    """Its users are computed anew or restart, pages of the old one are not shared; plain ones do
    not notice.
    """
    engine, other = engine_of(model), Adapter.random(model.spec, 4, b_std=0.3, seed=2)
    engine.load_adapter("one", Adapter.random(model.spec, 4, b_std=0.3, seed=1))
    adapted = engine.add(LONG, params(), adapter="one", options=HIDDEN)
    plain = engine.add(LONG, params())
    outputs = steps(engine, 12)
    drawn = engine.loop.requests[adapted].samples[0].drawn
    engine.load_adapter("one", other, in_flight=in_flight)
    done = run(engine, outputs=outputs)
    same_bits(done[plain, 0], engines.alone(model, LONG, params()))
    assert done[plain, 0].recomputed == ()
    mine, goes_on = done[adapted, 0], in_flight == "continue"
    born = drawn if goes_on else 0
    assert (mine.recomputed, mine.restarts) == (((299 + drawn,), 0) if goes_on else ((), 1))
    got = logp(model, engines.recorded_hidden(mine))
    assert close(got[born:], _under(merged(model, other), mine)[born:])


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
