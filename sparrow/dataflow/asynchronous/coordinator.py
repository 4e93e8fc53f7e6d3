"""The coordinator: prompts to the rollout worker, its groups to the learner, in its own thread.

    learner  --next_batch, load_weights, evaluate-->  coordinator  <--messages-->  worker processes

Every decision is the dispatcher's, every end of a prompt is in the ledger. A worker that ends is
started again with the latest weights; its prompts are dispatched again. A group that takes longer
than `deadline` is given back too, and dropped after some attempts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparrow.dataflow.asynchronous.dispatch import DispatchedBatch, Dispatcher
from sparrow.dataflow.asynchronous.messages import (
    AbortGroup,
    EvaluateStep,
    EvaluationEnded,
    GroupEnded,
    GroupFailed,
    LoadWeights,
    Opened,
    Role,
    StartGroup,
    WeightsLoaded,
    WorkerFailed,
)
from sparrow.dataflow.asynchronous.prompt_ledger import FAILED, LATE, Lease, LeaseCount
from sparrow.dataflow.asynchronous.workers import WeightsFile, WorkerLost, WorkerProcess, ready
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.local.rollout import MOST_OVERLONG
from sparrow.schema.asynchronous import Phase
from sparrow.schema.base import Record
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight

POLL_SECONDS = 0.1  # between looks at deadlines
MOST_EVALUATIONS = 4  # that wait
MOST_CRASHES = 5  # of a worker in a row, without a group or an evaluation in between
FAILED_TOO_OFTEN = "failed too often"
OVERLONG = "overlong prompt"


@dataclass(kw_only=True)
class SinceLastBatch:
    """What happened since the batch before."""

    ended: list[Group] = field(default_factory=list)  # groups, those left out included
    dropped_groups: list[Group] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    fault: str = ""
    overlong: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # prompts by reason
    again: int = 0
    wasted_tokens: int = 0  # that no batch will have
    in_flight_tokens: int = 0  # that samples under way had when weights changed
    rollout_idle: float = 0.0  # seconds without a prompt under way
    learner_idle: float = 0.0  # seconds of waiting for a batch
    loading: float = 0.0  # seconds of loading weights
    begun: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class Coordinator:
    """Runs workers and the dispatcher for a learner that calls from another thread.

    start_worker   makes a worker process for a role
    overlong       says why the prompt of a position does not fit; None: it fits
    watched        answers of a batch that carry hidden states
    deadline       seconds of a group; None: no limit
    """

    dispatcher: Dispatcher[Group]
    start_worker: Callable[[Role], WorkerProcess]
    overlong: Callable[[int], str | None]
    samples: int
    watched: int = 0
    in_flight: InFlight = "keep"
    deadline: float | None = None
    schedule: Schedule | None = None
    report: Callable[[str], None] = lambda text: None
    on_poll: Callable[[], None] = lambda: None  # about every POLL_SECONDS, in the thread
    header: str = "the worker is being opened"
    restarts: int = 0
    again: int = 0  # prompts dispatched again, so far
    phase: Phase = "learning"  # of the learner
    interval: SinceLastBatch = field(default_factory=SinceLastBatch)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._workers: dict[Role, WorkerProcess] = {}
        self._begun: dict[int, tuple[Lease, float]] = {}  # groups that the worker answers
        self._started = 0  # groups
        self._open = False  # the rollout worker can load weights
        self._version: int | None = None  # of its weights; None: not known yet
        self._heard = time.monotonic()  # from it, or it was started
        self._files: dict[int, WeightsFile] = {}  # by version
        self._evaluations: dict[int, EvaluateStep] = {}  # that have not ended, by step
        self._evaluates = False  # the evaluation worker is open
        self._ended: list[tuple[int, Evaluation]] = []
        self._crashes: Counter[Role] = Counter()
        self._failures = 0  # prompts in a row that failed too often
        self._last_failure = ""
        self._looked = time.monotonic()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    # Called by the learner.

    def start(self, step: int) -> tuple[LeaseCount, ...]:
        """Begin before a step; what is done again, by how it had ended."""
        again = self.dispatcher.ledger.resume(step)
        self.dispatcher.step = self.dispatcher.version = step
        self._thread = threading.Thread(target=self._run, name="sparrow-coordinator", daemon=True)
        self._thread.start()
        return again

    @property
    def started(self) -> bool:
        return self._thread is not None

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Give weights to the worker, which goes on meanwhile."""
        file = WeightsFile(weights, version)
        with self._changed:
            self._files[version] = file
            if self._open:
                self._send_weights(file)
            self._close_files()

    def next_batch(
        self, stop: Callable[[], bool]
    ) -> tuple[DispatchedBatch[Group], SinceLastBatch] | None:
        """Wait for the groups of the next step, and what happened since; None if `stop` says so."""
        begun = time.monotonic()
        with self._changed:
            self.phase = "waiting for groups"
            while True:
                self._raise_failure()
                batch = self._take()
                if batch is not None:
                    break
                if stop():
                    return None
                self._changed.wait(POLL_SECONDS)
            self._abort_dropped()
            self._fill()
            self._pass_time()
            interval, self.interval = self.interval, SinceLastBatch()
            interval.learner_idle = time.monotonic() - begun
            self.phase = "learning"
            return batch, interval

    def _take(self) -> DispatchedBatch[Group] | None:
        before = Counter(self.dispatcher.dropped)
        batch = self.dispatcher.take()
        self.interval.dropped.update(self.dispatcher.dropped - before)
        self.interval.wasted_tokens += sum(sampled_tokens(s.group) for s in self.dispatcher.stale)
        return batch

    def evaluate(self, step: int, schedule: Schedule | None, stop: Callable[[], bool]) -> None:
        """Have the held-out rows answered with the weights after a step, beside everything else.

        Each one that waits holds weights of its own: with MOST_EVALUATIONS of them the learner
        waits too.
        """
        with self._changed:
            self._wait_for_evaluations(MOST_EVALUATIONS - 1, stop)
            known = self._files.get(step)
            file = "" if known is None else known.path
            self._evaluations[step] = EvaluateStep(step=step, file=file, schedule=schedule)
            if len(self._evaluations) == 1:
                self._send_evaluation()

    def evaluations(self, stop: Callable[[], bool] | None = None) -> list[tuple[int, Evaluation]]:
        """Evaluations that have ended. stop: wait for the others until it says so."""
        with self._changed:
            if stop is not None:
                self._wait_for_evaluations(0, stop)
            self._raise_failure()
            ended, self._ended = self._ended, []
            return ended

    def _wait_for_evaluations(self, most: int, stop: Callable[[], bool]) -> None:
        while len(self._evaluations) > most and not stop():
            self.phase = "evaluating"
            self._raise_failure()
            self._changed.wait(POLL_SECONDS)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        dispatcher = self.dispatcher
        with self._changed:
            return {"prompts": dispatcher.prompts.state(), "kept_share": dispatcher.kept_share}

    @property
    def evaluations_waiting(self) -> int:
        return len(self._evaluations)

    @property
    def worker_pid(self) -> int | None:
        worker = self._workers.get("rollout")
        return None if worker is None else worker.pid

    def close(self) -> None:
        """End the workers; prompts under way are given back, and dispatched again at a resume."""
        with self._changed:
            self._closing = True
        if self._thread is not None:
            self._thread.join()
            self.dispatcher.release()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, ValueError | RuntimeError):  # the loop saves a checkpoint
            raise EpisodeFailed(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    # The thread. Workers are its children: it lives as long as they do.

    def _run(self) -> None:
        try:
            with self._changed:
                self._workers["rollout"] = self.start_worker("rollout")
            while not self._closing:
                self._look()
        except BaseException as error:  # of a thread: handed to the learner, or it is lost
            self._failure = error
        finally:
            for worker in self._workers.values():
                worker.close()
            with self._changed:
                self._changed.notify_all()

    def _look(self) -> None:
        for worker in ready(list(self._workers.values()), POLL_SECONDS):
            try:
                message = worker.receive()
            except WorkerLost as error:
                with self._changed:
                    self._restart(worker.role, str(error))
                continue
            with self._changed:
                if worker.role == "rollout":
                    self._heard = time.monotonic()
                self._handle(worker.role, message)
        with self._changed:
            self._pass_time()
            self._give_back_late()
            if self._evaluations and "evaluation" not in self._workers:
                self._workers["evaluation"] = self.start_worker("evaluation")
            self._fill()
            self._changed.notify_all()
        with suppress(OSError):  # a status that cannot be written is no reason to stop
            self.on_poll()

    def _pass_time(self) -> None:
        now = time.monotonic()
        if not self._begun:
            self.interval.rollout_idle += now - self._looked
        self._looked = now

    def _send(self, role: Role, message: Record) -> None:
        try:
            self._workers[role].send(message)
        except WorkerLost:
            return  # the thread sees it too, and starts another one

    # Messages.

    def _handle(self, role: Role, message: Record) -> None:
        self._pass_time()
        match message:
            case GroupEnded():
                self._end(message)
            case GroupFailed():
                self._fail(message)
            case WeightsLoaded():
                self._loaded(message)
            case Opened():
                self._opened(role, message)
            case EvaluationEnded():
                self._crashes[role] = 0
                if self._evaluations.pop(message.step, None) is not None:
                    self._ended.append((message.step, message.evaluation))
                self._send_evaluation()
                self._close_files()
            case WorkerFailed(fatal=True):
                raise ValueError(f"the {role} worker: {message.reason}")
            case _:
                self._restart(role, f"it sent {type(message).__name__}")

    def _opened(self, role: Role, message: Opened) -> None:
        if role == "evaluation":
            self._evaluates = True
            self._send_evaluation()
            return
        self.header, self._open = message.header, True
        if self._files:
            self._send_weights(self._files[max(self._files)])
        else:
            self._version = self.dispatcher.version

    def _send_evaluation(self) -> None:
        """Have the first that waits answered; one at a time, in the order of their steps."""
        if self._evaluations and self._evaluates:
            self._send("evaluation", next(iter(self._evaluations.values())))

    def _send_weights(self, file: WeightsFile) -> None:
        load = LoadWeights(version=file.version, file=file.path, in_flight=self.in_flight)
        self._send("rollout", load)

    def _loaded(self, message: WeightsLoaded) -> None:
        self._version = message.version
        self.interval.loading += message.seconds
        self.interval.in_flight_tokens += message.tokens
        if self.in_flight == "restart":
            self.interval.wasted_tokens += message.tokens
        while self.dispatcher.version < message.version:
            self.dispatcher.advance()
        self._close_files()

    def _close_files(self) -> None:
        """Keep the latest weights, for a worker that starts again, and those still to be read."""
        waiting = set(self._evaluations)
        least = -1 if self._version is None else self._version
        for version in [v for v in self._files if v < min(least, max(self._files))]:
            if version not in waiting:
                self._files.pop(version).close()

    def _end(self, message: GroupEnded) -> None:
        self._crashes["rollout"] = self._failures = 0
        self.interval.verdicts.update(message.verdicts)
        self.interval.fault = self.interval.fault or message.fault
        begun = self._begun.pop(message.lease, None)
        if begun is None or message.lease not in self.dispatcher.under_way:
            self.interval.wasted_tokens += sampled_tokens(message.group)
            return  # it was aborted meanwhile
        lease, group = begun[0], message.group
        self.interval.ended.append(group)
        before = Counter(self.dispatcher.dropped)
        oldest = oldest_version(group, lease.version)
        self.dispatcher.finish(lease, accuracies(group), oldest, group)
        if dropped := self.dispatcher.dropped - before:
            self.interval.dropped.update(dropped)
            self.interval.dropped_groups.append(group)
            self.interval.wasted_tokens += sampled_tokens(group)
            self._report_filtered()

    def _report_filtered(self) -> None:
        """Say so where a batch waits for groups that the filter keeps."""
        count, most = len(self.interval.dropped_groups), self.dispatcher.refills
        if count % (most * self.dispatcher.batch) == 0:
            self.report(
                f"{count} groups were left out by dispatch.group_filter since the last step"
            )

    def _fail(self, message: GroupFailed) -> None:
        begun = self._begun.pop(message.lease, None)
        if begun is not None:
            self._last_failure = message.reason
            self._give_back(begun[0], FAILED)

    def _give_back(self, lease: Lease, reason: str) -> None:
        if lease.number in self.dispatcher.under_way:
            self.dispatcher.fail(lease, reason)
            self._count_again(1)

    def _count_again(self, prompts: int) -> None:
        self.interval.again += prompts
        self.again += prompts

    # Prompts.

    def _fill(self) -> None:
        """Start what may start."""
        while self._version is not None and self._version >= self.dispatcher.version:
            before = Counter(self.dispatcher.dropped)
            lease = self.dispatcher.next("rollout")
            dropped = self.dispatcher.dropped - before
            self.interval.dropped.update(dropped)
            self._count_failures(dropped[FAILED_TOO_OFTEN])
            if lease is None:
                return
            if (problem := self.overlong(lease.position)) is not None:
                self.dispatcher.abort(lease, OVERLONG)
                self.interval.dropped[OVERLONG] += 1
                self.interval.overlong.append(problem)
                self._refuse_overlong()
                continue
            self._start(lease)

    def _refuse_overlong(self) -> None:
        count = len(self.interval.overlong)
        if count > MOST_OVERLONG:
            raise ValueError(
                f"{count} prompts of a step are too long, the last {self.interval.overlong[-1]}; "
                "raise rollout.max_prompt, or lower rollout.max_tokens"
            )

    def _count_failures(self, dropped: int) -> None:
        """Stop a run whose episodes always fail."""
        self._failures += dropped
        if self._failures >= self.dispatcher.batch:
            raise EpisodeFailed(
                f"{self._failures} prompts in a row failed {self.dispatcher.attempts} times each; "
                f"the last: {self._last_failure}"
            )

    def _start(self, lease: Lease) -> None:
        batch = self.dispatcher.batch
        share, more = divmod(min(self.watched, batch * self.samples), batch)
        watched = share + (self._started % batch < more)
        self._started += 1
        self._begun[lease.number] = (lease, time.monotonic())
        start = StartGroup(
            lease=lease.number,
            position=lease.position,
            version=lease.version,
            watched=watched,
            schedule=self.schedule,
        )
        self._send("rollout", start)

    def _abort_dropped(self) -> None:
        """Stop answering what the dispatcher has dropped as late."""
        for number in self._begun.keys() - self.dispatcher.under_way.keys():
            del self._begun[number]
            self._send("rollout", AbortGroup(lease=number))

    def _give_back_late(self) -> None:
        if self.deadline is None:
            return
        now = time.monotonic()
        for lease, begun in list(self._begun.values()):
            if now - begun > self.deadline:
                del self._begun[lease.number]
                self._send("rollout", AbortGroup(lease=lease.number))
                self._last_failure = f"no group after {self.deadline:g} s"
                self._give_back(lease, LATE)
                if now - self._heard > 2 * self.deadline:
                    self._restart("rollout", f"no message for {now - self._heard:.0f} s")
                    return

    def _restart(self, role: Role, reason: str) -> None:
        """Start a worker again; prompts that it had are dispatched again."""
        self._crashes[role] += 1
        self.restarts += 1
        self.report(f"the {role} worker was lost and is started again: {reason}")
        self._workers[role].close()
        if role == "rollout":
            self._open, self._version, self._heard = False, None, time.monotonic()
            self._begun.clear()
            self._count_again(len(self.dispatcher.lose(role)))
        else:
            self._evaluates = False
        if self._crashes[role] > MOST_CRASHES:
            raise EpisodeFailed(f"the {role} worker ended {MOST_CRASHES} times in a row: {reason}")
        self._workers[role] = self.start_worker(role)


def accuracies(group: Group) -> list[float]:
    """By accuracy, not by reward: shaping must not make a group look informative."""
    return [t.acc or 0.0 for t in group.trajectories]


def oldest_version(group: Group, default: int) -> int:
    """The version of the oldest sampled token; the default where there is none."""
    versions = np.concatenate([t.weight_version for t in group.trajectories])
    return int(min(versions[versions >= 0], default=default))


def sampled_tokens(group: Group) -> int:
    return sum(map(_sampled, group.trajectories))


def _sampled(trajectory: Trajectory) -> int:
    return int((trajectory.weight_version >= 0).sum())
