"""The proxy of bench/faults, for tests."""

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[2] / "bench/faults/proxy.py"
_spec = importlib.util.spec_from_file_location("fault_proxy", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
Line: Any = _module.Line
Proxy: Any = _module.Proxy


@contextmanager
def bad_line(address: str, line: Any) -> Iterator[str]:
    """An address that leads to another one, http://HOST:PORT, over a line in a thread."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    proxy, opened, end = Proxy(host, int(port), line), threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        async with proxy.listening() as number:
            found.update(port=number, loop=asyncio.get_running_loop())
            opened.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert opened.wait(10)
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        found["loop"].call_soon_threadsafe(end.set)
        thread.join()
