"""Supervisor of a worker process: nothing that the worker starts outlives the parent.

    parent --control--> supervisor --> [init of a pid namespace -->] worker <--data--> parent

A script that worker.py starts. It runs no third-party code. When its control connection closes, the
process that started it ends, or the worker ends, it kills everything that the worker has started:
children in other sessions, double forks, processes that hold the GIL. If the kernel allows, the
worker has a pid namespace, which ends with all processes in it; otherwise orphans of the worker
become children of the supervisor (a subreaper), which kills them. Without a namespace a worker can
kill the supervisor; the parent then kills the processes that carry its mark in the environment. A
worker that also hides that mark can leave processes behind: this is no sandbox.

The worker holds its data connection, a pipe for its output, and no other descriptor.
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
POLL_SECONDS = 0.25  # between checks of the parent and of memory
OUTPUT_BYTES = 1 << 16  # of a worker's output that are read at once
MESSAGE_CHARACTERS = 500  # of an error that are kept
MOST_DESCRIPTORS = 1 << 20  # that a process may have
PARENT = "SPARROW_PARENT"  # environment variable of a child: the id of its parent process

SIGNALS = {number.value for number in signal.Signals}

Setup = dict[str, Any]


def main() -> NoReturn:
    """Start the worker described by the first line of the control connection, and supervise it."""
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
    prctl(PDEATHSIG, signal.SIGCONT)  # wakes a stopped supervisor when the parent ends
    try:
        _send(control, {"isolation": "pid namespace" if namespace else "subreaper"})
    except OSError:
        os._exit(0)  # the parent has closed the connection
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
    """Fork the worker; return its id, or that of the init of its namespace."""
    alive, end = os.pipe()
    if namespace:
        _unshare_pids()
    child = os.fork()
    if child == 0:
        os.close(end)
        prctl(PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:
            os._exit(0)  # the supervisor ended before prctl
        if namespace:
            _mount_proc()
            _reap_worker()
        _become_worker(setup, data, output)
    os.close(alive)
    return child  # `end` stays open: it closes when this process ends


def _reap_worker() -> None:
    """Fork; the parent is the init of its namespace, reaps its processes, and ends with the worker.

    It holds no connection, which the worker could take from it.
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
    """Whether a pid namespace with a private /proc is allowed here, tried in a child."""
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
    """Make the next child the init of a new pid namespace; without root, in a user namespace."""
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
    """Mount a /proc of this namespace's processes, in a private mount namespace."""
    _call("unshare", NEWNS)
    _call("mount", b"none", b"/", None, PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", PROC, None)


def _drop_capabilities() -> None:
    """Drop all capabilities, which a user namespace gives its first process."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def prctl(option: int, value: int) -> None:
    """Call prctl on Linux; do nothing elsewhere."""
    if sys.platform == "linux":
        _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


# Supervision.


def _watch(control: socket.socket, output: int, worker: int, setup: Setup) -> str:
    """Wait until the worker ends or must be ended; return how."""
    poll, stderr, left = select.poll(), _stderr(), setup["output"]
    for descriptor in (control.fileno(), output, *_pidfd(worker)):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(POLL_SECONDS * 1000)}
        if output in ready:
            count = _relay(output, stderr, left)
            left = left if left is None or count is None else max(0, left - count)
            if count == 0:
                poll.unregister(output)
        ending = _ended(worker)
        if ending is not None:
            _relay(output, stderr, left)
            return ending
        if control.fileno() in ready or os.getppid() != setup["parent"]:
            return "it was closed"
        if setup["memory"] is not None and _memory() > setup["memory"]:  # on Linux
            return f"over its limit of {setup['memory']} bytes of memory"


def _pidfd(worker: int) -> Iterator[int]:
    """Yield a descriptor that is ready when the worker has ended, if the system has pidfds."""
    with contextlib.suppress(OSError, AttributeError):
        yield os.pidfd_open(worker)


def _ended(worker: int) -> str | None:
    """Return how the worker ended, or None; adopted children that ended are reaped."""
    while True:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == worker:
            code = os.waitstatus_to_exitcode(status)
            number = -code if code < 0 else code - 128  # of a signal, also in a shell's form
            return signal.Signals(number).name if number in SIGNALS else f"exit code {code}"
        if child == 0:
            return None


def _relay(output: int, stderr: int, most: int | None) -> int | None:
    """Print the worker's output without control characters; bytes that came, 0 at its end.

    Of these at most so many are printed, if given; None: nothing came.
    """
    from sparrow.files import printable

    if not select.select([output], [], [], 0)[0]:
        return None
    text = os.read(output, OUTPUT_BYTES)
    shown = printable(text[:most].decode(errors="replace")).encode(errors="replace")
    if most is not None and 0 < most <= len(text):
        shown += b"\n[further output of this process is not shown]\n"
    with contextlib.suppress(OSError):  # dropped if no reader takes it now
        while shown and select.select([], [stderr], [], 0)[1]:
            shown = shown[os.write(stderr, shown[: select.PIPE_BUF]) :]
    return len(text)


def _stderr() -> int:
    """Open stderr for writes that never block: a terminal or pipe is opened again."""
    mode = os.fstat(2).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return 2


def descendants(root: int) -> list[int]:
    """Return all processes that a process has started, directly or not."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    processes = [root]
    for process in processes:
        processes += children.get(process, ())
    return processes[1:]


def _memory() -> int:
    """Return the resident memory of the worker and all it started, orphans too, in bytes."""
    pages = 0
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _kill_all(worker: int) -> None:
    """Kill the worker and all it has started until nothing is left."""
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
    """Run the target in this process, with no other descriptors than its data connection."""
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
        code = 0  # the parent has closed the connection
    finally:
        _flush()
        os._exit(code & 0xFF)


def _serve(connection: socket.socket, setup: Setup) -> None:
    """Make the target's handler, then answer questions, one JSON line each, to the end of input.

    Before third-party code runs, a line tells the parent which process answers.
    """
    connection.sendall(f"{setup['id']}\n".encode())
    _close_in_children(connection.fileno())
    module, _, name = setup["target"].partition(":")
    try:
        handler = getattr(importlib.import_module(module), name)(**setup["arguments"])
    except Exception as error:  # a user's module: anything may be raised
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
        except Exception as error:  # a user's code: anything may be raised
            reply = {"id": question["id"], "error": describe(error)}
        _flush()
        _send(connection, reply)


def _close_in_children(descriptor: int) -> None:
    """Close the connection in children that are forked without exec."""
    worker = os.getpid()

    def close() -> None:
        if os.getppid() == worker:
            os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the worker may have replaced them
            stream.flush()


def describe(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


# A process that ends with the process that started it.


def with_parent(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment for children of this process that call `die_with_parent`."""
    return environment | {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Have this process killed when the process in SPARROW_PARENT ends; without it do nothing.

    The variable is removed from the environment, so children do not inherit it. The kernel counts
    the end of the thread that started this process.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before prctl


if __name__ == "__main__":
    main()
