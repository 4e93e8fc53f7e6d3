"""Tokens a second through HTTP beside those of the engine in process, and time to first token.

The same requests, all at once (or at --rate a second), first by the engine alone, then by clients
in a process of their own. Prompts are token ids; end-of-sequence tokens do not end answers.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from serve_client import prompts

from sparrow import models
from sparrow.engine.answer import DENSE, ResolvedDecoding
from sparrow.engine.engine import Engine
from sparrow.engine.language import Language
from sparrow.models import load_tokenizer
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.serve import ServeConfig
from sparrow.serve.app import make_app
from sparrow.serve.server import _HttpProtocol
from sparrow.serve.service import Service

CLIENT = Path(__file__).with_name("serve_client.py")


class Folded:
    """The tokenizer of `tiny` for a model of any vocabulary: ids are folded into its own."""

    chat_template = None

    def __init__(self) -> None:
        self.inner = load_tokenizer("tiny")
        self.size = len(self.inner.get_vocab())

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self.inner.decode([token % self.size for token in ids], **options))


def serve(service: Service) -> tuple[uvicorn.Server, str]:
    app = make_app(service)
    config = uvicorn.Config(app, http=_HttpProtocol, port=8765, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, "http://127.0.0.1:8765/v1"


def engine_alone(engine: Engine, args: argparse.Namespace, schedule: Schedule | None) -> float:
    begun = time.monotonic()
    params = [
        SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=number)
        for number in range(args.requests)
    ]
    made = engine.generate(prompts(args), params, schedule=schedule)
    assert sum(len(one.token_ids) for one in made) == args.requests * args.tokens
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a model, or a shape with random weights")
    parser.add_argument("--requests", type=int, action="append")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, help="sparse decoding")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: at once")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = args.model.startswith("qwen3")
    model = models.random(args.model, device=device) if shape else models.load(args.model)
    model = model.to(torch.bfloat16) if shape and device == "cuda" else model
    args.vocabulary = model.spec.vocabulary
    engine = Engine(model, max_context=args.prompt + args.tokens)
    schedule = None if args.budget is None else Schedule.fixed(args.budget)
    service = Service(
        config=ServeConfig(model=args.model, max_waiting=4096),
        engine=engine,
        language=Language(Folded(), "bench"),
        decoding=DENSE if schedule is None else ResolvedDecoding(schedule),
        name="bench",
    )
    server, url = serve(service)
    for requests in args.requests or [32, 256]:
        for stream in (False, True):
            case = argparse.Namespace(**vars(args) | {"requests": requests})
            words = [sys.executable, CLIENT, url, "--requests", requests]
            words += ["--prompt", args.prompt, "--tokens", args.tokens, "--rate", args.rate]
            words += ["--vocabulary", args.vocabulary, *(["--stream"] if stream else [])]
            alone, through = [], []
            for turn in range(args.repeat + 1):
                engine.owned, owned = False, engine.owned  # the server is idle meanwhile
                seconds = engine_alone(engine, case, schedule)
                engine.owned = owned
                said = subprocess.run(
                    [*map(str, words)], capture_output=True, text=True, check=True
                ).stdout
                if turn:  # the first one warms up
                    alone.append(seconds)
                    through.append(json.loads(said.splitlines()[-1]))
            best = min(through, key=lambda one: one["seconds"])
            row = {"model": args.model, "requests": requests, "stream": stream}
            row |= {"engine_seconds": round(min(alone), 3), **best}
            row["ratio"] = round(min(alone) / best["seconds"], 3)
            print(json.dumps(row), flush=True)
    server.should_exit = True


if __name__ == "__main__":
    main()
