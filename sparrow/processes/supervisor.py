"""The program between a `Worker` and its process: it sees to it that nothing of that outlives us.

    parent --control--> supervisor --> [init of a pid namespace -->] worker <--data--> parent

Started by worker.py as a script. It runs no code of others. When its control connection closes, or
the process that started it is gone, or the worker ends, it kills everything that the worker has
started: children in sessions of their own, double forks, processes that hold the GIL. Where the
kernel allows, the worker has a pid namespace, whose end is the end of all in it; elsewhere orphans
of the worker become children of the supervisor (a subreaper), which kills them. There a worker can
kill the supervisor itself; the parent then kills what carries its mark in the environment. A worker
that also hides that mark can leave processes behind: it is no sandbox.

The worker holds its data connection, a pipe for what it prints, and no other descriptor.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NoReturn

PDEATHSIG, CHILD_SUBREAPER = 1, 36  # of prctl
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000  # of unshare
PRIVATE, PROC = 0x4000 | 0x40000, 0x2 | 0x4 | 0x8  # of mount: recursive; no suid, device, exec
CAPABILITY_VERSION = 0x20080522  # of capset, with 64 capabilities
LOOK_EVERY = 0.25  # seconds between looks at the parent and at memory
SHOWN = 1 << 16  # bytes of what a worker prints that are read at once
TOLD = 500  # characters of an error that are kept
MOST_DESCRIPTORS = 1 << 20  # that a process may have
PARENT = "SPARROW_PARENT"  # in the environment of a child: the id of the process that started it

SIGNALS = {number.value for number in signal.Signals}

Setup = dict[str, Any]


def main() -> NoReturn:
    """Start the worker that the first line of the control connection describes, and watch it."""
    control, data = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for connection in (control, data):
        connection.set_inheritable(False)
    setup = json.loads(control.makefile("rb").readline() or b"null")
    if setup is None:
        os._exit(0)
    sys.path[:] = setup["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output, worker_output = os.pipe()
    namespace = setup["namespace"] and namespaces_work()
    prctl(CHILD_SUBREAPER, 1)
    prctl(PDEATHSIG, signal.SIGCONT)  # one that was stopped hears of the parent's end too
    _send(control, {"isolation": "pid namespace" if namespace else "subreaper"})
    worker = _start(setup, data, worker_output, namespace)
    data.close()
    os.close(worker_output)
    ending = "its supervisor failed"
    try:
        ending = _watch(control, output, worker, setup)
    finally:
        _kill_all(worker)
    with contextlib.suppress(OSError):
        _send(control, {"ended": ending})
    os._exit(0)


def _send(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


# Starting the worker.


def _start(setup: Setup, data: socket.socket, output: int, namespace: bool) -> int:
    """The id of the worker, or of the init of its namespace."""
    alive, end = os.pipe()
    if namespace:
        _unshare_pids()
    child = os.fork()
    if child == 0:
        os.close(end)
        prctl(PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:
            os._exit(0)  # the supervisor ended before the kernel was asked
        if namespace:
            _mount_proc()
            _reap_worker()
        _become_worker(setup, data, output)
    os.close(alive)
    return child  # `end` stays open: its other side hears when this process has ended


def _reap_worker() -> None:
    """Fork; the parent is the init of its namespace, waits for all that ends there, and ends with
    the worker. It holds no connection, which the worker might take from it.
    """
    worker = os.fork()
    if worker:
        os.closerange(3, MOST_DESCRIPTORS)
    while worker:
        child, status = os.wait()
        if child == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def namespaces_work() -> bool:
    """Whether a pid namespace with a /proc of its own is allowed here, tried in a child."""
    if sys.platform != "linux":
        return False
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            _unshare_pids()
            inner = os.fork()
            if inner == 0:
                _mount_proc()
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) != 0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _unshare_pids() -> None:
    """The next child is the init of a new pid namespace; without root, in a user namespace."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", NEWPID)
    except PermissionError:
        _call("unshare", NEWPID | NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount_proc() -> None:
    """A /proc that shows the processes of this namespace, in a mount namespace of its own."""
    _call("unshare", NEWNS)
    _call("mount", b"none", b"/", None, PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", PROC, None)


def _drop_capabilities() -> None:
    """A user namespace gives its first process all of them, and with them others' names."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def prctl(option: int, value: int) -> None:
    """Ask the kernel something about this process, where it is Linux."""
    if sys.platform == "linux":
        _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library; OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


# Watching it.


def _watch(control: socket.socket, output: int, worker: int, setup: Setup) -> str:
    """Wait for the worker's end, or a reason to end it; how it ended."""
    poll, shown_to = select.poll(), _stderr()
    for descriptor in (control.fileno(), output, *_pidfd(worker)):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(LOOK_EVERY * 1000)}
        if output in ready and not _relay(output, shown_to):
            poll.unregister(output)
        ending = _ended(worker)
        if ending is not None:
            _relay(output, shown_to)
            return ending
        if control.fileno() in ready or os.getppid() != setup["parent"]:
            return "it was closed"
        if setup["memory"] is not None and _memory() > setup["memory"]:  # on Linux
            return f"over its limit of {setup['memory']} bytes of memory"


def _pidfd(worker: int) -> Iterator[int]:
    """A descriptor that is ready when the worker has ended, where there are such."""
    with contextlib.suppress(OSError, AttributeError):
        yield os.pidfd_open(worker)


def _ended(worker: int) -> str | None:
    """How the worker ended, None where it has not; adopted children that ended are let go."""
    while True:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == worker:
            code = os.waitstatus_to_exitcode(status)
            number = -code if code < 0 else code - 128  # of a signal, also as a shell tells it
            return signal.Signals(number).name if number in SIGNALS else f"exit code {code}"
        if child == 0:
            return None


def _relay(output: int, shown_to: int) -> bool:
    """Show what the worker printed, without what terminals obey; whether more can come."""
    from sparrow.files import printable

    if not select.select([output], [], [], 0)[0]:
        return True
    text = os.read(output, SHOWN)
    shown = printable(text.decode(errors="replace")).encode(errors="replace")
    with contextlib.suppress(OSError):  # nobody reads it any more, or not now: it is dropped
        while shown and select.select([], [shown_to], [], 0)[1]:
            shown = shown[os.write(shown_to, shown[: select.PIPE_BUF]) :]
    return bool(text)


def _stderr() -> int:
    """stderr, so that writing never waits for a reader: a terminal or pipe is opened once more."""
    mode = os.fstat(2).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return 2


def descendants(root: int) -> list[int]:
    """Everything that a process has started, and what that has started."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found[1:]


def _memory() -> int:
    """Bytes of memory that the worker and what it started hold, orphans too."""
    pages = 0
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _kill_all(worker: int) -> None:
    """Kill the worker and what it has started until there is nothing left."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        for process in (worker, *descendants(os.getpid())):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


# In the worker.


def _become_worker(setup: Setup, data: socket.socket, output: int) -> NoReturn:
    """Run the target in this process, with no descriptor but its own."""
    os.setsid()
    if os.geteuid() != 0 and sys.platform == "linux":
        _drop_capabilities()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kept = data.detach()
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (setup["memory"], setup["memory"]))
    sys.argv = ["worker"]
    code = 1
    try:
        _serve(socket.socket(fileno=kept), setup)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (EOFError, OSError):
        code = 0  # nobody is there any more
    finally:
        _flush()
        os._exit(code & 0xFF)


