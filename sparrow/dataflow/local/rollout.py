"""The rollout side of a run: rows to groups with rewards, played by the sparse actor.

Every draw is a function of the run's seed, the step and the row's position, so a step played again
gives the same tokens (on a CPU bit for bit), however many episodes run beside each other.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple

from sparrow.dataflow.backend import RolloutBackend, Sampler
from sparrow.dataflow.episodes import Actor, Episode, shaped_reward
from sparrow.dataflow.evaluation import Part, evaluate
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.language import Language
from sparrow.dataflow.local.messages import (
    FAILED,
    EpisodeFailed,
    Nobody,
    RolloutBatch,
    RolloutRequest,
    Watcher,
)
from sparrow.dataflow.stopping import Stopped, Stopping
from sparrow.schema.base import from_dict
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig, TrainConfig
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import is_task, judge_of, rows_of
from sparrow.training.objectives.advantages import informative
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.world import World, dealt

VALIDATION_SEED = 2**40  # where the seeds of validation begin: rows of a run never use them
MOST_OVERLONG = 1000  # prompts in a row that are too long before it is an error


def validation_of(config: TrainConfig) -> list[Part]:
    """Open the held-out rows: those of `validation`, then a part for each of its sets."""
    held, parts = config.validation, list[Part]()
    if not held.every:
        return parts
    with ExitStack() as judges:
        for name, place in {"": held.rows or config.data.task, **held.sets}.items():
            if place is None:
                continue  # rows of training, which say little; there are sets
            chosen = _held_out(config, place)
            rows = rows_of(chosen, seed=config.run.seed)
            judge = judges.enter_context(closing(judge_of(chosen, rows)))
            try:
                parts += Part.of(rows, judge, count=held.prompts, first=held.first, name=name)
            except ValueError as error:
                setting = f"sets.{name}" if name else "first"
                raise ValueError(f"validation.{setting}: {error}") from error
        judges.pop_all()
    return parts


def _held_out(config: TrainConfig, place: str) -> RowsConfig:
    """Settings of held-out rows: a task from its first seed on, or a file in its order."""
    columns = config.validation.columns or config.data.columns
    changes: dict[str, object] = {"rows": place, "task": None, "columns": columns}
    if is_task(place):
        changes = {"rows": None, "task": place, "first": 0, "prompts": None, "reward": None}
    return config.data.model_copy(update={"shuffle": False, **changes})


class Seat(NamedTuple):
    """A row that is due, where it stands in the data, and how many of its answers are watched."""

    example: Example
    position: int
    watched: int


@dataclass(kw_only=True)
class RolloutSide:
    """The backend with its rows, episode and judge, and held-out rows.

    It holds nothing that a step changes but the backend's weights.
    """

    config: TrainConfig
    backend: RolloutBackend
    rows: Examples
    judge: Judge
    language: Language
    episode: Episode
    algorithm: Algorithm  # which groups it can learn from, whether it wants a greedy answer
    max_prompt: int  # tokens
    validation: list[Part]
    world: World = field(default_factory=World)
    stopping: Stopping = field(default_factory=Stopping)
    watch: Watcher = field(default_factory=Nobody)

    def sleep(self) -> None:
        """The backend gives its memory back while the learner works."""
        if self.config.rollout.sleep:
            self.backend.sleep()

    def validate(self, schedule: Schedule | None) -> Evaluation:
        """Accuracy on held-out rows, by the first rank; dense unless it is to be as training is."""
        self.watch.phase("validation")
        config, most = self.config, self.config.rollout.max_tokens
        samples = config.validation.samples  # always alike, so that points compare
        params = SamplingParams(n=samples, max_tokens=most, seed=VALIDATION_SEED)
        asked = (self.backend, self.validation, self.language, params)
        name, chosen = config.model.name, schedule if config.validation.sparse else None
        return self.world.only_first(
            lambda: evaluate(*asked, model=name, schedule=chosen).evaluation
        )

    def close(self) -> None:
        """Let go of verifiers."""
        for judge in {self.judge, *(part.judge for part in self.validation)}:
            if (close := getattr(judge, "close", None)) is not None:
                close()

    # A step.

    def play(self, request: RolloutRequest) -> RolloutBatch:
        """One round of prompts, or as many as dynamic sampling needs and is allowed."""
        kept, every = list[Group](), list[Group]()
        position, overlong, rounds = request.position, list[str](), 0
        watched, before = request.watched, Counter(self._verdicts())
        most = self.config.algorithm.refills if self.algorithm.dynamic else 1
        while rounds < most and len(kept) < request.prompts:
            rounds += 1
            count = request.prompts - len(kept)
            seats, position, skipped = self._seats(request, position, count, watched)
            watched -= sum(seat.watched for seat in seats)
            overlong += skipped
            fresh = self._round(request, seats)
            every += fresh
            kept += filter(self._informs, fresh)
        dropped = [group for group in every if not self._informs(group)]
        trajectories = [one for group in every for one in group.trajectories]
        accs = [one.acc for one in trajectories if one.acc is not None]
        own = Counter(self._verdicts()) - before
        told = getattr(self.judge, "last_fault", "") if own.keys() & {*FAILED} else ""
        ranks = self.world.collect((own, told))
        return RolloutBatch(
            groups=tuple(kept),
            position=position,
            overlong=tuple(overlong),
            uninformative=len(dropped),
            watched=self._watched_of(dropped),
            acc=sum(accs) / len(accs) if accs else None,
            rounds=rounds,
            verdicts=dict(sum((counts for counts, _ in ranks), Counter[str]())),
            fault=next((fault for _, fault in ranks if fault), ""),
        )

    def _verdicts(self) -> Mapping[str, int]:
        """What this rank's judge has counted so far."""
        return getattr(self.judge, "counts", {})

    def _informs(self, group: Group) -> bool:
        """By accuracy, not by reward: shaping must not make a group look informative."""
        accs = [one.acc or 0 for one in group.trajectories]
        return not self.algorithm.dynamic or informative(accs)

    def _watched_of(self, groups: Sequence[Group]) -> tuple[Trajectory, ...]:
        """Trajectories whose hidden states some rank has, in the same order on all."""
        every = [trajectory for group in groups for trajectory in group.trajectories]
        held = [number for number, one in enumerate(every) if one.hidden is not None]
        numbers = {number for part in self.world.collect(held) for number in part}
        return tuple(every[number] for number in sorted(numbers))

    def _seats(
        self, request: RolloutRequest, position: int, count: int, watched: int
    ) -> tuple[list[Seat], int, list[str]]:
        """The next rows whose prompts fit, where the data goes on, and those that do not fit.

        What the gate samples is spread over the prompts: those are what is independent.
        """
        each, more = divmod(min(watched, count * request.samples), count)
        seats, overlong, in_a_row = list[Seat](), list[str](), 0
        while len(seats) < count:
            example = self.rows.at(position)
            tokens = len(self.language.encode(example.prompt))
            if tokens <= self.max_prompt:
                seats.append(Seat(example, position, each + (len(seats) < more)))
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
        return seats, position, overlong

    def _round(self, request: RolloutRequest, seats: Sequence[Seat]) -> list[Group]:
        """Play these seats, this rank's share of them here. Where one rank stops, all do.

        Hidden states are big and stay on the rank that played, which will read them too.
        """
        world, own, failures = self.world, list[Group](), list[Exception]()

        def share() -> list[Group] | Stopped | EpisodeFailed:
            work = self._play_all(request, world.mine(seats))
            try:
                own.extend(run_coroutine(self.stopping.unless(work)))
            except (Stopped, EpisodeFailed) as error:
                failures.append(error)
                return error
            return own if world.size == 1 else [_without_states(group) for group in own]

        parts = world.together(share)
        for rank, part in enumerate(parts):
            if isinstance(part, EpisodeFailed) and world.size > 1:
                raise EpisodeFailed(f"rank {rank}: {part}") from (failures[0] if failures else None)
        for part in parts:
            if isinstance(part, Exception):
                raise part
        groups = dealt([part for part in parts if not isinstance(part, Exception)])
        groups[world.rank :: world.size] = own
        return groups

    async def _play_all(self, request: RolloutRequest, seats: Sequence[Seat]) -> list[Group]:
        done = 0

        async def play_one(sampler: Sampler, seat: Seat) -> Group:
            nonlocal done
            group = await self._group(request, sampler, seat)
            done += 1
            self.watch.phase("rollout", done, len(seats))
            return group

        self.watch.phase("rollout", 0, len(seats))
        async with self.backend.serving() as sampler:
            return list(await asyncio.gather(*(play_one(sampler, seat) for seat in seats)))

    async def _group(self, request: RolloutRequest, sampler: Sampler, seat: Seat) -> Group:
        rollout, example = self.config.rollout, seat.example
        actor = Actor(
            engine=sampler,
            language=self.language,
            judge=self.judge,
            params=SamplingParams(max_tokens=rollout.max_tokens),
            schedule=request.schedule,
            samples=request.samples,
            context=self.max_prompt + rollout.max_tokens,
            watched=seat.watched,
            key=(self.config.run.seed, request.step, seat.position),
        )
        actors = [actor, actor.as_greedy()] if self.algorithm.greedy else [actor]
        where = f"step {request.step}: the episode of {example.id}"
        try:
            found = await asyncio.gather(*(self._trajectories(one, example) for one in actors))
            baseline = None
            if self.algorithm.greedy:
                baseline = shaped_reward(found[1][0], self.algorithm, rollout.max_tokens)
            group = {"trajectories": tuple(found[0]), "baseline": baseline}
            return from_dict(Group, {"prompt_id": example.id, **group})
        except EpisodeFailed as error:
            raise EpisodeFailed(f"{where}: {error}") from error.__cause__
        except ValueError as error:
            raise EpisodeFailed(f"{where}: {error}") from error

    async def _trajectories(self, actor: Actor, example: Example) -> list[Trajectory]:
        """What the episode gives, which may be anybody's code: any exception can come of it."""
        try:
            found = await self.episode(actor, example)
        except Exception as error:  # told with its type, and chained: nothing is hidden
            raise EpisodeFailed(f"{type(error).__name__}: {error}") from error
        if not found or not all(isinstance(one, Trajectory) for one in found):
            raise EpisodeFailed(f"it gave {found!r:.80}, not trajectories")
        if any(one.reward is None for one in found):
            raise EpisodeFailed("it gave a trajectory without a reward")
        if self.algorithm.dynamic and any(one.acc is None for one in found):
            raise EpisodeFailed("it gave no acc, which dynamic sampling needs")
        return found


def _without_states(group: Group) -> Group:
    light = tuple(one.replace(hidden=None) for one in group.trajectories)
    return group.replace(trajectories=light)
