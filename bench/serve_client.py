"""The clients of serve_load.py, in a process that loads neither torch nor sparrow."""

import argparse
import asyncio
import json
import time
from typing import Any

import httpx2
import numpy as np


def prompts(args: argparse.Namespace) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, args.vocabulary, args.prompt).tolist() for _ in range(args.requests)]


async def client(args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests and return their times."""
    limits = httpx2.Limits(max_connections=None)
    begun, first, tokens = time.monotonic(), [], 0

    async def ask(http: httpx2.AsyncClient, number: int, prompt: list[int]) -> None:
        nonlocal tokens
        await asyncio.sleep(number / args.rate if args.rate else 0)
        body = {"model": "bench", "prompt": prompt, "max_tokens": args.tokens, "seed": number}
        body |= {"stream": args.stream, "sparrow": {"ignore_eos": True}}
        sent = time.monotonic()
        if not args.stream:
            response = await http.post(f"{args.url}/completions", json=body)
            tokens += response.raise_for_status().json()["usage"]["completion_tokens"]
            return
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", f"{args.url}/completions", json=body) as response:
            response.raise_for_status()
            seen = False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not seen:
                        first.append(time.monotonic() - sent)
                        seen = True
                    usage = json.loads(line[6:]).get("usage")
                    tokens += usage["completion_tokens"] if usage else 0

    async with httpx2.AsyncClient(timeout=None, limits=limits) as http:
        await asyncio.gather(*(ask(http, *item) for item in enumerate(prompts(args))))
    seconds = time.monotonic() - begun
    found = {"seconds": round(seconds, 3), "tokens": tokens}
    if first:
        p50, p99 = np.quantile(first, [0.5, 0.99])
        found |= {"first_token_p50": round(float(p50), 4), "first_token_p99": round(float(p99), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    print(json.dumps(asyncio.run(client(parser.parse_args()))))


if __name__ == "__main__":
    main()
