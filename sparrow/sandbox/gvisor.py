"""gVisor: programs on a kernel of their own, `runsc`, which takes their system calls.

An OCI container for each program, with the interpreter's paths read-only and no network. The
kernel inside has its own /proc and /dev, with nothing of this machine in them. seccomp and rlimits
by inside.py, in that kernel, which has no landlock. `unshare` gives runsc a namespace of processes:
whatever runsc has started ends with it. As root, all of this runs as nobody.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sparrow.sandbox.base import (
    NOBODY,
    Limits,
    Mode,
    Outcome,
    Running,
    Sandbox,
    SandboxRefused,
    as_user,
    inside_settings,
    inside_source,
    kill,
    left_behind,
    popen,
    sandbox_user,
)
from sparrow.sandbox.bubblewrap import ENVIRONMENT, find_interpreter
from sparrow.sandbox.seccomp import python_filter

UNSHARE = ["--user", "--map-root-user", "--pid", "--mount-proc", "--fork", "--kill-child"]
FLAGS = ["--rootless", "--network=none", "--ignore-cgroups"]
PREFIX = "sparrow-gvisor-"
UNSETTABLE = ("MSGQUEUE",)  # inside
INSTALL = {"runsc": "apt install runsc", "unshare": "apt install util-linux"}


class Container(Running):
    """A container. folder: its root, and what runsc knows of it; removed with it."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, folder: Path) -> None:
        super().__init__(process, limits)
        self._folder, self._first = folder, f"/proc/{process.pid}/task/{process.pid}/children"

    def end(self) -> Outcome:
        outcome = super().end()
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcome

    def _kill(self) -> None:
        """Kill runsc, the first process of its namespace; unshare reaps it."""
        children = Path(self._first).read_text().split()
        if not children:
            super()._kill()
        for child in children:
            kill(int(child))


class Gvisor(Sandbox):
    """Programs by runsc."""

    name = "gvisor"

    def __init__(self) -> None:
        self._binaries = {name: _binary(name) for name in INSTALL}
        self._user = sandbox_user()
        self._python = find_interpreter(self._user)
        for folder in left_behind(Path(tempfile.gettempdir()), f"{PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._filter = python_filter(final=True).hex()
        layers = "a kernel of its own, namespaces, seccomp, rlimits; no landlock inside"
        self.isolation = f"gvisor ({layers}), Python {self._python.version}"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        settings = inside_settings(mode, limits, source=source, seccomp=self._filter)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._make_root(folder / "root")
            (folder / "config.json").write_text(json.dumps(self._container(settings, limits)))
            for path in folder.rglob("*"):
                path.chmod(0o755)  # whatever the umask is: users inside are others
            if self._user is not None:
                os.chown(folder, self._user, self._user)
            words = [self._binaries["unshare"], *UNSHARE, self._binaries["runsc"], *FLAGS]
            words += ["--root", str(folder), "run", "--bundle", str(folder), folder.name]
            process = popen(words, **as_user(self._user))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(f"runsc cannot be started: {error}") from error
        return Container(process, limits, folder)

    def _make_root(self, root: Path) -> None:
        """An empty root with a place for each path; /tmp is not empty, or runsc would fill it."""
        for path in [*self._python.paths, "/tmp/none"]:
            place = root / path.lstrip("/")
            if os.path.isdir(path):
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()

    def _container(self, settings: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """The container in terms of OCI."""
        words = [self._python.executable, "-s", "-S", "-B", "-P", "-c", inside_source()]
        mounts = [
            {"destination": path, "source": path, "type": "bind", "options": ["ro", "rbind"]}
            for path in self._python.paths
        ]
        for path in self._python.packages:
            mounts.append({"destination": path, "type": "tmpfs", "options": ["ro", "size=4096"]})
        if limits.scratch_bytes:
            options = [f"size={limits.scratch_bytes}", "mode=1777"]
            mounts.append({"destination": "/tmp", "type": "tmpfs", "options": options})
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": NOBODY, "gid": NOBODY},
                "args": [*words, json.dumps(settings)],
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "cwd": "/",
                "capabilities": {},
                "noNewPrivileges": True,
                "rlimits": [
                    {"type": f"RLIMIT_{kind}", "soft": 0, "hard": 0} for kind in UNSETTABLE
                ],
            },
            "root": {"path": "root", "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
            },
        }


def _binary(name: str) -> str:
    if (found := shutil.which(name)) is None:
        raise SandboxRefused(f"{name} is not installed: {INSTALL[name]}")
    return found
