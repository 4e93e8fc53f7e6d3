"""Tokens a second through HTTP beside those of the engine in process, and time to first token.

Two loads, each with whole and with streamed answers, first by the engine alone, then by clients in
a process of their own:

- burst: N requests at once, answers all of one length. Nothing overlaps: what the server does for
  a request before its first and after its last token comes on top.
- steady: `--rounds` times N requests, answers of different lengths. The first N come at once, the
  others at `--load` times the rate at which the engine alone ends them, so that N are in flight all
  the time. The engine alone has all of them from the start.

The engine runs up to N samples together. Prompts are token ids; end-of-sequence tokens do not end
answers.
"""

import argparse
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from serve_client import lengths, prompts

from sparrow import models
from sparrow.engine.answer import DENSE, ResolvedDecoding
from sparrow.engine.engine import Engine
from sparrow.engine.language import Language
from sparrow.models import load_tokenizer
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.serve import ServeConfig
from sparrow.serve.server import http_server
from sparrow.serve.service import Service

OPTIONS = {"sparrow": {"ignore_eos": True}}
GPU_MEMORY = 40 * 2**30  # of keys and values: for two engines, should the first not be gone yet
CLIENT = Path(__file__).with_name("serve_client.py")


class Folded:
    """The tokenizer of `tiny` for a model of any vocabulary: ids are folded into its own."""

    chat_template = None

    def __init__(self) -> None:
        self.inner = load_tokenizer("tiny")
        self.size = len(self.inner.get_vocab())

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self.inner.decode([token % self.size for token in ids], **options))


@contextmanager
def serving(engine: Engine, schedule: Schedule | None) -> Iterator[str]:
    """Serve an engine; the address up to and including /v1."""
    service = Service(
        config=ServeConfig(model="bench", max_waiting=2**16),
        engine=engine,
        language=Language(Folded(), "bench"),
        decoding=DENSE if schedule is None else ResolvedDecoding(schedule),
        name="bench",
    )
    server = http_server(service)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


def engine_alone(
    engine: Engine, case: argparse.Namespace, schedule: Schedule | None
) -> tuple[float, int]:
    """Seconds that the engine takes in process, while the server is idle; and the tokens."""
    begun, ids = time.monotonic(), prompts(case)
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
        for number, tokens in enumerate(lengths(case))
    ]
    engine.owned, owned = False, engine.owned
    made = engine.generate(ids, params, schedule=schedule)
    engine.owned = owned
    return time.monotonic() - begun, sum(len(one.token_ids) for one in made)


def through_http(case: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, str(CLIENT), json.dumps(vars(case))]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(said.splitlines()[-1]))


def compare(
    engine: Engine, case: argparse.Namespace, schedule: Schedule | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of both, the best of `--repeat` turns each, and what the best turn took."""
    alone, through = [], []
    for _ in range(args.repeat):
        seconds, tokens = engine_alone(engine, case, schedule)
        alone.append(tokens / seconds)
        if case.spread:
            case.rate = args.load * case.requests / seconds
        found = through_http(case)
        assert found["tokens"] == tokens, "clients got other tokens than the engine drew"
        through.append(found | {"tokens_per_second": tokens / found["seconds"]})
    best = max(through, key=lambda one: one["tokens_per_second"])
    ratio = round(best["tokens_per_second"] / max(alone), 3)
    engine_figures = {"engine_tokens_per_second": round(max(alone)), "ratio": ratio}
    return best | {"tokens_per_second": round(best["tokens_per_second"])} | engine_figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a model, or a shape with random weights")
    parser.add_argument("--requests", type=int, action="append", help="N; default 32 and 256")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, help="sparse decoding")
    parser.add_argument("--loads", nargs="+", default=["burst", "steady"])
    parser.add_argument("--rounds", type=int, default=2, help="of the steady load")
    parser.add_argument("--load", type=float, default=1.1, help="of the steady load")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = args.model.startswith("qwen3")
    model = models.random(args.model, device=device) if shape else models.load(args.model)
    model = model.to(torch.bfloat16) if shape and device == "cuda" else model
    schedule = None if args.budget is None else Schedule.fixed(args.budget)
    context = args.prompt + args.tokens * 3 // 2
    memory = GPU_MEMORY if device == "cuda" else None
    for number in args.requests or [32, 256]:
        engine = Engine(model, max_context=context, max_running=number, kv_bytes=memory)
        common = {"prompt": args.prompt, "tokens": args.tokens, "round": 0}
        common |= {"vocabulary": model.spec.vocabulary, "options": OPTIONS}
        steady = common | {"requests": number * args.rounds, "spread": True, "at_once": number}
        burst = common | {"requests": number, "spread": False, "at_once": 0, "rate": 0.0}
        with serving(engine, schedule) as url:
            warm = argparse.Namespace(**steady | {"requests": number, "url": url, "rate": 0.0})
            engine_alone(engine, warm, schedule)  # captures steps of all sizes
            for stream in (False, True):
                few = {"requests": 8, "tokens": 8, "stream": stream, "url": url}
                through_http(argparse.Namespace(**burst | few))
                for load in args.loads:
                    settings = (burst if load == "burst" else steady) | {"stream": stream}
                    case = argparse.Namespace(**settings, url=url)
                    row = {"model": args.model, "load": load, "requests": number, "stream": stream}
                    row |= compare(engine, case, schedule, args)
                    print(json.dumps(row), flush=True)
        del engine
        gc.collect()  # its keys and values make room for those of the next


if __name__ == "__main__":
    main()
