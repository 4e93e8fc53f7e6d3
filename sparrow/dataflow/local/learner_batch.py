"""From rollouts and the policy's scores to the optimiser's batch, the same for every learner side.

    samples = credited_samples(rollouts, algorithm, limit=max_tokens, vocabulary=vocabulary)
    batch = make_batch(rollouts, samples, scores, algorithm)

Advantages, pi_old, correction weights by pi_old / mu over the whole batch, readings for the gate.
"""

from collections.abc import Sequence

import numpy as np
import torch

from sparrow.dataflow.episodes import shaped_reward
from sparrow.dataflow.local.messages import LearnerBatch, RolloutBatch
from sparrow.schema.base import Float32Array, Float32Matrix, Int32Array
from sparrow.schema.episode import Group, TrainSample, Trajectory
from sparrow.schema.gate import AcceptanceReading, RatioEstimate
from sparrow.training.learner import SampleScores
from sparrow.training.objectives.advantages import Rewards
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.objectives.corrections import combine, diagnose
from sparrow.training.policy import TeacherStates

Measured = tuple[Trajectory, SampleScores]


def credited_samples(
    rollouts: RolloutBatch, algorithm: Algorithm, *, limit: int, vocabulary: int
) -> list[TrainSample]:
    """Samples with their advantages, then those of `rollouts.watched`, which are not learnt.

    limit: most tokens of an answer, for overlong shaping. vocabulary: of the policy; ValueError
    names a trajectory with other token ids, as episodes may make them.
    """
    for trajectory in (*rollouts.trajectories, *rollouts.watched):
        if (largest := int(trajectory.ids.max(initial=0))) >= vocabulary:
            expected = f"expected ids below {vocabulary}, the size of the vocabulary"
            raise ValueError(f"prompt {trajectory.prompt_id!r}: token id {largest}, {expected}")
    watched = [TrainSample.of(trajectory, 0.0) for trajectory in rollouts.watched]
    return [*credit(rollouts.groups, algorithm, limit=limit), *watched]


def credit(groups: Sequence[Group], algorithm: Algorithm, *, limit: int) -> list[TrainSample]:
    """Samples with their advantages, by rewards that are shaped if the algorithm says so.

    A trajectory is compared with those of its prompt and subgroup.
    """
    parts = [(group, numbers) for group in groups for numbers in group.subgroups()]
    rewards = [
        Rewards(np.array([_shaped(group, n, algorithm, limit) for n in numbers]), group.baseline)
        for group, numbers in parts
    ]
    samples = {
        (id(group), number): TrainSample.of(group.trajectories[number], float(advantage))
        for (group, numbers), advantages in zip(parts, algorithm.advantage(rewards), strict=True)
        for number, advantage in zip(numbers, advantages, strict=True)
    }
    return [samples[id(group), n] for group in groups for n in range(len(group.trajectories))]


def _shaped(group: Group, number: int, algorithm: Algorithm, limit: int) -> float:
    return shaped_reward(group.trajectories[number], algorithm, limit)


def actor_states(rollouts: RolloutBatch) -> list[Float32Matrix | None]:
    """The actor's hidden states of the learnt tokens, where they are known, by sample."""
    return list(map(_states, [*rollouts.trajectories, *rollouts.watched]))


def token_versions(rollouts: RolloutBatch) -> list[Int32Array]:
    """Weight versions of the learnt tokens of every sample."""
    trajectories = (*rollouts.trajectories, *rollouts.watched)
    return [trajectory.weight_version[trajectory.loss_mask] for trajectory in trajectories]


def make_batch(
    rollouts: RolloutBatch,
    samples: Sequence[TrainSample],
    scores: Sequence[SampleScores],
    algorithm: Algorithm,
    *,
    measured: Sequence[Measured] | None = None,
    references: Sequence[Float32Array] | None = None,
    teacher: TeacherStates | None = None,
) -> LearnerBatch:
    """The batch of the samples of `credited_samples`; broken if a score is not finite.

    scores: of every sample, by the policy that samples are learnt from. measured: trajectories with
    the dense policy's scores, for the gate; None: these.
    """
    if not all(map(_is_finite, scores)):
        return LearnerBatch(broken=True)
    trajectories, count = rollouts.trajectories, len(rollouts.trajectories)
    if measured is None:
        measured = list(zip([*trajectories, *rollouts.watched], scores, strict=True))
    others = [pair for pair in measured if pair[0].excluded_from_gate]
    measured = [pair for pair in measured if not pair[0].excluded_from_gate]
    learnt = tuple(map(_with_old, samples[:count], scores[:count]))
    weights, mismatch = _weights(learnt, scores[:count], algorithm)
    return LearnerBatch(
        samples=learnt,
        groups=tuple(n for n, group in enumerate(rollouts.groups) for _ in group.trajectories),
        weights=tuple(weights),
        scores=tuple(scores[:count]),
        references=None if references is None else tuple(references),
        readings=tuple(_reading(*pair) for pair in measured if pair[1].alpha is not None),
        estimates=tuple(_estimate(*pair) for pair in measured),
        mismatch=mismatch | _by_worker(others),
        teacher=teacher,
    )


def _weights(
    samples: Sequence[TrainSample], scores: Sequence[SampleScores], algorithm: Algorithm
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
    weight_T = combine(algorithm.corrections, log_rho_T, sequence_T)
    parts = np.split(weight_T.numpy(), np.cumsum(counts)[:-1])
    return parts, diagnose(log_rho_T, weight_T, sequence_T)


def _by_worker(measured: Sequence[Measured]) -> dict[str, float]:
    """Estimated acceptance of workers that the gate does not read, by name."""
    ratios: dict[str, list[np.ndarray]] = {}
    for pair in measured:
        ratios.setdefault(pair[0].worker, []).append(_estimate(*pair).ratio)
    found = {name: np.concatenate(parts) for name, parts in ratios.items()}
    return {f"async/accept/{name}": float(r.mean()) for name, r in found.items() if len(r)}


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
    starts = [turn.start for turn in trajectory.turns]  # of a reply to oneself, too
    decoded = (trajectory.weight_version >= 0)[places - 1] & ~np.isin(places, starts)
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
