"""`sparrow status`: where a training run is, from its files and its lock; nothing is written.

A running process holds the lock of its run. An asynchronous run also writes status.json about every
second; everything else is in metrics.jsonl, validation.jsonl and actions.jsonl.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from sparrow.dataflow.run_files import CHANGED, saved_step
from sparrow.files import has_sums, lock_holder, printable
from sparrow.schema.asynchronous import (
    STATUS,
    AsyncStatus,
    PolicyStatus,
    RunStatus,
    State,
    StepAccuracy,
)
from sparrow.schema.run_folder import (
    ACTIONS,
    METRICS,
    VALIDATION,
    RunFolder,
    read_run,
    training_folder,
)

LAST = 10  # steps whose median is the time of a step
OLD = 30.0  # seconds after which a process that writes no status may hang
ENDS = ("ended", "stopped")  # phases after which a process writes no more


def run_status(folder: Path, *, now: float | None = None) -> RunStatus:
    """Look at a run; now: in seconds since 1970."""
    now, folder = time.time() if now is None else now, training_folder(folder)
    process = lock_holder(folder)  # first: a run that ends meanwhile has then written all
    live = AsyncStatus.load(folder)
    read, ended = read_run(folder), has_sums(folder)
    state = _state(process, ended, live)
    taken = read.steps[-1].step + 1 if read.steps else 0
    steps = read.settings.given.get("run.steps")
    steps = steps if isinstance(steps, int) else None if live is None else live.steps
    seconds = _seconds_per_step(read)
    left = None
    if state == "running" and seconds is not None and steps is not None:
        left = max(0, steps - taken) * seconds
    age = max(0.0, now - (_last_written(folder) if live is None else live.time))
    return RunStatus(
        run=printable(str(folder)),
        state=state,
        loop="sync" if live is None and read.settings.given.get("run.loop") != "async" else "async",
        process=process,
        step=taken,
        steps=steps,
        checkpoint=saved_step(folder),
        seconds_per_step=seconds,
        seconds_left=left,
        age=age,
        metrics=dict(read.steps[-1].values) if read.steps else {},
        accuracy=_accuracy(read),
        actions=tuple(action for action in read.actions if action.kind != CHANGED),
        live=live,
        policies=tuple(map(_policy, read.policies.values())),
        notes=tuple(_notes(state, live, age)),
    )


def _accuracy(read: RunFolder) -> tuple[StepAccuracy, ...]:
    return tuple(
        StepAccuracy(step=held.step, value=held.value, low=held.low, high=held.high)
        for held in read.held_out()
    )


def _policy(read: RunFolder) -> PolicyStatus:
    last = {key: value for line in read.steps for key, value in line.values.items()}
    return PolicyStatus(name=read.name, metrics=last, accuracy=_accuracy(read))


def _last_written(folder: Path) -> float:
    """When a line was last added to the run's files."""
    files = [folder / name for name in (METRICS, VALIDATION, ACTIONS)]
    return max(file.stat().st_mtime for file in files if file.exists())


def _state(process: int | None, ended: bool, live: AsyncStatus | None) -> State:
    if process is not None:
        return "running"
    if ended:
        return "ended"
    return "stale" if live is not None and live.phase not in ENDS else "stopped"


def _seconds_per_step(read: RunFolder) -> float | None:
    seconds = [value for _, value in read.values("timing_s/step")[-LAST:]]
    return median(seconds) if seconds else None


def _notes(state: State, live: AsyncStatus | None, age: float) -> Sequence[str]:
    if state == "stale" and live is not None:
        said = f"{STATUS} says {live.phase!r}, {age:.0f} s ago, but no process has the run open"
        return [f"{said}: it was killed; the same command resumes it"]
    if state == "running" and live is not None and age > OLD and live.phase not in ENDS:
        return [f"{STATUS} was written {age:.0f} s ago, though the process lives: it may hang"]
    return []
