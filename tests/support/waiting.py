"""Waiting for what another process does, where there is nothing to listen to."""

import subprocess
import time
from collections.abc import Callable


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
    assert until(lambda: process.poll() is not None or happened(), seconds=600)
