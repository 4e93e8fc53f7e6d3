"""A TCP proxy that delays, cuts and damages what goes through it."""

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress


class BadLine:
    """Forwards to an address while it is entered; chances are by chunk of at most 64 KiB."""

    def __init__(
        self,
        target: str,
        *,
        delay: float = 0.0,
        cut: float = 0.0,
        damage: float = 0.0,
        seed: int = 0,
    ) -> None:
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target, self._delay, self._cut, self._damage = (host, int(port)), delay, cut, damage
        self._random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "BadLine":
        self._thread.start()
        opening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection(*self._target)
            ways = [(reader, back), (there, writer)]
            tasks = [self._loop.create_task(self._forward(*way)) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            back.close()
        writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                await asyncio.sleep(self._delay)
                if self._strikes("cut", self._cut):
                    writer.write(data[: len(data) // 2])
                    return
                if self._strikes("damaged", self._damage):
                    place = self._random.randrange(len(data))
                    data = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                writer.write(data)
                await writer.drain()

    def _strikes(self, kind: str, chance: float) -> bool:
        struck = self._random.random() < chance
        self.faults[kind] += struck
        return struck
