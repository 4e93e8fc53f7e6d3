"""Exact decoding of real models: tokens a second, accepted drafts, and where bf16 first differs.

    PYTHONPATH=. python bench/exact_models.py smollm2-135m standard --out smollm2.json
    PYTHONPATH=. python bench/exact_models.py small assignments --out small.json

Prompts are the first 4096 tokens of ten texts, or those of a task. Dense decoding, exact decoding
by rejection, and by shared noise, which draws dense decoding's tokens up to rounding. The first
index at which an answer differs is counted; so it is for dense decoding in batches of half the
size, whose products have other shapes too; and all in fp32.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from sparrow import models
from sparrow.benchmarks.timing import schedule_named
from sparrow.calibration.flows import texts
from sparrow.dataflow.prompts import of_task, of_texts
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.schema.sampling import Completion, SamplingParams, SpeculationStats, SpeculativeParams
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule

PROMPT_TOKENS = 4096


def prompts_of(model: Decoder, source: str, count: int, length: int) -> list[list[int]]:
    if source == "standard" or Path(source).is_dir():
        found = texts.standard(print) if source == "standard" else texts.from_folder(source)
        prompts = of_texts(model, found, tokens=PROMPT_TOKENS).prompts
    else:
        prompts = of_task(model, source, length=length, count=count).prompts
    return [list(prompt.ids) for prompt in prompts]


def generate(
    engine: Engine, prompts: list[list[int]], tokens: int, samples: int, **how: Any
) -> tuple[list[Completion], float]:
    params = SamplingParams(max_tokens=tokens, n=samples, seed=0)
    engine.generate(prompts, params, **how)  # captures graphs
    begin = time.perf_counter()
    done = engine.generate(prompts, params, **how)
    return done, time.perf_counter() - begin


def compare(mine: list[Completion], dense: list[Completion]) -> dict[str, Any]:
    """Where answers first differ, and how far log-probs of equal tokens before it do."""
    firsts, gaps = [], []
    for a, b in zip(mine, dense, strict=True):
        size = min(len(a.token_ids), len(b.token_ids))
        differ = np.flatnonzero(a.token_ids[:size] != b.token_ids[:size])
        same = int(differ[0]) if len(differ) else size
        if len(differ):
            firsts.append(same)
        gaps.append(np.abs(a.logprobs[:same] - b.logprobs[:same]))
    gap, equal = np.concatenate(gaps), len(mine) - len(firsts)
    return {
        "answers": len(mine),
        "equal_answers": equal,
        "first_difference_median": median(firsts) if firsts else None,
        "first_difference_least": min(firsts, default=None),
        "equal_tokens": len(gap),
        "differences_per_1000_tokens": 1000 * len(firsts) / max(1, len(gap)),
        "logprob_gap_mean": float(gap.mean()),
        "logprob_gap_p99": float(np.quantile(gap, 0.99)),
    }


def figures(who: str, done: list[Completion], seconds: float) -> dict[str, Any]:
    tokens = sum(len(each.token_ids) for each in done)
    row: dict[str, Any] = {"who": who, "tokens": tokens, "tokens_per_s": tokens / seconds}
    if done[0].speculation is not None:
        spec = SpeculationStats.total(each.speculation for each in done)
        pairs = zip(spec.accepted_by_position, spec.drafted_by_position, strict=True)
        row |= {
            "tokens_per_round": tokens / spec.rounds,
            "accepted_of_drafted": spec.accepted_tokens / spec.draft_tokens,
            "accepted_by_position": [accepted / drafted for accepted, drafted in pairs],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("source", help="standard, a folder of texts, or a task")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--flow", default="fine_means(4)")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--reselect", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--length", type=int, default=2500)
    parser.add_argument("--out", type=Path, required=True)
    at = parser.parse_args()
    flow, rows = load_flow(at.flow), []
    for dtype in ("bfloat16", "float32"):
        model = models.load(at.model, dtype=dtype)
        prompts = prompts_of(model, at.source, at.count, at.length)
        context = max(map(len, prompts)) + at.tokens + 1
        schedule = schedule_named(f"fixed-{at.budget}-all", flow)
        assert schedule is not None
        batch = len(prompts) * at.samples
        sizes: dict[str, Any] = {"max_context": context, "rule": Rule.like(schedule, flow)}
        work = (prompts, at.tokens, at.samples)
        dense, seconds = generate(Engine(model, max_running=batch, **sizes), *work)
        rows.append({"dtype": dtype} | figures("dense", dense, seconds))
        print(json.dumps(rows[-1]), flush=True)
        half, seconds = generate(Engine(model, max_running=max(1, batch // 2), **sizes), *work)
        named = figures(f"dense, batches of {max(1, batch // 2)}", half, seconds)
        rows.append({"dtype": dtype} | named | {"against_dense": compare(half, dense)})
        print(json.dumps(rows[-1]), flush=True)
        for acceptance in ("rejection", "shared_noise"):
            speculative = SpeculativeParams(
                draft_tokens=at.draft_tokens, acceptance=acceptance, reselect=at.reselect
            )
            engine = Engine(model, max_running=batch, speculative=speculative, **sizes)
            done, seconds = generate(engine, *work, schedule=schedule, speculative=speculative)
            row = {"dtype": dtype} | figures(f"exact, {acceptance}", done, seconds)
            if acceptance == "shared_noise":
                row |= {"against_dense": compare(done, dense)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            del engine
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {key: str(value) for key, value in vars(at).items() if key != "out"}
    at.out.write_text(json.dumps(about | {"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
