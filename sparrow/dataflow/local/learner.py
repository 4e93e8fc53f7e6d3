"""The learner side of a run: groups of answers in, optimiser steps and new weights out.

Advantages, dense log-probs with acceptance, correction weights of tokens, optimiser steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparrow.dataflow.local.learner_batch import (
    Measured,
    actor_states,
    credited_samples,
    make_batch,
    token_versions,
)
from sparrow.dataflow.local.messages import Callbacks, LearnerBatch, NoCallbacks, RolloutBatch
from sparrow.dataflow.local.sides import LearnerProtocol
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models import Decoder, hf_views, provenance
from sparrow.models.lora import Adapter, MergedDecoder
from sparrow.models.weights import with_weights
from sparrow.schema.base import Float32Array, Float32Matrix
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import TrainConfig
from sparrow.training.distillation import Distiller, DistillUpdate
from sparrow.training.learner import Learner, PolicySnapshot
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.policy import TeacherStates
from sparrow.training.sparse_attention import SparseDecoding
from sparrow.training.update import UpdateStats


@dataclass(kw_only=True)
class LearnerSide(LearnerProtocol):
    """The policy with its optimiser, and the algorithm."""

    config: TrainConfig
    learner: Learner
    algorithm: Algorithm
    distiller: Distiller | None = None
    callbacks: Callbacks = field(default_factory=NoCallbacks)
    _merged: MergedDecoder | None = None  # where an adapter is trained

    def header(self) -> str:
        return provenance(self.learner.policy.model)

    # A step.

    def score(self, rollouts: RolloutBatch, decoding: ResolvedDecoding) -> LearnerBatch:
        """Advantages, and one pass: pi_old of all tokens, exact acceptance of some.

        Trajectories in `rollouts.watched` are for the gate alone. Acceptance is that of the dense
        policy: where the pass is sparse (`batch.attention`), in a second one of those it is
        measured on.
        """
        limits = {"limit": self.config.rollout.max_tokens}
        limits["vocabulary"] = self.learner.policy.model.spec.vocabulary
        samples = credited_samples(rollouts, self.algorithm, **limits)
        states, sparse = actor_states(rollouts), self._sparse(decoding)
        name, teacher = "old log-probs", list[TeacherStates]()
        old = self.distiller is not None and self.config.rollout.distill.teacher == "old"
        self.callbacks.phase(name, 0, len(samples))
        scores = self.learner.score(
            samples,
            states if sparse is None else None,
            versions=token_versions(rollouts),
            teacher=teacher if old else None,
            sparse=sparse,
            on_batch=lambda done, total: self.callbacks.phase(name, done, total),
        )
        return make_batch(
            *(rollouts, samples, scores, self.algorithm),
            measured=None if sparse is None else self._measured(rollouts, samples, states),
            references=self._references(samples[: len(rollouts.trajectories)], sparse),
            teacher=teacher[0] if teacher else None,
        )

    def _measured(
        self,
        rollouts: RolloutBatch,
        samples: Sequence[TrainSample],
        states: Sequence[Float32Matrix | None],
    ) -> list[Measured]:
        """A dense pass of the trajectories whose states are known, beside a sparse one of all."""
        trajectories = [*rollouts.trajectories, *rollouts.watched]
        known = sorted(self.learner.owners(states))
        found = self.learner.score([samples[n] for n in known], [states[n] for n in known])
        return list(zip([trajectories[n] for n in known], found, strict=True))

    def _sparse(self, decoding: ResolvedDecoding) -> SparseDecoding | None:
        """The sparse attention of log-probs and updates; None: dense."""
        schedule, rule = decoding.schedule, decoding.rule
        if self.config.batch.attention == "dense" or schedule is None or rule is None:
            return None
        return SparseDecoding(schedule, rule)

    def update(self, batch: LearnerBatch, decoding: ResolvedDecoding) -> list[UpdateStats]:
        """Take the step's optimiser steps, each on a share of the groups; none if it is broken."""
        if batch.broken:
            return [UpdateStats.without_loss()]
        return [
            self.learner.update(
                [batch.samples[n] for n in numbers],
                [batch.weights[n] for n in numbers],
                self.algorithm,
                references=batch.references and [batch.references[n] for n in numbers],
                sparse=self._sparse(decoding),
                on_batch=lambda done, total: self.callbacks.phase("update", done, total),
            )
            for numbers in batch.shares(self.config.batch.updates)
        ]

    def snapshot(self, batch: LearnerBatch, step: int) -> PolicySnapshot | None:
        """The policy before the update, on batch.kl_sample samples; None: on none."""
        if self.config.run.loop == "async" and self.config.gate.mode != "off":
            self.learner.keep_head(step, self.config.dispatch.staleness)
        samples = [sample for sample in batch.samples if sample.learnt]
        if not self.config.batch.kl_sample or not samples:
            return None
        self.callbacks.phase("KL of the update")
        rng = np.random.default_rng((self.config.run.seed, step))
        drawn = draw_samples(samples, self.config.batch.kl_sample, rng)
        return self.learner.snapshot([samples[n] for n in drawn], list(drawn.values()))

    def kl(self, old: PolicySnapshot | None) -> float | None:
        """KL(new || old) of the step's updates, in nats a token; None if it is not measured."""
        if old is None:
            return None
        self.callbacks.phase("KL of the update")
        return self.learner.kl(old)

    def distill(
        self, batch: LearnerBatch, decoding: ResolvedDecoding, step: int
    ) -> DistillUpdate | None:
        """Update the actor's adapter on a share of the samples; None if it is not due.

        Samples of exact decoding were drawn from the dense policy: the objective's own term, whose
        ratios are those of the sparse actor, is left out.
        """
        settings, schedule, rule = self.config.rollout.distill, decoding.schedule, decoding.rule
        due = settings.every and step % settings.every == 0
        if self.distiller is None or schedule is None or rule is None or not due:
            return None
        if batch.broken or not batch.samples:
            return None
        count = max(1, round(settings.share * len(batch.samples)))
        rng = np.random.default_rng((self.config.run.seed, step))
        chosen = sorted(rng.permutation(len(batch.samples))[:count].tolist())
        teacher = batch.teacher
        if teacher is not None:
            teacher = teacher._replace(hidden=[teacher.hidden[number] for number in chosen])
        update = self.distiller.step(
            [batch.samples[number] for number in chosen],
            schedule,
            rule,
            objective=self.algorithm if settings.ppo and decoding.speculative is None else None,
            teacher=teacher,
            on_batch=lambda done, total: self.callbacks.phase("distillation", done, total),
        )
        if update.skipped:
            figures = f"loss {update.loss:g}, gradient {update.gradient:g}"
            text = f"step {step}: distillation: {figures}: update skipped, adapter unchanged"
            self.callbacks.event(text, "red")
        return update

    def _references(
        self, samples: Sequence[TrainSample], sparse: SparseDecoding | None
    ) -> list[Float32Array] | None:
        """Log-probs of the reference model by learnt token; None without one."""
        if self.learner.reference is None:
            return None
        self.callbacks.phase("reference log-probs")
        scores = self.learner.score(samples, policy=self.learner.reference, sparse=sparse)
        return [sample.logprob for sample in scores]

    # Weights.

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the sparse actor, if it has one."""
        return None if self.distiller is None else self.distiller.adapter

    def weights(self) -> dict[str, torch.Tensor]:
        """Full weights by Hugging Face names; a collective call on all ranks."""
        return hf_views(self._whole())

    def _whole(self) -> Decoder:
        """The policy in one piece, with its own adapter in its weights."""
        policy = self.learner.policy
        if policy.adapter is not None:
            self._merged = self._merged or MergedDecoder(policy.model, policy.adapter)
            self._merged.load(policy.adapter)
            self._merged.allocate()
            self._merged.renew()
            return self._merged.decoder
        if self.learner.world.size == 1:
            return policy.model
        return with_weights(policy.model, self.learner.trained())

    def host_model(self) -> Decoder:
        """A copy in host memory, in the dtype of products; a collective call on all ranks."""
        policy, named = self.learner.policy, self._whole().named_parameters()
        host = {name: weight.detach().to(policy.dtype).cpu() for name, weight in named}
        return with_weights(policy.model, host)

    @property
    def lora(self) -> Adapter | None:
        return self.learner.policy.adapter

    def state(self) -> dict[str, Any]:
        """The learner's and the distiller's state; a collective call on all ranks."""
        own = {"learner": self.learner.state()}
        return own if self.distiller is None else {**own, "distiller": self.distiller.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state["learner"])
        if self.distiller is not None:
            self.distiller.restore(state["distiller"])


def draw_samples(
    samples: Sequence[TrainSample], count: int, rng: np.random.Generator
) -> dict[int, float]:
    """Draw samples by what moves a policy, tokens x |advantage|, for the mean KL of an update.

    Returns their numbers with the weight of each token, which makes a sum over the drawn tokens an
    unbiased estimate of the mean over all. With 8 of 64 its standard error was 16 to 35 % in three
    steps of `tiny`; drawn evenly, 43 to 76 %.
    """
    tokens = np.array([sample.learnt for sample in samples], np.float64)
    if count >= len(samples):
        return dict.fromkeys(range(len(samples)), 1 / tokens.sum())
    size = np.abs([sample.advantage for sample in samples])
    chance = tokens * (size + (size.mean() or 1.0) / 2)
    chance /= chance.sum()
    order = rng.permutation(len(samples))
    places = np.searchsorted(np.cumsum(chance[order]), (np.arange(count) + rng.random()) / count)
    drawn, times = np.unique(order[places.clip(max=len(samples) - 1)], return_counts=True)
    weights = times / (count * chance[drawn] * tokens.sum())
    return dict(zip(drawn.tolist(), weights.tolist(), strict=True))
