"""The rollout side of an asynchronous run: a step's groups are made while earlier ones are learnt.

The loop is that of a synchronous run (local/loop.py). Here `generate` waits for the groups of a
step, new weights go to the worker without waiting for it, and held-out rows are answered beside.
With staleness 0 both loops give the same bits on a CPU, with the same number of threads.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparrow.dataflow.asynchronous.coordinator import Coordinator, SinceLastBatch
from sparrow.dataflow.asynchronous.dispatch import DispatchedBatch, Dispatcher
from sparrow.dataflow.asynchronous.messages import Open, Role
from sparrow.dataflow.asynchronous.prompt_ledger import PromptLedger
from sparrow.dataflow.asynchronous.selection import make_data_algorithms
from sparrow.dataflow.asynchronous.weight_versions import WeightVersions
from sparrow.dataflow.asynchronous.workers import (
    ConnectedWorker,
    StartWorker,
    WeightsFile,
    WorkerLink,
    WorkerProcess,
)
from sparrow.dataflow.language import Language
from sparrow.dataflow.local.messages import Callbacks, NoCallbacks, RolloutBatch, RolloutRequest
from sparrow.dataflow.local.rollout import without_states
from sparrow.dataflow.local.sides import RolloutHeader, RolloutProtocol
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.engine.answer import ResolvedDecoding
from sparrow.files import make_folder
from sparrow.models import Decoder, model_identity
from sparrow.models.checkpoint import pick_device
from sparrow.models.lora import Adapter
from sparrow.schema.asynchronous import PROMPTS as PROMPTS_FILE
from sparrow.schema.asynchronous import WORKER_KEY, AsyncStatus, Phase, WorkerStatus
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.evaluation import Evaluation, outcome, outcome_shares
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import environment_key
from sparrow.sparse.flows.flow import Flow
from sparrow.tasks.base import Examples
from sparrow.training.objectives.algorithms import Algorithm

if TYPE_CHECKING:
    from sparrow.dataflow.asynchronous.remote_workers import RemoteWorkers

LOGS = "workers"
STATUS_SECONDS = 1.0  # between two writes of status.json
ADVICE_STEPS = 10  # whose idle shares are looked at together
WAITS, HARDLY_WAITS = 0.10, 0.05  # shares of its time that the learner waits for groups


@dataclass(kw_only=True)
class AsyncRolloutSide(RolloutProtocol):
    """Rollouts by workers. dtype: of the weights. folder: of the run."""

    config: TrainConfig
    rows: Examples
    language: Language
    algorithm: Algorithm
    max_prompt: int  # tokens
    exact: ResolvedDecoding | None
    flow: Flow
    dtype: torch.dtype
    folder: Path
    stopping: GracefulShutdown
    start_worker: StartWorker | None = None  # None: a process of this machine
    callbacks: Callbacks = field(default_factory=NoCallbacks)
    coordinator: Coordinator = field(init=False)
    remote: "RemoteWorkers | None" = field(init=False, default=None)
    step: int = field(init=False, default=0)  # steps taken
    advice: str = field(init=False, default="")
    _idle: tuple[float, float] | None = field(init=False, default=None)  # shares of the last step
    _shares: deque[tuple[float, float]] = field(
        init=False, default_factory=lambda: deque(maxlen=ADVICE_STEPS)
    )
    _learnt: int = field(init=False, default=0)  # steps, whose weights were sent
    _written: float = field(init=False, default=0.0)  # when status.json was

    def __post_init__(self) -> None:
        self.coordinator = _coordinator(self)

    def header(self) -> RolloutHeader:
        count, listen = self.config.dispatch.workers, self.config.dispatch.listen
        here = "engine in a worker process" if count == 1 else f"{count} worker processes"
        if self.config.run.ray is not None:
            here = f"{count} rollout workers on a Ray cluster"
        there = "" if listen is None else f", workers of other machines at {listen}"
        return RolloutHeader(self.rows.name, here + there, None)

    def decoding(self, schedule: Schedule | None) -> ResolvedDecoding:
        return self.exact or ResolvedDecoding(schedule, self.flow)

    def generate(self, request: RolloutRequest) -> RolloutBatch:
        """Wait for the groups of the next step."""
        coordinator = self.coordinator
        self.step, coordinator.schedule = request.step, request.schedule
        self._start(request.step)
        self.callbacks.phase("rollout", len(coordinator.dispatcher.buffer), request.prompts)
        found = coordinator.next_batch(lambda: self.stopping.requested)
        if found is None:
            raise Stopped
        batch, interval = found
        if batch.step != request.step:
            raise ValueError(f"a batch of step {batch.step} for step {request.step}")
        rollouts = self._batch(batch, interval)
        self._idle = rollouts.metrics["async/rollout_idle"], rollouts.metrics["async/learner_idle"]
        self._advise(rollouts.metrics)
        return rollouts

    def _advise(self, metrics: Mapping[str, float]) -> None:
        """Say it where more or fewer workers would do."""
        self._shares.append((metrics["async/rollout_idle"], metrics["async/learner_idle"]))
        if len(self._shares) < ADVICE_STEPS:
            return
        rollout, learner = (float(share) for share in np.mean(self._shares, axis=0))
        advice = scaling_advice(rollout, learner, workers=int(metrics["async/workers"]))
        if advice and advice[0] != self.advice:
            self.callbacks.event(f"in the last {len(self._shares)} steps {advice[1]}")
        self.advice = advice[0] if advice else ""

    def _start(self, step: int) -> None:
        if self.coordinator.started:
            return
        self.callbacks.phase("opening the rollout worker")
        make_folder(self.folder / LOGS)
        file = self.folder / PROMPTS_FILE
        ledger = self.coordinator.dispatcher.ledger = PromptLedger(file)
        if step and not ledger.batch(step - 1):
            raise ValueError(
                f"{file} has no batch of step {step - 1}: it is not the ledger of the checkpoint "
                f"after {step} steps; was the folder copied without it, or without {file.name}-wal?"
            )
        for count in self.coordinator.start(step):
            text = f"{count.leases} prompts are dispatched again: {count.end}, {count.reason}"
            self.callbacks.event(text, "yellow")
        if self.coordinator.versions is not None:
            self._listen(self.coordinator.versions)

    def _listen(self, versions: WeightVersions) -> None:
        """Let workers of other machines join."""
        from sparrow.dataflow.asynchronous.remote_workers import KEY_FILE, RemoteWorkers

        coordinator = self.coordinator
        identity = "" if coordinator.model is None else model_identity(coordinator.model)
        self.remote = RemoteWorkers(
            self.config, self.folder, versions, coordinator.join, model=identity
        )
        key = WORKER_KEY if environment_key(WORKER_KEY) else str(self.folder / KEY_FILE)
        text = f"sparrow worker --connect {self.remote.address} (key: {key})"
        self.callbacks.event(text)

    def _batch(self, batch: DispatchedBatch[Group], interval: SinceLastBatch) -> RolloutBatch:
        fresh = [finished.group for finished in batch.fresh]
        replayed = [without_states(finished.group) for finished in batch.replayed]
        trajectories = [t for group in interval.ended for t in group.trajectories]
        accs = [t.acc for t in trajectories if t.acc is not None]
        outcomes = [outcome(t.acc, t.truncated) for t in trajectories if t.acc is not None]
        dispatcher = self.coordinator.dispatcher
        return RolloutBatch(
            groups=(*fresh, *replayed),
            position=dispatcher.ledger.next_position,
            overlong=tuple(interval.overlong),
            uninformative=len(interval.dropped_groups),
            watched=_watched(interval.dropped_groups),
            acc=sum(accs) / len(accs) if accs else None,
            outcomes=outcome_shares(outcomes),
            verdicts=dict(interval.verdicts),
            fault=interval.fault,
            metrics=_metrics(batch, interval, dispatcher) | self._worker_metrics(interval),
        )

    def _worker_metrics(self, interval: SinceLastBatch) -> dict[str, float]:
        workers = [w for w in self.coordinator.rollout_workers if w.version is not None]
        return {
            "async/workers": float(len(workers)),
            "async/workers_lost": float(interval.lost),
            "async/refused_messages": float(interval.refused),
        }

    def sleep(self) -> None:
        """The worker goes on while the learner works."""

    def wake(self) -> None:
        """The worker has gone on."""

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        """Send weights to the worker, without waiting for it."""
        assert adapter is None, "refused by the configuration"
        self.coordinator.load_weights(weights, version, self.dtype)
        self._learnt = version

    def publish(self, weights: Mapping[str, torch.Tensor], model: Decoder) -> None:
        """Keep the weights that the run starts from for workers of other machines."""
        assert self.coordinator.versions is not None
        self.coordinator.model = model
        file = WeightsFile(weights, 0, self.dtype)
        self.coordinator.versions.publish(file)
        file.close()

    def evaluate(self, schedule: Schedule | None, *, sparse: bool | None = None) -> Evaluation:
        raise ValueError("an asynchronous run is evaluated beside its steps: use validate")

    def validate(self, step: int, schedule: Schedule | None) -> list[tuple[int, Evaluation]]:
        self._start(step)
        self.coordinator.evaluate(step, schedule, lambda: self.stopping.requested)
        return self.evaluations()

    def evaluations(self, *, wait: bool = False) -> list[tuple[int, Evaluation]]:
        if wait and self.coordinator.evaluations_waiting:
            self.callbacks.phase("validation")
        stop = (lambda: self.stopping.requested) if wait else None
        ended = self.coordinator.evaluations(stop)
        if wait and not ended and self.coordinator.evaluations_waiting:
            raise Stopped
        return ended

    def close(self) -> None:
        ended = self._learnt >= self.config.run.steps
        if self.remote is not None:
            self.remote.close(ended=ended)
        self.coordinator.close()  # its thread writes the status too
        if self.coordinator.started:
            self.write_status("ended" if ended else "stopped")
        self.coordinator.dispatcher.ledger.close()

    def state(self) -> dict[str, Any]:
        return self.coordinator.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        dispatcher = self.coordinator.dispatcher
        dispatcher.prompts.restore(state["prompts"])
        dispatcher.kept_share = float(state["kept_share"])

    def poll_status(self) -> None:
        """Write status.json about every second."""
        if time.monotonic() - self._written < STATUS_SECONDS:
            return
        self._written = time.monotonic()
        self.write_status(self.coordinator.phase)

    def write_status(self, phase: Phase) -> None:
        coordinator, config = self.coordinator, self.config
        dispatcher, idle = coordinator.dispatcher, self._idle or (None, None)
        AsyncStatus(
            time=time.time(),
            pid=os.getpid(),
            step=self.step,
            steps=config.run.steps,
            version=dispatcher.version,
            staleness=dispatcher.staleness,
            phase=phase,
            under_way=len(dispatcher.under_way),
            buffer=len(dispatcher.buffer),
            batch=dispatcher.batch,
            dropped=dict(dispatcher.dropped),
            again=coordinator.again,
            rollout_idle=idle[0],
            learner_idle=idle[1],
            worker_pid=coordinator.worker_pid,
            worker_restarts=coordinator.restarts,
            evaluations_waiting=coordinator.evaluations_waiting,
            address=None if self.remote is None else self.remote.address,
            advice=self.advice,
            workers=tuple(map(_worker_status, coordinator.rollout_workers)),
        ).save(self.folder)

    def overlong(self, position: int) -> str | None:
        """Why the prompt of a position does not fit; None: it fits."""
        example = self.rows.at(position)
        tokens = len(self.language.encode(example.prompt))
        if tokens <= self.max_prompt:
            return None
        return f"{example.id} ({tokens} of at most {self.max_prompt} tokens)"


def _coordinator(side: AsyncRolloutSide) -> Coordinator:
    config, settings = side.config, side.config.dispatch
    if side.algorithm.dynamic and settings.group_filter == "all":
        settings = settings.replace(group_filter="informative")
    dispatcher = Dispatcher[Group](
        batch=config.rollout.prompts,
        staleness=settings.staleness,
        row=lambda position: side.rows.at(position).id,
        **make_data_algorithms(settings)._asdict(),
        late=settings.late,
        oversample=settings.oversample,
        replay=settings.replay,
        attempts=settings.attempts,
        refills=config.algorithm.refills,
        seed=config.run.seed,
    )
    return Coordinator(
        dispatcher=dispatcher,
        start_worker=lambda role: _start_worker(side, role),
        overlong=side.overlong,
        samples=config.rollout.samples,
        workers=settings.workers,
        versions=None if settings.listen is None else WeightVersions(),
        dtype=str(side.dtype).removeprefix("torch."),
        worker_timeout=settings.worker_timeout,
        watched=0 if config.gate.mode == "off" else config.gate.sample,
        in_flight=settings.in_flight,
        deadline=settings.deadline,
        report=lambda text: side.callbacks.event(text, "yellow"),
        on_poll=side.poll_status,
    )


def scaling_advice(rollout: float, learner: float, *, workers: int) -> tuple[str, str] | None:
    """Whether more or fewer workers would do, and why; from shares of idle time."""
    if learner > WAITS:
        why = f"the learner waited {learner:.0%} of the time"
        return "more rollout workers", f"{why}: more rollout workers would help"
    if learner < HARDLY_WAITS and workers > 1 and rollout > 1 / workers:
        why = f"the learner waited {learner:.0%} of the time, rollout was idle {rollout:.0%}"
        return "fewer rollout workers", f"{why}: fewer rollout workers would do"
    return None


def _start_worker(side: AsyncRolloutSide, role: Role) -> WorkerLink:
    opening = Open(
        role=role,
        config=side.config.model_dump_json(),
        path=tuple(sys.path),
        threads=share_threads(side.config),
    )
    if side.start_worker is not None:
        return side.start_worker(opening)
    return WorkerProcess(opening, side.folder / LOGS / f"{role}.log")


def share_threads(config: TrainConfig) -> int | None:
    """Half of the threads for each side on a CPU, of the workers together; None on a GPU."""
    if pick_device(config.model.device).type != "cpu":
        return None
    return max(1, torch.get_num_threads() // 2 // max(1, config.dispatch.workers))


def _worker_status(worker: ConnectedWorker) -> WorkerStatus:
    heard = worker.heard if worker.remote is None else worker.remote.heard
    return WorkerStatus(
        name=worker.name,
        version=worker.version,
        under_way=len(worker.begun),
        heard=time.monotonic() - heard,
        remote=worker.remote is not None,
        dtype=worker.dtype,
        attention=worker.attention,
    )


def _watched(groups: Sequence[Group]) -> tuple[Trajectory, ...]:
    """Trajectories with hidden states."""
    return tuple(t for group in groups for t in group.trajectories if t.hidden is not None)


def _metrics(
    batch: DispatchedBatch[Group], interval: SinceLastBatch, dispatcher: Dispatcher[Group]
) -> dict[str, float]:
    """Staleness of the learnt tokens, idle shares, buffer and drops since the step before."""
    trajectories = [t for group in batch.groups for t in group.trajectories]
    versions = np.concatenate([t.weight_version[t.loss_mask] for t in trajectories])
    staleness = batch.step - versions
    seconds = max(1e-9, time.monotonic() - interval.begun)
    figures = {
        "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": float(staleness.max(initial=0)),
        "rollout_idle": interval.rollout_idle / seconds,
        "learner_idle": interval.learner_idle / seconds,
        "loading_s": interval.loading,
        "buffer": float(len(dispatcher.buffer)),
        "under_way": float(len(dispatcher.under_way)),
        "again": float(interval.again),
        "wasted_tokens": float(interval.wasted_tokens),
        "in_flight_tokens": float(interval.in_flight_tokens),
        "replayed_groups": float(len(batch.replayed)),
    }
    dropped = {reason.replace(" ", "_"): count for reason, count in interval.dropped.items()}
    figures |= {f"dropped/{reason}": float(count) for reason, count in dropped.items()}
    return {f"async/{name}": value for name, value in figures.items()}
