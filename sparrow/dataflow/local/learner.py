"""The learner side of a run: groups of answers in, optimiser steps and new weights out.

Advantages, dense log-probs with acceptance, correction weights of tokens, optimiser steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparrow.dataflow.episodes import shaped_reward
from sparrow.dataflow.local.messages import Callbacks, LearnerBatch, NoCallbacks, RolloutBatch
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models import Decoder, hf_views
from sparrow.models.lora import Adapter
from sparrow.schema.base import Float32Array, Float32Matrix
from sparrow.schema.episode import Group, TrainSample, Trajectory
from sparrow.schema.gate import AcceptanceReading, RatioEstimate
from sparrow.schema.train import TrainConfig
from sparrow.training.distillation import Distiller, DistillUpdate
from sparrow.training.learner import Learner, PolicySnapshot, SampleScores
from sparrow.training.objectives.advantages import Rewards
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.objectives.corrections import combine, diagnose
from sparrow.training.policy import TeacherStates
from sparrow.training.sparse_attention import SparseDecoding
from sparrow.training.update import UpdateStats


@dataclass(kw_only=True)
class LearnerSide:
    """The policy with its optimiser, and the algorithm."""

    config: TrainConfig
    learner: Learner
    algorithm: Algorithm
    distiller: Distiller | None = None
    callbacks: Callbacks = field(default_factory=NoCallbacks)

    # A step.

    def score(self, rollouts: RolloutBatch, decoding: ResolvedDecoding) -> LearnerBatch:
        """Advantages, and one pass: pi_old of all tokens, exact acceptance of some.

        Trajectories in `rollouts.watched` are for the gate alone. Acceptance is that of the dense
        policy: where the pass is sparse (`batch.attention`), in a second one of those it is
        measured on.
        """
        count = len(rollouts.trajectories)
        trajectories = [*rollouts.trajectories, *rollouts.watched]
        samples = [
            *self.credit(rollouts.groups),
            *(TrainSample.of(trajectory, 0.0) for trajectory in rollouts.watched),
        ]
        name, sparse = "old log-probs", self._sparse(decoding)
        states = list(map(_states, trajectories))
        self.callbacks.phase(name, 0, len(samples))
        old = self.distiller is not None and self.config.rollout.distill.teacher == "old"
        teacher: list[TeacherStates] = []
        scores = self.learner.score(
            samples,
            states if sparse is None else None,
            teacher=teacher if old else None,
            sparse=sparse,
            on_batch=lambda done, total: self.callbacks.phase(name, done, total),
        )
        if not all(map(_is_finite, scores)):
            return LearnerBatch(broken=True)
        pairs = list(zip(trajectories, scores, strict=True))
        if sparse is not None:
            known = sorted(self.learner.owners(states))
            found = self.learner.score([samples[n] for n in known], [states[n] for n in known])
            pairs = list(zip([trajectories[n] for n in known], found, strict=True))
        learnt = tuple(map(_with_old, samples[:count], scores[:count]))
        weights, mismatch = self._weights(learnt, scores[:count])
        return LearnerBatch(
            samples=learnt,
            groups=tuple(n for n, group in enumerate(rollouts.groups) for _ in group.trajectories),
            weights=tuple(weights),
            scores=tuple(scores[:count]),
            references=self._references(learnt, sparse),
            readings=tuple(_reading(*pair) for pair in pairs if pair[1].alpha is not None),
            estimates=tuple(_estimate(*pair) for pair in pairs),
            mismatch=mismatch,
            teacher=teacher[0] if teacher else None,
        )

    def credit(self, groups: Sequence[Group]) -> list[TrainSample]:
        """Samples with their advantages, by rewards that are shaped if the algorithm says so."""
        limit = self.config.rollout.max_tokens
        rewards = [
            Rewards(
                rewards=np.array(
                    [shaped_reward(t, self.algorithm, limit) for t in group.trajectories]
                ),
                baseline=group.baseline,
            )
            for group in groups
        ]
        return [
            TrainSample.of(trajectory, float(advantage))
            for group, advantages in zip(groups, self.algorithm.advantage(rewards), strict=True)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        ]

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
        shares = np.array_split(
            np.unique(np.array(batch.groups, dtype=int)), self.config.batch.updates
        )
        return [
            self.learner.update(
                [batch.samples[n] for n in numbers],
                [batch.weights[n] for n in numbers],
                self.algorithm,
                references=batch.references and [batch.references[n] for n in numbers],
                sparse=self._sparse(decoding),
                on_batch=lambda done, total: self.callbacks.phase("update", done, total),
            )
            for share in shares
            if (numbers := [n for n, group in enumerate(batch.groups) if group in share])
        ]

    def snapshot(self, batch: LearnerBatch, step: int) -> PolicySnapshot | None:
        """The policy before the update, on batch.kl_sample samples; None: on none."""
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
    ) -> tuple[Float32Array, ...] | None:
        """Log-probs of the reference model by learnt token; None without one."""
        if self.learner.reference is None:
            return None
        self.callbacks.phase("reference log-probs")
        scores = self.learner.score(samples, policy=self.learner.reference, sparse=sparse)
        return tuple(sample.logprob for sample in scores)

    def _weights(
        self, samples: Sequence[TrainSample], scores: Sequence[SampleScores]
    ) -> tuple[list[Float32Array], dict[str, float]]:
        """Correction weights by pi_old / mu over the whole batch, and their diagnostics."""
        if not samples:
            return [], {}
        counts = [sample.learnt for sample in samples]
        log_rho = [
            score.logprob - sample.rollout_logprob[sample.loss_mask]
            for sample, score in zip(samples, scores, strict=True)
        ]
        log_rho_T = torch.from_numpy(np.concatenate(log_rho))
        sequence_T = torch.from_numpy(np.repeat(np.arange(len(samples)), counts))
        weight_T = combine(self.algorithm.corrections, log_rho_T, sequence_T)
        parts = np.split(weight_T.numpy(), np.cumsum(counts)[:-1])
        return parts, diagnose(log_rho_T, weight_T, sequence_T)

    # Weights.

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the sparse actor, if it has one."""
        return None if self.distiller is None else self.distiller.adapter

    def weights(self) -> dict[str, torch.Tensor]:
        """Full weights by Hugging Face names; a collective call on all ranks."""
        if self.learner.world.size == 1:
            return hf_views(self.learner.policy.model)
        return hf_views(self._decoder(self.learner.named_weights()))

    def host_model(self) -> Decoder:
        """A copy in host memory, in the dtype of products; a collective call on all ranks."""
        dtype, named = self.learner.policy.dtype, self.learner.named_weights()
        return self._decoder({name: weight.to("cpu", dtype) for name, weight in named.items()})

    def _decoder(self, weights: dict[str, torch.Tensor]) -> Decoder:
        """The learner's model with other tensors."""
        with torch.device("meta"):
            model = Decoder(self.learner.policy.model.spec)
        model.load_state_dict(weights, assign=True)
        model.source = self.learner.policy.model.source
        return model


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


