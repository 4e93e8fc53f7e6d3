"""Attacks that a sandbox must stop before it is used: it is refused by name if one gets through.

Each attack is a program that prints THROUGH if it succeeds; some leave a trace outside, which is
looked for too. Canaries outside: a variable in the launcher's environment, a file, listening
sockets, and a process that could be signalled.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparrow.sandbox.base import (
    Limits,
    Outcome,
    Sandbox,
    SandboxRefused,
    as_user,
    sandbox_user,
)

THROUGH, TRIED = "THROUGH", "TRIED"
CANARY = "SPARROW_CANARY"
LIMITS = Limits(cpu_seconds=1, wall_seconds=20.0, memory_bytes=256 << 20, output_bytes=1 << 16)
TRY = f"""
import atexit
atexit.register(print, "{TRIED}")
def attempt(act):
    try:
        if act():
            print("{THROUGH}", flush=True)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """What attacks aim at."""

    secret: str
    folder: Path
    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen[bytes]

    def trace(self) -> str:
        """What an attack left outside; empty: nothing."""
        if self.victim.poll() is not None:
            return "a process outside was killed"
        if len(list(self.folder.iterdir())) != 1:
            return "a file was written outside"
        for name in ("tcp", "udp", "abstract"):
            with contextlib.suppress(BlockingIOError):
                receive = getattr(self, name)
                _ = receive.recv(1) if name == "udp" else receive.accept()
                return f"a message came through the network ({name})"
        return ""


@contextlib.contextmanager
def canaries() -> Iterator[Canaries]:
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-canary-")))
        folder.chmod(0o777)
        (folder / "secret").write_text(secret)
        (folder / "secret").chmod(0o666)
        sockets = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{secret}"),
        ):
            opened = stack.enter_context(socket.socket(family, kind))
            opened.bind(address)
            opened.setblocking(False)
            if kind == socket.SOCK_STREAM:
                opened.listen()
            sockets.append(opened)
        settings = as_user(sandbox_user())  # who may signal processes of the sandbox's user
        settings |= {"stdin": subprocess.PIPE, "cwd": "/", "env": {}}
        victim = stack.enter_context(subprocess.Popen(["/bin/sleep", "600"], **settings))
        stack.callback(victim.kill)
        os.environ[CANARY] = secret
        stack.callback(os.environ.pop, CANARY, None)
        tcp, udp, abstract = sockets
        yield Canaries(
            secret=secret, folder=folder, tcp=tcp, udp=udp, abstract=abstract, victim=victim
        )


