"""Workers as the coordinator sees them: processes of this machine, and links to others."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from sparrow.dataflow.asynchronous.messages import Open, Role, receive, send
from sparrow.dataflow.asynchronous.prompt_ledger import Lease
from sparrow.processes.supervisor import with_parent
from sparrow.schema.base import Record

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
STALLED_SECONDS = 60.0  # in the middle of a message, before a worker counts as lost


class WorkerLost(Exception):
    """The process has ended, or no longer speaks the language."""


class WorkerLink(Protocol):
    """A line to a worker, on this machine or another."""

    role: Role
    connection: socket.socket  # readable where a message waits

    def send(self, message: Record) -> None:
        """WorkerLost if it is gone."""

    def receive(self) -> Record:
        """WorkerLost: it is gone. ValueError: what it sent is no message."""

    def close(self) -> None: ...


StartWorker = Callable[[Open], WorkerLink]


class RemoteLink(WorkerLink, Protocol):
    """A line to a worker on another machine. heard: when it last asked for messages."""

    heard: float


@dataclass(kw_only=True)
class ConnectedWorker:
    """A worker with what the coordinator knows of it."""

    name: str
    link: WorkerLink
    remote: RemoteLink | None = None  # the link, if the worker is on another machine
    room: float = 1.0  # groups that it decodes at once
    is_open: bool = False  # it can load weights
    version: int | None = None  # of its weights; None: not known yet
    sent: int = -1  # the newest version that it was sent
    heard: float = field(default_factory=time.monotonic)  # from it, or it was started
    begun: dict[int, tuple[Lease, float]] = field(default_factory=dict)  # groups, and since when
    unanswered: set[int] = field(default_factory=set)  # leases, those aborted included
    crashes: int = 0  # in a row, without a group or an evaluation in between
    refused: int = 0  # messages
    dtype: str = ""
    attention: str = ""  # its own; "": as the gate says
    differs: bool = False  # it samples in another way than the gate's schedule says

    @property
    def load(self) -> float:
        """Groups under way, as a share of those that it decodes at once."""
        return len(self.begun) / self.room


class WorkerProcess:
    """One worker with its connection; its output goes to a log file, or to stderr."""

    pid: int

    def __init__(self, opening: Open, log: Path | None) -> None:
        self.role, self.log = opening.role, log
        self.connection, remote = socket.socketpair()
        self.connection.settimeout(STALLED_SECONDS)
        words = [sys.executable, "-m", "sparrow.dataflow.asynchronous.worker", str(remote.fileno())]
        with remote, nullcontext(2) if log is None else log.open("ab") as output:
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
        self.send(opening)

    def send(self, message: Record) -> None:
        try:
            send(self.connection, message)
        except OSError as error:
            with suppress(OSError):  # part of a message may be sent: nothing may follow it
                self.connection.shutdown(socket.SHUT_RDWR)
            raise WorkerLost(self._ending(error)) from error

    def receive(self) -> Record:
        try:
            return receive(self.connection)
        except (OSError, EOFError, ValueError) as error:
            raise WorkerLost(self._ending(error)) from error

    def _ending(self, error: Exception) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        see = "" if self.log is None else f"; see {self.log}"
        return str(error) if code is None else f"it ended with code {code}{see}"

    def close(self) -> None:
        """End the process and everything that it has started."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ready(workers: Iterable[ConnectedWorker], seconds: float) -> Iterator[ConnectedWorker]:
    """Wait for messages; yield the workers that have sent one."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.link.connection, selectors.EVENT_READ, worker)
        for key, _ in selector.select(seconds):
            yield key.data


class WeightsFile:
    """Weights of one version for other processes, in memory; gone with this process.

    A file without a name, which children of the same user open through /proc; where the system has
    none, a temporary one. Tensors of a device are copied straight into it. Fresh memory costs most
    of the time of writing gigabytes: `rewrite` uses that of a version which nobody reads any more.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], version: int, dtype: torch.dtype | None = None
    ) -> None:
        self._temporary: Path | None = None
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create(f"sparrow weights {version}")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(suffix=".safetensors")
            self._temporary = Path(self.path)
        self.rewrite(weights, version, dtype)

    def rewrite(
        self, weights: Mapping[str, torch.Tensor], version: int, dtype: torch.dtype | None = None
    ) -> None:
        """Write a safetensors file in one pass; dtype: of all tensors, if not their own."""
        self.version = version
        header, end = dict[str, Any](), 0
        items = sorted(weights.items(), key=lambda item: -item[1].itemsize)  # aligned, then
        for name, weight in items:
            stored = dtype or weight.dtype
            start, end = end, end + weight.numel() * stored.itemsize
            span = {"shape": [*weight.shape], "data_offsets": [start, end]}
            header[name] = {"dtype": _NAMES[stored], **span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        os.ftruncate(self._descriptor, len(head) + end)
        data = torch.frombuffer(mmap(self._descriptor, len(head) + end), dtype=torch.uint8)
        data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for name, weight in items:
            start, end = (len(head) + offset for offset in header[name]["data_offsets"])
            cast = weight.to(dtype or weight.dtype)  # on its device: copy_ converts on the CPU
            data[start:end].view(cast.dtype).view(weight.shape).copy_(cast)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)


def read_weights(file: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file by name."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            yield name, opened.get_tensor(name)
