"""Waiting for something that another process does, for as long as that process runs."""

import subprocess
import time
from collections.abc import Callable

LOOK_EVERY = 0.02  # seconds


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], object]) -> None:
    """Until it happened, or the process has ended."""
    while process.poll() is None and not happened():
        time.sleep(LOOK_EVERY)