def _is_finite(scores: SampleScores) -> bool:
    alpha = np.zeros(0) if scores.alpha is None else scores.alpha
    return bool(np.isfinite(scores.logprob).all() and np.isfinite(alpha).all())


def _states(trajectory: Trajectory) -> Float32Matrix | None:
    """The actor's hidden states of the tokens in the loss."""
    if trajectory.hidden is None:
        return None
    return trajectory.hidden[trajectory.loss_mask[trajectory.weight_version >= 0]]


def _with_old(sample: TrainSample, scores: SampleScores) -> TrainSample:
    old = np.zeros(len(sample), np.float32)
    old[sample.loss_mask] = scores.logprob
    return sample.replace(old_logprob=old)


def _decoded(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Which learnt tokens were drawn by a decode step, and the total lengths at those.

    The first token of an answer comes from the dense prefill: it says nothing of sparse decoding.
    """
    places = np.flatnonzero(trajectory.loss_mask)
    decoded = (trajectory.weight_version >= 0)[places - 1]
    return decoded, places[decoded].astype(np.int32)


def _reading(trajectory: Trajectory, scores: SampleScores) -> AcceptanceReading:
    assert scores.alpha is not None, "only called for measured trajectories"
    decoded, lengths = _decoded(trajectory)
    return AcceptanceReading(
        prompt=trajectory.prompt_id,
        lengths=lengths,
        alpha=scores.alpha[decoded],
        entropy=scores.entropy[decoded],
    )


def _estimate(trajectory: Trajectory, scores: SampleScores) -> RatioEstimate:
    decoded, lengths = _decoded(trajectory)
    log_rho = scores.logprob - trajectory.rollout_logprob[trajectory.loss_mask]
    ratio = np.exp(np.minimum(log_rho, 0.0))[decoded].astype(np.float32)
    return RatioEstimate(lengths=lengths, ratio=ratio)
