"""The clients of serve_load.py, in a process that loads neither torch nor sparrow.

Plain sockets: a client library takes longer over 256 requests than the server. Requests are
encoded before the clock starts, answers are read after it has stopped.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np


def prompts(args: argparse.Namespace) -> list[list[int]]:
    rng = np.random.default_rng(args.round)
    return [rng.integers(2, args.vocabulary, args.prompt).tolist() for _ in range(args.requests)]


def lengths(args: argparse.Namespace) -> list[int]:
    """Tokens of each answer: all alike, or spread from a half to one and a half times as many."""
    if not args.spread:
        return [args.tokens] * args.requests
    least, most = args.tokens // 2, args.tokens * 3 // 2
    return np.random.default_rng(args.round).integers(least, most + 1, args.requests).tolist()


def _encode(args: argparse.Namespace) -> list[bytes]:
    """The requests as they are sent."""
    url, requests = urlsplit(args.url), []
    for number, (prompt, tokens) in enumerate(zip(prompts(args), lengths(args), strict=True)):
        body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "seed": number}
        body |= {"stream": args.stream, **args.options}
        if args.stream:
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        head = (
            f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        requests.append(head.encode() + data)
    return requests


class Answer(asyncio.Protocol):
    """One request on a connection of its own, and what came back."""

    def __init__(self, request: bytes) -> None:
        self.request, self.parts = request, list[bytes]()
        self.first: float | None = None  # seconds until the first chunk
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.sent = time.monotonic()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if self.first is None and b"data: {" in data:
            self.first = time.monotonic() - self.sent

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    @property
    def tokens(self) -> int:
        """The number of sampled tokens that the answer says it has."""
        data = b"".join(self.parts)
        found = re.findall(rb'"completion_tokens": ?(\d+)', data)
        if not data.startswith(b"HTTP/1.1 200 ") or not found:
            raise ValueError(f"an answer failed: {data[-500:]!r}")
        return int(found[-1])


async def client(args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests and return their times.

    The first `at_once` of them at once, the others at `rate` a second; rate 0: all at once.
    """
    url, requests = urlsplit(args.url), _encode(args)
    loop = asyncio.get_running_loop()

    async def ask(number: int, request: bytes) -> Answer:
        late = max(0, number - args.at_once) / args.rate if args.rate else 0
        await asyncio.sleep(begun + late - time.monotonic())
        answer = Answer(request)
        await loop.create_connection(lambda: answer, url.hostname, url.port)
        await answer.ended
        return answer

    begun = time.monotonic()
    answers = await asyncio.gather(*(ask(*item) for item in enumerate(requests)))
    seconds = time.monotonic() - begun
    found = {"seconds": round(seconds, 3), "tokens": sum(answer.tokens for answer in answers)}
    first = [answer.first for answer in answers if answer.first is not None]
    if first:
        p50, p99 = np.quantile(first, [0.5, 0.99])
        found |= {"first_token_p50": round(float(p50), 4), "first_token_p99": round(float(p99), 4)}
    return found | {"client_cpu_seconds": round(time.process_time(), 2)}


def main() -> None:
    """Read the settings, a JSON object, from the command line."""
    settings = argparse.Namespace(**json.loads(sys.argv[1]))
    print(json.dumps(asyncio.run(client(settings))))


if __name__ == "__main__":
    main()
