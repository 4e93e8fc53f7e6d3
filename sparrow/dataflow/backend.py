"""The rollout backend: the engine that samples tokens for training and evaluation.

    backend = open_backend(model, rule)
    async with backend.serving() as sampler:
        completions = await sampler.generate(ids, params, schedule=schedule)

Another backend (another library's engine, a server) is a class with the methods of
`RolloutBackend`, made in `open_backend`: no other code depends on it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import torch

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight
from sparrow.sparse.rule import Rule


class Sampler(Protocol):
    """Samples answers for many coroutines concurrently."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        schedule: Schedule | None = None,
        speculative: SpeculativeParams | None = None,
        options: OutputOptions | None = None,
    ) -> list[Completion]:
        """Sample params.n completions of a prompt; schedule None: dense.

        speculative: exact decoding, where the schedule is that of the drafts.
        """

    async def update(
        self, items: Mapping[str, torch.Tensor], *, version: int, in_flight: InFlight
    ) -> int:
        """Load weights by Hugging Face names while prompts are answered.

        in_flight: what becomes of the keys and values of samples under way. Returns the tokens that
        these had.
        """


class RolloutBackend(Protocol):
    """A model that answers prompts, and gets the learner's weights between rollouts."""

    max_context: int  # tokens of the longest sequence, prompt and answer
    max_running: int  # samples decoded at once

    def serving(self) -> AbstractAsyncContextManager[Sampler]:
        """A context in which prompts are answered."""

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        """Load weights by Hugging Face names; tokens sampled from now on have this version.

        adapter: that of sparse decoding; None: it has none.
        """

    def set_actor(self, adapter: Adapter | None) -> None:
        """Load the adapter of sparse decoding for the present weights."""

    def sleep(self) -> None:
        """Free memory while the learner works; weights may be lost until `sync_weights`."""

    def wake(self) -> None: ...

    def header(self) -> str:
        """Describe the backend in one line."""


class EngineBackend(RolloutBackend):
    """The engine of this package, in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.max_context, self.max_running = engine.max_context, engine.max_running

    def serving(self) -> AsyncEngine:
        return AsyncEngine(self.engine)

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        self.engine.update(weights, version=version)
        self.engine.set_actor(adapter)

    def set_actor(self, adapter: Adapter | None) -> None:
        self.engine.set_actor(adapter)

    def sleep(self) -> None:
        self.engine.sleep(weights="drop")

    def wake(self) -> None:
        if self.engine.asleep:
            torch.cuda.empty_cache()  # memory of the learner: the engine counts free bytes
            self.engine.wake()

    def header(self) -> str:
        return self.engine.header()


def open_backend(
    model: Decoder,
    rule: Rule | None,
    speculative: SpeculativeParams | None = None,
    **limits: int | None,
) -> EngineBackend:
    """Make the backend of a run or an evaluation; rule: of sparse requests, None: dense only.

    speculative: of exact requests. limits: max_running, max_context, kv_bytes; None: as memory
    allows.
    """
    settings: dict[str, Any] = {"rule": rule, "speculative": speculative, **limits}
    return EngineBackend(Engine(model, **settings))
