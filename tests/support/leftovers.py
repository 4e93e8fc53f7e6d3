"""Processes that a test has started, directly or not: they carry a mark in their environment."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until

MARK = "SPARROW_TEST_MARK"
SOON = 20.0  # seconds after which nothing may be left, on a machine with much to do


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
