"""How a policy of a team learns: in this process, or in one of its own beside the others.

    learnt = learner.learn(rollouts, schedule, version)   # log-probs, update
    learner.weights(), learner.lora                       # what samples next

A run in lock-step has `PolicyLearner`. The asynchronous one has a `LearnerProcess` for each policy:
Python runs one thread at a time, so learners in threads would hold up the engines and each other.
Messages to it are pickled, as both are one program; weights come back
in shared memory.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from sparrow.dataflow.asynchronous.workers import WeightsFile, read_weights
from sparrow.dataflow.local.messages import (
    Callbacks,
    Clock,
    LearnerBatch,
    NoCallbacks,
    RolloutBatch,
)
from sparrow.dataflow.local.run import learner_side
from sparrow.dataflow.local.sides import LearnerProtocol
from sparrow.engine.answer import ResolvedDecoding, resolve_decoding
from sparrow.models import Decoder, load, save
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.lora import Adapter
from sparrow.models.spec import ModelSpec
from sparrow.processes.supervisor import die_with_parent, with_parent
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.training.objectives.algorithms import make_algorithm
from sparrow.training.update import UpdateStats
from sparrow.training.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntBatch:
    """What became of the groups of a batch. kl: KL(new || old) of its updates, if measured."""

    batch: LearnerBatch
    updates: list[UpdateStats]
    kl: float | None
    seconds: dict[str, float]


class TeamLearner(Protocol):
    """A policy with its optimiser, as the run sees it."""

    callbacks: Callbacks

    def learn(self, rollouts: RolloutBatch, schedule: Schedule | None, version: int) -> LearntBatch:
        """Learn from groups that were sampled under a schedule; version: updates before this."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Full weights by Hugging Face names, those of an adapter merged."""

    @property
    def lora(self) -> Adapter | None:
        """The adapter that is trained in place of the weights; None: they are trained."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def save(self, model: Path, adapter: Path) -> None:
        """Write the Hugging Face folder, and PEFT's where an adapter is trained."""

    def close(self) -> None: ...


@dataclass(kw_only=True)
class PolicyLearner(TeamLearner):
    """A learner in this process."""

    side: LearnerProtocol
    decoding: ResolvedDecoding

    @classmethod
    def open(cls, config: TrainConfig, model: Decoder, dtype: torch.dtype) -> "PolicyLearner":
        """config: as of a run with this policy alone. model: what it trains, or lays LoRA over."""
        algorithm = make_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
        side = learner_side(config, model, None, dtype, algorithm, World())
        return cls(side=side, decoding=resolve_decoding(config.rollout, model.spec.family))

    @property
    def callbacks(self) -> Callbacks:
        return self.side.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Callbacks) -> None:
        self.side.callbacks = callbacks

    def learn(self, rollouts: RolloutBatch, schedule: Schedule | None, version: int) -> LearntBatch:
        decoding, clock = decoding_under(self.decoding, schedule), Clock()
        with clock("old_log_prob"):
            batch = self.side.score(rollouts, decoding)
        with clock("kl"):
            old = self.side.snapshot(batch, version)
        with clock("update_actor"):
            updates = self.side.update(batch, decoding)
        with clock("kl"):
            kl = self.side.kl(old)
        return LearntBatch(batch=batch, updates=updates, kl=kl, seconds=clock.seconds())

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.side.weights()

    @property
    def lora(self) -> Adapter | None:
        return self.side.lora

    def state(self) -> dict[str, Any]:
        return self.side.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.side.restore(state)

    def save(self, model: Path, adapter: Path) -> None:
        save(self.side.host_model(), model)
        if self.side.lora is not None:
            self.side.lora.save(adapter)

    def close(self) -> None:
        """There is nothing to close."""


def decoding_under(decoding: ResolvedDecoding, schedule: Schedule | None) -> ResolvedDecoding:
    """How tokens are sampled under a schedule of the gate, which exact decoding does not have."""
    exact = decoding.speculative is not None
    return decoding if exact else ResolvedDecoding(schedule, decoding.flow)


