"""Jobs as subprocesses, several at a time, each as soon as its inputs exist.

When the study stops, its jobs get SIGINT: they save a checkpoint and resume next time. If the study
is killed, the kernel kills its jobs too.
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

POLL_SECONDS = 0.5
GRACE = 60.0  # seconds between SIGINT and SIGKILL
LAST = 400  # characters of a failed job's log in the message


class Job(NamedTuple):
    """A command `python -m sparrow WORDS`; `done` says whether its work is done."""

    name: str
    words: tuple[str, ...]
    log: Path
    done: Callable[[], bool]
    ready: Callable[[], bool]


class JobFailed(Exception):
    """A job ended without having done its work. The message has the end of its log."""


Running = dict[Job, "subprocess.Popen[bytes]"]


def run_jobs(
    jobs: Sequence[Job],
    parallel: int,
    *,
    stop: Callable[[], bool],
    event: Callable[[str], None],
    show: Callable[[Sequence[str]], None],
) -> bool:
    """Run jobs until all are done or one fails; False if `stop` returned true before."""
    running: Running = {}
    waiting = [job for job in jobs if not job.done()]
    try:
        while waiting or running:
            if stop():
                return False
            for job in _ended(running):
                event(f"{job.name}: done")
            for job in waiting:
                if len(running) < parallel and job.ready():
                    running[job] = _open(job)
                    event(f"{job.name}: started")
            waiting = [job for job in waiting if job not in running]
            show([job.name for job in running])
            time.sleep(POLL_SECONDS)
    finally:
        _end_all(running)
        for job in running:
            if job.done():
                event(f"{job.name}: done")
    return True


def _open(job: Job) -> "subprocess.Popen[bytes]":
    """Start a job in its own session: Ctrl-C reaches only this process, which stops the jobs."""
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
    """Remove and return jobs whose process has ended; JobFailed if the work is not done."""
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
