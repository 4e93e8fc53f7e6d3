"""A program in a sandbox: its limits, the exchange with it, and how it ended.

    sandbox = open_sandbox("bwrap")                       # backends.py; tested, or refused
    outcome = sandbox.start(source, "script", Limits()).finish(b"input")

A backend starts `inside.py` in isolation with pipes as stdin, stdout and stderr. Everything else is
here: output is capped, the wall clock is a backstop, and CPU time alone decides what was too slow.
"""

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparrow.files import printable

INSIDE = Path(__file__).with_name("inside.py")
CHUNK = 1 << 16
NOBODY = 65534
POLL_SECONDS = 0.5
END_POLL_SECONDS = 0.001
STALE_SECONDS = 3 * 3600  # longer than any program may run
# Exit codes of a program that was killed by its limit of CPU time.
OUT_OF_CPU = (-signal.SIGXCPU, -signal.SIGKILL, 128 + signal.SIGXCPU, 128 + signal.SIGKILL)

Mode = Literal["script", "calls", "tests"]
Ending = Literal["exited", "time", "wall", "asleep", "output", "memory"]
PROBLEMS: dict[Ending, str] = {
    "time": "out of CPU time",
    "wall": "out of wall time",
    "asleep": "it sleeps",
    "output": "too much output",
    "memory": "out of memory",
}


class SandboxRefused(ValueError):
    """A backend that is not there, does not work here, or lets an attack through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use.

    cpu_seconds: of its process, system time included
    wall_seconds: a backstop; load must not reach it
    asleep_seconds: in which it neither runs nor waits for the processor, where a backend can tell
    output_bytes: of stdout and stderr together, before it is killed
    scratch_bytes: of a writable /tmp; 0: it can write nowhere
    """

    cpu_seconds: int = 10
    wall_seconds: float = 60.0
    asleep_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 18
    scratch_bytes: int = 0
    threads: int = 32


class Outcome(NamedTuple):
    """How a program ended. code: of its exit; negative or above 128: a signal."""

    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def problem(self) -> str:
        """What was wrong in a few words; empty: it exited with 0."""
        if self.ending != "exited":
            return PROBLEMS[self.ending]
        if not self.code:
            return ""
        lines = printable_lines(self.stderr)
        return f"exit code {self.code}" + (f": {lines[-1]:.200}" if lines else "")