def _serve(connection: socket.socket, setup: Setup) -> None:
    """Make the handler of the target, then answer questions, a JSON line each, until none come.

    Before code of others runs, a line tells the parent which process it is that answers.
    """
    connection.sendall(f"{setup['id']}\n".encode())
    _close_in_children(connection.fileno())
    module, _, name = setup["target"].partition(":")
    try:
        handler = getattr(importlib.import_module(module), name)(**setup["arguments"])
    except Exception as error:  # a module of others: anything may come
        _send(connection, {"id": setup["id"], "error": describe(error)})
        return
    _send(connection, {"id": setup["id"], "answer": None})
    for line in connection.makefile("rb"):
        digest, _, text = line.partition(b" ")
        if sha256(text).hexdigest().encode() != digest:
            raise EOFError("another process took a part of the question")
        question = json.loads(text)
        try:
            reply = {"id": question["id"], "answer": handler(question["body"])}
        except Exception as error:  # code of others on text of a model: anything may come
            reply = {"id": question["id"], "error": describe(error)}
        _flush()
        _send(connection, reply)


def _close_in_children(descriptor: int) -> None:
    """Children that are forked without exec do not hold the connection; theirs find it closed."""
    worker = os.getpid()

    def close() -> None:
        if os.getppid() == worker:
            os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever the worker has put in their places
            stream.flush()


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"[:TOLD]


# A process that ends when the one that started it has ended, however that came about.


def with_parent(environment: dict[str, str]) -> dict[str, str]:
    """An environment for children of this process that call `die_with_parent`."""
    return environment | {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Ask to be killed when the process that SPARROW_PARENT names is gone; without it do nothing.

    Processes that this one starts are not meant: the variable is taken out of the environment. It
    is the end of the parent's thread that counts: the one that started this process.
    """
    named = os.environ.pop(PARENT, None)
    if named is None:
        return
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(named):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended before anybody was asked


if __name__ == "__main__":
    main()
