"""Training on a Ray cluster: learner ranks, rollout workers and judges as actors.

    driver (`sparrow train`)  --> learner ranks           one placement group, FSDP2 between them
    the first learner rank    --> the evaluation worker   in the group of the ranks
                              --> rollout workers         a placement group each, with its judge

Ray says where each of them runs and when one has ended. What they say to each other is what they
say without Ray: messages of asynchronous/messages.py, torch.distributed between ranks. Weights go
through Ray's object store as numpy arrays, one copy for all workers of a machine.

**When one ends.** A rollout worker is replaced as soon as the cluster has room for it, its prompts
are dispatched again (coordinator.py): workers that have no room wait, so a machine that joins gets
them. A judge is restarted by Ray, and asked again. If a learner rank ends, all ranks start again
from the last checkpoint.

Ray unpickles what actors send each other, and whoever reaches its ports can run code: a cluster is
one trust boundary. This is the only file that imports ray.
"""

import asyncio
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address, placement_group_table
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sparrow.dataflow.asynchronous.messages import (
    EvaluateStep,
    LoadWeights,
    Open,
    WorkerFailed,
    decode_frame,
    encode,
)
from sparrow.dataflow.asynchronous.worker import (
    RolloutWorker,
    evaluate_step,
    open_side,
    opened,
)
from sparrow.dataflow.asynchronous.workers import WorkerLost, read_weights
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import Callbacks, NoCallbacks
from sparrow.dataflow.local.run import open_run
from sparrow.dataflow.placement import (
    Resources,
    actor_resources,
    count_actors,
    describe_resources,
)
from sparrow.dataflow.stopping import SIGNALS, GracefulShutdown
from sparrow.models.deltas import DTYPES
from sparrow.schema.base import Record
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import Report
from sparrow.tasks.base import Example, FailedVerdict, Verdict
from sparrow.tasks.choosing import open_judge, open_rows
from sparrow.tasks.judging import CountingJudge, failed_verdict

LOCAL = "local"  # value of run.ray: a cluster of this machine, for the time of the run
POLL_SECONDS = 0.3
CONNECT_SECONDS = 10.0
GRACE_SECONDS = 90.0  # for Ray to notice that a machine has ended, after a rank has noticed
SLOW_SECONDS = 30.0  # without room for the ranks, before it is reported
MOST_RESTARTS = 5  # of the ranks, without a step in between
KEPT = 2  # versions of weights in the object store; an earlier one is put there again
JUDGE_RETRIES = 3  # of a verdict, while its judge is restarted

Arrays = dict[str, tuple[str, np.ndarray]]  # dtype and bits, by the name of a tensor


class RankLost(Exception):
    """The process or the machine of a learner rank has ended."""


# The driver.


def train_on_ray(
    config: TrainConfig,
    *,
    callbacks: Callbacks | None = None,
    stopping: GracefulShutdown | None = None,
    report: Report = lambda text: None,
) -> Path:
    """Train on a cluster and return the folder of the model; started again, it resumes.

    All machines need the run's folder, the model and the data under the same paths.
    """
    with _cluster(config, report):
        if config.model.device == "auto":  # of the cluster, not of the driver's machine
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
            config = config.replace(model=config.model.replace(device=device))
        shown = callbacks or NoCallbacks()
        return _Driver(config, shown, stopping or GracefulShutdown(), report).train()


