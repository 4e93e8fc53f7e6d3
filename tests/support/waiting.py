"""Waiting for what another process does, where there is nothing to listen to but its files."""

import subprocess
import time
from collections.abc import Callable


def until(happened: Callable[[], object], seconds: float = 120) -> None:
    """Look again and again; AssertionError after so long."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], object]) -> None:
    """Until it happened, or the process has ended."""
    until(lambda: process.poll() is not None or happened(), seconds=600)
