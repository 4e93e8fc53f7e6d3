"""The rollout side of several policies."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparrow.dataflow.backend import Sampler
from sparrow.dataflow.episodes import Actor
from sparrow.dataflow.evaluation import evaluate
from sparrow.dataflow.local.messages import EpisodeFailed, RolloutRequest
from sparrow.dataflow.local.metrics import Metrics
from sparrow.dataflow.local.rollout import VALIDATION_SEED, PromptSlot, RolloutSide
from sparrow.dataflow.team.member import Member, policy_group
from sparrow.engine.answer import DENSE
from sparrow.schema.episode import NOT_SAMPLED, Group, Trajectory
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.sampling import SamplingParams
from sparrow.stats import mean_at_k
from sparrow.tasks.base import Example, Judge


class Actors(dict[str, Actor]):
    """The actors of an episode, by name of their policies."""

    def __missing__(self, name: str) -> Actor:
        raise KeyError(f"no policy {name!r}; the run has {', '.join(self)}")


@dataclass(kw_only=True)
class TeamRollout(RolloutSide):
    """The rollout side of several policies: an episode gets an actor of each, by name."""

    members: Mapping[str, Member]

    def serving(self) -> AbstractAsyncContextManager[Any]:
        @asynccontextmanager
        async def all_of_them() -> AsyncIterator[dict[str, Sampler]]:
            async with AsyncExitStack() as stack:
                yield {
                    name: await stack.enter_async_context(member.backend.serving())
                    for name, member in self.members.items()
                }

        return all_of_them()

    def actor(self, request: RolloutRequest, sampler: Any, slot: PromptSlot) -> Any:
        """Actors by name."""
        actors = {
            name: Actor(
                engine=sampler[name],
                language=member.language,
                judge=self.judge,
                params=SamplingParams(max_tokens=self.config.rollout.max_tokens),
                decoding=member.sampling(),
                samples=request.samples,
                context=self.max_prompt + self.config.rollout.max_tokens,
                watched=slot.watched if member.measured else 0,
                key=(self.config.run.seed, request.step, slot.position, name),
                policy=member.number,
                vocabulary=member.vocabulary,
                agents=self.config.rollout.agents,
            )
            for name, member in self.members.items()
        }
        return Actors(actors)

    async def trajectories(self, actor: Any, example: Example) -> list[Trajectory]:
        """The trajectories of an episode, with what every policy learns from."""
        found = await super().trajectories(actor, example)
        for trajectory in found:
            self._check_policies(trajectory)
            self._check_rewards(trajectory)
        return found

    def _check_policies(self, trajectory: Trajectory) -> None:
        known = [NOT_SAMPLED, *(member.number for member in self.members.values())]
        if others := {*trajectory.policy_id.tolist()} - {*known}:
            names = ", ".join(f"{member.number} {name}" for name, member in self.members.items())
            got = ", ".join(map(str, sorted(others)))
            raise EpisodeFailed(f"policy_id: expected numbers of policies ({names}), got {got}")

    def _check_rewards(self, trajectory: Trajectory) -> None:
        if others := trajectory.rewards.keys() - self.members.keys():
            names, got = ", ".join(self.members), ", ".join(sorted(others))
            raise EpisodeFailed(f"rewards: expected names of policies ({names}), got {got}")
        for member in self.members.values():
            if member.learner is None or not (trajectory.policy_id == member.number).any():
                continue
            if member.team and trajectory.team_reward is None:
                raise EpisodeFailed(f"a trajectory of policy {member.name} has no team_reward")
            known = trajectory.acc is not None or member.name in trajectory.rewards
            if member.algorithm.dynamic and not known:
                text = f"a trajectory of policy {member.name} has no acc"
                raise EpisodeFailed(f"{text}, which dynamic sampling needs")

    def held_out_actor(self, actor: Any, judge: Judge) -> Any:
        held_out = super().held_out_actor
        return {name: held_out(one, judge) for name, one in actor.items()}

    def evaluate_episode(self) -> Metrics:
        """Rewards and accuracy of every policy in the episode on held-out rows, by source."""
        metrics = Metrics()
        for part, groups in zip(self.validation, self.play_held_out(None), strict=True):
            for member in self.members.values():
                own = [policy_group(group, member.name, member.number) for group in groups]
                taken = [group.trajectories for group in own if group is not None]
                name = f"policy/{member.name}/val-episode/{part.source}"
                metrics |= means(f"{name}/reward", [[t.reward for t in ts] for ts in taken])
                metrics |= means(f"{name}/acc", [[t.acc for t in ts] for ts in taken])
            rewards = [_team_rewards(group) for group in groups]
            metrics |= means(f"val-episode/{part.source}/team_reward", rewards)
        return metrics

    def evaluate_member(self, member: Member) -> Evaluation:
        """The accuracy of one policy on held-out rows, by itself."""
        held, most = self.config.validation, self.config.rollout.max_tokens
        params = SamplingParams(n=held.samples, max_tokens=most, seed=VALIDATION_SEED)
        arguments = (member.backend, self.validation, member.language, params)
        decoding = member.sampling() if held.sparse else DENSE
        return evaluate(*arguments, model=member.name, decoding=decoding).evaluation


def _team_rewards(group: Group) -> list[float | None]:
    """The team's reward of every play, in the mean of its trajectories."""
    plays = [[t.team_reward for t in play if t.team_reward is not None] for play in group.plays()]
    return [float(np.mean(rewards)) for rewards in plays if rewards]


def means(name: str, rows: Sequence[Sequence[float | None]]) -> Metrics:
    """The mean over rows of their mean values; with an interval where all are from 0 to 1."""
    values = [[value for value in row if value is not None] for row in rows]
    values = [row for row in values if row]
    if not values:
        return {}
    if not all(0 <= value <= 1 for row in values for value in row):
        return {f"{name}/mean": float(np.mean([np.mean(row) for row in values]))}
    found = mean_at_k(values)
    metrics = {f"{name}/mean": found.value}
    if found.low is not None and found.high is not None:
        metrics |= {f"{name}/low": found.low, f"{name}/high": found.high}
    return metrics
