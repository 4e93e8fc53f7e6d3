"""Rollouts of equal lengths under the schedules of a study, each alone on the device.

    python bench/study_rollouts.py PLANS [--device cuda] > FILE

PLANS is the folder plans/ of a study. 16 prompts x 8 answers of 3840 tokens (no end taken), twice;
the first includes compiling and capturing.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sparrow.dataflow.prompts import of_task
from sparrow.engine.engine import Engine
from sparrow.models import Decoder, load
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.loading import resolve_flow
from sparrow.sparse.rule import Rule

ARMS = ("dense", "p05-0.92", "p05-0.86", "fixed", "p05-0.80", "p05-0.75", "p05-0.60", "dense")
PROMPTS, SAMPLES, TOKENS, CONTEXT = 16, 8, 3840, 4096


def timed(model: Decoder, prompts: list[list[int]], schedule: Schedule | None) -> list[float]:
    rule = None if schedule is None else Rule.of(schedule, resolve_flow(schedule))
    engine = Engine(model, rule=rule, max_running=PROMPTS * SAMPLES, max_context=CONTEXT)
    params = SamplingParams(n=SAMPLES, max_tokens=TOKENS, seed=0, ignore_eos=True)
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        engine.generate(prompts, params, schedule=schedule)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    model = load("small", device=given.device)
    source = of_task(model, "assignments", length=2000, count=PROMPTS, skip=100_000)
    prompts = [list(prompt.ids) for prompt in source.prompts]
    rows: list[dict[str, Any]] = []
    for name in ARMS:
        schedule = None if name == "dense" else Schedule.load(given.plans / f"{name}.json")
        first, second = timed(model, prompts, schedule)
        tokens = PROMPTS * SAMPLES * TOKENS
        rows.append({"arm": name, "first_s": first, "second_s": second, "tokens": tokens})
        print(rows[-1], file=sys.stderr)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
