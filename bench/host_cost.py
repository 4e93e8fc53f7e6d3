"""What the host does for a decode step: the model is replaced by fixed draws, all else is real.

    python bench/host_cost.py [--prompts 16] [--samples 8] [--tokens 2000]

Prints milliseconds a step for `Engine.generate` and for `AsyncEngine.generate`, prompts included.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

import torch

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.engine.requests import Sample
from sparrow.engine.runner import Runner, StepOutput
from sparrow.models import load
from sparrow.schema.sampling import SamplingParams


def fixed_draws(runner: Runner, samples: Sequence[Sample]) -> StepOutput:
    """Token 5 for everybody, after what a step looks up on the host."""
    runner._kind(samples)
    draws = torch.zeros(4, len(samples), dtype=torch.int32)
    draws[0], draws[3] = 5, 1
    return StepOutput(draws_4B=draws, hidden_BC=None, logits_BV=None)


async def concurrent(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    async with AsyncEngine(engine) as rollouts:
        await asyncio.gather(*(rollouts.generate(prompt, params) for prompt in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("prompts", 16), ("samples", 8), ("tokens", 2000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    model = load("tiny", dtype="float32", device="cpu")
    rows = given.prompts * given.samples
    engine = Engine(model, max_running=rows, max_context=64 + given.tokens, kv_bytes=2 * 2**30)
    engine.loop.late = True
    Runner.decode = fixed_draws  # type: ignore[method-assign]
    prompts = [[7] * 40 for _ in range(given.prompts)]
    params = SamplingParams(n=given.samples, max_tokens=given.tokens, seed=1, ignore_eos=True)
    for name, run in (
        ("engine", lambda: engine.generate(prompts, params)),
        ("asynchronous", lambda: asyncio.run(concurrent(engine, prompts, params))),
    ):
        begun = time.perf_counter()
        run()
        print(
            f"{name}: {(time.perf_counter() - begun) / given.tokens * 1e3:.3f} ms a step of {rows}"
        )


if __name__ == "__main__":
    main()
