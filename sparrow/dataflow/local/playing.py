"""Rows to groups with rewards: the step's prompts, played by the sparse actor.

Every draw is a function of the run's seed, the step and the row's position, so a step played again
gives the same tokens (on a CPU bit for bit), however many episodes run beside each other.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sparrow.dataflow.episodes import Actor
from sparrow.dataflow.local.learning import shaped_reward
from sparrow.dataflow.local.run import EpisodeFailed, Run
from sparrow.dataflow.stopping import Stopped
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.sampling import SamplingParams
from sparrow.tasks.base import Example
from sparrow.train.objectives.advantages import informative
from sparrow.train.world import dealt

MOST_OVERLONG = 1000  # prompts in a row that are too long before it is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A row that is due, where it stands in the data, and how many of its answers are watched."""

    example: Example
    position: int
    watched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The groups of a step, and what became of the rows that it took."""

    groups: tuple[Group, ...]
    position: int  # where the next step goes on
    overlong: tuple[str, ...]  # rows whose prompt does not fit, by name
    uninformative: int = 0  # groups that dynamic sampling left out
    watched: tuple[Trajectory, ...] = ()  # of those: what the gate shall see all the same
    acc: float | None = None  # over all that was played, what was left out included
    rounds: int = 1


def play(run: Run) -> Played:
    """One round of prompts, or as many as dynamic sampling needs and is allowed."""
    groups, every = list[Group](), list[Group]()
    position, overlong, rounds = run.position, list[str](), 0
    most = run.config.algorithm.refills if run.algorithm.dynamic else 1
    while rounds < most and len(groups) < run.config.rollout.prompts:
        rounds += 1
        seats, position, skipped = _seats(run, position, run.config.rollout.prompts - len(groups))
        overlong += skipped
        fresh = _round(run, seats)
        every += fresh
        groups += [group for group in fresh if _kept(run, group)]
    dropped = [group for group in every if not _kept(run, group)]
    return Played(
        groups=tuple(groups),
        position=position,
        overlong=tuple(overlong),
        uninformative=len(dropped),
        watched=_watched_of(run, dropped),
        acc=_accuracy(every),
        rounds=rounds,
    )


def _watched_of(run: Run, groups: Sequence[Group]) -> tuple[Trajectory, ...]:
    """Trajectories whose hidden states some rank has, in the same order on all."""
    held = [
        (place, number)
        for place, group in enumerate(groups)
        for number, one in enumerate(group.trajectories)
        if one.hidden is not None
    ]
    places = sorted({each for part in run.world.collect(held) for each in part})
    return tuple(groups[place].trajectories[number] for place, number in places)


def _accuracy(groups: Sequence[Group]) -> float | None:
    known = [one.acc for group in groups for one in group.trajectories if one.acc is not None]
    return sum(known) / len(known) if known else None


def _kept(run: Run, group: Group) -> bool:
    """By accuracy, not by reward: shaping must not make a group look informative."""
    return not run.algorithm.dynamic or informative([one.acc or 0 for one in group.trajectories])


def _seats(run: Run, position: int, count: int) -> tuple[list[Seat], int, list[str]]:
    """The next rows whose prompts fit, where the data goes on, and those that do not fit."""
    found: list[tuple[Example, int]] = []
    overlong: list[str] = []
    in_a_row = 0
    while len(found) < count:
        example = run.rows.at(position)
        tokens = len(run.language.encode(example.prompt))
        if tokens <= run.max_prompt:
            found.append((example, position))
            in_a_row = 0
        else:
            overlong.append(f"{example.id} ({tokens} tokens)")
            in_a_row += 1
        if in_a_row > MOST_OVERLONG:
            raise ValueError(
                f"{in_a_row} prompts in a row have more than {run.max_prompt} tokens "
                f"({overlong[-1]}); raise rollout.max_prompt, or lower rollout.max_tokens"
            )
        position += 1
    watched = _watched(run, count)
    seats = [
        Seat(example=example, position=place, watched=watched[number])
        for number, (example, place) in enumerate(found)
    ]
    return seats, position, overlong


def _watched(run: Run, count: int) -> list[int]:
    """The gate's sample, spread over the prompts: those are what is independent."""
    gate = run.config.gate
    wanted = 0 if gate.mode == "off" else min(gate.sample, count * run.config.rollout.samples)
    return [wanted // count + (number < wanted % count) for number in range(count)]


def _round(run: Run, seats: Sequence[Seat]) -> list[Group]:
    """Play these seats, this rank's share of them here. Where one rank stops, all do.

    Hidden states are big and stay on the rank that played, which will read them too.
    """
    world, own, failures = run.world, list[Group](), list[Exception]()

    def share() -> list[Group] | Stopped | EpisodeFailed:
        try:
            own.extend(asyncio.run(run.stopping.unless(_play_all(run, world.mine(seats)))))
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


def _without_states(group: Group) -> Group:
    light = tuple(one.replace(hidden=None) for one in group.trajectories)
    return group.replace(trajectories=light)


async def _play_all(run: Run, seats: Sequence[Seat]) -> list[Group]:
    done = 0

    async def play_one(engine: AsyncEngine, seat: Seat) -> Group:
        nonlocal done
        group = await _episode(run, engine, seat)
        done += 1
        run.watch.phase("rollout", done, len(seats))
        return group

    run.watch.phase("rollout", 0, len(seats))
    async with AsyncEngine(run.engine) as engine:
        return list(await asyncio.gather(*(play_one(engine, seat) for seat in seats)))


async def _episode(run: Run, engine: AsyncEngine, seat: Seat) -> Group:
    actor = Actor(
        engine=engine,
        language=run.language,
        judge=run.judge,
        params=SamplingParams(max_tokens=run.config.rollout.max_tokens),
        schedule=run.gate.schedule,
        samples=run.config.rollout.samples,
        context=run.max_prompt + run.config.rollout.max_tokens,
        watched=seat.watched,
        key=(run.config.run.seed, run.step, seat.position),
    )
    actors = [actor, actor.as_greedy()] if run.algorithm.greedy else [actor]
    played = await asyncio.gather(*(_trajectories(run, one, seat.example) for one in actors))
    baseline = shaped_reward(run, played[1][0]) if run.algorithm.greedy else None
    try:
        return Group(prompt_id=seat.example.id, trajectories=tuple(played[0]), baseline=baseline)
    except ValueError as error:
        raise EpisodeFailed(
            f"step {run.step}: the episode of {seat.example.id}: {error}"
        ) from error


async def _trajectories(run: Run, actor: Actor, example: Example) -> list[Trajectory]:
    """What the episode gives, which may be anybody's code: any exception can come of it."""
    try:
        found = await run.episode(actor, example)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        raise EpisodeFailed(f"step {run.step}: the episode of {example.id}: {fault}") from error
    if not found or not all(isinstance(one, Trajectory) for one in found):
        raise EpisodeFailed(f"the episode of {example.id} gave {found!r:.80}, not trajectories")
    if any(one.reward is None for one in found):
        raise EpisodeFailed(f"the episode of {example.id} gave a trajectory without a reward")
    if run.algorithm.dynamic and any(one.acc is None for one in found):
        raise EpisodeFailed(
            f"the episode of {example.id} gave no acc, which dynamic sampling needs"
        )
    return found
