"""One engine for several policies: adapters over one base, and the base itself, in one batch."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparrow.dataflow.backend import Sampler
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.models.lora import Adapter
from sparrow.schema.base import Int32Array
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.types import InFlight


class SharedEngine:
    """An engine whose requests are of several policies, in one batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._serving: AsyncEngine | None = None
        self._users = 0

    def load(self, name: str, adapter: Adapter, in_flight: InFlight) -> int:
        """Load an adapter between steps; the number of the change, which later tokens carry."""
        self.engine.load_adapter(name, adapter, in_flight=in_flight)
        self.engine.version += 1
        return self.engine.version

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[AsyncEngine]:
        """The engine at work, from the first who enters to the last who leaves."""
        if self._serving is None:
            self._serving = await AsyncEngine(self.engine).__aenter__()
        self._users += 1
        try:
            yield self._serving
        finally:
            self._users -= 1
            if not self._users:
                last, self._serving = self._serving, None
                await last.__aexit__(None, None, None)


@dataclass(kw_only=True)
class AdapterBackend:
    """A policy as requests of a shared engine; with an adapter, whose version its tokens have."""

    shared: SharedEngine
    name: str
    # Versions of its adapter, by the change of the engine that brought each.
    versions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine = self.shared.engine
        self.max_context, self.max_running = engine.max_context, engine.max_running

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Sampler]:
        async with self.shared.serving() as engine:
            yield AdapterSampler(engine, self)

    @property
    def adapter(self) -> str:
        """The name of its adapter in the engine, which keeps some for itself."""
        return f"policy {self.name}"

    def load(self, adapter: Adapter, version: int, in_flight: InFlight = "recompute") -> None:
        """Load its adapter, as of a version."""
        change = self.shared.load(self.adapter, adapter, in_flight)
        self.versions = {**self.versions, change: version}  # others may be reading it

    def versions_of(self, changes_T: Int32Array) -> Int32Array:
        """Versions of its tokens, from the last change of the engine before each."""
        if not self.versions:
            return np.zeros_like(changes_T)
        changes = np.fromiter(self.versions, np.int32)
        versions = np.fromiter(self.versions.values(), np.int32)
        return versions[np.searchsorted(changes, changes_T, side="right") - 1]

    def header(self) -> str:
        return self.shared.engine.header()

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        raise ValueError("weights of a shared engine stay as they are")

    def set_actor(self, adapter: Adapter | None) -> None:
        raise ValueError("a shared engine has no adapter of sparse decoding")

    def sleep(self) -> None:
        """Its memory is needed: the learners use its weights."""

    def wake(self) -> None:
        """It was never asleep."""


@dataclass(frozen=True)
class AdapterSampler:
    """Prompts of one policy to a shared engine."""

    engine: AsyncEngine
    backend: AdapterBackend

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **settings: Any
    ) -> list[Completion]:
        own = self.backend
        name = own.adapter if own.versions else None
        answers = await self.engine.generate(prompt, params, adapter=name, **settings)
        return [
            answer.replace(weight_versions=own.versions_of(answer.weight_versions))
            for answer in answers
        ]

    async def load(self, adapter: Adapter, version: int, in_flight: InFlight) -> None:
        """Load its adapter while prompts are answered, before any token is drawn with it."""
        await self.engine.run(lambda _: self.backend.load(adapter, version, in_flight))

    async def update(
        self, items: Mapping[str, torch.Tensor], *, version: int, in_flight: InFlight
    ) -> int:
        raise ValueError("weights of a shared engine stay as they are")
