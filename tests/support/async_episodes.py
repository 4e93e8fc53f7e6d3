"""Episodes by import path for worker processes: some fail, some never end."""

import asyncio
import os
from pathlib import Path

from sparrow.dataflow.episodes import Actor, single_turn
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example

HANGS = "SPARROW_TEST_HANGS"  # a folder with a file for each row that hung


def _number(example: Example) -> int:
    return int(example.id.rpartition(" ")[2])


async def third_hangs_once(actor: Actor, example: Example) -> list[Trajectory]:
    """Every third row never ends at its first attempt."""
    mark = Path(os.environ[HANGS]) / str(_number(example))
    if _number(example) % 3 == 0 and not mark.exists():
        mark.touch()
        await asyncio.sleep(3600)
    return await single_turn(actor, example)


async def fifth_fails(actor: Actor, example: Example) -> list[Trajectory]:
    """Every fifth row raises at every attempt."""
    if _number(example) % 5 == 0:
        raise OSError("the tool is down")
    return await single_turn(actor, example)


async def always_fails(actor: Actor, example: Example) -> list[Trajectory]:
    raise OSError("the tool is down")
