"""Graceful shutdown on Ctrl-C, SIGTERM and a closed terminal: the run stops where nothing is lost.

A second signal stops it at once.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"\nstopping after this step, with a checkpoint; repeat to stop at once\n"
POLL_SECONDS = 0.2  # between checks for a request while episodes run


class Stopped(Exception):
    """The user asked the run to stop; the unfinished step is dropped."""


class GracefulShutdown:
    """Handles the signals while it is entered; `requested` says whether one has come."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "GracefulShutdown":
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run must outlive its terminal
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, NOTICE)  # printing takes locks, which a signal's handler must not

    async def run_until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; cancel it and raise Stopped as soon as a stop is requested."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=POLL_SECONDS)
            if self.requested and not task.done():
                task.cancel()
                await asyncio.wait([task])
                raise Stopped
        return task.result()
