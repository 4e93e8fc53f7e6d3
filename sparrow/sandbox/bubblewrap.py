"""The default sandbox: bubblewrap with namespaces, seccomp, rlimits and landlock.

Namespaces of users, processes, network, mounts, IPC and host names; an empty environment, of bwrap
itself too (its own is in /proc otherwise, which is not mounted either); a read-only root with the
interpreter, its standard library and shared libraries; null, zero and urandom as devices. As root,
everything runs as nobody: root has no limit of processes.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparrow.sandbox.base import (
    CHUNK,
    Limits,
    Mode,
    Outcome,
    Running,
    Sandbox,
    SandboxRefused,
    as_user,
    data_descriptor,
    inside_settings,
    inside_source,
    kill,
    popen,
    sandbox_user,
)
from sparrow.sandbox.cgroup import Cgroup, check_delegated
from sparrow.sandbox.seccomp import python_filter

LAYERS = ("namespaces", "seccomp", "rlimits", "landlock")
LANDLOCK_VERSION = 444  # the call that creates rules, or tells the version of landlock
SYSTEM = ("/usr/bin/python3", "/usr/local/bin/python3")
FILES = ("/mnt/inside.py", "/mnt/program.py")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/nowhere", "HOME": "/tmp"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PACKAGES = [f"{below}{kind}-packages" for below in ("", "*/") for kind in ("site", "dist")]
CHILD = re.compile(rb'"child-pid": (\d+)')  # in bwrap's status
ASK_LIBRARIES = """
import os, re, sys, sysconfig
import _ctypes, _hashlib, _ssl, _bz2, _lzma, zlib  # what programs may import is mapped, then
found = {os.path.realpath(sys.executable), sysconfig.get_path("stdlib")}
found.add(sysconfig.get_path("platstdlib"))
for line in open("/proc/self/maps"):
    path = line.split(maxsplit=5)[5].strip() if len(line.split(maxsplit=5)) > 5 else ""
    if re.search(r"\\.so[.0-9]*$", path): found.add(os.path.dirname(path))
print("%d.%d" % sys.version_info[:2], *sorted(found), sep="\\n")
"""


class Interpreter:
    """A Python that the sandbox's user can run: its version, and the paths that it needs.

    packages: folders below them that are hidden.
    """

    def __init__(self, executable: str, user: int | None) -> None:
        words = [executable, "-s", "-S", "-E", "-c", ASK_LIBRARIES]
        settings: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 60,
            "cwd": "/",
            "env": {},
        }
        try:
            answer = subprocess.run(words, check=True, **settings, **as_user(user))
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxRefused(f"{executable} cannot be run by user {user}: {error}") from error
        self.version, *paths = answer.stdout.split("\n")[:-1]
        self.executable = os.path.realpath(executable)
        self.packages = _packages(paths)
        below = [path for path in paths if not any(_is_below(path, other) for other in paths)]
        self.paths = sorted({*below, *_loaders()})


def _packages(paths: list[str]) -> list[str]:
    """Folders of installed packages below paths; data of problem sets may be among them."""
    found = [Path(path).glob(pattern) for path in paths for pattern in PACKAGES]
    return sorted({str(folder) for folders in found for folder in folders if folder.is_dir()})


def _is_below(path: str, other: str) -> bool:
    return path != other and path.startswith(other.rstrip("/") + "/")


def _loaders() -> list[str]:
    """The dynamic loader of libc, where programs expect it."""
    names = ("/lib/ld-linux-aarch64.so.1", "/lib64/ld-linux-x86-64.so.2")
    return [name for name in names if os.path.exists(name)]


@functools.cache
def find_interpreter(user: int | None) -> Interpreter:
    """The Python that runs this, or the system's: the first that the user can run."""
    base = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    problems = []
    for executable in (base, *SYSTEM):
        if os.path.exists(executable):
            try:
                return Interpreter(executable, user)
            except SandboxRefused as error:
                problems.append(str(error))
        else:
            problems.append(f"{executable} does not exist")
    raise SandboxRefused(
        "no Python for the sandbox: " + "; ".join(problems) + ". Install one that every "
        "user can run, as /usr/bin/python3"
    )


def landlock_version() -> int:
    """The version of landlock that the kernel has; 0: none."""
    import ctypes

    return max(ctypes.CDLL(None).syscall(LANDLOCK_VERSION, None, ctypes.c_size_t(0), 1), 0)


