"""The two sides of a run as the loop and `Run` see them: a few typed calls each.

    RolloutProtocol   rows in, groups of answers with rewards out (`RolloutSide`)
    LearnerProtocol   groups in, optimiser steps and weights out (`LearnerSide`, and
                      `TransformersLearner`: one that is plain transformers)

The sides do not know each other; messages between them are in messages.py. On several ranks every
call is made on all of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from sparrow.dataflow.local.messages import Callbacks, LearnerBatch, RolloutBatch, RolloutRequest
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models import Decoder
from sparrow.models.lora import Adapter
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.schedule import Schedule
from sparrow.training.distillation import DistillUpdate
from sparrow.training.update import UpdateStats


class RolloutHeader(NamedTuple):
    """A rollout side in a few words: its rows, its engine, and how its verifiers are isolated."""

    rows: str
    engine: str
    verifiers: str | None  # None: the reward runs in this process


class RolloutProtocol(Protocol):
    """Answers rows with the actor, and gets the learner's weights between rollouts."""

    callbacks: Callbacks

    def header(self) -> RolloutHeader: ...

    def generate(self, request: RolloutRequest) -> RolloutBatch:
        """Sample the groups of a step; the same request and weights give the same tokens."""

    def decoding(self, schedule: Schedule | None) -> ResolvedDecoding:
        """How tokens are sampled in a step under this schedule of the gate."""

    def evaluate(self, schedule: Schedule | None, *, sparse: bool | None = None) -> Evaluation:
        """Answer the held-out rows; sparse: under the schedule, None: as the configuration says."""

    def sleep(self) -> None:
        """Free memory while the learner works; weights may be lost until `sync_weights`."""

    def wake(self) -> None:
        """Take the memory back, before `sync_weights`."""

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        """Load weights by Hugging Face names; tokens sampled from now on have this version."""

    def close(self) -> None:
        """Stop the verifiers."""

    # Optional: for a side that goes on while the learner works.

    def validate(self, step: int, schedule: Schedule | None) -> list[tuple[int, Evaluation]]:
        """Have the held-out rows answered after a step; return what has ended so far, by step."""
        return [(step, self.evaluate(schedule))]

    def evaluations(self, *, wait: bool = False) -> list[tuple[int, Evaluation]]:
        """Evaluations that have ended since; wait: for all of them."""
        return []

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs; nothing if every draw is a function of seed, step and row."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        return


class LearnerProtocol(Protocol):
    """A policy with its optimiser. What is optional has a default, which subclasses inherit."""

    callbacks: Callbacks

    def header(self) -> str:
        """Where its weights come from, in a word or two."""

    def score(self, rollouts: RolloutBatch, decoding: ResolvedDecoding) -> LearnerBatch:
        """Advantages, pi_old of every learnt token, weights of tokens, readings for the gate.

        Broken if a score is not finite. `learner_batch` has what is the same for every learner.
        """

    def update(self, batch: LearnerBatch, decoding: ResolvedDecoding) -> list[UpdateStats]:
        """Take the optimiser steps; one that has no finite loss and gradient is skipped."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Full weights by Hugging Face names, as they are now."""

    def host_model(self) -> Decoder:
        """A copy in host memory, which is written as the run's model."""

    def state(self) -> dict[str, Any]:
        """Its sections of a checkpoint, in host memory: at least {"learner": {"taken", "weights"}}.

        taken: optimiser steps. weights: by the decoder's names, as `sparrow eval --checkpoint`
        reads them. Other keys are its own; step, gate and the ledger's are taken.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint with the sections of `state`: on a CPU with the same bits.

        A LookupError, ValueError, TypeError, AttributeError or RuntimeError says that the state is
        of another run.
        """

    # Optional.

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the sparse actor; None: it has none."""
        return None

    @property
    def lora(self) -> Adapter | None:
        """The adapter that is trained in place of the weights; None: they are trained."""
        return None

    def distill(
        self, batch: LearnerBatch, decoding: ResolvedDecoding, step: int
    ) -> DistillUpdate | None:
        """Take a step of the adapter; None: there is none, or it is not due."""
        return None

    def snapshot(self, batch: LearnerBatch, step: int) -> Any | None:
        """What `kl` needs of the policy before an update; None: KL is not measured."""
        return None

    def kl(self, old: Any | None) -> float | None:
        """KL(new || old) of the updates since a snapshot, in nats a token; None: not measured."""
        return None
