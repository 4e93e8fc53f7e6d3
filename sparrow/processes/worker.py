"""A worker process that answers questions as JSON lines and can be killed with all it started.

    worker = Worker("my_package.my_module:make_handler", {"setting": 1})
    answer = worker.ask({"any": "JSON"}, deadline=10.0)

The process calls `make_handler(**arguments)` once, and the returned handler with every question.
What it writes is not trusted: an answer is one line of JSON with the random number of its question,
sent by that very process (on Linux the kernel gives the sender). Any other byte is a fault, and the
process is killed. Nothing is pickled. supervisor.py describes how processes end.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from sparrow.files import parse_json

SUPERVISOR = Path(__file__).with_name("supervisor.py")
START = 300.0  # seconds in which a process must make its handler
GRACE = 3.0  # seconds in which a supervisor must kill everything
MARK = "SPARROW_WORKER"  # in the environment of all that a supervisor starts
LONGEST = 1 << 20  # bytes of an answer
MESSAGE_BYTES = 500  # of a line of the supervisor
PASSCRED = getattr(socket, "SO_PASSCRED", None)  # on Linux
CREDENTIALS = struct.Struct("3i")  # process, user, group


class WorkerFault(Exception):
    """A question without an answer; kill the process unless its handler raised.

    late: past the deadline; ended: the process ended; garbled: it wrote something else; raised:
    the handler raised.
    """

    def __init__(self, kind: Literal["late", "ended", "garbled", "raised"], reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return self.reason


class Worker:
    """A supervised worker process. One thread asks; any thread may kill it.

    target: module:function that makes the handler from JSON arguments
    memory: bytes that a process may allocate, and all together may hold; None: no limit
    namespace: whether to use a pid namespace if that is allowed
    longest: bytes of an answer
    output: bytes of what it prints that are shown; None: all
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        memory: int | None = None,
        namespace: bool = True,
        longest: int = LONGEST,
        output: int | None = None,
    ) -> None:
        self.isolation = "not started"
        self._setup: dict[str, Any] = {"target": target, "arguments": dict(arguments)}
        self._setup |= {"memory": memory, "namespace": namespace, "output": output}
        self._longest = longest
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._data: socket.socket | None = None
        self._number: str | None = None  # marks the processes of this start
        self._worker_pid: int | None = None  # the process that may answer
        self._starting: str | None = None  # the number until the first answer has come

    def start(self) -> None:
        """Start the process if none runs, without waiting for it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._end()
            if self._closed:
                raise ValueError("the worker is closed")
            self._control, their_control = _socketpair()
            self._data, their_data = _socketpair()
            self._starting = self._number = secrets.token_hex(16)
            with their_control, their_data:
                descriptors = (their_control.fileno(), their_data.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(SUPERVISOR), *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, MARK: self._starting},
                    start_new_session=True,  # Ctrl-C of the terminal does not reach it
                )
            place = {"id": self._starting, "path": sys.path, "parent": os.getpid()}
            self._control.sendall(json.dumps(self._setup | place).encode() + b"\n")

    def wait(self) -> None:
        """Wait until it is ready; WorkerFault if its handler cannot be made."""
        self.start()
        number = self._starting
        if number is not None:
            self._handshake(number)
            self._receive(number, START)
            self.isolation = self._report("isolation")
            self._starting = None

    def ask(self, body: Any, deadline: float) -> Any:
        """Return the answer to a question, both JSON; WorkerFault if it takes too many seconds."""
        line, number = json.dumps(body), secrets.token_hex(16)
        self.wait()
        if self._data is not None and _peek(self._data) == b"":  # it ended between two questions
            self.kill()
            self.wait()
        data, begun = self._data, time.monotonic()
        if data is None or _peek(data) is not None:
            raise self._unasked(data)
        try:
            data.settimeout(deadline)
            question = f'{{"id": "{number}", "body": {line}}}\n'.encode()
            data.sendall(sha256(question).hexdigest().encode() + b" " + question)
        except TimeoutError:
            raise _late(deadline) from None
        except OSError:
            raise self._unasked(data) from None
        return self._receive(number, deadline, begun)

    def _handshake(self, number: str) -> None:
        """Learn which process answers, from the line it sends before it runs third-party code."""
        self._worker_pid, line, until = None, b"", time.monotonic() + START
        while len(line) <= len(number):
            part, self._worker_pid = self._read(until, START, len(number) + 1 - len(line))
            line += part
        if line != f"{number}\n".encode():
            raise WorkerFault("garbled", "its output is not an answer")

    def _receive(self, number: str, deadline: float, begun: float | None = None) -> Any:
        """Receive the answer with this number: one line of the worker, and no other byte."""
        data, received = self._data, bytearray()
        until = (begun or time.monotonic()) + deadline
        while b"\n" not in received and len(received) <= self._longest:
            part, sender = self._read(until, deadline)
            if sender != self._worker_pid:
                raise WorkerFault("garbled", "another process wrote to its connection")
            received += part
        line, newline, rest = bytes(received).partition(b"\n")
        if not newline or rest or (data is not None and _peek(data)):
            raise WorkerFault("garbled", "it wrote more than an answer")
        return _answer(line, number)

    def _read(self, until: float, deadline: float, most: int = 1 << 16) -> tuple[bytes, int | None]:
        """Receive some bytes and the process that sent them; WorkerFault at the end, or if late."""
        data, part, sender = self._data, b"", None
        try:
            if data is not None:
                data.settimeout(max(until - time.monotonic(), 1e-3))
                part, sender = _receive_from(data, most)
        except TimeoutError:
            raise _late(deadline) from None
        except OSError:
            part = b""
        if not part:
            raise self._unasked(None)
        return part, sender

    def _unasked(self, data: socket.socket | None) -> WorkerFault:
        """Return why no question can be asked: unexpected bytes, or the process ended."""
        if data is not None and _peek(data):
            return WorkerFault("garbled", "it wrote without a question")
        return WorkerFault("ended", f"its process ended ({self._report('ended')})")

    def _report(self, key: str) -> str:
        """Return what the supervisor reports under a key, on its control connection."""
        control, process = self._control, self._process
        if control is None or process is None:
            return "it was closed"
        until = time.monotonic() + GRACE
        with contextlib.suppress(OSError, ValueError):
            while line := _line(control, process.pid, until):
                message = parse_json(line.decode())
                if isinstance(message, dict) and key in message:
                    return str(message[key])[:MESSAGE_BYTES]
        return "its supervisor is gone"

    def kill(self) -> None:
        """Kill the process with all it started."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Kill it, and refuse to start again."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        number, self._number = self._number, None
        for connection in (self._control, self._data):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # also if a fork holds a copy
        self._control = self._data = None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)  # it may have been stopped
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode != 0 and number is not None:
            _kill_marked(number)


