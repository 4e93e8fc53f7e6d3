"""Rewards for programs: the sandbox that runs them, and its limits."""

from typing import Annotated, Literal

from pydantic import Field

from sparrow.schema.base import Record
from sparrow.schema.types import Directory

UNSAFE = "UNSAFE: no sandbox, programs run as this user"
SandboxName = Literal["bwrap", "nsjail", "gvisor", "wasm", "unsafe"]


# What a program may use; the machine's own, not the verdict's.
LIMITS = ("cpu_seconds", "wall_seconds", "memory_mib", "output_kib", "scratch_mib")


class CodeConfig(Record):
    """Rewards of programs: rows with tests, judged in a sandbox."""

    # bwrap, nsjail, gvisor or wasm (docs/code.md). unsafe: a bare subprocess, for programs that you
    # trust. One that is not there or fails its self-test is refused; none replaces another.
    sandbox: SandboxName = "bwrap"
    reward: Literal["all", "share"] = "all"  # 1 if all tests pass, or the share that does
    cpu_seconds: Annotated[int, Field(ge=1, le=3600)] = 10  # of a process: a test, or all calls
    wall_seconds: Annotated[float, Field(gt=0, le=7200)] = 120.0  # of a program with all its tests
    memory_mib: Annotated[int, Field(ge=64, le=2**20)] = 512  # of a process
    output_kib: Annotated[int, Field(ge=1, le=2**20)] = 256  # before it is killed
    # Size of a writable /tmp; 0: programs can write nowhere. Its files are limited by size, not by
    # number.
    scratch_mib: Annotated[int, Field(ge=0, le=2**14)] = 0
    # bwrap: a folder of cgroup v2 that was delegated to this user, with memory and pids in its
    # cgroup.subtree_control. Counts what the kernel holds for a program; None: rlimits alone.
    cgroup: Directory | None = None
    # Numbers with a decimal point may differ by this much, relative or absolute.
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    cache: Annotated[int, Field(ge=0, le=2**24)] = 10_000  # verdicts kept, by program and tests
