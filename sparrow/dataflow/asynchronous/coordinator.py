"""The coordinator: prompts to the rollout workers, their groups to the learner, in its own thread.

    learner  --next_batch, load_weights, evaluate-->  coordinator  <--messages-->  workers

Every decision is the dispatcher's, every end of a prompt is in the ledger. Workers are processes
that it starts, and workers on other machines that join. A process that ends is started again with
the latest weights, a worker of another machine is forgotten; prompts of both are dispatched again.
A group that takes longer than `deadline` is given back too, and dropped after some attempts.

**Which worker.** The one with the fewest groups under way for what it decodes at once, of those
whose weights are new enough: a prompt starts where its group, drawn under the version that this
worker has, is expected to be used within the staleness. One that is full gets more only if all are.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from sparrow.dataflow.asynchronous.dispatch import DispatchedBatch, Dispatcher
from sparrow.dataflow.asynchronous.group_checks import (
    accuracies,
    find_problem,
    oldest_version,
    sampled_tokens,
    with_worker,
)
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
from sparrow.dataflow.asynchronous.weight_versions import WeightVersions
from sparrow.dataflow.asynchronous.workers import (
    ConnectedWorker,
    RemoteLink,
    WeightsFile,
    WorkerLink,
    WorkerLost,
    ready,
)
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.local.rollout import MOST_OVERLONG
from sparrow.models import Decoder, model_identity
from sparrow.schema.asynchronous import Phase
from sparrow.schema.base import Record
from sparrow.schema.episode import Group
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight

POLL_SECONDS = 0.1  # between looks at deadlines
MOST_EVALUATIONS = 4  # that wait
MOST_CRASHES = 5  # of a process in a row, without a group or an evaluation in between
MOST_REFUSED = 3  # messages of a worker, before it is dropped
FAILED_TOO_OFTEN = "failed too often"
OVERLONG = "overlong prompt"
RESERVED = ("rollout", "evaluation")  # names of processes


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
    lost: int = 0  # workers
    refused: int = 0  # messages of workers
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
    workers        rollout processes of this machine
    versions       weights for workers on other machines; None: there are none
    dtype          of the run's rollouts, to know workers that differ
    worker_timeout seconds without a request, after which a worker on another machine is lost
    overlong       says why the prompt of a position does not fit; None: it fits
    watched        answers of a batch that carry hidden states
    deadline       seconds of a group; None: no limit
    """

    dispatcher: Dispatcher[Group]
    start_worker: Callable[[Role], WorkerLink]
    overlong: Callable[[int], str | None]
    samples: int
    workers: int = 1
    versions: WeightVersions | None = None
    dtype: str = ""
    worker_timeout: float = 60.0
    model: Decoder | None = None  # its shape and function are checked on other machines
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
        self._workers: dict[str, ConnectedWorker] = {}  # by name
        self._started = 0  # prompts, each counted once
        self._watched: dict[int, int] = {}  # answers for the gate, by position of a prompt
        self._files: dict[int, WeightsFile] = {}  # by version
        self._spare: WeightsFile | None = None  # that nobody reads, to be written again
        self._evaluations: dict[int, EvaluateStep] = {}  # that have not ended, by step
        self._ended: list[tuple[int, Evaluation]] = []
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

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], version: int, dtype: torch.dtype
    ) -> None:
        """Give weights to the workers, which go on meanwhile."""
        with self._changed:
            file, self._spare = self._spare, None
        if file is None:
            file = WeightsFile(weights, version, dtype)
        else:
            file.rewrite(weights, version, dtype)
        if self.versions is not None:
            self.versions.publish(file)
        with self._changed:
            self._files[version] = file
            for worker in self.rollout_workers:
                if worker.is_open:
                    self._send_weights(worker)
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
        """The process of the first rollout worker of this machine."""
        worker = self._workers.get("rollout")
        return None if worker is None else getattr(worker.link, "pid", None)

    @property
    def rollout_workers(self) -> list[ConnectedWorker]:
        return [worker for worker in [*self._workers.values()] if worker.link.role == "rollout"]

    def join(self, link: RemoteLink, name: str) -> str:
        """Take a worker on another machine; return its name, with a number if it is in use."""
        with self._changed:
            names = (name if n == 1 else f"{name}-{n}" for n in count(1))
            free = next(name for name in names if name not in {*self._workers, *RESERVED})
            if self._closing or self._failure is not None:
                raise ValueError("the run is stopping")
            self._workers[free] = ConnectedWorker(name=free, link=link, remote=link)
        self.report(f"worker {free} has joined")
        return free

    def close(self) -> None:
        """End the workers; prompts under way are given back, and dispatched again at a resume."""
        with self._changed:
            self._closing = True
        if self._thread is not None:
            self._thread.join()
            self.dispatcher.release()
        for file in (*self._files.values(), *([self._spare] if self._spare else [])):
            file.close()
        self._files.clear()
        self._spare = None

    def _raise_failure(self) -> None:
        if isinstance(self._failure, ValueError | RuntimeError):  # the loop saves a checkpoint
            raise EpisodeFailed(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    # The thread. Workers are its children: it lives as long as they do.

    def _run(self) -> None:
        try:
            with self._changed:
                for number in range(1, self.workers + 1):
                    self._start_process(
                        "rollout", "rollout" if number == 1 else f"rollout-{number}"
                    )
            while not self._closing:
                self._look()
        except BaseException as error:  # of a thread: handed to the learner, or it is lost
            self._failure = error
        finally:
            with self._changed:
                for worker in self._workers.values():
                    worker.link.close()
                self._changed.notify_all()

    def _start_process(self, role: Role, name: str, crashes: int = 0) -> None:
        link = self.start_worker(role)
        self._workers[name] = ConnectedWorker(name=name, link=link, crashes=crashes)

    def _look(self) -> None:
        for worker in ready([*self._workers.values()], POLL_SECONDS):
            with self._changed:
                if self._workers.get(worker.name) is worker:
                    self._receive(worker)
        with self._changed:
            self._pass_time()
            self._give_back_late()
            self._lose_silent()
            if self._evaluations and "evaluation" not in self._workers:
                self._start_process("evaluation", "evaluation")
            self._fill()
            self._changed.notify_all()
        with suppress(OSError):  # a status that cannot be written is no reason to stop
            self.on_poll()

    def _receive(self, worker: ConnectedWorker) -> None:
        try:
            message = worker.link.receive()
        except WorkerLost as error:
            self._lose(worker, str(error))
        except ValueError as error:
            self._refuse(worker, str(error))
        else:
            worker.heard = time.monotonic()
            self._handle(worker, message)

    def _pass_time(self) -> None:
        now = time.monotonic()
        if not any(worker.begun for worker in self._workers.values()):
            self.interval.rollout_idle += now - self._looked
        self._looked = now

    def _send(self, worker: ConnectedWorker, message: Record) -> None:
        with suppress(WorkerLost):  # the thread sees it too
            worker.link.send(message)

    # Messages.

    def _handle(self, worker: ConnectedWorker, message: Record) -> None:
        self._pass_time()
        match message:
            case GroupEnded():
                self._end(worker, message)
            case GroupFailed():
                self._fail(worker, message)
            case WeightsLoaded():
                self._loaded(worker, message)
            case Opened():
                self._opened(worker, message)
            case EvaluationEnded() if worker.link.role == "evaluation":
                worker.crashes = 0
                if self._evaluations.pop(message.step, None) is not None:
                    self._ended.append((message.step, message.evaluation))
                self._send_evaluation()
                self._close_files()
            case WorkerFailed(fatal=True) if worker.remote is None:
                raise ValueError(f"the {worker.name} worker: {message.reason}")
            case WorkerFailed():
                self._lose(worker, message.reason)
            case _:
                self._refuse(worker, f"it sent {type(message).__name__}")

    def _refuse(self, worker: ConnectedWorker, reason: str) -> None:
        """Count a message that is not used; a worker that sends several is dropped."""
        worker.refused += 1
        self.interval.refused += 1
        self.report(f"a message of worker {worker.name} is refused: {reason}")
        if worker.refused >= MOST_REFUSED:
            self._lose(worker, f"{worker.refused} of its messages were refused")

    def _opened(self, worker: ConnectedWorker, message: Opened) -> None:
        known = None if self.model is None else model_identity(self.model)
        if worker.remote is not None and known is not None and message.model != known:
            self._lose(worker, "its model has another configuration or tokenizer")
            return
        worker.is_open = True
        if worker.link.role == "evaluation":
            self._send_evaluation()
            return
        self.header, worker.room = message.header, max(1, message.running) / self.samples
        worker.dtype, worker.attention = message.dtype, message.attention
        other = bool(message.attention) or message.dtype != self.dtype
        worker.differs = worker.remote is not None and other
        if self._files or worker.remote is not None:
            self._send_weights(worker)
        else:
            worker.version = worker.sent = self.dispatcher.version

    def _send_evaluation(self) -> None:
        """Have the first that waits answered; one at a time, in the order of their steps."""
        worker = self._workers.get("evaluation")
        if self._evaluations and worker is not None and worker.is_open:
            self._send(worker, next(iter(self._evaluations.values())))

    def _send_weights(self, worker: ConnectedWorker) -> None:
        """Have a worker load the latest weights; one of another machine fetches them."""
        version = max(self._files, default=self.dispatcher.version)
        path = "" if worker.remote is not None else self._files[version].path
        worker.sent = version
        self._send(worker, LoadWeights(version=version, file=path, in_flight=self.in_flight))

    def _loaded(self, worker: ConnectedWorker, message: WeightsLoaded) -> None:
        if message.version > worker.sent:
            self._refuse(worker, f"version {message.version} was not sent to it")
            return
        worker.version = message.version
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
        local = [w.version for w in self.rollout_workers if w.remote is None and w.is_open]
        least = min((-1 if version is None else version for version in local), default=2**31)
        for version in [v for v in self._files if v < min(least, max(self._files))]:
            if version in waiting:
                continue
            if self._spare is None and self.versions is None:  # which keeps what it has read
                self._spare = self._files.pop(version)
            else:
                self._files.pop(version).close()

    def _end(self, worker: ConnectedWorker, message: GroupEnded) -> None:
        row = self.dispatcher.row
        spec = None if self.model is None else self.model.spec
        if (problem := find_problem(worker, message, row, spec)) is not None:
            if (held := worker.begun.pop(message.lease, None)) is not None:
                self._give_back(held[0], FAILED)
            self._refuse(worker, problem)
            return
        worker.unanswered.discard(message.lease)
        worker.crashes = self._failures = 0
        self.interval.verdicts.update(message.verdicts)
        self.interval.fault = self.interval.fault or message.fault
        begun = worker.begun.pop(message.lease, None)
        if begun is None or message.lease not in self.dispatcher.under_way:
            self.interval.wasted_tokens += sampled_tokens(message.group)
            return  # it was aborted meanwhile
        lease, group = begun[0], with_worker(message.group, worker)
        self._watched.pop(lease.position, None)
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

    def _fail(self, worker: ConnectedWorker, message: GroupFailed) -> None:
        if message.lease not in worker.unanswered:
            self._refuse(worker, f"it has no lease {message.lease}")
            return
        worker.unanswered.discard(message.lease)
        if (begun := worker.begun.pop(message.lease, None)) is not None:
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
        while (worker := self._next_worker()) is not None:
            before = Counter(self.dispatcher.dropped)
            lease = self.dispatcher.next(worker.name, worker.version)
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
            self._start(worker, lease)

    def _next_worker(self) -> ConnectedWorker | None:
        """The worker that gets the next prompt; None: none may start."""
        ready = [
            worker
            for worker in self.rollout_workers
            if worker.version is not None and self.dispatcher.admits(worker.version)
        ]
        best = min(ready, key=lambda worker: (worker.load, -(worker.version or 0)), default=None)
        if (
            best is not None
            and best.load >= 1
            and any(worker.is_open and worker.load < 1 for worker in self.rollout_workers)
        ):
            return None  # for one that loads weights, or for the next end of a group
        return best

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

    def _start(self, worker: ConnectedWorker, lease: Lease) -> None:
        watched = 0 if worker.differs else self._watched_answers(lease.position)
        worker.begun[lease.number] = (lease, time.monotonic())
        worker.unanswered.add(lease.number)
        start = StartGroup(
            lease=lease.number,
            position=lease.position,
            version=lease.version,
            watched=watched,
            schedule=self.schedule,
        )
        self._send(worker, start)

    def _watched_answers(self, position: int) -> int:
        """Answers with states, as many when a prompt is dispatched again: draws depend on it."""
        if position not in self._watched:
            batch = self.dispatcher.batch
            share, more = divmod(min(self.watched, batch * self.samples), batch)
            self._watched[position] = share + (self._started % batch < more)
            self._started += 1
        return self._watched[position]

    def _abort_dropped(self) -> None:
        """Stop answering what the dispatcher has dropped as late."""
        for worker in self.rollout_workers:
            for number in worker.begun.keys() - self.dispatcher.under_way.keys():
                self._abort(worker, number)

    def _abort(self, worker: ConnectedWorker, number: int) -> None:
        del worker.begun[number]
        self._send(worker, AbortGroup(lease=number))

    def _give_back_late(self) -> None:
        if self.deadline is None:
            return
        for worker in self.rollout_workers:
            self._give_back_late_of(worker, self.deadline, time.monotonic())

    def _give_back_late_of(self, worker: ConnectedWorker, deadline: float, now: float) -> None:
        for lease, begun in list(worker.begun.values()):
            if now - begun > deadline:
                self._abort(worker, lease.number)
                self._last_failure = f"no group after {deadline:g} s"
                self._give_back(lease, LATE)
                if now - worker.heard > 2 * deadline:
                    self._lose(worker, f"no message for {now - worker.heard:.0f} s")
                    return

    def _lose_silent(self) -> None:
        """Forget workers on other machines that no longer ask for messages."""
        now = time.monotonic()
        for worker in self.rollout_workers:
            if worker.remote is not None and now - worker.remote.heard > self.worker_timeout:
                self._lose(worker, f"no request for {self.worker_timeout:g} s")

    def _lose(self, worker: ConnectedWorker, reason: str) -> None:
        """Have the prompts of a worker dispatched again; a process is started again."""
        worker.link.close()
        del self._workers[worker.name]
        self._count_again(len(self.dispatcher.lose(worker.name)))
        self.interval.lost += 1
        if worker.remote is not None:
            self.report(f"worker {worker.name} was lost: {reason}")
            return
        self.restarts += 1
        self.report(f"the {worker.name} worker was lost and is started again: {reason}")
        if worker.crashes >= MOST_CRASHES:
            raise EpisodeFailed(
                f"the {worker.name} worker ended {MOST_CRASHES} times in a row: {reason}"
            )
        self._start_process(worker.link.role, worker.name, worker.crashes + 1)
