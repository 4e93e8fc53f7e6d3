"""What an engine refuses, and what is left after failures, interrupts and strange use: nothing."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from support import engines
from support.engines import SPARSE, alone, engine_of, params, prompt, run, same_bits, steps, tiny

from sparrow import models
from sparrow.engine import AsyncEngine, Engine, Output
from sparrow.models import hf_views
from sparrow.schema.sampling import OutputOptions
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.rule import Rule

LONG, PROMPTS = prompt(300, 9), [prompt(40), prompt(150, 1)]
FEW = params(max_tokens=6)


# Refusals.


def test_impossible_requests_are_refused_by_name(model) -> None:
    engine = engine_of(model, rule=Rule())
    training = {"options": OutputOptions(training=True)}
    beyond = LayerBudgets(layer=7, budgets=np.array([64]))
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        ([], {}, {}, "prompt"),
        ([1, 211], {}, {}, "211"),
        ([-1], {}, {}, "-1"),
        ([1] * 500, {"max_tokens": 13}, {}, "max_tokens"),
        ([1], {"stop_token_ids": (3, 211)}, {}, "stop_token_ids"),
        ([1], {"stop_token_ids": tuple(range(33)), "min_tokens": 2}, {}, "min_tokens"),
        ([1], {"top_p": 0.9}, training, "top_p"),
        ([1], {"top_k": 5}, training, "top_k"),
        ([1], {"min_tokens": 1}, training, "min_tokens"),
        ([1], {"temperature": 0.0}, training, "temperature"),
        ([1], {}, {"schedule": Schedule.fixed(96, page=32)}, "page"),
        ([1], {}, {"schedule": Schedule.fixed(48, flow="quest")}, "flow"),
        ([1], {}, {"schedule": Schedule.fixed(48, dense_layers=(0,))}, "dense_layers"),
        ([1], {}, {"schedule": Schedule.fixed(64, last=3)}, "last"),
        ([1], {}, {"schedule": Schedule.fixed(64, first=2)}, "first"),
        ([1], {}, {"schedule": Schedule.fixed(48, family="llama")}, "family"),
        ([1], {}, {"schedule": Schedule.fixed(48, layers=(beyond,))}, "layers"),
        ([1], {}, {"schedule": "qwen3-1.7b-0.86"}, "Schedule"),
        ([1], {}, {"adapter": "x"}, "adapter"),
        ([1], {}, {"options": OutputOptions(top_logprobs=212)}, "top_logprobs"),
    ]
    for ids, changes, how, field in cases:
        with pytest.raises(ValueError, match=field):
            engine.add(ids, params(**changes), **how)
        assert engine.idle
    with pytest.raises(ValueError, match="adapter"):
        engine.drop_adapter("x")
    own = params(temperature=0.7, max_tokens=2, stop_token_ids=(5,))
    assert len(engine.generate([[1]], own, **training)) == 1
    forced = Schedule.fixed(48, family="llama").forced_onto(family="qwen3")
    (done,) = engine.generate([[1]], params(max_tokens=2), schedule=forced)
    assert "FORCED" in done.attention


def test_settings_that_mean_nothing_are_refused_by_name(model) -> None:
    """A misspelt one must not quietly become another mode."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reuse": "promts"}, "reuse"),
        ({"max_running": 0}, "max_running"),
        ({"swap_bytes": -1}, "swap_bytes"),
        ({"max_context": 5000}, "max_context"),
        ({"pages": 31}, "max_context"),  # 496 tokens
    ]
    for settings, field in cases:
        with pytest.raises(ValueError, match=field):
            engine_of(model, **settings)
    with pytest.raises(ValueError, match="kv_bytes"):
        Engine(model, kv_bytes=2**60, max_context=4096, max_running=2**24)
    engine_of(model, pages=32)


def test_generate_wants_an_engine_of_its_own_and_matching_params(engine, model) -> None:
    for prompts, own in (([[1], [2]], [params()]), ([1, 2], params()), ([[1], []], params())):
        with pytest.raises(ValueError, match="prompt"):
            engine.generate(prompts, own)
        assert engine.idle
    request = engine.add([1], params(max_tokens=2))
    with pytest.raises(ValueError, match="requests"):
        engine.generate([[1]], params())
    assert run(engine)[request, 0].finish_reason == "length"
    given = engine.generate([torch.tensor(PROMPTS[0])], params())
    same_bits(given, [alone(model, PROMPTS[0], params())])


def test_without_a_rule_an_engine_is_dense_only(model) -> None:
    dense_only = engine_of(model, rule=None)
    with pytest.raises(ValueError, match="rule=None"):
        dense_only.add([1], params(), schedule=SPARSE)
    same_bits(dense_only.generate([prompt(40)], params()), [alone(model, prompt(40), params())])
    assert engines.page_bytes(model, None) < engines.page_bytes(model, Rule())


# Numbers that are none.


@pytest.fixture
def nan_model() -> models.Decoder:
    """Token 13 gives NaN wherever it stands; the head is not tied to it."""
    model = tiny(tied=False)
    with torch.no_grad():
        model.embed.weight[13] = float("nan")
    return model


