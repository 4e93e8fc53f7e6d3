"""No isolation: a subprocess with limits of CPU time and memory, for programs that one trusts."""

import json
import os
import sys
import tempfile
from pathlib import Path

from sparrow.sandbox.base import INSIDE, Limits, Mode, Running, Sandbox, popen
from sparrow.schema.code import UNSAFE


class Unsafe(Sandbox):
    """A bare subprocess. It can read, write and send whatever this user can."""

    name = "unsafe"

    def __init__(self) -> None:
        version = ".".join(map(str, sys.version_info[:2]))
        self.isolation = f"{UNSAFE} (Python {version})"
        self._folder = tempfile.TemporaryDirectory(prefix="sparrow-unsafe-")

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        descriptor, path = tempfile.mkstemp(suffix=".py", dir=self._folder.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(source)
        settings = {"mode": mode, "rlimits": True, "program": path, "threads": 4096}
        settings |= {"cpu": limits.cpu_seconds, "memory": limits.memory_bytes}
        settings["scratch"] = limits.scratch_bytes
        words = [sys.executable, "-s", "-S", "-B", "-P", str(INSIDE), json.dumps(settings)]
        return Running(popen(words), limits, remove=Path(path))
