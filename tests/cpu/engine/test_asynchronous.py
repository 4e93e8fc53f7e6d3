"""The asyncio engine gives what the engine gives, to many coroutines at once."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support import engines
from support.engines import engine_of, same_bits, tiny, weights_of

from sparrow import models
from sparrow.engine import AsyncEngine, Engine
from sparrow.schema.types import InFlight

params = partial(engines.params, max_tokens=20)
PROMPTS = [[5, 9, 2], list(range(40)), [7] * 33, [1], list(range(20, 90))]


@pytest.fixture
def engine(model: models.Decoder) -> Engine:
    return engine_of(model, max_running=6, max_context=256)


def play(engine: Engine, work: Callable[[AsyncEngine], Awaitable[Any]]) -> Any:
    async def inside() -> Any:
        async with AsyncEngine(engine) as rollouts:
            return await work(rollouts)

    return asyncio.run(inside())


async def first_token(rollouts: AsyncEngine) -> None:
    """Until a step has brought something: the request of another is in the engine by then."""
    async for _ in rollouts.stream([3], params(max_tokens=2)):
        pass


def test_many_coroutines_get_what_the_engine_gives(engine, model) -> None:
    """Some stream, some wait; nothing is kept of requests that have ended."""

    async def stream(rollouts: AsyncEngine) -> list[Any]:
        return [output async for output in rollouts.stream(PROMPTS[1], params())]

    async def work(rollouts: AsyncEngine) -> tuple[list[Any], list[Any], int]:
        waiting = (rollouts.generate(p, params(n=2)) for p in PROMPTS)
        *groups, outputs = await asyncio.gather(*waiting, stream(rollouts))
        return groups, outputs, await rollouts.run(lambda _: len(rollouts._listeners))

    groups, outputs, listeners = play(engine, work)
    calm = engine_of(model, max_running=6).generate(PROMPTS, params(n=2))
    busy = [completion for group in groups for completion in group]
    same_bits(busy, calm)
    tokens = [token for output in outputs for token in output.tokens]
    assert busy[2].token_ids.tolist() == tokens
    assert 1 < len(outputs) <= 20  # a busy machine brings tokens of several steps at once
    assert listeners == 0


def test_cancelled_coroutines_abort_their_requests_and_hurt_nobody_else(engine, model) -> None:
    """Cancelled before, while and after the engine's thread takes the request in."""

    async def work(rollouts: AsyncEngine) -> list[Any]:
        calm = [asyncio.create_task(rollouts.generate(p, params(n=2))) for p in PROMPTS]
        for number in range(40):
            task = asyncio.create_task(rollouts.generate(PROMPTS[0], params(max_tokens=200)))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            if number % 10 == 0:
                await first_token(rollouts)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        done = await asyncio.gather(*calm)
        await rollouts.run(lambda _: None)
        return done

    given = [completion for group in play(engine, work) for completion in group]
    same_bits(given, engine_of(model).generate(PROMPTS, params(n=2)))
    list(engine.stream())
    assert engine.idle
    engine.check_integrity()


def test_refusals_reach_the_one_who_asked(engine) -> None:
    async def work(rollouts: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="prompt"):
            await rollouts.generate([], params())
        with pytest.raises(ValueError, match="already"):
            await AsyncEngine(engine).__aenter__()
        await asyncio.to_thread(asyncio.run, elsewhere(rollouts))
        assert len(await rollouts.generate(PROMPTS[0], params())) == 1

    async def elsewhere(rollouts: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="event loop"):
            await rollouts.generate([1], params())

    play(engine, work)
    with pytest.raises(ValueError, match="enter"):
        asyncio.run(AsyncEngine(engine).generate(PROMPTS[0], params()))


def test_a_failure_of_the_engine_reaches_everybody(model) -> None:
    """And another asynchronous engine may go on with what is left: nothing."""
    engine = engine_of(model, pages=14, max_context=200, swap_bytes=0)

    async def work(rollouts: AsyncEngine) -> None:
        for told in ("failed", "ended"):
            with pytest.raises(RuntimeError, match=told):
                await rollouts.generate(list(range(30)), params(n=3, max_tokens=60))

    play(engine, work)
    assert len(play(engine, lambda rollouts: rollouts.generate([1, 2], params()))) == 1
    engine.check_integrity()


@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_weights_change_between_steps(in_flight) -> None:
    """For who streams and for who waits; each token is that of the weights that it names."""
    model, new = tiny(), engines.changed(tiny())
    decoders = [engines.with_weights(weights) for weights in (weights_of(model), new)]
    engine, own = engine_of(model), params(max_tokens=100)

    async def stream(rollouts: AsyncEngine) -> list[Any]:
        outputs = []
        async for output in rollouts.stream(PROMPTS[0], own, options=engines.HIDDEN):
            if len(outputs) == 3:
                assert await rollouts.update(new, version=1, in_flight=in_flight) >= 3
            outputs.append(output)
        return outputs

    async def work(rollouts: AsyncEngine) -> list[Any]:
        waiting = rollouts.generate(PROMPTS[1], own, options=engines.HIDDEN)
        return await asyncio.gather(stream(rollouts), waiting)

    outputs, (waited,) = play(engine, work)
    streamed, restarts = outputs[-1].completion, int(in_flight == "restart")
    last = [token for output in outputs if output.restarts == restarts for token in output.tokens]
    assert streamed.token_ids.tolist() == last
    for mine in (streamed, waited):
        versions = mine.weight_versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == ({1} if restarts else {0, 1})
        assert (len(mine.recomputed), mine.restarts) == (in_flight == "recompute", restarts)
        drew = [decoders[version] for version in versions]
        states = engines.recorded_hidden(mine).split(1)
        given = [engines.logp(decoder, state) for decoder, state in zip(drew, states, strict=True)]
        wanted = engines.logp_by_hand(drew, mine)
        np.testing.assert_allclose(torch.cat(given), wanted.detach(), atol=1e-4)
