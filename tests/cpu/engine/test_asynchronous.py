"""The asyncio engine gives what the engine gives, to many coroutines at once."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sparrow import models
from sparrow.engine import AsyncEngine, Engine
from sparrow.schema.sampling import SamplingParams

PROMPTS = [[5, 9, 2], list(range(40)), [7] * 33, [1], list(range(20, 90))]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    sizes = {"layers": 3, "hidden": 64, "intermediate": 64, "heads": 4, "kv_heads": 2}
    return models.random("qwen3-0.6b", **sizes, head_size=32, vocabulary=101, max_positions=512)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "seed": 3, **changes})


def engine(model: models.Decoder) -> Engine:
    return Engine(model, max_running=6, max_context=256)


def test_many_coroutines_get_what_the_engine_gives(model: models.Decoder) -> None:
    async def play() -> list[Any]:
        async with AsyncEngine(engine(model)) as rollouts:
            return await asyncio.gather(*(rollouts.generate(p, params(n=2)) for p in PROMPTS))

    calm = engine(model).generate(PROMPTS, params(n=2))
    busy = [completion for group in asyncio.run(play()) for completion in group]
    assert [c.token_ids.tolist() for c in busy] == [c.token_ids.tolist() for c in calm]


def test_an_episode_of_several_turns(model: models.Decoder) -> None:
    async def episode(rollouts: AsyncEngine, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(3):
            (answer,) = await rollouts.generate(ids, params(max_tokens=5))
            ids += [*answer.token_ids.tolist(), 4, 4]
        return ids

    async def play() -> list[list[int]]:
        async with AsyncEngine(engine(model)) as rollouts:
            return await asyncio.gather(*(episode(rollouts, prompt) for prompt in PROMPTS))

    assert [len(ids) for ids in asyncio.run(play())] == [len(p) + 21 for p in PROMPTS]


def test_streams_tokens_as_they_come(model: models.Decoder) -> None:
    async def play() -> list[Any]:
        async with AsyncEngine(engine(model)) as rollouts:
            return [output async for output in rollouts.stream(PROMPTS[0], params())]

    outputs = asyncio.run(play())
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == outputs[-1].completion.token_ids.tolist()
    assert len(outputs) == 30


def test_one_who_streams_and_one_who_waits_get_the_same(model: models.Decoder) -> None:
    async def stream(rollouts: AsyncEngine) -> list[Any]:
        return [output async for output in rollouts.stream(PROMPTS[1], params())]

    async def play() -> tuple[list[Any], list[Any]]:
        async with AsyncEngine(engine(model)) as rollouts:
            waited = rollouts.generate(PROMPTS[1], params(n=2))
            return await asyncio.gather(waited, stream(rollouts))

    waited, outputs = asyncio.run(play())
    assert len(waited) == 2
    tokens = [token for output in outputs for token in output.tokens]
    assert waited[0].token_ids.tolist() == tokens
    assert np.array_equal(waited[0].logprobs, outputs[-1].completion.logprobs)


def test_a_cancelled_coroutine_aborts_its_request(model: models.Decoder) -> None:
    inner = engine(model)

    async def play() -> None:
        async with AsyncEngine(inner) as rollouts:
            task = asyncio.create_task(rollouts.generate(PROMPTS[0], params(max_tokens=200)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await rollouts.generate(PROMPTS[1], params())) == 1

    asyncio.run(play())
    inner.check_integrity()


def test_a_storm_of_cancellations_hurts_nobody_else(model: models.Decoder) -> None:
    """Cancelled before, while and after the engine's thread takes the request in."""
    inner = engine(model)

    async def play() -> list[Any]:
        async with AsyncEngine(inner) as rollouts:
            calm = [asyncio.create_task(rollouts.generate(p, params(n=2))) for p in PROMPTS]
            for number in range(60):
                task = asyncio.create_task(rollouts.generate(PROMPTS[0], params(max_tokens=200)))
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                await asyncio.sleep(0.001 * (number % 3))
                task.cancel()
            done = await asyncio.gather(*calm)
            await rollouts.run(lambda _: None)
            return done

    groups = asyncio.run(play())
    wanted = engine(model).generate(PROMPTS, params(n=2))
    given = [completion for group in groups for completion in group]
    assert [c.token_ids.tolist() for c in given] == [c.token_ids.tolist() for c in wanted]
    list(inner.stream())
    assert inner.idle
    inner.check_integrity()


def test_nothing_is_kept_of_requests_that_have_ended(model: models.Decoder) -> None:
    async def play() -> int:
        async with AsyncEngine(engine(model)) as rollouts:
            for prompt in PROMPTS * 3:
                await rollouts.generate(prompt, params(max_tokens=2))
            return await rollouts.run(lambda _: len(rollouts._listeners))

    assert asyncio.run(play()) == 0


def test_refusals_reach_the_one_who_asked(model: models.Decoder) -> None:
    async def play() -> None:
        async with AsyncEngine(engine(model)) as rollouts:
            with pytest.raises(ValueError, match="prompt is empty"):
                await rollouts.generate([], params())
            assert len(await rollouts.generate(PROMPTS[0], params())) == 1

    asyncio.run(play())
    outside = AsyncEngine(engine(model))
    with pytest.raises(ValueError, match="enter the asynchronous engine first"):
        asyncio.run(outside.generate(PROMPTS[0], params()))


def test_a_failure_of_the_engine_reaches_everybody(model: models.Decoder) -> None:
    inner = engine(model)

    def broken() -> Any:
        raise MemoryError("no memory")

    async def play() -> None:
        async with AsyncEngine(inner) as rollouts:
            inner.step = broken  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="the engine has failed"):
                await rollouts.generate(PROMPTS[0], params())
            with pytest.raises(RuntimeError, match="has ended"):
                await rollouts.generate(PROMPTS[0], params())

    asyncio.run(play())


def test_weights_change_between_steps(model: models.Decoder) -> None:
    async def play() -> np.ndarray:
        async with AsyncEngine(engine(model)) as rollouts:
            task = asyncio.create_task(rollouts.generate(PROMPTS[0], params(max_tokens=200)))
            await asyncio.sleep(0.1)
            items = models.hf_views(model).items()
            await rollouts.run(lambda inner: inner.update(items, version=1))
            (completion,) = await task
            return completion.weight_versions

    versions = asyncio.run(play())
    assert versions[0] == 0
    assert versions[-1] == 1
    assert (np.diff(versions) >= 0).all()