@contextmanager
def _cluster(config: TrainConfig, report: Report) -> Iterator[None]:
    """Connect to the cluster, or start one of this machine that has room for all actors."""
    address, settings = config.run.ray, dict[str, Any]()
    if address == LOCAL:
        each = actor_resources(config)
        needed = sum(n * each[role]["CPU"] for role, n in count_actors(config).items())
        cpus = max(os.cpu_count() or 1, int(needed))
        settings = {"address": LOCAL, "num_cpus": cpus, "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        _require_reachable(str(address))
        settings = {"address": address}
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    try:
        ray.init(**settings, log_to_driver=False, configure_logging=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"run.ray: no cluster at {address}: {error}") from error
    for number, handler in handlers.items():  # it sets its own
        signal.signal(number, handler)
    nodes = sum(node["Alive"] for node in ray.nodes())
    report(f"Ray cluster of {nodes} machines: {describe_resources(ray.cluster_resources())}")
    try:
        yield
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """ValueError for an address where nobody listens; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto: it finds out by itself
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"run.ray: no cluster at {address}: {error}") from error


class _Driver:
    def __init__(
        self, config: TrainConfig, callbacks: Callbacks, stopping: GracefulShutdown, report: Report
    ) -> None:
        self.config, self.callbacks = config, callbacks
        self.stopping, self.report = stopping, report
        self.name = f"sparrow-{os.getpid()}-{time.time_ns():x}"  # of its placement groups
        self.furthest = -1  # step that was shown

    def train(self) -> Path:
        """Start the ranks, again where one was lost, until they have ended."""
        restarts = 0
        while True:
            before = self.furthest
            try:
                return self._attempt()
            except RankLost as error:
                restarts = 1 if self.furthest > before else restarts + 1
                if restarts > MOST_RESTARTS:
                    raise ValueError(f"the learner was lost {restarts} times: {error}") from error
                text = f"{error}; all ranks start again from the last checkpoint"
                self.callbacks.event(text, "yellow")

    def _attempt(self) -> Path:
        ranks, roles = self.config.run.ranks, actor_resources(self.config)
        each, held = roles["learner"], count_actors(self.config).get("evaluation", 0)
        bundles = [each] * ranks + [roles["evaluation"]] * held
        group = placement_group(bundles, strategy="PACK", name=self.name)
        actors = list[ActorHandle]()
        try:
            self._wait_for(group)
            for rank in range(ranks):
                where = PlacementGroupSchedulingStrategy(group, rank)
                actors.append(_actor(_LearnerRank, each, where, max_concurrency=4).remote())
            try:
                host, port = _get(actors[0].rendezvous.remote())
            except RayError as error:
                raise RankLost(f"learner rank 0 ended: {_short(error)}") from error
            shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            text, place = self.config.model_dump_json(), (os.getcwd(), sys.path)
            refs = [
                actor.train.remote(text, self.name, place, {**shared, "RANK": str(rank)})
                for rank, actor in enumerate(actors)
            ]
            return Path(self._watch(actors, refs))
        finally:
            for actor in actors:
                ray.kill(actor)
            self._remove_groups()

    def _wait_for(self, group: PlacementGroup) -> None:
        begun, told = time.monotonic(), False
        while not group.wait(POLL_SECONDS):
            if self.stopping.requested:
                raise KeyboardInterrupt  # nothing has begun that could be saved
            if not told and time.monotonic() - begun > SLOW_SECONDS:
                told, has = True, describe_resources(ray.available_resources())
                wanted = " + ".join(map(describe_resources, group.bundle_specs))
                text = f"waiting for room for the learner, {wanted}: free {has}"
                self.callbacks.event(text, "yellow")

    def _watch(self, actors: Sequence[ActorHandle], refs: Sequence[Any]) -> str:
        """Show what the first rank shows; return its result when all have ended."""
        told = False
        while True:
            done, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=POLL_SECONDS)
            self._show(actors[0])
            if self.stopping.requested and not told:
                told = True
                for actor in actors:
                    actor.stop.remote()
            if not waiting or any(isinstance(_outcome(ref), Exception) for ref in done):
                ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_SECONDS)
                self._show(actors[0])
                return self._result(refs)

    def _result(self, refs: Sequence[Any]) -> str:
        ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        outcomes = {rank: _outcome(ref) for rank, ref in enumerate(refs) if ref in ended}
        if isinstance(outcomes.get(0), str):  # the others have nothing left to do
            return str(outcomes[0])
        for rank, outcome in outcomes.items():
            if isinstance(outcome, RayError) and not isinstance(outcome, RayTaskError):
                raise RankLost(f"learner rank {rank} ended: {_short(outcome)}")
        for outcome in outcomes.values():
            if isinstance(outcome, RayTaskError):
                raise outcome.cause if isinstance(outcome.cause, Exception) else outcome
        raise RankLost("no learner rank has a result")

    def _show(self, first: ActorHandle) -> None:
        with suppress(RayError):  # its end is seen elsewhere
            for name, words in _get(first.calls.remote()):
                if name == "report":
                    self.report(*words)
                    continue
                if name == "step":
                    self.furthest = max(self.furthest, int(words[0]["step"]))
                getattr(self.callbacks, name)(*words)

    def _remove_groups(self) -> None:
        """Those of workers too, whose owner may have ended without a word."""
        for entry in placement_group_table().values():
            if entry["name"].startswith(self.name) and entry["state"] != "REMOVED":
                with suppress(ValueError, RayError):
                    remove_placement_group(get_placement_group(entry["name"]))


def _get(ref: Any) -> Any:
    return ray.get(ref)


def _actor(
    kind: type, each: Resources, where: PlacementGroupSchedulingStrategy, **options: Any
) -> Any:
    """A class whose `remote` makes an actor in a bundle of a placement group."""
    given = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
    return ray.remote(kind).options(**given, scheduling_strategy=where, **options)


def _outcome(ref: Any) -> Any:
    try:
        return _get(ref)
    except RayError as error:
        return error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _last_line(error: Exception) -> str:
    """What a traceback says."""
    return str(error).strip().rpartition("\n")[2]


# Learner ranks.


class _QueuedCallbacks(Callbacks):
    """Callbacks that wait until the driver takes them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=10_000)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        if self.waiting and self.waiting[-1][0] == "phase":
            self.waiting.pop()
        self.waiting.append(("phase", (name, done, total)))

    def step(self, metrics: Mapping[str, float]) -> None:
        self.waiting.append(("step", (dict(metrics),)))

    def event(self, text: str, style: str = "") -> None:
        self.waiting.append(("event", (text, style)))

    def report(self, text: str) -> None:
        self.waiting.append(("report", (text,)))


