"""CPU time of the server's process for a request that is answered whole, the engine left out.

    python bench/serve_cost.py --requests 256

Every answer is one of 1500 characters, half a second later. Clients are those of serve_load.py.
"""

import argparse
import asyncio
import time
from typing import Any

from serve_load import OPTIONS, serving, through_http

from sparrow import models
from sparrow.engine.engine import Engine
from sparrow.serve.answers import Answers


async def whole(answers: Answers) -> dict[str, Any]:
    await asyncio.sleep(0.5)
    answers.usage.completion = 512
    choice = {"index": 0, "text": "x" * 1500, "logprobs": None, "finish_reason": "length"}
    return answers.envelope.whole([choice], answers.usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    Answers.whole = whole  # type: ignore[method-assign]
    model = models.load("tiny")
    case = {"prompt": 64, "tokens": 512, "round": 0, "vocabulary": model.spec.vocabulary}
    case |= {"requests": args.requests, "spread": False, "at_once": 0, "rate": 0.0}
    with serving(Engine(model, max_context=1024, max_running=args.requests), None) as url:
        for _ in range(args.repeat):
            begun = time.process_time()
            settings = argparse.Namespace(**case, options=OPTIONS, stream=False, url=url)
            seconds = through_http(settings)["seconds"]
            cpu = (time.process_time() - begun) / args.requests
            print(f"{cpu * 1000:.3f} ms a request, all of them {seconds} s")


if __name__ == "__main__":
    main()
