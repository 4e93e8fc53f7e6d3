"""Random traffic in too little memory: all ends once, books are kept, tokens are the calm ones."""

import random
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support import engines
from support.engines import SPARSE, Done, alone, engine_of, params, prompt, run, same_bits, tiny
from torch import Tensor

from sparrow import models
from sparrow.engine import Engine, Output
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight

STEMS = [prompt(200, seed) for seed in range(2)]  # prompts begin alike, for prefixes to share


Asked = tuple[list[int], SamplingParams, dict[str, Any]]  # to ask again of another engine


@dataclass(kw_only=True)
class Traffic:
    """Adds, aborts and updates by dice, a step in between, integrity after each."""

    engine: Engine
    dice: random.Random
    updates: bool = False
    turns: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by version

    def add(self) -> None:
        dice = self.dice
        stem = dice.choice(STEMS)[: dice.choice((3, 16, 31, 31, 150, 200))]
        own = params(
            n=dice.choice((1, 1, 2, 3)),
            max_tokens=dice.choice((1, 8, 40, 40)),
            seed=dice.randrange(1000),
            temperature=dice.choice((1.0, 1.0, 1.0 if self.updates else 0.0)),
            top_k=dice.choice((0, 0, 0 if self.updates else 20)),
        )
        how = {
            "schedule": dice.choice((None, SPARSE, None if self.updates else Schedule.fixed(80))),
            "adapter": dice.choice((None, None, "one")),
        }
        if self.updates and how["schedule"] is not None and dice.random() < 0.5:
            how["speculative"] = SpeculativeParams(draft_tokens=3)
        ids = stem + [dice.randrange(211) for _ in range(dice.randint(0, 5))]
        self.asked[self.engine.add(ids, own, **how)] = ids, own, how

    def turn(self) -> None:
        if self.dice.random() < 0.25:
            self.add()
        if self.asked and self.dice.random() < 0.04:
            request = self.dice.choice(list(self.asked))
            self.aborted.add(request)
            self.engine.abort(request)
        self.turns += 1
        if self.updates and self.turns % 6 == 0:
            self._update()
        self.engine.check_integrity()
        if not self.engine.idle:
            self.outputs += self.engine.step()
        self.engine.check_integrity()

    def _update(self) -> None:
        mode = self.dice.choice(get_args(InFlight))
        version = self.engine.version + 1
        new = engines.changed(self.engine.model, seed=version, size=0.05)
        self.engine.update(new.items(), version=version, in_flight=mode)
        self.weights[version] = new

    def finish(self, turns: int) -> Done:
        self.weights[0] = engines.weights_of(self.engine.model)
        for _ in range(3):
            self.add()
        for _ in range(turns):
            self.turn()
        done = run(self.engine, outputs=self.outputs)
        asked = self.asked.items()
        assert set(done) == {(one, n) for one, (_, own, _) in asked for n in range(own.n)}
        return done


def crowded(model: models.Decoder, **settings: Any) -> Engine:
    engine = engine_of(model, **{"pages": 20, "max_context": 300, "max_running": 8, **settings})
    engine.load_adapter("one", adapter_of(model))
    return engine


def adapter_of(model: models.Decoder) -> Adapter:
    return Adapter.random(model.spec, 4, b_std=0.3)


def calm(model: models.Decoder, traffic: Traffic) -> Done:
    """The same requests under the same numbers, all at once, with room for all of them."""
    engine = crowded(model, pages=600, max_running=64, reuse="none")
    for request, (ids, own, how) in traffic.asked.items():
        assert engine.add(ids, own, **how) == request
    return run(engine)


@pytest.mark.parametrize(("seed", "reuse"), [(1, "prompts"), (2, "none"), (5, "prompts")])
def test_crowded_traffic_gives_the_calm_bits(model, seed, reuse) -> None:
    traffic = Traffic(engine=crowded(model, reuse=reuse), dice=random.Random(seed))
    done = traffic.finish(16)
    assert any(one.swaps for one in done.values())
    for key, wanted in calm(model, traffic).items():
        given, count = done[key], len(done[key].token_ids)
        assert given.seed == wanted.seed
        assert given.finish_reason == wanted.finish_reason or key[0] in traffic.aborted
        assert given.token_ids.tolist() == wanted.token_ids[:count].tolist()
        for name in ("kept", "logprobs", "entropies"):
            np.testing.assert_array_equal(getattr(given, name), getattr(wanted, name)[:count])


