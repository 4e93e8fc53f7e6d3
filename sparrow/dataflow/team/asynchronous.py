"""The asynchronous loop of several policies: episodes, and a learner of each, at the same time.

    episodes --groups--> what each policy waits for --batch--> its learner (a process of its own)
       ^                                                           |
       +---------------- its weights, between steps of the engine -+

An episode starts only if every policy is expected to learn from it within `dispatch.staleness`
versions. A batch is that of the earliest rows, and waits for those under way that would be too old
for the next: so nothing is thrown away, and long episodes are not left out. The fast policies wait
for the slowest one no longer than that.

Rounds are recorded in the order of their rows. Before a checkpoint or a validation all that is
under way ends, so that the state of a run is that of the loop in lock-step.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparrow.dataflow.backend import Sampler
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.local.messages import Clock, RolloutBatch, RolloutRequest
from sparrow.dataflow.local.metrics import rollout_metrics
from sparrow.dataflow.local.rollout import PromptSlot, without_states
from sparrow.dataflow.team.member import Member
from sparrow.dataflow.team.rollout import TeamRollout
from sparrow.dataflow.team.run import TeamRun
from sparrow.schema.episode import Group
from sparrow.schema.gate import GateAction
from sparrow.training.update import UpdateStats


def take_steps(run: TeamRun) -> None:
    """Play rounds until the next checkpoint or validation is due, or a stop is requested."""
    run.start_step()
    every = [run.config.run.save_every, run.config.validation.every]
    ends = [(run.step // count + 1) * count for count in every if count]
    rounds = AsyncRounds(run, min(*ends, run.config.run.steps))
    run.settled = False
    run_coroutine(rounds.play())
    run.settled = True
    for member in run.learning:  # as after a resume
        member.forget_states()
    run.validate_if_due()
    run.save_if_due()
    run.ledger.raise_if_stopped(rounds.actions)


@dataclass(kw_only=True)
class _Round:
    """A round of episodes, by position of their rows."""

    request: RolloutRequest
    slots: list[PromptSlot]
    overlong: list[str]
    position: int  # of the first row of the next
    groups: dict[int, Group] = field(default_factory=dict)


class AsyncRounds:
    """Plays the rounds of a run up to a step, while its policies learn."""

    def __init__(self, run: TeamRun, last: int) -> None:
        assert isinstance(run.rollout, TeamRollout)
        self.run, self.rollout, self.last = run, run.rollout, last
        self.staleness = run.config.dispatch.staleness
        self.actions: list[GateAction] = []  # of all gates
        self._changed = asyncio.Condition()
        self._fed = False  # no further episode will start
        self._served = {m.name: m.version for m in run.learning}  # versions that sample now
        self._under_way: dict[int, Mapping[str, int]] = {}  # those at the start, by position
        self._learning = set[str]()
        self._rounds: list[_Round] = []  # not recorded yet
        # Since the last record.
        self._clock, self._verdicts = Clock(), Counter(self.rollout.verdicts())
        self._updates: list[UpdateStats] = []
        self._acted: list[GateAction] = []

    async def play(self) -> None:
        try:
            async with self.rollout.serving() as samplers, asyncio.TaskGroup() as tasks:
                for member in self.run.learning:
                    tasks.create_task(self._learn(member, samplers[member.name]))
                tasks.create_task(self._feed(samplers, tasks))
        except BaseException as error:
            for member in self.run.learning:  # nobody waits for updates that are under way
                assert member.learner is not None
                member.learner.close()
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            raise first from first.__cause__
        self._record_rounds(all_of_them=True)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # Episodes.

    async def _feed(self, samplers: Any, tasks: asyncio.TaskGroup) -> None:
        """Start episodes in the order of their rows, as soon as they may."""
        position, request = self.run.ledger.position, self.run.request()
        for step in range(self.run.step, self.last):
            request = request.replace(step=step, position=position)
            arguments = (request, position, request.prompts, request.watched)
            slots, after, overlong = self.rollout.next_slots(*arguments)
            round = _Round(request=request, slots=slots, overlong=overlong, position=after)
            for number, slot in enumerate(slots):
                await self._until(lambda: self._stops() or self._may_start())
                if self._stops():
                    round.slots, round.position = slots[:number], slot.position
                    break
                if number == 0:
                    self._rounds.append(round)
                    self._record_rounds()
                self._under_way[slot.position] = dict(self._served)
                tasks.create_task(self._episode(round, samplers, slot))
            if self._stops():
                break
            position = after
        self._fed = True
        await self._notify()

    def _stops(self) -> bool:
        """Whether the rounds end early: a signal, a gate, or no finite loss."""
        stopped = any(action.kind == "stop" for action in self.actions)
        skips = max(member.skips for member in self.run.learning)
        diverged = skips >= self.run.config.run.skips
        return self.run.stopping.requested or stopped or diverged

    def _may_start(self) -> bool:
        """Whether every policy would learn from one more episode within the staleness."""
        return all(
            (member.name in self._learning)
            + (len(self._under_way) + len(member.pending)) // member.prompts
            <= self.staleness
            for member in self.run.learning
        )

    async def _episode(self, round: _Round, samplers: Any, slot: PromptSlot) -> None:
        schedules = {member.name: member.gate.schedule for member in self.run.learning}
        group = await self.rollout.answer(round.request, samplers, slot)
        for member in self.run.learning:
            same = member.gate.schedule is schedules[member.name]  # else no matter of its gate
            member.take(slot.position, group if same else without_states(group))
        round.groups[slot.position] = group
        del self._under_way[slot.position]
        self._record_rounds()
        await self._notify()

    # Learning.

    async def _learn(self, member: Member, sampler: Sampler) -> None:
        """Take the steps of one policy, whenever it has a batch."""
        assert member.learner is not None
        in_flight = self.run.config.dispatch.in_flight
        while True:
            await self._until(lambda: self._is_due(member) or self._is_over())
            if not self._is_due(member):
                return
            self._learning.add(member.name)
            batch = member.due()
            assert batch is not None
            arguments = (batch, member.gate.schedule, member.version)
            learnt = await asyncio.to_thread(member.learner.learn, *arguments)
            actions = member.note(batch, learnt, self.run.step)
            self._updates += learnt.updates
            self._acted += actions
            self.actions += actions
            await member.sync_in_flight(sampler, in_flight)
            self._served[member.name] = member.version
            self._learning.remove(member.name)
            await self._notify()

    def _is_due(self, member: Member) -> bool:
        """Whether it has a batch, and what is under way can wait for the batches after it."""
        if len(member.pending) < member.prompts:
            return False
        later = sorted([*self._under_way, *sorted(member.pending)[member.prompts :]])
        for number, place in enumerate(later):
            version = member.version + 1 + number // member.prompts  # that learns from it
            if place in self._under_way:
                began = self._under_way[place][member.name]
                if version - began > self.staleness:
                    return False
        return True

    def _is_over(self) -> bool:
        return self._fed and not self._under_way

    # Records.

    def _record_rounds(self, *, all_of_them: bool = False) -> None:
        """Record the rounds that have ended, in order; the latest at the end, after its updates."""
        while len(self._rounds) > (not all_of_them):
            if len(self._rounds[0].groups) < len(self._rounds[0].slots):
                return
            self._record(self._rounds.pop(0))

    def _record(self, round: _Round) -> None:
        run, groups = self.run, [round.groups[place] for place in sorted(round.groups)]
        rollouts = RolloutBatch(
            groups=tuple(groups),
            position=round.position,
            overlong=tuple(round.overlong),
            **self.rollout.outcomes(groups, self._verdicts),
        )
        run.ledger.refuse_unjudged(rollouts)
        metrics = rollout_metrics(rollouts)
        for member in run.members.values():
            metrics |= member.round_metrics(groups)
        seconds = self._clock.seconds()
        metrics |= {f"timing_s/{part}": value for part, value in seconds.items()}
        run.record(rollouts, self._updates, self._acted, metrics)
        if not self.staleness:  # as in lock-step
            for member in run.learning:
                member.forget_states()
        self._clock, self._verdicts = Clock(), Counter(self.rollout.verdicts())
        self._updates, self._acted = [], []