class Running:
    """A started program, and what it has written.

    Its process and its group are killed, or told by `stop` to kill and reap those inside.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        *,
        stop: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._process, self._limits, self._stop_signal = process, limits, stop
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin, self._streams = process.stdin, (process.stdout, process.stderr)
        self._written = {stream: bytearray() for stream in self._streams}
        self._pending = b""
        self._closing = False
        self._total = 0
        self._until = time.monotonic() + limits.wall_seconds
        self._awake = time.monotonic()  # when it was seen to do something
        self._looked = self._awake  # when somebody looked whether it sleeps
        self._ending: Ending = "exited"
        self._stopped = False
        self._outcome: Outcome | None = None
        self._selector = selectors.DefaultSelector()
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(self._stdin.fileno(), False)

    def send(self, data: bytes) -> None:
        """Write to its stdin, as it reads."""
        self._pending += data
        self._watch_stdin()

    def read_line(self) -> bytes | None:
        """The next line of its stdout; None if it ended, or was killed, before the end of one."""
        stdout, self._awake = self._written[self._streams[0]], time.monotonic()
        while b"\n" not in stdout:
            if not self._pump():
                return None
        line, _, rest = bytes(stdout).partition(b"\n")
        stdout[:] = rest
        self._total -= len(line)  # lines that were read are no longer held
        return line

    def finish(self, stdin: bytes = b"") -> Outcome:
        """Give it the rest of its input, wait for its end, and collect its output."""
        self._closing, self._awake = True, time.monotonic()
        self.send(stdin)
        while self._pump():
            pass
        return self.end()

    def end(self) -> Outcome:
        """Kill it, if it still runs; how it ended."""
        if self._outcome is None:
            self._outcome = self._end()
        return self._outcome

    def _end(self) -> Outcome:
        if any(stream in self._selector.get_map() for stream in self._streams):
            self._stop()
        code, cpu_seconds = self._wait()
        self._selector.close()
        for stream in (self._stdin, *self._streams):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        killed = code in OUT_OF_CPU and not self._stopped
        if self._ending == "exited" and (killed or cpu_seconds >= self._limits.cpu_seconds):
            self._ending = "time"
        stdout, stderr = (bytes(self._written[stream]) for stream in self._streams)
        return Outcome(self._ending, code, stdout, stderr)

    def _wait(self) -> tuple[int, float]:
        """Wait for its end, until its wall time; its exit code, and the CPU time that it used.

        The limit of CPU time is checked at ticks of the clock: a program may run between them.
        """
        while (ended := os.wait4(self._process.pid, os.WNOHANG))[0] == 0:
            if not self._stopped and (late := self._overdue()):  # its pipes are closed
                self._stop(late)
            time.sleep(END_POLL_SECONDS)
        _, status, usage = ended
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode, usage.ru_utime + usage.ru_stime

    def _pump(self) -> bool:
        """Move what can be moved; False when all of its output has come, or it was killed."""
        if not any(stream in self._selector.get_map() for stream in self._streams):
            return False
        left = self._until - time.monotonic()
        if left <= 0:  # also of a program that writes now and then
            return self._stop("wall")
        events = self._selector.select(min(left, POLL_SECONDS))
        if events:
            self._awake = time.monotonic()
        elif late := self._overdue():
            return self._stop(late)
        for key, _ in events:
            if key.fileobj is self._stdin:
                self._write()
            elif not self._read(key.fileobj):
                return self._stop("output")
        return True

    def _overdue(self) -> Ending | None:
        """Which of its times is over."""
        now = time.monotonic()
        if now > self._until:
            return "wall"
        if now > self._looked + POLL_SECONDS:
            self._looked = now
            self._awake = self._awake if self._asleep() else now
        return "asleep" if now > self._awake + self._limits.asleep_seconds else None

    def _asleep(self) -> bool:
        """Whether it is known to sleep now."""
        return False

    def _read(self, stream: Any) -> bool:
        data = os.read(stream.fileno(), CHUNK)
        if not data:
            self._selector.unregister(stream)
            return True
        self._written[stream] += data
        self._total += len(data)
        return self._total <= self._limits.output_bytes

    def _write(self) -> None:
        try:
            written = os.write(self._stdin.fileno(), self._pending[:CHUNK])
            self._pending = self._pending[written:]
        except BrokenPipeError:  # it reads no further
            self._pending, self._closing = b"", True
        self._watch_stdin()

    def _watch_stdin(self) -> None:
        if self._stdin.closed:
            return
        watched = self._stdin in self._selector.get_map()
        if self._pending and not watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        elif not self._pending:
            if watched:
                self._selector.unregister(self._stdin)
            if self._closing:
                self._stdin.close()

    def _stop(self, ending: Ending = "exited") -> bool:
        self._ending, self._stopped = ending, True
        self._kill()
        for stream in [key.fileobj for key in self._selector.get_map().values()]:
            self._selector.unregister(stream)
        return False

    def _kill(self) -> None:
        kill(-self._process.pid, self._stop_signal)


class Sandbox(ABC):
    """A way to run Python programs in isolation.

    isolation: for people: the backend and its layers.
    """

    name: str
    isolation: str

    @abstractmethod
    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        """Start a program; ValueError if that fails."""


def printable_lines(output: bytes) -> list[str]:
    return [printable(line) for line in output.decode(errors="replace").strip().splitlines()]


def popen(words: list[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process with pipes, an empty environment and no other descriptor."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env={"PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
        **settings,
    )


def inside_settings(mode: Mode, limits: Limits, **more: Any) -> dict[str, Any]:
    """What inside.py is told: the mode, the limits, and what the backend adds."""
    return {
        "mode": mode,
        "rlimits": True,
        "cpu": limits.cpu_seconds,
        "memory": limits.memory_bytes,
        "threads": limits.threads,
        "scratch": limits.scratch_bytes,
        **more,
    }


@functools.cache
def inside_source() -> str:
    """The source of inside.py: small enough for `python -c`."""
    return INSIDE.read_text(encoding="utf-8")


def data_descriptor(data: bytes) -> int:
    """A descriptor to read data from."""
    descriptor = os.memfd_create("sparrow sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def left_behind(folder: Path, pattern: str) -> list[Path]:
    """Folders that judges made and never removed, since they were killed."""
    now = time.time()
    with contextlib.suppress(OSError):
        return [path for path in folder.glob(pattern) if now - path.stat().st_mtime > STALE_SECONDS]
    return []


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill a process, or a group of them by its negative number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sandbox_user() -> int | None:
    """The user that programs run as: nobody, where this is root; None: this one."""
    return NOBODY if os.geteuid() == 0 else None


def as_user(user: int | None) -> dict[str, Any]:
    """Settings of a process that runs as a user."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}