@pytest.mark.parametrize("seed", [6, 11])
def test_tokens_are_those_of_the_weights_that_they_name(seed) -> None:
    """Weights change with requests in every state. Each token of dense or exact decoding has the
    log-prob of a dense pass under its own version, over keys and values that this version computed
    or, where they were kept, those that drew the tokens. Nothing else is used, prefixes included.
    """
    engine = crowded(tiny())
    traffic = Traffic(engine=engine, dice=random.Random(seed), updates=True)
    done = traffic.finish(20)
    assert engine.version > 0
    decoders = {version: engines.with_weights(own) for version, own in traffic.weights.items()}
    ways = []
    for given in done.values():
        versions, lengths = given.weight_versions.tolist(), list(given.recomputed)
        assert versions == sorted(versions)
        assert lengths == sorted(lengths)
        assert given.finish_reason in ("length", "abort")
        if versions and (given.attention == "dense" or given.speculation is not None):
            _check_logprobs(given, [decoders[version] for version in versions])
            kept = len(set(versions)) - 1 > len(lengths)
            ways.append((given.speculation is not None, kept, bool(lengths), given.swaps > 0))
    assert all(map(any, zip(*ways, strict=True))), "the dice left out a way to go on"


def _check_logprobs(given: Completion, decoders: list[models.Decoder]) -> None:
    adapter = None if given.adapter is None else adapter_of(decoders[0])
    logp_TV = engines.logp_by_hand(decoders, given, adapter)
    wanted = logp_TV[torch.arange(len(logp_TV)), torch.tensor(given.token_ids).long()]
    np.testing.assert_allclose(given.logprobs, wanted.numpy(), atol=1e-4)


# Preemption, one case at a time.


@pytest.mark.parametrize("update", [False, True])
def test_the_oldest_sample_is_never_preempted(update) -> None:
    """Not even for one that is being computed anew and holds the last pages, nor where after an
    update both are.
    """
    engine = engine_of(tiny(), pages=20, max_context=320)
    oldest = engine.add(prompt(130), params(max_tokens=110))
    younger = engine.add(prompt(130, 1), params(max_tokens=60))
    outputs = engines.steps(engine, 25)
    if update:
        engine.update(engines.weights_of(engine.model).items(), version=1)
    done = run(engine, outputs=outputs, most=250)
    assert (done[oldest, 0].swaps, len(done[oldest, 0].recomputed)) == (0, update)
    assert done[younger, 0].swaps or done[younger, 0].recomputed


def test_a_group_runs_where_only_one_sequence_fits(model) -> None:
    """The prompt takes every page and its last one is unfinished: no room for a copy of it."""
    for length in (66, 72):
        engine, own = engine_of(model, pages=5, max_context=80), params(n=3, max_tokens=8)
        request = engine.add(prompt(length), own)
        done = run(engine, most=60)
        wanted = engine_of(model).generate([prompt(length)], own)
        same_bits([done[request, number] for number in range(3)], wanted)


def test_cached_prefixes_give_way_to_who_needs_pages(model) -> None:
    """A full cache of old prompts is no reason to preempt anybody."""
    engine = engine_of(model, pages=32)
    for seed in range(4):
        engine.generate([prompt(250, seed)], params(max_tokens=2))
    assert engine.pool.cached > 20
    (given,) = engine.generate([prompt(400, 9)], params(max_tokens=60))
    assert (given.swaps, given.recomputed) == (0, ())


def test_what_lies_in_unused_pages_does_not_matter(model) -> None:
    """Every page and table entry that nobody owns is poisoned before each step."""
    engine = engine_of(model, pages=60)
    request = engine.add(STEMS[0], params(n=2), schedule=SPARSE)
    dense = engine.add(prompt(40), params())
    outputs: list[Output] = []
    while not engine.idle:
        _poison(engine)
        outputs += engine.step()
    done = run(engine, outputs=outputs)
    wanted = engine_of(model).generate([STEMS[0]], params(n=2), schedule=SPARSE)
    same_bits([done[request, 0], done[request, 1]], wanted)
    same_bits([done[dense, 0]], [alone(model, prompt(40), params())])


def _poison(engine: Engine) -> None:
    owned = set(engine.scheduler.held_pages())
    free = torch.tensor([page for page in range(engine.pool.pages) if page not in owned])
    for layer in range(engine.model.spec.layers):
        for name in ("k", "v", "mean"):
            engine.runner.cache.field(name, layer)[free] = float("nan")
    engine.pool.forget()
