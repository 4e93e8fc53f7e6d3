"""The same open-loop load on two servers that run already, in turns: `sparrow serve` and vLLM.

    sparrow serve smollm2-135m --name bench --port 8100 --max-context 2048
    python -m vllm.entrypoints.openai.api_server --model ~/.cache/sparrow/models/smollm2-135m \
        --served-model-name bench --port 8200 --dtype float32 --max-model-len 2048
    python bench/serve_beside.py http://127.0.0.1:8100/v1 http://127.0.0.1:8200/v1 --out FILE.json

Greedy, streamed, prompts of token ids, a new set each round, the same for both; end-of-sequence
tokens do not end answers. Figures are medians over rounds, the ratio is first to second.
"""

import argparse
import asyncio
import json
import os
import statistics
from pathlib import Path
from typing import Any

import httpx2
from serve_client import client, prompts


def options(url: str) -> dict[str, Any]:
    """What a request sets beside OpenAI's keys."""
    ours = "sparrow" in httpx2.get(f"{url}/models").json()["data"][0]
    extra: dict[str, Any] = {"sparrow": {"ignore_eos": True}} if ours else {"ignore_eos": True}
    return {"temperature": 0, **extra}


def texts(url: str, args: argparse.Namespace) -> list[str]:
    """Answers to the prompts of the first round, without load."""
    body = {"model": "bench", "max_tokens": args.tokens, **options(url)}
    answers = (
        httpx2.post(f"{url}/completions", json=body | {"prompt": prompt}, timeout=600)
        for prompt in prompts(args)[:8]
    )
    return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs=2, help="addresses up to and including /v1")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0], help="requests a second; 0: at once"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.round, args.stream, args.spread, args.at_once, rows = 0, True, False, 0, []
    first, second = (texts(url, args) for url in args.urls)
    equal = sum(one == other for one, other in zip(first, second, strict=True))
    print(f"{equal} of {len(first)} greedy answers are equal", flush=True)
    for rate in args.rates:
        found: dict[str, list[dict[str, float]]] = {url: [] for url in args.urls}
        for number in range(1, args.rounds + 1):
            for url in args.urls:
                case = vars(args) | {"round": number, "url": url, "rate": rate}
                case |= {"options": options(url)}
                made = asyncio.run(client(argparse.Namespace(**case)))
                made["tokens_per_second"] = made["tokens"] / made["seconds"]
                made["load_average"] = os.getloadavg()[0]
                found[url].append(made)
                print(json.dumps({"rate": rate, "url": url, **made}), flush=True)
        names = ("tokens_per_second", "first_token_p50", "first_token_p99")
        middle = {
            url: {name: statistics.median(row[name] for row in rows_) for name in names}
            for url, rows_ in found.items()
        }
        ours, theirs = middle.values()
        ratio = {name: round(ours[name] / theirs[name], 3) for name in names}
        rows.append({"rate": rate, "medians": middle, "ratio": ratio, "rounds": found})
        print(json.dumps({"rate": rate, "medians": middle, "ratio": ratio}), flush=True)
    if args.out:
        about = {name: getattr(args, name) for name in ("requests", "prompt", "tokens", "rounds")}
        about |= {"equal_greedy_answers": f"{equal} of {len(first)}"}
        args.out.write_text(json.dumps({**about, "rates": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
