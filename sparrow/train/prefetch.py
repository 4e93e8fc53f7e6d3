"""Packs made ahead of the training step, by other processes; each is a function of its step.

Nothing is remembered between steps, so a resumed run sees the packs that it would have seen, and
it does not matter how many processes make them.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from sparrow.records import Document
from sparrow.train.packing import Pack, pack

Make = Callable[[int], list[Document]]  # the documents of a step; picklable where there are workers
AHEAD = 3  # packs in the making per worker


def packs(make: Make, start: int, stop: int, *, workers: int = 0) -> Iterator[Pack]:
    """The packs of steps start to stop, in order."""
    if not workers:
        yield from (pack(make(step)) for step in range(start, stop))
        return
    steps = iter(range(start, stop))
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit a GPU that it cannot use
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting: deque[Future[list[Document]]] = deque()
        try:
            for step in steps:
                waiting.append(pool.submit(make, step))
                if len(waiting) > workers * AHEAD:
                    yield pack(waiting.popleft().result())
            while waiting:
                yield pack(waiting.popleft().result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
