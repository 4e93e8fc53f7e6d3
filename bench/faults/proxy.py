"""A TCP proxy with latency, limited bandwidth, and faults: a bad line on one machine.

    python bench/faults/proxy.py 7001 127.0.0.1:7000 --delay-ms 150 --mbit 40

Faults strike by chance, each with a rate for every 64 KiB that pass: the connection is cut, or
stalls; a byte behind HTTP's head is changed (a damaged key is refused, as it must be); what a
client sent on a connection is sent again later, on another one, whose answer is thrown away (a
message that is duplicated and reordered). `Line.faults` counts them.
"""

import argparse
import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CHUNK = 2**16
MOST_KEPT = 2**20  # bytes of a connection that may be sent again
DEEP = 64  # chunks that are on their way


@dataclass(kw_only=True)
class Line:
    """How the line behaves; rates are chances of a fault per chunk of 64 KiB or less."""

    delay: float = 0.0  # seconds each way
    jitter: float = 0.0  # seconds, added at random
    bytes_per_s: float = float("inf")  # each way, of all connections
    cut: float = 0.0
    stall: float = 0.0
    stall_seconds: float = 5.0
    corrupt: float = 0.0
    repeat: float = 0.0
    seed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)  # bytes by direction

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._free = {"up": 0.0, "down": 0.0}  # when the line is free again

    def strikes(self, kind: str) -> bool:
        if self.random.random() >= getattr(self, kind):
            return False
        self.faults[kind] += 1
        return True

    def arrival(self, direction: str, size: int) -> float:
        """When the last byte of a chunk that is sent now is there."""
        now = asyncio.get_running_loop().time()
        self._free[direction] = max(now, self._free[direction]) + size / self.bytes_per_s
        self.passed[direction] += size
        return self._free[direction] + self.delay + self.random.uniform(0, self.jitter)


class Proxy:
    """Passes connections on to a target over a line."""

    def __init__(self, host: str, port: int, line: Line) -> None:
        self.target, self.line = (host, port), line
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[int]:
        """Listen on a port of this machine; gives its number."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", port)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(*self.target)
            pumps = [
                asyncio.create_task(self._pump("up", reader, back)),
                asyncio.create_task(self._pump("down", there, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(pumps, timeout=2 * self.line.delay + 1.0)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                back.close()
        writer.close()

    async def _pump(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read chunks at once, write each when it has arrived."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(DEEP)
        writing = asyncio.create_task(self._write(chunks, writer))
        line, kept = self.line, bytearray()
        try:
            while data := await reader.read(CHUNK):
                if line.strikes("cut"):
                    writer.transport.abort()
                    return
                head, end, _ = data.partition(b"\r\n\r\n")
                body = len(head) + len(end) if end else 0
                if body < len(data) and line.strikes("corrupt"):
                    place = line.random.randrange(body, len(data))
                    data = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
                if line.strikes("stall"):
                    await asyncio.sleep(line.stall_seconds)
                if direction == "up" and len(kept) + len(data) <= MOST_KEPT:
                    kept += data
                    if line.strikes("repeat"):
                        self._start(self._repeat(bytes(kept)))
                await chunks.put((line.arrival(direction, len(data)), data))
        except OSError:
            writer.transport.abort()
        finally:
            with suppress(asyncio.CancelledError):
                await chunks.put((0.0, b""))
                await writing
            writing.cancel()

    async def _write(
        self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due, data = await chunks.get()
                if not data:
                    writer.write_eof()
                    return
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)
                await writer.drain()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _repeat(self, data: bytes) -> None:
        """Send again what a client sent, after a while."""
        await asyncio.sleep(self.line.random.uniform(0, 2))
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(*self.target)
            writer.write(data)
            await asyncio.wait_for(reader.read(CHUNK), 10)
            writer.close()


@contextmanager
def bad_line(address: str, line: Line) -> Iterator[str]:
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
    opened.wait()
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        found["loop"].call_soon_threadsafe(end.set)
        thread.join()


async def run(port: int, proxy: Proxy) -> None:
    async with proxy.listening(port) as number:
        print(f"127.0.0.1:{number} -> {proxy.target[0]}:{proxy.target[1]}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, help="to listen on; 0: any")
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=float("inf"), help="each way")
    for kind in ("cut", "stall", "corrupt", "repeat"):
        parser.add_argument(f"--{kind}", type=float, default=0.0, help="chance per 64 KiB")
    args = parser.parse_args()
    host, _, port = args.target.rpartition(":")
    line = Line(
        delay=args.delay_ms / 1000,
        jitter=args.jitter_ms / 1000,
        bytes_per_s=args.mbit * 1e6 / 8,
        cut=args.cut,
        stall=args.stall,
        corrupt=args.corrupt,
        repeat=args.repeat,
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(run(args.port, Proxy(host, int(port), line)))


if __name__ == "__main__":
    main()
