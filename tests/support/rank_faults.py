"""What may go wrong on the second of two ranks alone, in its second step.

SPARROW_RANK_FAULT says what: raise (an episode does), kill (the process is gone), stop (it gets a
SIGTERM of its own), or nothing.
"""

import os
import signal
from dataclasses import replace

from sparrow.dataflow.episodes import Actor, single_turn
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example
from support.training import noisy

steps = {"now": 0}


def _due(fault: str) -> bool:
    wanted = os.environ.get("SPARROW_RANK_FAULT")
    return wanted == fault and os.environ.get("RANK") == "1" and steps["now"] == 1


async def episode(actor: Actor, example: Example) -> list[Trajectory]:
    """One turn with noisy rewards."""
    steps["now"] = actor.key[1]
    found = await single_turn(replace(actor, judge=noisy), example)
    if _due("raise"):
        raise KeyError("no such tool")
    if _due("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _due("stop"):
        os.environ["SPARROW_RANK_FAULT"] = "done"
        os.kill(os.getpid(), signal.SIGTERM)
    return found
