"""`sparrow serve tiny` in a process that is killed under load, and clients that try again.

Run as a program it is `sparrow`, and checks the engine of the server after SIGTERM.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai

from sparrow.cli import run
from sparrow.client import Client, ClientError
from sparrow.engine.engine import Engine
from sparrow.models import load
from sparrow.schema.sampling import SamplingParams
from support.clients import wait_until_ready
from support.http_faults import PROMPT

TESTS = Path(__file__).parents[1]
TOKENS = 96
LONGEST = 180.0  # seconds until every client has ended
Ask = Callable[[str, int], Any]  # address and seed to tokens or a text
Result = tuple[int, Any]  # seed and answer or error


class ServerProcess:
    """`sparrow serve tiny` on one port, to be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = ["serve", "tiny", "--port", str(self.port), "--device", "cpu", "--kv-gib", "0.2"]
        words += ["--max-running", "8", "--max-waiting", "8"]
        paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths}
        self.process = subprocess.Popen([sys.executable, __file__, *words], env=environment)
        wait_until_ready(self.root, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def in_flight(self) -> int:
        text = httpx2.get(f"{self.root}/metrics").text
        found = re.search(r"^sparrow_samples_in_flight (\S+)", text, re.MULTILINE)
        assert found
        return int(float(found[1]))

    def stop(self) -> None:
        """End it by SIGTERM; nothing may be in flight before, and no page lost after it."""
        end = time.monotonic() + 20
        while self.in_flight():
            assert time.monotonic() < end, "samples are still in flight"
            time.sleep(0.05)
        self.process.terminate()
        assert self.process.wait(60) == 0


def kill_under_load(kills: int, clients: int = 8, seed: int = 0) -> Counter[str]:
    """Kill and restart a server while clients ask; count how their requests ended.

    Every answer must have the tokens of the engine in process, every failure be an error of the
    client, and every client be answered in the end.
    """
    rng, stopping, server = random.Random(seed), threading.Event(), ServerProcess()
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(clients)]
    try:
        with ThreadPoolExecutor(clients) as threads:
            try:
                work = [
                    threads.submit(_ask_until, stopping, KINDS[kind], f"{server.root}/v1", number)
                    for number, kind in enumerate(kinds)
                ]
                for _ in range(kills):
                    time.sleep(rng.uniform(1, 2))
                    while not server.in_flight():
                        time.sleep(0.01)
                    server.kill()
                    server.start()
            finally:
                stopping.set()
            end = time.monotonic() + LONGEST
            results = [one.result(end - time.monotonic()) for one in work]
        server.stop()
    finally:
        server.kill()
    return _check(kinds, results)


def _ask_until(stopping: threading.Event, ask: Ask, url: str, number: int) -> list[Result]:
    """Ask until told to stop, and once more; return seeds with tokens, texts or errors."""
    results: list[Result] = []
    last = False
    while not last:
        last = stopping.is_set()
        seed = 1000 * number + len(results)
        try:
            results.append((seed, ask(url, seed)))
        except (ClientError, openai.APIError) as error:
            results.append((seed, error))
            time.sleep(0.2)
    return results


def _ask_ours(url: str, seed: int, *, retries: int) -> list[int]:
    with Client(url, retries=retries) as client:
        return client.complete(PROMPT, _params(seed))[0].token_ids.tolist()


def _ask_openai(url: str, seed: int, *, stream: bool) -> str:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        answer: Any = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            seed=seed,
            max_tokens=TOKENS,
            stream=stream,
            extra_body={"sparrow": {"ignore_eos": True}},
        )
        return "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))


def _params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True)


KINDS: dict[str, Ask] = {
    "client": partial(_ask_ours, retries=10),
    "client without retries": partial(_ask_ours, retries=0),
    "openai": partial(_ask_openai, stream=False),
    "openai stream": partial(_ask_openai, stream=True),
}


def _check(kinds: list[str], results: list[list[Result]]) -> Counter[str]:
    """Compare answers with those of the engine in process."""
    engine = Engine(load("tiny", device="cpu"), max_running=8, kv_bytes=2**26)
    counts: Counter[str] = Counter()
    for kind, done in zip(kinds, results, strict=True):
        wanted = engine.generate([PROMPT] * len(done), [_params(seed) for seed, _ in done])
        for (_, found), completion in zip(done, wanted, strict=True):
            if isinstance(found, Exception):
                counts[f"{kind}: {type(found).__name__}"] += 1
                continue
            right = completion.text if isinstance(found, str) else completion.token_ids.tolist()
            assert found == right, kind
            counts[f"{kind}: right"] += 1
        assert not isinstance(done[-1][1], Exception), kind
    return counts


def main() -> None:
    from sparrow.serve import server

    services: list[Any] = []
    opened = server.open_service

    def keep(*given: Any) -> Any:
        services.append(opened(*given))
        return services[-1]

    server.open_service = keep
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again after the drain
    run(sys.argv[1:])
    (service,) = services
    assert not service.sampler.in_flight
    assert not service.engine.loop.requests
    service.engine.check_integrity()


if __name__ == "__main__":
    main()
