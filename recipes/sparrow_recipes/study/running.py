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
from pathlib import Path
from typing import NamedTuple

from sparrow.files import make_folder, open_append
from sparrow.processes.supervisor import with_parent

LOOK_EVERY = 0.5  # seconds
GRACE = 60.0  # seconds that a job has to end when asked
LAST = 400  # characters of a failed job's log that are told


class Job(NamedTuple):
    """Something to be done by `python -m sparrow` with these words; `done` says whether it is."""

    name: str
    words: tuple[str, ...]
    log: Path
    done: Callable[[], bool]
    ready: Callable[[], bool]


class JobFailed(Exception):
    """A job ended without having done its work. Its message has the end of its log."""


Running = dict[Job, "subprocess.Popen[bytes]"]


def run_jobs(
    jobs: Sequence[Job],
    parallel: int,
    *,
    stop: Callable[[], bool],
    event: Callable[[str], None],
    look: Callable[[Sequence[str]], None],
) -> bool:
    """Run jobs until all are done or one fails; False where `stop` said so before."""
    running: Running = {}
    left = [job for job in jobs if not job.done()]
    try:
        while left or running:
            if stop():
                return False
            for job in _ended(running):
                event(f"{job.name}: done")
            for job in left:
                if len(running) < parallel and job.ready():
                    running[job] = _open(job)
                    event(f"{job.name}: begins")
            left = [job for job in left if job not in running]
            look([job.name for job in running])
            time.sleep(LOOK_EVERY)
    finally:
        _end_all(running)
    return True


def _open(job: Job) -> "subprocess.Popen[bytes]":
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


def _ended(running: Running) -> list[Job]:
    """Take out those whose process has ended; JobFailed where it has not done its work."""
    ended = [job for job, process in running.items() if process.poll() is not None]
    for job in ended:
        code = running.pop(job).returncode
        if not job.done():
            log = job.log.read_text(encoding="utf-8", errors="replace")[-LAST:].strip()
            raise JobFailed(f"{job.name} ended with code {code}; {job.log} ends:\n{log}")
    return ended


def _end_all(running: Running) -> None:
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    until = time.monotonic() + GRACE
    for process in running.values():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
