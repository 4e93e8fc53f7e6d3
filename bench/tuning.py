"""Shared by the tuning scripts: patched constants, timing, a table of the best candidates."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparrow.benchmarks import timing

DEVICE = torch.device("cuda")
KV_HEADS, GROUP, SIZE, PAGE = 8, 2, 128, 16  # of Qwen3-1.7B


@contextmanager
def constants(module: ModuleType, **values: Any) -> Iterator[None]:
    """Patch constants or functions of a module."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def microseconds(*calls: Callable[[], object], rounds: int = 15) -> float:
    """Median time of one of these calls, from replays of a CUDA graph that makes them in turn."""
    case = timing.TimedCase(names={}, bytes=1, calls=calls)
    return float(timing.measure([case], DEVICE, replays=1, rounds=rounds)[0]["us"])


def compile_all(
    compile: Callable[..., None], arguments: Sequence[tuple[Any, ...]], workers: int
) -> None:
    """Call a function in many processes, to fill Triton's cache on disk."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for job in [pool.submit(compile, *own) for own in arguments]:
            job.result()


def print_best(
    times: Mapping[Any, float], own: NamedTuple, amount: float, unit: str, best: int = 5
) -> None:
    """The best candidates by their microseconds and our own (*), the best one last.

    amount: what one call does, in terabytes or tera-operations.
    """
    ranked = sorted(times, key=lambda candidate: times[candidate])
    print("  ".join([*(f"{name:>7}" for name in own._fields), f"{'us':>9}", f"{unit:>8}"]))
    for candidate in reversed(ranked):
        if candidate in ranked[:best] or candidate == own:
            us = times[candidate]
            cells = [f"{number:>7}" for number in candidate]
            mark = " *" if candidate == own else ""
            print("  ".join([*cells, f"{us:>9.1f}", f"{amount / us * 1e6:>8.2f}"]) + mark)
    sys.stdout.flush()
