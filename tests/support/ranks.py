"""Ranks on this machine: a scenario in several processes that talk by gloo."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed, multiprocessing

from sparrow.training.world import World

PATIENCE = 240  # seconds, for slow machines: nothing here takes a tenth of it

Scenario = Callable[[World, Path], Any]


def on_ranks(scenario: Scenario, folder: Path, size: int = 2) -> list[Any]:
    """What a scenario, a function of a module that can be imported, gives on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (scenario, folder, size)
    context = multiprocessing.spawn(_rank, arguments, nprocs=size, join=False)
    end = monotonic() + PATIENCE
    while not context.join(timeout=5):  # raises where one failed, and ends the others
        if monotonic() > end:
            for process in context.processes:
                process.kill()
            raise AssertionError(f"{scenario.__name__}: ranks still run after {PATIENCE} s")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, scenario: Scenario, folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(size), str(rank)
    timeout = timedelta(seconds=PATIENCE)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=timeout
    )
    found = scenario(World(rank=rank, size=size, deadline=timeout), folder)
    torch.save(found, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