def test_bad_logits_fail_their_request_and_no_other(nan_model) -> None:
    """The pool is just large enough, so pages that held NaN are written over later."""
    engine = engine_of(nan_model, pages=9, max_context=128)
    healthy = [token for token in prompt(40) if token != 13]
    own = params(top_k=12, stop_token_ids=(13,), min_tokens=24)
    good, bad = engine.add(healthy, own), engine.add([1, 13, 2], params(n=2), schedule=SPARSE)
    done = run(engine)
    for number in range(2):
        assert (done[bad, number].finish_reason, len(done[bad, number].token_ids)) == ("error", 0)
        assert "NaN" in done[bad, number].error
    same_bits(done[good, 0], alone(nan_model, healthy, own))
    worse, beside = asyncio.run(_together(engine, [13] * 100, healthy, own))
    assert worse.finish_reason == "error"
    same_bits(beside, done[good, 0])
    for schedule in (None, SPARSE):
        (later,) = engine.generate([healthy], own, schedule=schedule)
        same_bits(later, alone(nan_model, healthy, own, schedule=schedule))


async def _together(engine: Engine, bad: list[int], good: list[int], own: Any) -> list[Any]:
    async with AsyncEngine(engine) as rollouts:
        both = await asyncio.gather(rollouts.generate(bad, own), rollouts.generate(good, own))
        return [completion for (completion,) in both]


def test_a_sample_that_goes_bad_later_keeps_what_it_has(engine, model) -> None:
    """NaN in the pages of one running sample; its neighbour of the same group goes on."""
    request = engine.add(prompt(20), params(n=2))
    outputs = steps(engine, 6)
    victim = engine.scheduler.running[1]
    engine.runner.cache.field("v", 1)[victim.context.pages[-1]] = float("nan")
    done = run(engine, outputs=outputs)
    whole = engine_of(model).generate([prompt(20)], params(n=2))
    same_bits(done[request, 0], whole[0])
    ended = done[request, 1]
    assert ended.finish_reason == "error"
    assert ended.token_ids.tolist() == whole[1].token_ids[:6].tolist()


# Failures and interrupts.


def _break(holder: Any, name: str, error: type[BaseException], *, after: int = 0) -> None:
    """The method works so often, then raises once (where it worked before: after its work)."""
    inner, calls = getattr(holder, name), iter(range(1, after + 1))

    def method(*args: Any, **settings: Any) -> Any:
        result = inner(*args, **settings) if after else None
        if next(calls, after) == after:
            setattr(holder, name, inner)
            raise error("broken")
        return result

    setattr(holder, name, method)


@pytest.mark.parametrize("part", ["prefill", "decode", "first_draws"])
def test_after_a_failed_step_nothing_goes_on_from_what_it_left(engine, model, part) -> None:
    """Wrong tokens without a word are no option: those concerned must go first. Above all no page
    is offered for reuse that was never computed.
    """
    wanted = alone(model, LONG, FEW)
    _break(engine.runner, part, RuntimeError)
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate([LONG], FEW)
    assert engine.idle
    engine.check_integrity()
    same_bits(engine.generate([LONG], FEW), [wanted])
    request = engine.add(LONG, FEW)
    _break(engine.runner, part, RuntimeError)
    with pytest.raises(RuntimeError, match="broken"):
        engines.step_into([], engine)
    with pytest.raises(RuntimeError, match="abort"):
        engine.step()
    engine.abort(request)
    (output,) = engine.stream()
    assert output.completion.finish_reason == "abort"
    assert engine.idle
    same_bits(engine.generate([LONG], FEW), [wanted])


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("loop", "_end"),
        ("loop", "_read"),
        ("pool", "take"),
        ("scheduler", "retire"),
        ("pool", "publish"),
        ("scheduler.rows", "enter"),
    ],
)
def test_after_an_interrupt_the_next_generate_is_right(model, holder, name) -> None:
    """`publish`: the keys of a prompt come with its plan; if that is not run, they must go."""
    wanted = engine_of(model).generate(PROMPTS, params(n=2, max_tokens=6))
    for calls in (1, 3):
        engine = engine_of(model)
        place: Any = engine
        for part in holder.split("."):
            place = getattr(place, part)
        _break(place, name, KeyboardInterrupt, after=calls)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, params(n=2, max_tokens=6))
        same_bits(engine.generate(PROMPTS, params(n=2, max_tokens=6)), wanted)
        engine.check_integrity()


def test_too_little_room_for_swapping(model) -> None:
    """Who steps by hand can give up one request; tables and pages of the rest still agree."""
    tight = {"pages": 14, "max_context": 200, "swap_bytes": 1000}
    engine = engine_of(model, **tight)
    with pytest.raises(RuntimeError, match="swap_bytes"):
        engine.generate([prompt(30)], params(n=3, max_tokens=60))
    assert engine.idle
    ids = [engine.add(prompt(16, seed), params(seed=seed, max_tokens=72)) for seed in range(3)]
    outputs: list[Output] = []
    with pytest.raises(RuntimeError, match="swap_bytes"):
        engines.step_into(outputs, engine)
    engine.check_integrity()
    engine.abort(ids[-1])
    done = run(engine, outputs=outputs)
    for seed in range(2):
        calm = alone(model, prompt(16, seed), params(seed=seed, max_tokens=72))
        assert done[ids[seed], 0].token_ids.tolist() == calm.token_ids.tolist()


# Weights that others hold.


def test_weights_that_others_move_or_change() -> None:
    """An update finds them where they are now; another engine on the model notices it."""
    model, weights = tiny(), engines.changed(tiny())
    first, second = engine_of(model), engine_of(model)
    second.generate([PROMPTS[1]], params(max_tokens=2))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    first.update(weights, version=1)
    assert all(torch.equal(view, weights[name]) for name, view in hf_views(model).items())
    first.generate([PROMPTS[1]], params(max_tokens=2))
    with pytest.raises(ValueError, match="weights"):
        second.generate([PROMPTS[1]], params(max_tokens=2))