@dataclass(kw_only=True)
class LearnerProcess(TeamLearner):
    """A learner in a process of its own; RuntimeError if that has ended.

    Calls wait for their answer, so make them in a thread. log: a file for its output.
    """

    name: str
    config: TrainConfig
    spec: ModelSpec
    dtype: torch.dtype
    threads: int
    log: Path | None = None
    callbacks: Callbacks = field(default_factory=NoCallbacks)

    def __post_init__(self) -> None:
        own, remote = socket.socketpair()
        start = f"from {__name__} import main; main()"  # as a script, its types would be others
        words = [sys.executable, "-c", start, str(remote.fileno())]
        with remote, nullcontext(2) if self.log is None else self.log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which decides
                pass_fds=[remote.fileno()],
                env=with_parent(dict(os.environ)),
            )
        self.pid = self._process.pid
        self._connection, self._calling = Connection(own.detach()), threading.Lock()
        config = self.config.model_dump_json()
        self._connection.send_bytes(pickle.dumps((sys.path, config, self.dtype, self.threads)))

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._calling:
            try:
                self._connection.send_bytes(pickle.dumps((name, arguments)))
                result = pickle.loads(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                see = "" if self.log is None else f"; see {self.log}"
                code = self._process.returncode
                text = f"policy {self.name}: its learner ended with code {code}{see}"
                raise RuntimeError(text) from error
        if isinstance(result, BaseException):
            raise result
        return result

    def learn(self, rollouts: RolloutBatch, schedule: Schedule | None, version: int) -> LearntBatch:
        learnt: LearntBatch = self._call("learn", rollouts, schedule, version)
        return learnt

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(read_weights(self._call("weights")))

    @property
    def lora(self) -> Adapter | None:
        if not self.config.model.lora.on:
            return None
        file, scaling = self._call("lora")
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        return Adapter.from_state(self.spec, dict(read_weights(file)), **scaling, **kind)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call("state")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self._call("restore", state)

    def save(self, model: Path, adapter: Path) -> None:
        self._call("save", model, adapter)

    def close(self) -> None:
        """End the process; whoever waits for it gets an error."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._calling:
            self._connection.close()


class _Served:
    """The other end of a `LearnerProcess`: calls in, answers or exceptions out."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        path, text, dtype, threads = pickle.loads(connection.recv_bytes())
        sys.path[:] = path
        torch.set_num_threads(threads)
        config = TrainConfig.model_validate_json(text)
        device = pick_device(config.model.device)
        kept = pick_dtype(config.model.dtype, device, {}) if config.model.lora.on else torch.float32
        model = load(config.model.name, dtype=kept, device=device)
        self._learner, self._dtype = PolicyLearner.open(config, model, dtype), dtype
        self._file: WeightsFile | None = None

    def serve(self) -> None:
        while True:
            name, arguments = pickle.loads(self._connection.recv_bytes())
            own = {"weights": self._weights, "lora": self._lora}
            try:
                answer = own.get(name, getattr(self._learner, name, None))(*arguments)  # type: ignore[misc]
            except Exception as error:  # raised again where it was asked for
                traceback.print_exc()
                answer = _portable(error)
            self._connection.send_bytes(pickle.dumps(answer))

    def _weights(self) -> str:
        return self._written(self._learner.weights(), self._dtype)

    def _lora(self) -> tuple[str, dict[str, Any]]:
        adapter = self._learner.lora
        assert adapter is not None
        tensors = {name: tensor.detach() for name, tensor in adapter.tensors().items()}
        return self._written(tensors, None), {"alpha": adapter.alpha, "rslora": adapter.rslora}

    def _written(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> str:
        """Tensors in shared memory, which are read before the next call."""
        if self._file is None:
            self._file = WeightsFile(tensors, 0, dtype)
        else:
            self._file.rewrite(tensors, 0, dtype)
        return self._file.path


def _portable(error: Exception) -> Exception:
    """The exception, or what it says where it is of a kind that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of a user's own class: whatever that does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with suppress(EOFError):  # the run has ended
        _Served(Connection(int(sys.argv[1]))).serve()
