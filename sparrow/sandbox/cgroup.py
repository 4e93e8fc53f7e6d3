"""A cgroup v2 for each program: what the kernel holds for it counts as its memory too.

Tables of pages and inodes of a scratch folder are out of reach of rlimits. Needs a folder below
the mount of cgroup v2 in which this process may create others, with the controllers of memory and
processes on for them.
"""

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

from sparrow.sandbox.base import Limits, SandboxRefused, left_behind

CONTROLLERS = ("memory", "pids")
PREFIX = "sparrow-"
REMOVE_SECONDS = 5.0


class CgroupRefused(SandboxRefused):
    """A folder in which programs cannot be limited."""


def check_delegated(folder: Path) -> None:
    """Refuse a folder in which programs cannot be limited."""
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError as error:
        advice = "name one that was delegated to you, or leave it out"
        raise CgroupRefused(
            f"data.code.cgroup: {folder} is no folder of cgroup v2 ({error}): {advice}"
        ) from error
    if missing := [name for name in CONTROLLERS if name not in enabled]:
        raise CgroupRefused(
            f"data.code.cgroup: {folder} does not limit {' and '.join(missing)} of cgroups in it: "
            f"echo '+memory +pids' > {folder}/cgroup.subtree_control"
        )
    for left in left_behind(folder, f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # something runs in it
            left.rmdir()


class Cgroup:
    """The cgroup of one program. gate: a descriptor that can be read once it is limited."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        self._folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        try:
            self._folder.mkdir()
            self._write("memory.max", limits.memory_bytes + limits.scratch_bytes)
            self._write("pids.max", limits.threads)
            self._write("memory.oom.group", 1)
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                self._write("memory.swap.max", 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise CgroupRefused(
                f"data.code.cgroup: a cgroup cannot be made in {parent}: {error}"
            ) from error
        self.gate, self._open_gate = os.pipe()

    def admit(self, pid: int) -> None:
        """Take a process in, and let it run."""
        self._write("cgroup.procs", pid)
        os.write(self._open_gate, b"x")

    def out_of_memory(self) -> bool:
        """Whether the kernel killed the program for its memory."""
        events = (self._folder / "memory.events").read_text()
        return re.search(r"^oom_kill [1-9]", events, re.M) is not None

    def remove(self) -> None:
        """Kill what is left in it, and remove it."""
        os.close(self._open_gate)
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)
        until = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                return self._folder.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)

    def _write(self, name: str, value: int) -> None:
        descriptor = os.open(self._folder / name, os.O_WRONLY)  # never creates a file
        try:
            os.write(descriptor, str(value).encode())
        finally:
            os.close(descriptor)
