"""Threads that share one call's work: the caller, and helpers that live as long as the process.

Numba's own parallel loops are not used: their default layer aborts the process when two Python
threads enter it at once, as a server and a trainer in one process do.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

# Chunks per thread: enough that a thread which loses its core for a while delays little.
_CHUNKS = 4


def share(work: Callable[[int, int], object], items: int, *, most: int | None = None) -> None:
    """Call work(first, last) over disjoint ranges that cover 0..items, on several threads.

    At most `most` threads take part (default and upper bound: torch.get_num_threads()), the
    caller among them; `work` must release the GIL to gain from it. A helper that has not begun
    when the work is done is called off, so concurrent calls never wait for each other's helpers.
    """
    threads = torch.get_num_threads() if most is None else min(most, torch.get_num_threads())
    grain = max(1, items // (_CHUNKS * threads)) if threads > 1 else max(1, items)
    starts = deque(range(0, items, grain))

    def drain() -> None:
        while starts:
            try:
                first = starts.popleft()
            except IndexError:  # another thread took the last one
                return
            work(first, min(first + grain, items))

    helpers = [_pool().submit(drain) for _ in range(min(threads, len(starts)) - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="sparrow-ops")


# A forked child inherits the pool object but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
