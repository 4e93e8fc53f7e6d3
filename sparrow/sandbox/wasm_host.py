"""The process of a WebAssembly program: it loads CPython, gives up its rights, and runs it.

Started by wasm.py with the task as JSON by a descriptor, or as `compile` with a module on stdin. A
process for each program: its limit of CPU time is that of the program.
"""

import json
import os
import resource  # inside.py imports these when they may be out of reach
import signal
import struct
import sys
from importlib import import_module
from typing import Any

LOADED = (resource, struct)
TRAP_CODE = 70  # of a program that WebAssembly ended, such as by its depth of calls
WASM_STACK = 2 << 20  # bytes; the most that wasmtime takes


def _engine(wasmtime: Any) -> Any:
    config = wasmtime.Config()
    config.max_wasm_stack = WASM_STACK
    return wasmtime.Engine(config)


def compile_module() -> None:
    """Make machine code of a module."""
    wasmtime = import_module("wasmtime")
    module = wasmtime.Module(_engine(wasmtime), sys.stdin.buffer.read())
    sys.stdout.buffer.write(module.serialize())


def run(task: dict[str, Any]) -> int:
    """Run CPython with the arguments of a task; its exit code."""
    from sparrow.sandbox.inside import limit

    wasmtime = import_module("wasmtime")
    engine = _engine(wasmtime)
    module = wasmtime.Module.deserialize_file(engine, f"/proc/self/fd/{task['compiled']}")
    os.close(task["compiled"])
    if task["user"] is not None:
        os.setgroups([])
        os.setresgid(*[task["user"]] * 3)
        os.setresuid(*[task["user"]] * 3)
    limit(task["limits"])
    wasi = wasmtime.WasiConfig()  # no folder, no socket
    wasi.argv, wasi.env = task["argv"], task["environment"]
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    store = wasmtime.Store(engine)
    store.set_limits(memory_size=task["memory"], memories=1, instances=1)
    store.set_wasi(wasi)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    signal.alarm(task["alarm"])
    try:
        start = linker.instantiate(store, module).exports(store)["_start"]
        start(store)
    except wasmtime.ExitTrap as exited:
        return exited.code
    except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
        print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)
        return TRAP_CODE
    return 0


def main() -> None:
    sys.path += json.loads(sys.argv[2])
    if sys.argv[1] == "compile":
        compile_module()
        return
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        task = json.load(file)
    os._exit(run(task))


if __name__ == "__main__":
    main()
