"""Jobs in processes of their own, several at a time, each as soon as what it needs is there.

A process is asked to end (SIGINT) when the study is: it saves a checkpoint and goes on next time.
Where the study is killed, the kernel kills its processes too.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparrow.files import make_folder, open_append
from sparrow.processes.parents import with_parent

LOOK_EVERY = 0.5  # seconds
GRACE = 60.0  # seconds that a job has to end when asked
LAST = 400  # characters of a failed job's log that are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to be done by `python -m sparrow` with these words; `done` says whether it is."""

    name: str
    words: tuple[str, ...]
    log: Path
    done: Callable[[], bool]
    ready: Callable[[], bool]


class JobFailed(Exception):
    """A job ended without having done its work. Its message has the end of its log."""


class Jobs:
    """Runs jobs until all are done, one fails, or `stop` says so."""

    def __init__(
        self,
        parallel: int,
        *,
        stop: Callable[[], bool],
        event: Callable[[str], None],
        look: Callable[[Sequence[str]], None],
    ) -> None:
        self.parallel, self._stop, self._event, self._look = parallel, stop, event, look
        self._running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}

    def run(self, jobs: Sequence[Job]) -> bool:
        """Whether all are done; False where the end was wanted before."""
        left = [job for job in jobs if not job.done()]
        try:
            while left or self._running:
                if self._stop():
                    return False
                self._collect()
                left = self._start(left)
                self._look([job.name for job, _ in self._running.values()])
                time.sleep(LOOK_EVERY)
        finally:
            self._end_all()
        return True

    def _start(self, left: list[Job]) -> list[Job]:
        for job in left:
            if len(self._running) < self.parallel and job.ready():
                self._running[job.name] = job, self._open(job)
                self._event(f"{job.name}: begins")
        return [job for job in left if job.name not in self._running]

    def _open(self, job: Job) -> "subprocess.Popen[bytes]":
        """In a session of its own: Ctrl-C reaches this process, which tells the others."""
        make_folder(job.log.parent)
        with open_append(job.log) as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sparrow", *job.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=with_parent({**os.environ, "TERM": "dumb", "NO_COLOR": "1"}),
            )

    def _collect(self) -> None:
        for name, (job, process) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            if not job.done():
                raise JobFailed(
                    f"{name} ended with code {code}; {job.log} ends:\n{_end_of(job.log)}"
                )
            self._event(f"{name}: done")

    def _end_all(self) -> None:
        for _, process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        until = time.monotonic() + GRACE
        for _, process in self._running.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LAST:].strip()
