"""The rollout side of an asynchronous run whose learner has several ranks.

The first rank has the coordinator; the others get its batches, as every rank needs the whole one.
Hidden states stay on the first, which measures acceptance (`World`: what an exchange costs).
"""

from collections.abc import Mapping
from typing import Any

import torch

from sparrow.dataflow.asynchronous.rollout import AsyncRolloutSide
from sparrow.dataflow.local.messages import Callbacks, EpisodeFailed, RolloutBatch, RolloutRequest
from sparrow.dataflow.local.rollout import without_states
from sparrow.dataflow.local.sides import RolloutHeader, RolloutProtocol
from sparrow.dataflow.stopping import Stopped
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models.lora import Adapter
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.schedule import Schedule
from sparrow.training.world import World

SHARED = (Stopped, EpisodeFailed)


class FirstRankRollout(RolloutProtocol):
    """Every call is made on all ranks; side: opened on all, started on the first alone."""

    def __init__(self, side: AsyncRolloutSide, world: World) -> None:
        self.side, self.world = side, world

    @property
    def callbacks(self) -> Callbacks:
        return self.side.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Callbacks) -> None:
        self.side.callbacks = callbacks

    def header(self) -> RolloutHeader:
        return self.side.header()

    def generate(self, request: RolloutRequest) -> RolloutBatch:
        own = list[RolloutBatch]()

        def first() -> RolloutBatch:
            own.append(self.side.generate(request))
            return own[0].replace(
                groups=tuple(map(without_states, own[0].groups)),
                watched=tuple(t.replace(hidden=None) for t in own[0].watched),
            )

        batch = self.world.on_first_rank(first, SHARED)
        return own[0] if own else batch

    def decoding(self, schedule: Schedule | None) -> ResolvedDecoding:
        return self.side.decoding(schedule)

    def evaluate(self, schedule: Schedule | None, *, sparse: bool | None = None) -> Evaluation:
        return self.side.evaluate(schedule, sparse=sparse)

    def sleep(self) -> None:
        """Workers go on while the learner works."""

    def wake(self) -> None:
        """Workers have gone on."""

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        if self.world.is_first:
            self.side.sync_weights(weights, version=version, adapter=adapter)

    def validate(self, step: int, schedule: Schedule | None) -> list[tuple[int, Evaluation]]:
        return self.world.on_first_rank(lambda: self.side.validate(step, schedule), SHARED)

    def evaluations(self, *, wait: bool = False) -> list[tuple[int, Evaluation]]:
        return self.world.on_first_rank(lambda: self.side.evaluations(wait=wait), SHARED)

    def close(self) -> None:
        if self.world.is_first:
            self.side.close()

    def state(self) -> dict[str, Any]:
        return self.side.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.side.restore(state)
