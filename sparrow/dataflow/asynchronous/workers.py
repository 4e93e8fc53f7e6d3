"""Worker processes, as their parent sees them: started, spoken to, killed, started again."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save

from sparrow.dataflow.asynchronous.messages import Open, receive, send
from sparrow.processes.supervisor import with_parent
from sparrow.schema.base import Record

STALLED_SECONDS = 60.0  # in the middle of a message, before a worker counts as lost


class WorkerLost(Exception):
    """The process has ended, or no longer speaks the language."""


class WorkerProcess:
    """One worker with its connection; its output goes to a log file."""

    def __init__(self, opening: Open, log: Path) -> None:
        self.role, self.log = opening.role, log
        self.connection, remote = socket.socketpair()
        self.connection.settimeout(STALLED_SECONDS)
        words = [sys.executable, "-m", "sparrow.dataflow.asynchronous.worker", str(remote.fileno())]
        with remote, log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which decides
                pass_fds=[remote.fileno()],
                env=with_parent(dict(os.environ)),
            )
        self.send(opening)

    @property
    def pid(self) -> int:
        return self._process.pid

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
        return str(error) if code is None else f"it ended with code {code}; see {self.log}"

    def close(self) -> None:
        """End the process and everything that it has started."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ready(workers: Iterable[WorkerProcess], seconds: float) -> Iterator[WorkerProcess]:
    """Wait for messages; yield the workers that have sent one."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.connection, selectors.EVENT_READ, worker)
        for key, _ in selector.select(seconds):
            yield key.data


class WeightsFile:
    """Weights of one version for other processes, in memory; gone with this process.

    A file without a name, which children of the same user open through /proc; where the system has
    none, a temporary one.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.version = version
        # Names may be views of one tensor, which the format refuses.
        parts = {name: weight.contiguous().clone() for name, weight in weights.items()}
        self._temporary: Path | None = None
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create(f"sparrow weights {version}")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(suffix=".safetensors")
            self._temporary = Path(self.path)
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(save(parts))

    def close(self) -> None:
        os.close(self._descriptor)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
