"""Strange use: interrupts in unlucky places, shared models, values beyond all sense."""

import asyncio
from typing import Any

import pytest
import torch
from support.engines import (
    changed,
    engine_of,
    params,
    prompt,
    same_bits,
    tiny,
)

from sparrow.engine import AsyncEngine, Engine
from sparrow.models import Decoder, hf_views
from sparrow.schema.sampling import SamplingParams

PROMPTS = [prompt(40), prompt(150, 1)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny()


def interrupt_after(holder: Any, name: str, calls: int) -> None:
    """The method works, and at its n-th call an interrupt follows."""
    inner, count = getattr(holder, name), iter(range(1, calls + 1))

    def method(*args: Any, **settings: Any) -> Any:
        result = inner(*args, **settings)
        if next(count, None) == calls:
            setattr(holder, name, inner)
            raise KeyboardInterrupt
        return result

    setattr(holder, name, method)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("where", ["end", "enter", "take", "read", "retire"])
def test_after_an_interrupt_the_next_generate_is_right(model, where, calls) -> None:
    engine = engine_of(model)
    holder, name = {
        "end": (engine.loop, "_end"),
        "enter": (engine.scheduler.rows, "enter"),
        "take": (engine.pool, "take"),
        "read": (engine.loop, "_read"),
        "retire": (engine.scheduler, "retire"),
    }[where]
    interrupt_after(holder, name, calls)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, params(n=2, max_tokens=6))
    again = engine.generate(PROMPTS, params(n=2, max_tokens=6))
    same_bits(again, engine_of(model).generate(PROMPTS, params(n=2, max_tokens=6)))
    engine.check_integrity()


def test_engines_that_share_a_model_do_not_mix_weights() -> None:
    model = tiny()
    first, second = engine_of(model), engine_of(model)
    second.generate([PROMPTS[1]], params(max_tokens=2))
    first.update(changed(model), version=1)
    first.generate([PROMPTS[1]], params(max_tokens=2))
    with pytest.raises(ValueError, match="changed, but not by this engine's update"):
        second.generate([PROMPTS[1]], params(max_tokens=2))


def test_an_update_finds_the_weights_where_they_are_now() -> None:
    model, weights = tiny(), changed(tiny())
    engine = engine_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    engine.update(weights, version=1)
    assert all(torch.equal(view, weights[name]) for name, view in hf_views(model).items())


@pytest.mark.parametrize("bad", ["meta", "sparse", "array"])
def test_an_update_that_cannot_be_copied_changes_nothing(bad) -> None:
    model = tiny()
    engine, before = engine_of(model), changed(model, size=0.0)
    items: dict[str, Any] = changed(model)
    name = list(items)[-1]
    items[name] = {
        "meta": items[name].to("meta"),
        "sparse": items[name].to_sparse(),
        "array": items[name].numpy(),
    }[bad]
    with pytest.raises(ValueError, match="no plain tensor"):
        engine.update(items, version=1)
    assert all(torch.equal(view, before[key]) for key, view in hf_views(model).items())


@pytest.mark.parametrize("version", [1.5, 2**31, -1, "2"])
def test_versions_are_whole_numbers(model, version) -> None:
    with pytest.raises(ValueError, match="version must be a whole number"):
        engine_of(model).update({}, version=version)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 1e300}, {"top_k": 2**63}, {"top_p": 1e-50}, {"n": 9_000_000_000}]
)
def test_values_beyond_all_sense_are_refused_at_once(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_common_slips_are_named(model) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match=r"give a Schedule, such as preset\(name\)"):
        engine.add([1], params(), schedule="qwen3-1.7b-0.86")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a list of prompts"):
        engine.generate([1, 2], params())  # type: ignore[list-item]
    given = engine.generate([torch.tensor(PROMPTS[0])], params())  # type: ignore[list-item]
    same_bits(given, engine_of(model).generate([PROMPTS[0]], params()))


def test_an_engine_has_one_owner_and_an_event_loop_of_its_own(model) -> None:
    engine: Engine = engine_of(model)

    async def twice() -> None:
        async with AsyncEngine(engine):
            with pytest.raises(ValueError, match="steps this engine already"):
                await AsyncEngine(engine).__aenter__()

    asyncio.run(twice())
    mine = AsyncEngine(engine)

    async def elsewhere() -> None:
        async with mine:
            await asyncio.to_thread(asyncio.run, other())

    async def other() -> None:
        with pytest.raises(ValueError, match="belongs to the event loop"):
            await mine.generate([1], params())

    asyncio.run(elsewhere())


def test_after_a_failure_another_asynchronous_engine_may_go_on(model) -> None:
    engine = engine_of(model, pages=14, max_context=200, swap_bytes=0)

    async def too_much() -> None:
        async with AsyncEngine(engine) as rollouts:
            await rollouts.generate(prompt(30), params(n=3, max_tokens=60))

    with pytest.raises(RuntimeError, match="the engine has failed"):
        asyncio.run(too_much())

    async def little() -> int:
        async with AsyncEngine(engine) as rollouts:
            return len(await rollouts.generate(prompt(30), params(max_tokens=5)))

    assert asyncio.run(little()) == 1
    engine.check_integrity()