class _LearnerRank:
    """Trains in one of several threads, so that it can be asked meanwhile."""

    def __init__(self) -> None:
        self._stopping, self._calls = GracefulShutdown(), _QueuedCallbacks()

    def rendezvous(self) -> tuple[str, int]:
        """Host and port where the ranks meet."""
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return host, server.getsockname()[1]

    def train(
        self, text: str, name: str, place: tuple[str, list[str]], environment: dict[str, str]
    ) -> str:
        os.environ.update(environment, LOCAL_RANK="0")  # Ray shows a rank its own GPU alone
        _enter(*place)
        config, first = TrainConfig.model_validate_json(text), environment["RANK"] == "0"
        weights = _StoredWeights()
        with open_run(
            config,
            callbacks=self._calls if first else None,
            stopping=self._stopping,
            report=self._calls.report if first else None,
            start_worker=lambda opening: RayWorker(
                opening, weights, name, lambda text: self._calls.event(text, "yellow")
            ),
        ) as run:
            if first:
                for line in run.header():
                    self._calls.event(line)
            return str(train(run))

    def stop(self) -> None:
        self._stopping.requested = True

    def calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        calls, waiting = [], self._calls.waiting
        while waiting:
            calls.append(waiting.popleft())
        return calls


def _enter(folder: str, path: Sequence[str]) -> None:
    """Go where the driver is: relative paths and code are the same for all actors."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise ValueError(
            f"run.ray: {socket.gethostname()} has no {folder}, where the run was started; start it "
            "in a folder that all machines share"
        ) from error
    sys.path[:] = path


# Rollout workers, as the first rank sees them.


class _StoredWeights:
    """Versions of the weights in Ray's object store, each put there once."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}  # by version: names of files are used again

    def ref(self, version: int, file: str) -> Any:
        if version not in self._refs:
            arrays: Arrays = {
                name: (str(tensor.dtype).removeprefix("torch."), _to_array(tensor))
                for name, tensor in read_weights(file)
            }
            kept = list(self._refs.items())[-(KEPT - 1) :]
            self._refs = {**dict(kept), version: ray.put(arrays)}
        return self._refs[version]


