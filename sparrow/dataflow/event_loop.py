"""Coroutines from synchronous code, also where an event loop is running already."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    Where an event loop is running in this thread, as in a notebook, the coroutine runs in a thread
    of its own with its own loop; KeyboardInterrupt here cancels it there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(asyncio.run, supervised())
        try:
            return result.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise
