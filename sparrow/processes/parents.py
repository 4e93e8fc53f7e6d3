"""A process that ends when the one that started it has ended, however that came about."""

import os
import signal
import sys
import threading
import time

from sparrow.processes.supervisor import PDEATHSIG, prctl

PARENT = "SPARROW_PARENT"  # in the environment of a child: the id of the process that started it
LOOK_EVERY = 1.0  # seconds between looks at the parent, where the kernel cannot be asked


def with_parent(environment: dict[str, str]) -> dict[str, str]:
    """An environment for children of this process that call `die_with_parent`."""
    return environment | {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Ask to be killed when the process that SPARROW_PARENT names is gone; without it do nothing.

    Processes that this one starts are not meant: the variable is taken out of the environment. On
    Linux it is the end of the parent's thread that counts: the one that started this process.
    """
    named = os.environ.pop(PARENT, None)
    if named is None:
        return
    if sys.platform == "linux":
        prctl(PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(int(named),), daemon=True).start()
    if os.getppid() != int(named):
        _die()  # it ended before anybody was asked


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
