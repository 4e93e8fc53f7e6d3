"""A policy of a team: how it samples, how it learns, and what it has not learnt yet."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparrow.dataflow.backend import RolloutBackend, Sampler
from sparrow.dataflow.episodes import is_informative
from sparrow.dataflow.language import Language
from sparrow.dataflow.local.messages import RolloutBatch
from sparrow.dataflow.local.metrics import (
    Metrics,
    learnt_tokens,
    policy_metrics,
    sampled_tokens,
    step_metrics,
)
from sparrow.dataflow.local.rollout import without_states
from sparrow.dataflow.team.learners import LearntBatch, TeamLearner, decoding_under
from sparrow.dataflow.team.shared_engine import AdapterBackend, AdapterSampler
from sparrow.engine.answer import ResolvedDecoding
from sparrow.gate import Gate
from sparrow.schema.base import from_dict
from sparrow.schema.episode import NOT_SAMPLED, Group, Trajectory
from sparrow.schema.gate import GateAction
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import InFlight
from sparrow.training.objectives.algorithms import Algorithm


@dataclass(kw_only=True, eq=False)
class Member:
    """One policy: its settings, how it samples, how it learns, and what it has not learnt yet.

    config: as of a run with it alone. version: updates taken. learner: None if it is frozen.
    """

    name: str
    number: int
    config: TrainConfig
    team: float  # share of the team's reward
    decoding: ResolvedDecoding
    algorithm: Algorithm
    language: Language
    gate: Gate
    learner: TeamLearner | None
    backend: RolloutBackend = field(init=False)
    vocabulary: int = 0  # number of the first policy with the same
    version: int = 0
    skips: int = 0  # updates in a row without a finite loss
    pending: dict[int, Group] = field(default_factory=dict)  # by position of their row
    # What its dynamic sampling left out, with hidden states: for its gate alone.
    _left_out: list[Trajectory] = field(default_factory=list)
    # Since the last round was recorded.
    _metrics: Metrics = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def prompts(self) -> int:
        """Groups of a batch."""
        return self.config.rollout.prompts

    @property
    def measured(self) -> bool:
        """Whether its gate wants hidden states of what it samples."""
        return self.learner is not None and self.config.gate.mode != "off"

    def sampling(self) -> ResolvedDecoding:
        """How it samples now, under the schedule of its gate."""
        return decoding_under(self.decoding, self.gate.schedule)

    def take(self, position: int, group: Group) -> None:
        """Add what it can learn from to what is pending."""
        own = self._own(group)
        if own is None:
            return
        if self._keeps(own):
            self.pending[position] = own
        else:
            self._counts["data/uninformative_groups"] += 1
            found = [*self._left_out, *(t for t in own.trajectories if t.hidden is not None)]
            self._left_out = found[-self.config.gate.sample :]

    def learns_from(self, group: Group) -> bool:
        """Whether it took part, and dynamic sampling leaves it in."""
        own = self._own(group)
        return own is not None and self._keeps(own)

    def _own(self, group: Group) -> Group | None:
        return policy_group(group, self.name, self.number, self.team)

    def _keeps(self, own: Group) -> bool:
        return not self.algorithm.dynamic or self._is_informative(own)

    def _is_informative(self, own: Group) -> bool:
        """By accuracy; where it has rewards of its own, whose accuracy is not known, by these."""
        if not any(self.name in trajectory.rewards for trajectory in own.trajectories):
            return is_informative(own)
        parts = ([own.trajectories[n].reward for n in numbers] for numbers in own.subgroups())
        return any(len({*rewards}) > 1 for rewards in parts)

    def due(self) -> RolloutBatch | None:
        """The groups of a batch, those of earlier rows first, if it has enough of them."""
        if len(self.pending) < self.prompts:
            return None
        places = sorted(self.pending)[: self.prompts]
        groups = tuple(self.pending.pop(place) for place in places)
        watched, self._left_out = tuple(self._left_out), []
        return RolloutBatch(groups=groups, position=0, watched=watched)

    def forget_states(self) -> None:
        """Drop hidden states of what is pending: large, and of weights or budgets that are gone."""
        self.pending = {place: without_states(group) for place, group in self.pending.items()}
        self._left_out = []

    def note(self, rollouts: RolloutBatch, learnt: LearntBatch, step: int) -> list[GateAction]:
        """Take note of an update, in a round: its gate looks at it, the next version begins."""
        batch, schedule = learnt.batch, self.gate.schedule
        look = self.gate.observe(self.version, batch.readings, batch.estimates)
        look = self.gate.judge_policy(look, entropy=batch.entropy, kl=learnt.kl)
        if self.gate.schedule is not schedule:
            self.forget_states()
        stale = [self.version - t.weight_version[t.loss_mask].mean() for t in rollouts.trajectories]
        self.version += 1
        self.skips = self.skips + 1 if any(update.skipped for update in learnt.updates) else 0
        figures = (rollouts, batch, learnt.updates, look, learnt.seconds)
        self._metrics = step_metrics(*figures, kl=learnt.kl)
        self._metrics["staleness_mean"] = float(np.mean(stale))
        self._counts.update(steps=1, tokens_learnt=learnt_tokens(rollouts.groups))
        named = f"policy {self.name}: "
        return [a.replace(step=step, reason=named + a.reason) for a in look.actions]

    def round_metrics(self, groups: Sequence[Group]) -> Metrics:
        """Metrics of a round, by its name: of its last update, and counts since the last round."""
        counts = {"tokens_sampled": sampled_tokens(groups, self.number)}
        if self.learner is not None:
            names = ("steps", "tokens_learnt", "data/uninformative_groups")
            counts |= {name: self._counts[name] for name in names}
            counts |= {"pending": len(self.pending), "version": self.version}
        found, self._metrics = self._metrics, {}
        self._counts.clear()
        return policy_metrics(self.name, {**found, **counts})

    def sync(self) -> None:
        """Give its weights, as of its version, to what samples."""
        assert self.learner is not None, "frozen policies do not change"
        if isinstance(self.backend, AdapterBackend):
            adapter = self.learner.lora
            assert adapter is not None
            self.backend.load(adapter, self.version)
        else:
            self.backend.sync_weights(self.learner.weights(), version=self.version)

    async def sync_in_flight(self, sampler: Sampler, in_flight: InFlight) -> None:
        """The same while prompts are answered."""
        assert self.learner is not None, "frozen policies do not change"
        if isinstance(sampler, AdapterSampler):
            learner = self.learner
            adapter = await asyncio.to_thread(lambda: learner.lora)
            assert adapter is not None
            await sampler.load(adapter, self.version, in_flight)
        else:
            weights = await asyncio.to_thread(self.learner.weights)
            await sampler.update(weights, version=self.version, in_flight=in_flight)

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        assert self.learner is not None
        pending = {str(place): _stored(group) for place, group in self.pending.items()}
        own = {"gate": self.gate.state(), "version": self.version, "skips": self.skips}
        own |= {"pending": pending}
        return {**own, **self.learner.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self.learner is not None
        self.learner.restore(state)
        self.gate = Gate.restore(self.config.gate, state["gate"])
        self.version, self.skips = int(state["version"]), int(state["skips"])
        self.pending = {int(place): _read(group) for place, group in state["pending"].items()}
        if self.version:
            self.sync()


def policy_group(group: Group, name: str, number: int, team: float = 0.0) -> Group | None:
    """What one policy learns from a group; None: it took no part.

    Its trajectories are those in which it sampled tokens that are in the loss.
    """
    taken = [t for t in group.trajectories if (t.loss_mask & (t.policy_id == number)).any()]
    own = tuple(_own_part(trajectory, name, number, team) for trajectory in taken)
    return group.replace(trajectories=own) if own else None


def _own_part(trajectory: Trajectory, name: str, number: int, team: float) -> Trajectory:
    """A trajectory as one policy sees it: what others sampled is as the words of a tool.

    Its reward is that of the trajectory, or its own where it has one, mixed with the team's.
    """
    reward = trajectory.rewards.get(name, trajectory.reward)
    if team:
        assert reward is not None, "checked when the episode ended"
        assert trajectory.team_reward is not None, "checked when the episode ended"
        reward = (1 - team) * reward + team * trajectory.team_reward
    mine = trajectory.policy_id == number
    if (mine == (trajectory.weight_version >= 0)).all():
        return trajectory if reward == trajectory.reward else trajectory.replace(reward=reward)
    return trajectory.replace(
        reward=reward,
        loss_mask=trajectory.loss_mask & mine,
        rollout_logprob=np.where(mine, trajectory.rollout_logprob, 0),
        weight_version=np.where(mine, trajectory.weight_version, NOT_SAMPLED),
        policy_id=np.where(mine, trajectory.policy_id, NOT_SAMPLED),
        speculation=None,  # of all of them together
        hidden=trajectory.hidden_of.get(number),
        hidden_of={},
    )


def _stored(group: Group) -> dict[str, Any]:
    """A group in a checkpoint, without hidden states: arrays are tensors, a tenth of their text."""
    trajectories = []
    for trajectory in without_states(group).trajectories:
        arrays = {name: value for name, value in trajectory if isinstance(value, np.ndarray)}
        tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
        trajectories.append(trajectory.model_dump(mode="json", exclude={*arrays}) | tensors)
    others = group.model_dump(mode="json", exclude={"trajectories"})
    return {**others, "trajectories": trajectories}


def _read(stored: Mapping[str, Any]) -> Group:
    """Inverse of `_stored`."""
    trajectories = [
        {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in one}
        for one in (trajectory.items() for trajectory in stored["trajectories"])
    ]
    return from_dict(Group, {**stored, "trajectories": trajectories})
