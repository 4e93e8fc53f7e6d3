"""Processes that a test has started, directly or not: they carry a mark in their environment."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "SPARROW_TEST_MARK"
SOON = 5.0  # seconds after which nothing may be left


@contextmanager
def marking() -> Iterator[str]:
    """Processes that are started meanwhile carry the mark; at the end none of them may be left."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        yield mark
    finally:
        del os.environ[MARK]
    assert gone(mark)


def marked(mark: str) -> list[int]:
    """Processes with the mark that run; this one and zombies are none."""
    processes = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                processes.append(int(place.name))
        except OSError:
            continue
    return [process for process in processes if process != os.getpid()]


def gone(mark: str) -> bool:
    """Whether all processes with the mark have ended soon."""
    return until(lambda: not marked(mark), SOON)


def until(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for what only polling can tell; whether it came about in time."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
