"""Sandboxes by name: tested first, and refused if an attack gets through; none replaces another."""

from importlib import import_module
from pathlib import Path
from typing import cast

from sparrow.sandbox.base import Sandbox, SandboxRefused
from sparrow.sandbox.cgroup import CgroupRefused
from sparrow.sandbox.selftest import self_test
from sparrow.sandbox.unsafe import Unsafe
from sparrow.schema.code import SandboxName

CLASSES = {
    "bwrap": ("bubblewrap", "Bubblewrap"),
    "nsjail": ("nsjail", "Nsjail"),
    "gvisor": ("gvisor", "Gvisor"),
    "wasm": ("wasm", "Wasm"),
}


def open_sandbox(name: SandboxName, *, cgroup: Path | None = None, test: bool = True) -> Sandbox:
    """Open a sandbox; SandboxRefused says what is missing or what gets through.

    cgroup: a delegated folder of cgroup v2, for bwrap. test: False where the caller knows that the
    same backend passed on this machine.
    """
    if cgroup and name != "bwrap":
        raise CgroupRefused(f"data.code.cgroup is for bwrap, {name} takes none: leave it out")
    if name == "unsafe":  # asked for by that word
        return Unsafe()
    module, backend = CLASSES[name]
    try:
        chosen = getattr(import_module(f"sparrow.sandbox.{module}"), backend)
        sandbox = cast(Sandbox, chosen(**({"cgroup": cgroup} if cgroup else {})))
        if test:
            self_test(sandbox)
    except CgroupRefused:
        raise
    except SandboxRefused as error:
        raise SandboxRefused(f"{error}. {ADVICE}") from error
    return sandbox


ADVICE = (
    "data.code.sandbox (in eval code.sandbox) chooses another: wasm needs no privilege; unsafe "
    "runs programs without isolation, for those that you trust"
)
