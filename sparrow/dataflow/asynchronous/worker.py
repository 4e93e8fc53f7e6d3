"""The worker process: the rollout side of a run, answering prompts as they come.

A script that workers.py starts, with its connection as the only argument. It answers many prompts
at once, loads new weights between two steps of the engine, and ends when its parent does. One with
the role of evaluation answers the held-out rows instead, each time with the weights of a step. The
parent is the run, or `sparrow worker` on another machine, where weights come as deltas.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import torch

from sparrow.dataflow.asynchronous.messages import (
    LENGTHS_BYTES,
    AbortGroup,
    EvaluateStep,
    EvaluationEnded,
    GroupEnded,
    GroupFailed,
    LoadWeights,
    Open,
    Opened,
    StartGroup,
    WeightsLoaded,
    WorkerFailed,
    decode,
    encode,
    frame_lengths,
    receive,
    send,
)
from sparrow.dataflow.asynchronous.workers import read_weights
from sparrow.dataflow.backend import EngineBackend, Sampler
from sparrow.dataflow.local.messages import FAILED, EpisodeFailed, RolloutRequest, Unjudged
from sparrow.dataflow.local.rollout import PromptSlot, RolloutSide
from sparrow.dataflow.local.run import open_rollout_side
from sparrow.engine.answer import ResolvedDecoding, resolve_decoding
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.models import model_identity
from sparrow.models.deltas import Delta
from sparrow.processes.supervisor import die_with_parent
from sparrow.schema.base import Record
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import Judge


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    opening = receive(connection)
    assert isinstance(opening, Open)
    try:
        side = open_side(opening)
    except (ValueError, OSError, ImportError) as error:
        send(connection, WorkerFailed(reason=f"{error}", fatal=True))
        if opening.remote:  # `sparrow worker` says the reason; a traceback is for log files
            sys.exit(2)
        raise
    try:
        own = own_decoding(side) if opening.own_decoding else None
        send(connection, opened(side, opening, own))
        if opening.role == "evaluation":
            evaluate_steps(side, connection)
        else:
            asyncio.run(_serve(RolloutWorker(side, own), connection))
    finally:
        side.close()


def open_side(opening: Open, judge: Judge | None = None) -> RolloutSide:
    """The rollout side that a message describes. judge: in place of the configuration's."""
    sys.path[:] = opening.path
    if opening.threads is not None:
        torch.set_num_threads(opening.threads)
    config = TrainConfig.model_validate_json(opening.config)
    if opening.role == "evaluation":  # servers have the weights of the rollout
        config = config.replace(rollout=config.rollout.replace(url=(), fixed_weights=False))
    return open_rollout_side(config, judge=judge)


async def _serve(worker: "RolloutWorker", connection: socket.socket) -> None:
    await worker.serve(await SocketChannel.open(connection))


class Channel(Protocol):
    """Messages to and from a rollout worker, and the weights that they mean."""

    async def receive(self) -> Record: ...

    async def send(self, message: Record) -> None: ...

    def weights(self, message: LoadWeights) -> Mapping[str, torch.Tensor]:
        """Weights by Hugging Face names; called in a thread."""


