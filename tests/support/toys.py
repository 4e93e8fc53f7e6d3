"""What a user's module might hold, by import path: episodes and surrogates, some of them deadly.

SPARROW_TOY="WHERE NUMBER SIGNAL MARKER" has the process send itself a signal, once: the file MARKER
says that it did. WHERE is rollout (NUMBER is a step), update (a call of the surrogate), or
checkpoint (its step).
"""

import asyncio
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparrow.dataflow import checkpoints as states
from sparrow.dataflow.episodes import Actor, build_trajectory, single_turn
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example, encode
from sparrow.training.objectives.surrogates import Surrogate, Terms, ppo
from support.training import noisy

TOOL = "so x1 = 5 ;"
calls = {"surrogate": 0}


def _at(where: str, number: int) -> bool:
    """Send the signal, if it is due; whether it was."""
    wanted, at, name, marker = os.environ.get("SPARROW_TOY", "none 0 0 0").split()
    if (wanted, int(at)) != (where, number) or Path(marker).exists():
        return False
    Path(marker).touch()
    os.kill(os.getpid(), signal.Signals[name])
    return True


async def episode(actor: Actor, example: Example) -> list[Trajectory]:
    """One turn with noisy rewards."""
    found = await single_turn(replace(actor, judge=noisy), example)
    if _at("rollout", actor.key[1]):
        await asyncio.Event().wait()  # it is in the middle of something long
    return found


async def two_turns(actor: Actor, example: Example) -> list[Trajectory]:
    """An answer, what a tool says to it, and another answer."""
    firsts = await actor.generate(actor.encode(example), n=actor.samples, max_tokens=8)
    found = []
    for number, first in enumerate(firsts):
        prompt = [*first.prompt_ids.tolist(), *first.token_ids.tolist(), *encode(TOOL)]
        (second,) = await actor.generate(
            prompt, max_tokens=8, turn=1, sample=number, watched=int(first.hidden is not None)
        )
        text = actor.decode([*first.token_ids.tolist(), *second.token_ids.tolist()])
        verdict = await noisy(example, text)
        found.append(build_trajectory(example.id, [first, second], verdict, text))
    return found


def deadly(terms: Terms) -> Surrogate:
    calls["surrogate"] += 1
    _at("update", calls["surrogate"])
    return ppo(terms)


def nan_later(terms: Terms, *, since: int, until: int = 10**9) -> Surrogate:
    """PPO's, and no number in some of its calls, counted without the one that tries it."""
    number, found = calls["surrogate"], ppo(terms)
    calls["surrogate"] += 1
    if since < number <= until:
        return Surrogate(found.loss_T * math.nan, found.clipped_T)
    return found


def _watch_checkpoints() -> None:
    """A checkpoint is written up to its state, but not named, when the signal comes."""
    inner = states.sync

    def sync(file: Any) -> None:
        if file.name.endswith("state.safetensors"):
            _at("checkpoint", int(Path(file.name).parent.name.split(".")[1].removeprefix("step_")))
        inner(file)

    states.sync = sync


if "SPARROW_TOY" in os.environ and "pytest" not in sys.modules:
    _watch_checkpoints()
