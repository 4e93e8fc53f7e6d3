"""Commands in processes of their own, and waiting for what they do where nothing tells."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LONGEST = 600.0  # seconds that a command may take on a machine with much else to do


def start(cwd: Path, *words: str | Path, **environment: str) -> "subprocess.Popen[str]":
    """`python WORDS` in a folder; what it says comes in one stream, in wide lines."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", **environment},
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """How a command ended, and all that it said."""
    said, _ = process.communicate(timeout=LONGEST)
    return process.returncode, said


def output(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """All that a command said, which must end with this code."""
    actual, said = ended(process)
    assert actual == code, said
    return said


def until(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Look again and again; whether it came about in time."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], object]) -> None:
    """Until it happened, or the process has ended."""
    assert until(lambda: process.poll() is not None or happened(), LONGEST)