def attacks(aim: Canaries) -> dict[str, str]:
    """Programs by the name of the attack."""
    tcp, udp = (aim_socket.getsockname()[1] for aim_socket in (aim.tcp, aim.udp))
    return {
        "network, TCP": f"""
import socket
attempt(lambda: socket.create_connection(("127.0.0.1", {tcp}), 2))
""",
        "network, UDP": f"""
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {udp}))  # or its own
""",
        "network, abstract socket": f"""
import socket
attempt(lambda: not socket.socket(socket.AF_UNIX).connect("\\0{aim.secret}"))
""",
        "files, reading /etc": """
import os
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/hosts"):
    attempt(lambda: open(path).read())
""",
        "files, outside": f"""
attempt(lambda: open({str(aim.folder / "secret")!r}).read() == {aim.secret!r})
attempt(lambda: open({str(aim.folder / "new")!r}, "w"))
""",
        "files, of this user": f"""
for path in {_own_files()!r}:
    attempt(lambda: open(path, "rb"))
""",
        "files, installed packages": """
import os, sys
for place in {os.path.dirname(os.__file__), *sys.path}:
    for name in ("site-packages", "dist-packages"):
        attempt(lambda: os.listdir(os.path.join(place, name)))
""",
        "environment of the launcher": f"""
import os
secret = {aim.secret!r}
attempt(lambda: secret in str(dict(os.environ)))
for pid in ("self", *range(1, 400), {os.getpid()}):
    try:
        found = secret in open(f"/proc/{{pid}}/environ", errors="replace").read()
    except OSError:
        continue
    attempt(lambda: found)
""",
        "processes, fork": """
import os, time
def bomb():
    count = 0
    try:
        for _ in range(200):
            if os.fork() == 0:
                time.sleep(3); os._exit(0)
            count += 1
    except OSError:
        pass
    return count > 64
attempt(bomb)
""",
        "memory, one process": f"""
def take():
    x = bytearray({2 * LIMITS.memory_bytes}); x[::4096] = b"x" * len(x[::4096]); return True
attempt(take)
""",
        "memory, without mapping it": f"""
import os
def take():
    fd = os.memfd_create("x")
    for _ in range({2 * LIMITS.memory_bytes >> 20}):
        os.write(fd, bytes(1 << 20))
    return True
attempt(take)
""",
        "/dev/shm": f"""
def fill():
    with open("/dev/shm/sparrow-attack", "wb") as file:
        for _ in range({2 * LIMITS.memory_bytes >> 20}):
            file.write(bytes(1 << 20))
    return True
attempt(fill)
""",
        "signals": f"""
import os, signal
attempt(lambda: os.kill({aim.victim.pid}, signal.SIGKILL) is None)
attempt(lambda: os.kill({os.getpid()}, 0) is None)
""",
        "limits, raising them": """
import resource
attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) is None)
attempt(lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)) is None)
""",
        "privileges": """
import os
attempt(lambda: os.setuid(0) is None and os.getuid() == 0 and open("/proc/sysrq-trigger", "w"))
attempt(lambda: os.chroot("/") is None)
attempt(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0)) is None)
""",
    }


def _own_files() -> list[str]:
    """Some files of the user's home and of the working folder."""
    found = list[str]()
    for folder in (Path.home, Path.cwd):
        with contextlib.suppress(OSError, RuntimeError):
            found += [str(path) for path in sorted(folder().iterdir()) if path.is_file()][:3]
    return found


IGNORE = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
# Programs that must be ended, with how.
ENDLESS = {
    "CPU time": ("while True: pass", "time"),
    "CPU time, signals ignored": (IGNORE + "while True: pass", "time"),
    "output": ("while True: print('x' * 1000)", "output"),
}


def self_test(sandbox: Sandbox) -> None:
    """Run every attack; SandboxRefused names those that get through."""
    failed = []
    with canaries() as aim, ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = {name: TRY + source for name, source in attacks(aim).items()}
        programs |= {name: source for name, (source, _) in ENDLESS.items()}
        programs["an ordinary program"] = "print(sum(map(int, input().split())))"
        runs = {name: pool.submit(_run, sandbox, source, aim) for name, source in programs.items()}
        for name, run in runs.items():
            outcome, trace = run.result()
            if outcome.ending == "time" and name not in ENDLESS:  # the machine is busy
                outcome, trace = _run(sandbox, programs[name], aim)
            expected = ENDLESS[name][1] if name in ENDLESS else "exited"
            if name == "an ordinary program":
                if outcome.stdout.strip() != b"5":
                    detail = f"{outcome.problem} {outcome.stderr.decode(errors='replace')[-300:]}"
                    raise SandboxRefused(f"{sandbox.name} does not work here: {detail.strip()}")
            elif THROUGH.encode() in outcome.stdout or trace or outcome.ending != expected:
                failed.append(f"{name} ({trace or outcome.ending})")
            elif name not in ENDLESS and TRIED.encode() not in outcome.stdout:
                failed.append(f"{name} (it did not run to its end: {outcome.problem})")
    if failed:
        raise SandboxRefused(
            f"the sandbox {sandbox.name} lets through: {'; '.join(failed)}. It is not used"
        )


def _run(sandbox: Sandbox, source: str, aim: Canaries) -> tuple[Outcome, str]:
    outcome = sandbox.start(source, "script", LIMITS).finish(b"2 3\n")
    return outcome, aim.trace()