def _version(message: LoadWeights | EvaluateStep) -> int:
    return message.version if isinstance(message, LoadWeights) else message.step


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array of integers: numpy has no bfloat16, and Ray no fast way for tensors."""
    size = tensor.element_size()
    return tensor.view({2: torch.int16, 4: torch.int32}[size]).numpy()


def _to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Tensors that share memory with Ray's object store; they must not be written."""
    return {
        name: torch.from_numpy(bits).view(DTYPES[dtype]) for name, (dtype, bits) in arrays.items()
    }


class RayWorker:
    """A link to a worker actor, with a judge of its own beside it (`WorkerLink`).

    The placement group of a rollout worker waits until the cluster has room for it; the worker of
    the held-out rows has a bundle in the group of the learner, so that rollouts cannot take its
    place.
    """

    def __init__(self, opening: Open, weights: _StoredWeights, name: str, report: Report) -> None:
        self.role, self._weights, self._report = opening.role, weights, report
        self.connection, self._signal = socket.socketpair()
        self._messages = queue.SimpleQueue[Record | WorkerLost]()
        config = TrainConfig.model_validate_json(opening.config)
        each, place = actor_resources(config), os.getcwd()
        self._sent, self._judge = 0, None
        if self.role == "rollout":
            bundles, name = [each[self.role], each["judge"]], f"{name}-{time.time_ns():x}"
            self._group = placement_group(bundles, strategy="STRICT_PACK", name=name)
            options = {"max_restarts": -1, "max_task_retries": JUDGE_RETRIES}
            where = PlacementGroupSchedulingStrategy(self._group, 1)
            judges = _actor(_JudgeActor, each["judge"], where, **options)
            self._judge = judges.remote(encode(opening), place)
            bundle = 0
        else:
            self._group, bundle = get_placement_group(name), config.run.ranks
        where = PlacementGroupSchedulingStrategy(self._group, bundle)
        workers = _actor(_WorkerActor, each[self.role], where)
        self._worker = workers.remote(encode(opening), self._judge, place)
        threading.Thread(target=self._listen, name="sparrow-ray-worker", daemon=True).start()

    def _listen(self) -> None:
        """Put the messages of the actor where the coordinator finds them, until it ends."""
        with suppress(RayError):  # seen below
            if not self._group.wait(SLOW_SECONDS):
                needed = " and ".join(map(describe_resources, self._group.bundle_specs))
                self._report(f"a {self.role} worker waits until a machine has {needed} free")
        while True:
            try:
                found = [decode_frame(frame) for frame in ray.get(self._worker.messages.remote())]
            except Exception as error:  # of a thread: handed to the coordinator, or it is lost
                self._messages.put(WorkerLost(_short(error)))
                self._notify()
                return
            for message in found:
                self._messages.put(message)
                self._notify()

    def _notify(self) -> None:
        with suppress(OSError):  # closed meanwhile
            self._signal.send(b"!")

    def send(self, message: Record) -> None:
        weights = None
        if isinstance(message, LoadWeights | EvaluateStep) and message.file:
            weights = self._weights.ref(_version(message), message.file)
        # Its end is seen by the listener. Calls may overtake each other, so they have numbers.
        self._worker.send.remote(self._sent, encode(message), weights)
        self._sent += 1

    def receive(self) -> Record:
        self.connection.recv(1)
        message = self._messages.get_nowait()
        if isinstance(message, WorkerLost):
            raise message
        return message

    def close(self) -> None:
        with suppress(RayError):
            ray.kill(self._worker)
            if self._judge is not None:
                ray.kill(self._judge)
                remove_placement_group(self._group)
        self.connection.close()
        self._signal.close()


# Workers and judges, in their own processes.


class _ActorChannel:
    """Messages of a worker actor (`Channel`), weights in the object store."""

    def __init__(self) -> None:
        self.arriving = asyncio.Queue[Record]()
        self.leaving = asyncio.Queue[bytes]()
        self.stored: dict[int, Arrays] = {}  # weights by version

    async def receive(self) -> Record:
        return await self.arriving.get()

    async def send(self, message: Record) -> None:
        await self.leaving.put(encode(message))

    def weights(self, message: LoadWeights) -> Mapping[str, torch.Tensor]:
        return _to_tensors(self.stored.pop(message.version))


