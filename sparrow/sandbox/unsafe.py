"""No isolation: a subprocess with limits of CPU time and memory, for programs that one trusts."""

import json
import os
import sys

from sparrow.sandbox.base import (
    INSIDE,
    Limits,
    Mode,
    Running,
    Sandbox,
    data_descriptor,
    inside_settings,
    popen,
)
from sparrow.schema.code import UNSAFE

THREADS = 4096  # of this user, all processes together


class Unsafe(Sandbox):
    """A bare subprocess. It can read, write and send whatever this user can."""

    name = "unsafe"

    def __init__(self) -> None:
        version = ".".join(map(str, sys.version_info[:2]))
        self.isolation = f"{UNSAFE} (Python {version})"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        program = data_descriptor(source.encode(errors="replace"))
        settings = inside_settings(mode, limits, program=program) | {"threads": THREADS}
        words = [sys.executable, "-s", "-S", "-B", "-P", str(INSIDE), json.dumps(settings)]
        try:
            return Running(popen(words, pass_fds=[program]), limits)
        finally:
            os.close(program)