def _kill_marked(number: str) -> None:
    """Kill the processes of a supervisor that was itself killed, by the mark in environments."""
    mark = f"{MARK}={number}".encode()
    for _ in range(3):  # children of those that were killed in between
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)


def _late(deadline: float) -> WorkerFault:
    return WorkerFault("late", f"it took longer than {deadline:g} s")


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Make a connection; on Linux the first end learns from the kernel which process sent."""
    ours, theirs = socket.socketpair()
    if PASSCRED is not None:
        ours.setsockopt(socket.SOL_SOCKET, PASSCRED, 1)
    return ours, theirs


def _receive_from(connection: socket.socket, most: int) -> tuple[bytes, int | None]:
    """Receive bytes and the process that sent them; None if the kernel does not tell."""
    if PASSCRED is None:
        return connection.recv(most), None
    data, extra, *_ = connection.recvmsg(most, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return data, CREDENTIALS.unpack(content)[0]
    return data, None


def _peek(data: socket.socket) -> bytes | None:
    """Return a byte that waits to be read, nothing at the end, None if none has come."""
    try:
        data.setblocking(False)
        return data.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _line(control: socket.socket, supervisor: int, until: float) -> bytes:
    """Receive a line of the supervisor, byte by byte; ValueError if another process wrote."""
    line = b""
    while not line.endswith(b"\n"):
        control.settimeout(max(until - time.monotonic(), 1e-3))
        part, sender = _receive_from(control, 1)
        if not part:
            break
        if sender not in (supervisor, None) or len(line) > MESSAGE_BYTES:
            raise ValueError("another process than the supervisor wrote")
        line += part
    return line


def _answer(line: bytes, number: str) -> Any:
    """Parse the answer in a line with this number; WorkerFault for any other line."""
    try:
        reply = parse_json(line.decode())
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or reply.get("id") != number or len(reply) != 2:
        raise WorkerFault("garbled", "its output is not an answer")
    if "answer" in reply:
        return reply["answer"]
    raise WorkerFault("raised", str(reply.get("error")))
