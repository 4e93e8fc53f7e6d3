"""The rollout side of a run: rows in, groups of answers with rewards out, by the sparse actor.

Every draw is a function of the run's seed, the step and the row's position, so a repeated step
gives the same tokens (on a CPU bit for bit), however many episodes run concurrently.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from sparrow.dataflow.backend import RolloutBackend, Sampler
from sparrow.dataflow.episodes import Actor, Episode, is_informative, shaped_reward
from sparrow.dataflow.evaluation import Part, evaluate, summarise_plays
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.language import Language
from sparrow.dataflow.local.messages import (
    FAILED,
    Callbacks,
    EpisodeFailed,
    NoCallbacks,
    RolloutBatch,
    RolloutRequest,
    Unjudged,
)
from sparrow.dataflow.local.sides import RolloutHeader, RolloutProtocol
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.engine.answer import DENSE, ResolvedDecoding
from sparrow.models.lora import Adapter
from sparrow.schema.base import from_dict
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.evaluation import Evaluation, outcome, outcome_shares
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.world import World, interleave

VALIDATION_SEED = 2**40  # where the seeds of validation begin: rows of a run never use them
MOST_OVERLONG = 1000  # prompts in a row that are too long before it is an error


class PromptSlot(NamedTuple):
    """A row to answer: its position in the data, and how many of its answers the gate measures."""

    example: Example
    position: int
    watched: int


@dataclass(kw_only=True)
class RolloutSide(RolloutProtocol):
    """The backend with its rows, episode and judge, and the held-out rows.

    A step changes nothing of it but the backend's weights.
    """

    config: TrainConfig
    backend: RolloutBackend
    rows: Examples
    judge: Judge
    language: Language
    episode: Episode
    algorithm: Algorithm  # decides about dynamic sampling, overlong shaping, greedy baselines
    max_prompt: int  # tokens
    validation: list[Part]
    exact: ResolvedDecoding | None = None  # exact decoding; else by the schedule of each step
    flow: Flow = block_mean  # of those schedules
    world: World = field(default_factory=World)
    stopping: GracefulShutdown = field(default_factory=GracefulShutdown)
    callbacks: Callbacks = field(default_factory=NoCallbacks)

    def header(self) -> RolloutHeader:
        isolation = getattr(self.judge, "isolation", None)
        return RolloutHeader(self.rows.name, self.backend.header(), isolation)

    def sleep(self) -> None:
        """Free the backend's memory while the learner works."""
        if self.config.rollout.sleep:
            self.backend.sleep()

    def wake(self) -> None:
        self.backend.wake()

    def sync_weights(
        self, weights: Mapping[str, Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        self.backend.sync_weights(weights, version=version, adapter=adapter)

    def decoding(self, schedule: Schedule | None) -> ResolvedDecoding:
        """How tokens are sampled in a step under this schedule of the gate."""
        return self.exact or ResolvedDecoding(schedule, self.flow)

    def evaluate(self, schedule: Schedule | None, *, sparse: bool | None = None) -> Evaluation:
        """Measure accuracy on held-out rows, on the first rank.

        sparse: under the schedule, otherwise dense; None: as validation.sparse says.
        """
        self.callbacks.phase("validation")
        config, most = self.config, self.config.rollout.max_tokens
        samples = config.validation.samples  # the same seeds each time, so that points compare
        params = SamplingParams(n=samples, max_tokens=most, seed=VALIDATION_SEED)
        arguments = (self.backend, self.validation, self.language, params)
        sparse = config.validation.sparse if sparse is None else sparse
        decoding = self.decoding(schedule) if sparse else DENSE
        if config.validation.episode:
            return self.world.on_first_rank(lambda: self._evaluate_plays(schedule, decoding))
        return self.world.on_first_rank(
            lambda: evaluate(*arguments, model=config.model.name, decoding=decoding).evaluation,
            (Unjudged,),
        )

    def _evaluate_plays(self, schedule: Schedule | None, decoding: ResolvedDecoding) -> Evaluation:
        """Accuracy of the episode's plays on held-out rows."""
        played = zip(self.validation, self.play_held_out(schedule), strict=True)
        cells = [summarise_plays(part.source, part.length, groups) for part, groups in played]
        return Evaluation(
            model=self.config.model.name,
            attention=decoding.describe(),
            temperature=1.0,
            samples=self.config.validation.samples,
            seed=VALIDATION_SEED,
            left_out=(),
            isolation="",
            cells=tuple(cells),
        )

    def play_held_out(self, schedule: Schedule | None) -> list[list[Group]]:
        """The episode on held-out rows, by part: as in training, dense unless validation.sparse."""
        samples = self.config.validation.samples
        request = RolloutRequest(
            step=0, position=0, schedule=schedule, prompts=1, samples=samples, watched=0
        )

        async def play(sampler: Any, position: int, example: Example, judge: Judge) -> Group:
            slot = PromptSlot(example, VALIDATION_SEED + position, watched=0)
            actor = self.held_out_actor(self.actor(request, sampler, slot), judge)
            trajectories = await self.trajectories(actor, example)
            return Group(prompt_id=example.id, trajectories=tuple(trajectories))

        async def play_all() -> list[list[Group]]:
            async with self.serving() as sampler:
                return [
                    await asyncio.gather(
                        *(play(sampler, n, e, part.judge) for n, e in enumerate(part.examples))
                    )
                    for part in self.validation
                ]

        return run_coroutine(self.stopping.run_until_stopped(play_all()))

    def held_out_actor(self, actor: Any, judge: Judge) -> Any:
        """The actor of a row, for evaluation."""
        change: dict[str, Any] = {"judge": judge}
        change |= {} if self.config.validation.sparse else {"decoding": DENSE}
        return replace(actor, **change)

    def close(self) -> None:
        """Stop the verifiers."""
        for judge in {self.judge, *(part.judge for part in self.validation)}:
            if (close := getattr(judge, "close", None)) is not None:
                close()

    # A step.

    def generate(self, request: RolloutRequest) -> RolloutBatch:
        """Sample one round of prompts, or as many as dynamic sampling needs and is allowed."""
        kept, groups = list[Group](), list[Group]()
        position, overlong, rounds = request.position, list[str](), 0
        watched, before = request.watched, Counter(self.verdicts())
        most = self.config.algorithm.refills if self.algorithm.dynamic else 1
        while rounds < most and len(kept) < request.prompts:
            rounds += 1
            count = request.prompts - len(kept)
            slots, position, skipped = self.next_slots(request, position, count, watched)
            watched -= sum(slot.watched for slot in slots)
            overlong += skipped
            fresh = self._round(request, slots)
            groups += fresh
            kept += filter(self._is_informative, fresh)
        dropped = [group for group in groups if not self._is_informative(group)]
        return RolloutBatch(
            groups=tuple(kept),
            position=position,
            overlong=tuple(overlong),
            uninformative=len(dropped),
            watched=self._watched(dropped),
            rounds=rounds,
            **self.outcomes(groups, before),
        )

    def outcomes(self, groups: Sequence[Group], before: Counter[str]) -> dict[str, Any]:
        """Accuracy and outcomes of groups, and verdicts since `before`, for a RolloutBatch."""
        trajectories = [t for group in groups for t in group.trajectories]
        accs = [t.acc for t in trajectories if t.acc is not None]
        outcomes = [outcome(t.acc, t.truncated) for t in trajectories if t.acc is not None]
        verdicts = Counter(self.verdicts()) - before
        fault = getattr(self.judge, "last_fault", "") if verdicts.keys() & {*FAILED} else ""
        ranks = self.world.all_gather((verdicts, fault))
        return {
            "acc": sum(accs) / len(accs) if accs else None,
            "outcomes": outcome_shares(outcomes),
            "verdicts": dict(sum((counts for counts, _ in ranks), Counter[str]())),
            "fault": next((fault for _, fault in ranks if fault), ""),
        }

    def verdicts(self) -> Mapping[str, int]:
        """Verdict counts of this rank's judge so far."""
        return getattr(self.judge, "counts", {})

    def _is_informative(self, group: Group) -> bool:
        """By accuracy, not by reward: shaping must not make a group look informative."""
        return not self.algorithm.dynamic or is_informative(group)

    def _watched(self, groups: Sequence[Group]) -> tuple[Trajectory, ...]:
        """Trajectories whose hidden states some rank has, in the same order on all ranks."""
        trajectories = [t for group in groups for t in group.trajectories]
        held = [number for number, t in enumerate(trajectories) if t.hidden is not None]
        numbers = {number for part in self.world.all_gather(held) for number in part}
        return tuple(trajectories[number] for number in sorted(numbers))

    def next_slots(
        self, request: RolloutRequest, position: int, count: int, watched: int
    ) -> tuple[list[PromptSlot], int, list[str]]:
        """The next rows whose prompts fit, the position after them, and the overlong rows.

        Measured answers are spread over the prompts, which are what is independent.
        """
        share, more = divmod(min(watched, count * request.samples), count)
        slots, overlong, in_a_row = list[PromptSlot](), list[str](), 0
        while len(slots) < count:
            example = self.rows.at(position)
            tokens = len(self.language.encode(example.prompt))
            if tokens <= self.max_prompt:
                slots.append(PromptSlot(example, position, share + (len(slots) < more)))
                in_a_row = 0
            else:
                overlong.append(f"{example.id} ({tokens} of at most {self.max_prompt} tokens)")
                in_a_row += 1
            if in_a_row > MOST_OVERLONG:
                raise ValueError(
                    f"{in_a_row} prompts in a row have more than {self.max_prompt} tokens "
                    f"({overlong[-1]}); raise rollout.max_prompt, or lower rollout.max_tokens"
                )
            position += 1
        return slots, position, overlong

    def _round(self, request: RolloutRequest, slots: Sequence[PromptSlot]) -> list[Group]:
        """Answer these prompts, this rank's share of them here; if one rank stops, all do.

        Hidden states are large and stay on the rank that sampled them, which will score them too.
        """
        world, local = self.world, list[Group]()

        def share() -> list[Group]:
            work = self._generate_all(request, world.local_items(slots))
            local.extend(run_coroutine(self.stopping.run_until_stopped(work)))
            return local if world.size == 1 else [without_states(group) for group in local]

        groups = interleave(world.on_all_ranks(share, (EpisodeFailed, Stopped)))
        groups[world.rank :: world.size] = local
        return groups

    async def _generate_all(
        self, request: RolloutRequest, slots: Sequence[PromptSlot]
    ) -> list[Group]:
        done = 0

        async def generate_group(sampler: Any, slot: PromptSlot) -> Group:
            nonlocal done
            group = await self.answer(request, sampler, slot)
            done += 1
            self.callbacks.phase("rollout", done, len(slots))
            return group

        self.callbacks.phase("rollout", 0, len(slots))
        async with self.serving() as sampler:
            return list(await asyncio.gather(*(generate_group(sampler, slot) for slot in slots)))

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """What answers prompts while a round is sampled."""
        return self.backend.serving()

    def actor(self, request: RolloutRequest, sampler: Sampler, slot: PromptSlot) -> Actor:
        """What the episode of one prompt samples from."""
        return Actor(
            engine=sampler,
            language=self.language,
            judge=self.judge,
            params=SamplingParams(max_tokens=self.config.rollout.max_tokens),
            decoding=self.decoding(request.schedule),
            samples=request.samples,
            context=self.max_prompt + self.config.rollout.max_tokens,
            watched=slot.watched,
            key=(self.config.run.seed, request.step, slot.position),
            agents=self.config.rollout.agents,
        )

    async def answer(self, request: RolloutRequest, sampler: Any, slot: PromptSlot) -> Group:
        """Play the episode of one prompt; EpisodeFailed if it fails."""
        rollout, example = self.config.rollout, slot.example
        actor = self.actor(request, sampler, slot)
        actors = [actor, actor.as_greedy()] if self.algorithm.greedy else [actor]
        where = f"step {request.step}: the episode of {example.id}"
        try:
            answers = await asyncio.gather(*(self.trajectories(one, example) for one in actors))
            baseline = None
            if self.algorithm.greedy:
                baseline = shaped_reward(answers[1][0], self.algorithm, rollout.max_tokens)
            group = {"trajectories": tuple(answers[0]), "baseline": baseline}
            return from_dict(Group, {"prompt_id": example.id, **group})
        except EpisodeFailed as error:
            raise EpisodeFailed(f"{where}: {error}") from error.__cause__
        except ValueError as error:
            raise EpisodeFailed(f"{where}: {error}") from error

    async def trajectories(self, actor: Any, example: Example) -> list[Trajectory]:
        """Run the episode, which may be user code that raises anything, and check its result."""
        try:
            trajectories = await self.episode(actor, example)
        except asyncio.CancelledError as error:
            if _is_ending():
                raise
            raise EpisodeFailed("CancelledError: it awaited what it had cancelled") from error
        except (Exception, SystemExit) as error:  # named with its type, and chained
            raise EpisodeFailed(f"{type(error).__name__}: {error}") from error
        if not trajectories or not all(isinstance(t, Trajectory) for t in trajectories):
            wanted = (
                "a list of trajectories that is not empty (in an agent's play somebody replies)"
            )
            raise EpisodeFailed(f"expected {wanted}, got {trajectories!r:.80}")
        if any(t.reward is None for t in trajectories):
            raise EpisodeFailed("a trajectory has no reward")
        if len({id(t) for t in trajectories}) < len(trajectories):
            raise EpisodeFailed("a trajectory is given twice")
        for acc in (t.acc for t in trajectories):
            if acc is not None and not 0 <= acc <= 1:
                raise EpisodeFailed(f"a trajectory has acc {acc}, expected 0 to 1")
        if self.algorithm.dynamic and any(t.acc is None for t in trajectories):
            raise EpisodeFailed("a trajectory has no acc, which dynamic sampling needs")
        return trajectories


def _is_ending() -> bool:
    """Whether this task was asked to end; otherwise a cancellation is of another, and an error."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def without_states(group: Group) -> Group:
    """A group without its hidden states, which are large."""
    light = tuple(t.replace(hidden=None, hidden_of={}) for t in group.trajectories)
    return group.replace(trajectories=light)
