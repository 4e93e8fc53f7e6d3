"""The learner side of a run: groups to an update, and the weights that come of it.

Advantages, dense log-probs with acceptance, what corrections leave of each token, optimiser steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparrow.dataflow.episodes import shaped_reward
from sparrow.dataflow.local.messages import LearnerBatch, Nobody, RolloutBatch, Watcher
from sparrow.models import Decoder, hf_views
from sparrow.schema.base import Float32Array, Float32Matrix
from sparrow.schema.episode import Group, TrainSample, Trajectory
from sparrow.schema.gate import RatioEstimate, Reading
from sparrow.schema.train import TrainConfig
from sparrow.training.learner import Learner, Read, UpdateStats
from sparrow.training.objectives.advantages import Rewards
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.objectives.corrections import combine, diagnose


@dataclass(kw_only=True)
class LearnerSide:
    """The policy with its optimiser, and the algorithm by which it learns."""

    config: TrainConfig
    learner: Learner
    algorithm: Algorithm
    watch: Watcher = field(default_factory=Nobody)

    # A step.

    def read(self, played: RolloutBatch) -> LearnerBatch:
        """Advantages, and one dense pass: pi_old of all tokens, exact acceptance of the watched.

        Trajectories of `played.watched` are for the gate alone.
        """
        learnt = played.trajectories
        every = [*learnt, *played.watched]
        samples = [
            *self.credit(played.groups),
            *(TrainSample.of(one, 0.0) for one in played.watched),
        ]
        self.watch.phase("dense log-probs", 0, len(samples))
        reads = self.learner.read(
            samples,
            [_states(one) for one in every],
            on_batch=lambda done, total: self.watch.phase("dense log-probs", done, total),
        )
        if not all(_finite(read) for read in reads):
            return LearnerBatch(broken=True)
        pairs, count = list(zip(every, reads, strict=True)), len(learnt)
        own = tuple(map(_with_old, samples[:count], reads[:count]))
        weights, mismatch = self._weights(own, reads[:count])
        return LearnerBatch(
            samples=own,
            groups=tuple(n for n, group in enumerate(played.groups) for _ in group.trajectories),
            weights=tuple(weights),
            reads=tuple(reads[:count]),
            references=self._references(own),
            readings=tuple(_reading(one, r) for one, r in pairs if r.alpha is not None),
            estimates=tuple(_estimate(one, r) for one, r in pairs),
            mismatch=mismatch,
        )

    def credit(self, groups: Sequence[Group]) -> list[TrainSample]:
        """Rewards, shaped where the algorithm says so, to the advantage of each trajectory."""
        limit = self.config.rollout.max_tokens
        rewards = [
            Rewards(
                rewards=np.array(
                    [shaped_reward(one, self.algorithm, limit) for one in group.trajectories]
                ),
                baseline=group.baseline,
            )
            for group in groups
        ]
        return [
            TrainSample.of(one, float(advantage))
            for group, advantages in zip(groups, self.algorithm.advantage(rewards), strict=True)
            for one, advantage in zip(group.trajectories, advantages, strict=True)
        ]

    def update(self, batch: LearnerBatch) -> list[UpdateStats]:
        """The step's optimiser steps, each on a share of the groups; a skipped one if broken."""
        if batch.broken:
            return [UpdateStats.not_taken()]
        shares = np.array_split(
            np.unique(np.array(batch.groups, dtype=int)), self.config.batch.updates
        )
        return [
            self.learner.update(
                [batch.samples[n] for n in numbers],
                [batch.weights[n] for n in numbers],
                self.algorithm,
                references=batch.references and [batch.references[n] for n in numbers],
                on_batch=lambda done, total: self.watch.phase("update", done, total),
            )
            for share in shares
            if (numbers := [n for n, group in enumerate(batch.groups) if group in share])
        ]

    def _references(self, samples: Sequence[TrainSample]) -> tuple[Float32Array, ...] | None:
        """Log-probs of the reference model by learnt token; None without one."""
        if self.learner.reference is None:
            return None
        self.watch.phase("reference log-probs")
        return tuple(r.logprob for r in self.learner.read(samples, policy=self.learner.reference))

    def _weights(
        self, samples: Sequence[TrainSample], reads: Sequence[Read]
    ) -> tuple[list[Float32Array], dict[str, float]]:
        """What corrections make of pi_old / mu over the whole batch, and diagnostics of it."""
        if not samples:
            return [], {}
        counts = [sample.learnt for sample in samples]
        log_rho = [
            r.logprob - s.rollout_logprob[s.loss_mask] for s, r in zip(samples, reads, strict=True)
        ]
        log_rho_T = torch.from_numpy(np.concatenate(log_rho))
        sequence_T = torch.from_numpy(np.repeat(np.arange(len(samples)), counts))
        weight_T = combine(self.algorithm.corrections, log_rho_T, sequence_T)
        parts = np.split(weight_T.numpy(), np.cumsum(counts)[:-1])
        return parts, diagnose(log_rho_T, weight_T, sequence_T)

    # Weights.

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight whole, by Hugging Face names; all ranks must ask."""
        if self.learner.world.size == 1:
            return hf_views(self.learner.policy.model)
        return hf_views(self._decoder(self.learner.named_weights()))

    def host_model(self) -> Decoder:
        """A copy in host memory, in the dtype of the products; all ranks must ask."""
        dtype, named = self.learner.policy.dtype, self.learner.named_weights()
        return self._decoder({name: weight.to("cpu", dtype) for name, weight in named.items()})

    def _decoder(self, weights: dict[str, torch.Tensor]) -> Decoder:
        """The learner's model around other tensors."""
        with torch.device("meta"):
            model = Decoder(self.learner.policy.model.spec)
        model.load_state_dict(weights, assign=True)
        model.source = self.learner.policy.model.source
        return model


def _finite(read: Read) -> bool:
    """Whether the policy gave numbers; if not, nothing can be made of the step."""
    alpha = np.zeros(0) if read.alpha is None else read.alpha
    return bool(np.isfinite(read.logprob).all() and np.isfinite(alpha).all())


def _states(trajectory: Trajectory) -> Float32Matrix | None:
    """The actor's states of the tokens in the loss."""
    if trajectory.hidden is None:
        return None
    return trajectory.hidden[trajectory.loss_mask[trajectory.weight_version >= 0]]


def _with_old(sample: TrainSample, read: Read) -> TrainSample:
    old = np.zeros(len(sample), np.float32)
    old[sample.loss_mask] = read.logprob
    return sample.replace(old_logprob=old)


def _decoded(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Which of the learnt tokens a decode step drew, and the total lengths of those.

    The first of an answer comes from the prompt's dense pass: it says nothing of sparse decoding.
    """
    places = np.flatnonzero(trajectory.loss_mask)
    decoded = (trajectory.weight_version >= 0)[places - 1]
    return decoded, places[decoded].astype(np.int32)


def _reading(trajectory: Trajectory, read: Read) -> Reading:
    assert read.alpha is not None, "asked of watched ones alone"
    decoded, lengths = _decoded(trajectory)
    return Reading(
        prompt=trajectory.prompt_id,
        lengths=lengths,
        alpha=read.alpha[decoded],
        entropy=read.entropy[decoded],
    )


def _estimate(trajectory: Trajectory, read: Read) -> RatioEstimate:
    decoded, lengths = _decoded(trajectory)
    log_rho = read.logprob - trajectory.rollout_logprob[trajectory.loss_mask]
    ratio = np.exp(np.minimum(log_rho, 0.0))[decoded].astype(np.float32)
    return RatioEstimate(lengths=lengths, ratio=ratio)
