"""Episodes of several policies on random models, whose rewards are noise; and runs of them."""

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow.dataflow.episodes import Actor, build_trajectory, single_turn
from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.team.run import TeamRun
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example, Verdict
from sparrow.training.objectives.advantages import Rewards
from support.training import config, metrics, noisy


def noise(*parts: object) -> float:
    """A reward from 0 to 1 that nobody can foretell, but always the same."""
    return zlib.crc32(repr(parts).encode()) % 7 / 6


async def apart(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """The solver answers, the checker reads the answer and says something: a trajectory each."""

    async def play(sample: int) -> list[Trajectory]:
        solver = actors["solver"].conversation(example, sample)
        answer = await solver.reply(max_tokens=12)
        checker = actors["checker"].conversation(example, sample)
        checker.add_text(answer)
        said = await checker.reply(max_tokens=6)
        one, other = noise(example.id, answer), noise(example.id, answer, said)
        both = {"team_reward": one + other}
        return [
            solver.trajectory(Verdict(one, float(one > 0.5), "")).replace(**both),
            checker.trajectory(Verdict(other, float(other > 0.5), "")).replace(**both),
        ]

    played = await asyncio.gather(*map(play, range(actors["solver"].samples)))
    return [trajectory for pair in played for trajectory in pair]


async def together(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """Both write into one conversation: a trajectory of both."""

    async def play(sample: int) -> Trajectory:
        talk = actors["solver"].conversation(example, sample)
        await talk.reply(max_tokens=8)
        await talk.reply(max_tokens=5, actor=actors["checker"])
        await talk.reply(max_tokens=4)
        one, other = noise(example.id, talk.text), noise(talk.text, example.id)
        shared = talk.trajectory(Verdict(one, float(one > 0.5), ""))
        return shared.replace(rewards={"solver": one, "checker": other})

    return list(await asyncio.gather(*map(play, range(actors["solver"].samples))))


async def half(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """The checker takes part in every other prompt."""
    played = await apart(actors, example)
    return played if noise(example.id) > 0.5 else played[::2]


async def long(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """The solver says so much that sparse attention leaves something out."""
    solver = actors["solver"]

    async def play(sample: int) -> Trajectory:
        said = solver.conversation(example, sample)
        await said.reply(max_tokens=60)
        return said.trajectory(noise(said.text))

    return list(await asyncio.gather(*map(play, range(solver.samples))))


async def by_generate(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """The checker answers alone, and its answers are joined by hand."""
    checker = actors["checker"]
    answers = await checker.generate(checker.encode(example), n=checker.samples, max_tokens=5)
    said = [(one, checker.decode(one.token_ids.tolist())) for one in answers]
    verdict = Verdict(0.5, 0.0, "")
    return [build_trajectory(example.id, [one], verdict, text) for one, text in said]


async def by_single_turn(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    return await single_turn(actors["checker"], example)


async def abandons(actors: Any, example: Any) -> list[Trajectory]:
    """It awaits what it has cancelled; of one policy or several."""
    task = asyncio.ensure_future(asyncio.sleep(9))
    task.cancel()
    await task
    return []


def endless(groups: Sequence[Rewards]) -> list[np.ndarray]:
    """Advantages of a batch that take longer than any test."""
    time.sleep(600 if len(groups) > 1 else 0)
    return boundless(groups)


class Odd(Exception):
    """An error that cannot be made again from its text."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


def odd(groups: Sequence[Rewards]) -> list[np.ndarray]:
    """Advantages that a batch has none of."""
    if len(groups) > 1:
        raise Odd("there is nothing to learn in", len(groups))
    return boundless(groups)


def boundless(groups: Sequence[Rewards]) -> list[np.ndarray]:
    """Advantages under which no gradient is finite."""
    return [np.full(len(group.rewards), 3e38) for group in groups]


# Runs of two of them.

OWN = {"solver": {}, "checker": {"optimiser": {"rate": 2e-3}}}
LORA = {"solver": {"lora": {"rank": 4}}, "checker": {"lora": {"rank": 2}}}


def team(
    model: Path, out: Path, policies: Any = OWN, *, play: str = "apart", **changes: Any
) -> Any:
    base: dict[str, Any] = {
        "rollout": {"episode": f"support.teams:{play}"} | changes.pop("rollout", {}),
        "gate": {"mode": "off"} | changes.pop("gate", {}),
        "run": {"steps": 2, "save_every": 1} | changes.pop("run", {}),
        "batch": {"tokens": 256, "kl_sample": 0} | changes.pop("batch", {}),
    }
    return config(model, out, **base, **changes, policies=policies)


def trained(chosen: Any) -> TeamRun:
    with open_training(chosen, judge=noisy) as run:
        train(run)
    assert isinstance(run, TeamRun)
    return run


def weights(run: TeamRun, name: str) -> dict[str, torch.Tensor]:
    learner = run.members[name].learner
    assert learner is not None
    return {key: value.clone() for key, value in learner.weights().items()}


def timeless(folder: Path) -> list[dict[str, Any]]:
    clocks = ("timing_s/", "perf/throughput")
    return [
        {key: value for key, value in line.items() if not any(part in key for part in clocks)}
        for line in metrics(folder)
    ]
