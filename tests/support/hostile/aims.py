"""What hostile programs aim at, and whether they hit it; and what a campaign may leave behind.

Programs run as a user of their own (where this is root), so that a process or file of theirs is
known as one, and a signal to all of a user's processes reaches nobody else. Orphans come to this
process instead of init, as they do in a container without one: they are counted and reaped here.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sparrow.sandbox.selftest import Canaries, canaries

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/dev/mqueue", "/var/lock")
SHARED_BYTES = 4096
IPC = "/proc/sysvipc/"
SUBREAPER = 36  # of prctl
orphans: set[int] = set()  # processes that nobody waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """Canaries of the self-test and more: a path socket, a file to change, shared memory."""

    canaries: Canaries
    folder: Path
    listener: socket.socket
    shared: int
    key: int
    marker: str
    before: tuple[int, ...]

    def values(self) -> dict[str, Any]:
        """What programs are told; the marker is backwards."""
        own = self.canaries
        return {
            "marker": self.marker[::-1],
            "secret": own.secret,
            "folder": str(own.folder),
            "other": str(self.folder),
            "tcp": own.tcp.getsockname()[1],
            "udp": own.udp.getsockname()[1],
            "victim": own.victim.pid,
            "judge": os.getpid(),
            "key": self.key,
        }

    def trace(self) -> str:
        """What an attack left outside; empty: nothing."""
        if found := self.canaries.trace():
            return found
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return "a connection came to a socket with a path"
        if sorted(path.name for path in self.folder.iterdir()) != ["file", "listener", "pipe"]:
            return "a file was made in a folder outside"
        if _state(self.folder / "file") != self.before or socket.gethostname() == "hostile":
            return "a file or name outside was changed"
        return ""


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_mode, found.st_size, found.st_mtime_ns, found.st_nlink, found.st_uid


@contextlib.contextmanager
def aims() -> Iterator[Aims]:
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(canaries())
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-aim-"))
        folder = Path(place)
        folder.chmod(0o777)
        (folder / "file").write_text("content")
        (folder / "file").chmod(0o666)
        os.mkfifo(folder / "pipe")
        (folder / "pipe").chmod(0o666)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "listener"))
        (folder / "listener").chmod(0o777)
        listener.listen()
        listener.setblocking(False)
        key = secrets.randbelow(1 << 30) + 1
        shared = libc.shmget(key, SHARED_BYTES, 0o1666)  # with IPC_CREAT
        stack.callback(libc.shmctl, shared, 0, None)
        yield Aims(
            canaries=own,
            folder=folder,
            listener=listener,
            shared=shared,
            key=key,
            marker=f"GOT-{secrets.token_hex(8)}-THROUGH",
            before=_state(folder / "file"),
        )


@contextlib.contextmanager
def own_user() -> Iterator[int | None]:
    """Programs run as a user that nobody else is, where this is root; None: as this one."""
    if os.geteuid() != 0:
        yield None
        return
    user = 40_000 + os.getpid() % 20_000
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    with contextlib.ExitStack() as stack:
        stack.callback(libc.prctl, SUBREAPER, 0, 0, 0, 0)
        for name, module in list(sys.modules.items()):
            if name.startswith("sparrow.sandbox.") and hasattr(module, "sandbox_user"):
                stack.enter_context(mock.patch.object(module, "sandbox_user", return_value=user))
        try:
            yield user
        finally:
            end_processes(user, ())
            _reap(user, ())


# What is left.


@dataclass(frozen=True, slots=True)
class Left:
    """What there is of descriptors, processes and files."""

    descriptors: int
    processes: frozenset[int]
    zombies: frozenset[int]
    files: frozenset[str]


def look(user: int | None, known: tuple[int, ...] = ()) -> Left:
    """What is there now. known: processes that belong there."""
    processes, zombies = set(), set()
    parents: dict[int, int] = {}
    for pid, parent, uid, state in _processes():
        parents[pid] = parent
        if pid in known:
            continue
        if uid == user or _descends(pid, parents):
            (zombies if state == "Z" else processes).add(pid)
    return Left(
        len(os.listdir("/proc/self/fd")),
        frozenset(processes),
        frozenset(zombies),
        frozenset(_files(user)),
    )


def settled(before: Left, user: int | None, known: tuple[int, ...] = (), soon: float = 3.0) -> str:
    """What there is that was not there before, after a while; empty: nothing."""
    until = time.monotonic() + soon
    _reap(user, known)
    while (more := _more(before, look(user, known))) and time.monotonic() < until:
        time.sleep(0.05)
        _reap(user, known)
    return more


def _reap(user: int | None, known: tuple[int, ...]) -> None:
    """Wait for orphans of the programs' user; while no program runs."""
    for pid, parent, uid, state in _processes():
        if state == "Z" and parent == os.getpid() and uid == user and pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
                orphans.add(pid)


def _more(before: Left, now: Left) -> str:
    found = []
    if now.descriptors > before.descriptors:
        found.append(f"{now.descriptors - before.descriptors} descriptors more")
    for name in ("processes", "zombies", "files"):
        if more := getattr(now, name) - getattr(before, name):
            found.append(f"{name}: {sorted(more)[:5]}")
    return "; ".join(found)


def end_processes(user: int | None, known: tuple[int, ...]) -> None:
    """Kill what programs left behind, one by one; only where they have a user of their own."""
    if user is None:
        return
    for pid, _, uid, _ in _processes():
        if uid == user and pid not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def remove_files(user: int | None) -> None:
    """Remove what programs left behind."""
    libc = ctypes.CDLL(None)
    for name in list(_files(user)):
        if name.startswith(IPC):
            kind, number = name.removeprefix(IPC).split()
            words = (int(number), 0, 0) if kind == "sem" else (int(number), 0)
            getattr(libc, f"{kind}ctl")(*words, None)  # IPC_RMID
            continue
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(name) else os.unlink)(name)


def _processes() -> Iterator[tuple[int, int, int, str]]:
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
            uid = os.stat(f"/proc/{name}").st_uid
            lines = Path(f"/proc/{name}/status").read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("Uid:"):
                uid = int(line.split()[1])
        state, parent = text.rpartition(")")[2].split()[:2]
        yield int(name), int(parent), uid, state


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _files(user: int | None) -> Iterator[str]:
    """Files of the programs' user in places where anybody may write, and memory with a key."""
    if user is None:
        return
    for kind in ("shm", "msg", "sem"):
        names, *rows = Path(IPC + kind).read_text().splitlines() or [""]
        for row in rows:
            if row.split()[names.split().index("uid")] == str(user):
                yield f"{IPC}{kind} {row.split()[1]}"
    for place in PLACES:
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid == user:
                        yield entry.path