class SocketChannel:
    """Messages over a connection to the parent, weights in files."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=connection))

    async def receive(self) -> Record:
        reader = self._reader
        try:
            text, blob = frame_lengths(await reader.readexactly(LENGTHS_BYTES))
            return decode(await reader.readexactly(text), await reader.readexactly(blob))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the parent has gone

    async def send(self, message: Record) -> None:
        self._writer.write(encode(message))
        await self._writer.drain()

    def weights(self, message: LoadWeights) -> Mapping[str, torch.Tensor]:
        return dict(read_weights(message.file))


def opened(side: RolloutSide, opening: Open, own: ResolvedDecoding | None) -> Opened:
    of_remote = {}
    if opening.remote:
        engine = _engine(side)
        dtype = str(engine.model.dtype).removeprefix("torch.")
        of_remote = {"dtype": dtype, "digest": f"{engine.digest():016x}"}
        of_remote["model"] = model_identity(engine.model)
    return Opened(
        header=side.backend.header(),
        isolation=getattr(side.judge, "isolation", None),
        running=side.backend.max_running,
        attention="" if own is None else own.describe(),
        **of_remote,
    )


def own_decoding(side: RolloutSide) -> ResolvedDecoding:
    return resolve_decoding(side.config.rollout, _engine(side).model.spec.family)


def _engine(side: RolloutSide) -> Engine:
    assert isinstance(side.backend, EngineBackend), "the only backend of workers elsewhere"
    return side.backend.engine


class RolloutWorker:
    """Answers prompts by the rollout side, one task for each. own: not as each prompt says."""

    def __init__(self, side: RolloutSide, own: ResolvedDecoding | None = None) -> None:
        self.side, self._own = side, own
        self._groups: dict[int, asyncio.Task[None]] = {}  # by lease
        self._loading = asyncio.Lock()  # weights are loaded in the order of their messages
        self._verdicts: Counter[str] = Counter()  # that were sent

    async def serve(self, channel: Channel) -> None:
        """Do what the messages say."""
        self._channel = channel
        async with self.side.backend.serving() as sampler, asyncio.TaskGroup() as self._tasks:
            while True:  # a task that raises ends the worker, and so the loop
                self._begin(sampler, await channel.receive())

    def _begin(self, sampler: Sampler, message: Record) -> None:
        if isinstance(message, StartGroup):
            task = self._tasks.create_task(self._answer(sampler, message))
            self._groups[message.lease] = task
            task.add_done_callback(lambda _: self._groups.pop(message.lease, None))
        elif isinstance(message, AbortGroup):
            if (aborted := self._groups.get(message.lease)) is not None:
                aborted.cancel()
        elif isinstance(message, LoadWeights):
            self._tasks.create_task(self._load(sampler, message))
        else:
            raise ValueError(f"not a message to a worker: {type(message).__name__}")

    async def _answer(self, sampler: Sampler, start: StartGroup) -> None:
        side = self.side
        request = RolloutRequest(
            step=start.version,
            position=start.position,
            schedule=start.schedule if self._own is None else self._own.schedule,
            prompts=1,
            samples=side.config.rollout.samples,
            watched=start.watched,
        )
        slot = PromptSlot(side.rows.at(start.position), start.position, start.watched)
        try:
            group = await side.answer(request, sampler, slot)
        except EpisodeFailed as error:
            await self._channel.send(GroupFailed(lease=start.lease, reason=str(error)[:2000]))
            return
        counts = Counter(getattr(side.judge, "counts", {}))
        verdicts, self._verdicts = counts - self._verdicts, counts
        fault = getattr(side.judge, "last_fault", "") if verdicts.keys() & {*FAILED} else ""
        ended = GroupEnded(lease=start.lease, group=group, verdicts=dict(verdicts), fault=fault)
        await self._channel.send(ended)

    async def _load(self, sampler: Sampler, message: LoadWeights) -> None:
        async with self._loading:
            begun, version, state = time.monotonic(), message.version, ""
            if message.delta:
                delta = await asyncio.to_thread(lambda: Delta.decode(_take(Path(message.file))))
                tokens, state = await _apply(sampler, delta, message), f"{delta.digest:016x}"
            else:
                weights = await asyncio.to_thread(self._channel.weights, message)
                tokens = await sampler.update(weights, version=version, in_flight=message.in_flight)
            seconds = time.monotonic() - begun
            await self._channel.send(
                WeightsLoaded(version=version, seconds=seconds, tokens=tokens, digest=state)
            )


async def _apply(sampler: Sampler, delta: Delta, message: LoadWeights) -> int:
    """Lead the engine to a version; one that it has already, with other weights, is replaced."""
    assert isinstance(sampler, AsyncEngine), "the only backend of workers elsewhere"

    def apply(engine: Engine) -> int:
        reset = delta.version == engine.version
        return engine.apply_delta(delta, in_flight=message.in_flight, reset=reset)

    return await sampler.run(apply)


def _take(file: Path) -> bytes:
    """Read a file that nobody needs afterwards."""
    data = file.read_bytes()
    file.unlink()
    return data


def evaluate_steps(side: RolloutSide, connection: socket.socket) -> None:
    """Answer the held-out rows with the weights of each step that is asked for."""
    with suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            message = receive(connection)
            assert isinstance(message, EvaluateStep)
            weights = dict(read_weights(message.file)) if message.file else None
            ended = evaluate_step(side, message, weights)
            send(connection, ended)
            if isinstance(ended, WorkerFailed):
                return


def evaluate_step(
    side: RolloutSide, message: EvaluateStep, weights: Mapping[str, torch.Tensor] | None
) -> EvaluationEnded | WorkerFailed:
    """Answer the held-out rows; weights: None if the engine has those of the step."""
    if weights is not None:
        side.backend.sync_weights(weights, version=message.step)
    try:
        evaluation = side.evaluate(message.schedule)
    except Unjudged as error:
        return WorkerFailed(reason=str(error), fatal=True)
    return EvaluationEnded(step=message.step, evaluation=evaluation)


if __name__ == "__main__":
    main()
