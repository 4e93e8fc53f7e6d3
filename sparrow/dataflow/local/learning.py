"""Groups to an update: advantages, dense log-probs with acceptance, weights, optimiser steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sparrow.dataflow.local.run import Run
from sparrow.schema.base import Float32Array, Float32Matrix
from sparrow.schema.episode import Group, TrainSample, Trajectory
from sparrow.schema.gate import RatioEstimate, Reading
from sparrow.train.learner import Objective, Read, UpdateStats
from sparrow.train.objectives.advantages import Rewards, overlong_penalty
from sparrow.train.objectives.corrections import combine, diagnose


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's trajectories as the trainer sees them, and how far actor and policy are apart."""

    samples: tuple[TrainSample, ...]
    groups: tuple[int, ...]  # which group each sample belongs to
    weights: tuple[Float32Array, ...]  # by learnt token: what corrections leave of it
    reads: tuple[Read, ...]
    readings: tuple[Reading, ...]  # exact acceptance, of the watched trajectories
    estimates: tuple[RatioEstimate, ...]  # its cheap estimate, of all
    mismatch: dict[str, float]
    broken: bool = False  # the dense pass gave what is no number


NOTHING = Batch(samples=(), groups=(), weights=(), reads=(), readings=(), estimates=(), mismatch={})


def read(run: Run, groups: Sequence[Group], watched: Sequence[Trajectory] = ()) -> Batch:
    """Advantages, and one dense pass: pi_old of all tokens, exact acceptance of the watched.

    watched: trajectories for the gate alone, of groups that are not learnt from.
    """
    learnt = [one for group in groups for one in group.trajectories]
    every = [*learnt, *watched]
    samples = [*credit(run, groups), *(TrainSample.of(one, 0.0) for one in watched)]
    run.watch.phase("dense log-probs", 0, len(samples))
    reads = run.learner.read(
        samples,
        [_states(one) for one in every],
        on_batch=lambda done, total: run.watch.phase("dense log-probs", done, total),
    )
    if not all(_finite(found) for found in reads):
        return replace(NOTHING, broken=True)
    pairs = list(zip(every, reads, strict=True))
    own = [_with_old(one, found) for one, found in zip(samples, reads, strict=True)][: len(learnt)]
    weights, mismatch = _weights(run, own, reads[: len(learnt)])
    return Batch(
        samples=tuple(own),
        groups=tuple(n for n, group in enumerate(groups) for _ in group.trajectories),
        weights=tuple(weights),
        reads=tuple(reads[: len(learnt)]),
        readings=tuple(_reading(one, r) for one, r in pairs if r.alpha is not None),
        estimates=tuple(_estimate(one, found) for one, found in pairs),
        mismatch=mismatch,
    )


def _finite(found: Read) -> bool:
    """Whether the policy gave numbers; if not, nothing can be made of the step."""
    alpha = np.zeros(0) if found.alpha is None else found.alpha
    return bool(np.isfinite(found.logprob).all() and np.isfinite(alpha).all())


def credit(run: Run, groups: Sequence[Group]) -> list[TrainSample]:
    """Rewards, shaped where the algorithm says so, to the advantage of each trajectory."""
    rewards = [
        Rewards(
            rewards=np.array([shaped_reward(run, one) for one in group.trajectories]),
            baseline=group.baseline,
        )
        for group in groups
    ]
    found = run.algorithm.advantage(rewards)
    return [
        TrainSample.of(one, float(advantage))
        for group, advantages in zip(groups, found, strict=True)
        for one, advantage in zip(group.trajectories, advantages, strict=True)
    ]


def shaped_reward(run: Run, trajectory: Trajectory) -> float:
    """Its reward, with the penalty on long answers where the algorithm has one."""
    assert trajectory.reward is not None, "the episode gave one"
    if not run.algorithm.overlong:
        return trajectory.reward
    return trajectory.reward + overlong_penalty(
        int((trajectory.weight_version >= 0).sum()),
        limit=run.config.rollout.max_tokens,
        cushion=run.algorithm.overlong,
    )


def update(run: Run, batch: Batch) -> list[UpdateStats]:
    """The step's optimiser steps, each on a share of the groups; one that is skipped if broken."""
    if batch.broken:
        return [UpdateStats.not_taken()]
    objective = Objective(
        surrogate=run.algorithm.surrogate,
        aggregate=run.algorithm.aggregate,
        entropy=run.config.algorithm.entropy,
    )
    found = []
    count = run.config.batch.updates
    for part in np.array_split(np.unique(np.array(batch.groups, dtype=int)), count):
        numbers = [n for n, group in enumerate(batch.groups) if group in part]
        if not numbers:
            continue
        found.append(
            run.learner.update(
                [batch.samples[n] for n in numbers],
                [batch.weights[n] for n in numbers],
                objective,
                on_batch=lambda done, total: run.watch.phase("update", done, total),
            )
        )
    return found


def _states(trajectory: Trajectory) -> Float32Matrix | None:
    """The actor's states of the tokens in the loss."""
    if trajectory.hidden is None:
        return None
    return trajectory.hidden[trajectory.loss_mask[trajectory.weight_version >= 0]]


def _with_old(sample: TrainSample, found: Read) -> TrainSample:
    old = np.zeros(len(sample), np.float32)
    old[sample.loss_mask] = found.logprob
    return sample.replace(old_logprob=old)


def _weights(
    run: Run, samples: Sequence[TrainSample], reads: Sequence[Read]
) -> tuple[list[Float32Array], dict[str, float]]:
    """What corrections make of pi_old / mu over the whole batch, and what there is to say of it."""
    if not samples:
        return [], {}
    counts = [sample.learnt for sample in samples]
    log_rho = [
        r.logprob - s.rollout_logprob[s.loss_mask] for s, r in zip(samples, reads, strict=True)
    ]
    log_rho_T = torch.from_numpy(np.concatenate(log_rho))
    sequence_T = torch.from_numpy(np.repeat(np.arange(len(samples)), counts))
    weight_T = combine(run.algorithm.corrections, log_rho_T, sequence_T)
    parts = np.split(weight_T.numpy(), np.cumsum(counts)[:-1])
    return parts, diagnose(log_rho_T, weight_T, sequence_T)


def _decoded(trajectory: Trajectory) -> np.ndarray:
    """Places in the sequence of learnt tokens, and of them those that a decode step drew.

    The first of an answer comes from the prompt's dense pass: it says nothing of sparse decoding.
    """
    sampled = trajectory.weight_version >= 0
    places = np.flatnonzero(trajectory.loss_mask)
    return sampled[places - 1]


def _reading(trajectory: Trajectory, found: Read) -> Reading:
    assert found.alpha is not None, "asked of watched ones alone"
    decoded = _decoded(trajectory)
    return Reading(
        prompt=trajectory.prompt_id,
        lengths=np.flatnonzero(trajectory.loss_mask)[decoded].astype(np.int32),
        alpha=found.alpha[decoded],
        entropy=found.entropy[decoded],
    )


def _estimate(trajectory: Trajectory, found: Read) -> RatioEstimate:
    decoded = _decoded(trajectory)
    log_rho = found.logprob - trajectory.rollout_logprob[trajectory.loss_mask]
    return RatioEstimate(
        lengths=np.flatnonzero(trajectory.loss_mask)[decoded].astype(np.int32),
        ratio=np.exp(np.minimum(log_rho, 0.0))[decoded].astype(np.float32),
    )
