"""Ctrl-C, SIGTERM and a closed terminal as a wish: the run ends where nothing is lost.

A second one ends it now.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOLD = b"\nending at the next safe place, with a checkpoint; once more ends it at once\n"
LOOK_EVERY = 0.2  # seconds between looks at the wish while episodes run


class Stopped(Exception):
    """The user wants the run to end; the step that was under way is not part of it."""


class Stopping:
    """Takes the signals while it is entered."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stopping":
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run shall outlive its terminal
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        os.write(2, TOLD)  # printing takes locks, which a signal's handler must not

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled as soon as the end is wanted."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_EVERY)
            if self.wanted and not task.done():
                task.cancel()
                await asyncio.wait([task])
                raise Stopped
        return task.result()