class Wrapped(Running):
    """A program in bwrap.

    status: a descriptor to read bwrap's status from, which names the first process inside; killing
    that one ends all of them. It waits until it is in its cgroup, if it has one.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        status: int,
        cgroup: Cgroup | None,
    ) -> None:
        super().__init__(process, limits)
        self._status, self._told, self._cgroup = status, b"", cgroup
        if cgroup is not None and (first := self._first()) is not None:
            try:
                cgroup.admit(first)
            except OSError as error:
                self.end()
                raise ValueError(f"a program cannot be moved to its cgroup: {error}") from error

    def _first(self) -> int | None:
        """The first process inside; None if it never was, or has ended: its number is another's."""
        while (first := CHILD.search(self._told)) is None and (more := self._read_status()):
            self._told += more
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            self._told += self._read_status()
        return None if first is None or b"exit-code" in self._told else int(first[1])

    def _read_status(self) -> bytes:
        return os.read(self._status, CHUNK)

    def _kill(self) -> None:
        if (first := self._first()) is not None:
            kill(first)
        elif not CHILD.search(self._told):
            super()._kill()

    def _asleep(self) -> bool:
        """Whether all of its threads sleep; under load, they would wait for the processor."""
        try:
            threads = Path(f"/proc/{self._first()}/task").iterdir()
            states = {(thread / "stat").read_text().rpartition(")")[2][:2] for thread in threads}
        except OSError:  # it has ended, or a thread has
            return False
        return states == {" S"}

    def _end(self) -> Outcome:
        outcome = super()._end()
        os.close(self._status)
        if self._cgroup is None:
            return outcome
        if self._cgroup.out_of_memory():
            outcome = outcome._replace(ending="memory")
        self._outcome = outcome
        self._cgroup.remove()
        return outcome


class Bubblewrap(Sandbox):
    """Programs by bwrap.

    without: layers that are left out, to test the others. cgroup: a delegated folder of cgroup v2.
    """

    name = "bwrap"

    def __init__(
        self, without: frozenset[str] = frozenset(), *, cgroup: Path | None = None
    ) -> None:
        binary = shutil.which("bwrap")
        if binary is None:
            raise SandboxRefused("bwrap is not installed: apt install bubblewrap")
        if cgroup is not None:
            check_delegated(cgroup)
        self._binary = binary
        self._user = sandbox_user()
        self._python = find_interpreter(self._user)
        absent = set() if landlock_version() else {"landlock"}
        self._layers = {layer for layer in LAYERS if layer not in without | absent}
        named = ", ".join([layer for layer in LAYERS if layer in self._layers])
        named += ", cgroup" if cgroup is not None else ""
        missing = "; this kernel has no landlock" if absent else ""
        self._cgroup = cgroup
        self.isolation = f"bwrap ({named}{missing}), Python {self._python.version}"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        program = source.encode(errors="replace")
        cgroup = None if self._cgroup is None else Cgroup(self._cgroup, limits)
        status, status_end = os.pipe()
        descriptors = [status_end]
        words = [self._binary, "--json-status-fd", str(status_end), *self._walls(limits)]
        if cgroup is not None:  # nothing runs inside before it is in its cgroup
            descriptors.append(cgroup.gate)
            words += ["--block-fd", str(cgroup.gate)]
        for path, data in zip(FILES, (inside_source().encode(), program), strict=True):
            descriptors.append(data_descriptor(data))
            words += ["--ro-bind-data", str(descriptors[-1]), path]
        if "seccomp" in self._layers:
            descriptors.append(data_descriptor(python_filter()))
            words += ["--seccomp", str(descriptors[-1])]
        words += ["--remount-ro", "/"] if "namespaces" in self._layers else []
        words += ["--", self._python.executable, "-s", "-S", "-B", "-P", FILES[0]]
        words.append(json.dumps(self._settings(mode, limits)))
        try:
            process = popen(words, pass_fds=descriptors, **as_user(self._user))
        except OSError as error:
            os.close(status)
            if cgroup is not None:
                cgroup.remove()
            raise ValueError(f"bwrap cannot be started: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Wrapped(process, limits, status, cgroup)

    def _walls(self, limits: Limits) -> list[str]:
        """What bwrap is told of namespaces and files."""
        words = ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            words += ["--setenv", name, value]
        if "namespaces" not in self._layers:
            return [*words, "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/mnt"]
        words += [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts")]
        words += ["--as-pid-1"]  # or bwrap ends before it has reaped the first process inside
        words += ["--unshare-cgroup-try", "--disable-userns", "--hostname", "sandbox"]
        for path in self._python.paths:
            words += ["--ro-bind", path, path]
        for path in self._python.packages:
            words += ["--size", "1", "--tmpfs", path, "--remount-ro", path]
        for device in DEVICES:
            words += ["--dev-bind", device, device]
        scratch = ["--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]
        return [*words, *(scratch if limits.scratch_bytes else ["--dir", "/tmp"]), "--chdir", "/"]

    def _settings(self, mode: Mode, limits: Limits) -> dict[str, Any]:
        """What inside.py is told."""
        readable = [*self._python.paths, *DEVICES, *FILES]
        return inside_settings(
            mode,
            limits,
            rlimits="rlimits" in self._layers,
            landlock=readable if "landlock" in self._layers else [],
            seccomp=python_filter(final=True).hex() if "seccomp" in self._layers else "",
        )