class _WorkerActor:
    """A rollout worker, or the one that answers the held-out rows."""

    def __init__(self, opening: bytes, judge: ActorHandle | None, folder: str) -> None:
        message = decode_frame(opening)
        assert isinstance(message, Open)
        self._opening, self._judge, self._folder = message, judge, folder
        self._channel = _ActorChannel()
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[Record, Arrays | None]] = {}  # by number
        self._taken = 0

    async def messages(self) -> list[bytes]:
        """Wait for messages of the worker."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        leaving = self._channel.leaving
        return [await leaving.get(), *(leaving.get_nowait() for _ in range(leaving.qsize()))]

    async def send(self, number: int, frame: bytes, weights: Arrays | None) -> None:
        """Take a message in the order of their numbers."""
        self._waiting[number] = decode_frame(frame), weights
        while self._taken in self._waiting:
            message, weights = self._waiting.pop(self._taken)
            self._taken += 1
            if weights is not None and isinstance(message, LoadWeights | EvaluateStep):
                self._channel.stored[_version(message)] = weights
            self._channel.arriving.put_nowait(message)

    async def _run(self) -> None:
        """Work until it is killed, or say why it ends."""
        try:
            await self._serve()
        except Exception as error:  # of user code too: the coordinator reports it
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            reason = f"{type(error).__name__}: {_short(error)}"
            await self._channel.send(WorkerFailed(reason=reason, fatal=False))
            await asyncio.Event().wait()  # until it is killed

    async def _serve(self) -> None:
        channel, opening = self._channel, self._opening
        judge = None if self._judge is None else RayJudge(self._judge)
        try:
            _enter(self._folder, opening.path)
            if self._judge is not None:
                await self._judge.ready.remote()
            side = open_side(opening, judge)
        except (ValueError, OSError, ImportError, RayActorError) as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise
            await channel.send(WorkerFailed(reason=_last_line(error), fatal=True))
            await asyncio.Event().wait()  # until it is killed
            return
        await channel.send(opened(side, opening, None))
        if opening.role == "rollout":
            await RolloutWorker(side).serve(channel)
        while True:
            message = await channel.receive()
            assert isinstance(message, EvaluateStep)
            stored = channel.stored.pop(message.step, None)
            weights = None if stored is None else _to_tensors(stored)
            await channel.send(await asyncio.to_thread(evaluate_step, side, message, weights))


class _JudgeActor:
    """Verdicts for a rollout worker, by a reward function in processes that can be killed."""

    def __init__(self, frame: bytes, folder: str) -> None:
        opening = decode_frame(frame)
        assert isinstance(opening, Open)
        _enter(folder, opening.path)
        config = TrainConfig.model_validate_json(opening.config)
        self._judge = open_judge(config.data, open_rows(config.data, seed=config.run.seed))

    def ready(self) -> None:
        """Whether it could be made."""

    async def verdict(self, example: dict[str, Any], text: str) -> tuple[str, tuple[Any, ...]]:
        """The kind of fault, or "", and the verdict."""
        verdict = await self._judge(Example(**example), text)
        fault = verdict.fault if isinstance(verdict, FailedVerdict) else ""
        return fault, tuple(verdict)


class RayJudge(CountingJudge):
    """Verdicts by a judge actor; one that is restarted is asked again."""

    isolation = "Ray actor"

    def __init__(self, actor: ActorHandle) -> None:
        super().__init__()
        self._actor = actor

    async def __call__(self, example: Example, text: str) -> Verdict:
        try:
            fault, verdict = await self._actor.verdict.remote(asdict(example), text)
        except RayTaskError as error:
            raise ValueError(f"the judge: {_short(error.cause or error)}") from error
        except RayError as error:
            return self._count(failed_verdict(f"the judge ended: {_short(error)}", "crashes"))
        return self._count(failed_verdict(verdict[2], fault) if fault else Verdict(*verdict))
