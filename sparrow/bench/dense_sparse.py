"""Dense against sparse decoding on this machine, in turns: short rows as rolled out, long ones.

Two cases: a rollout of given prompts under a schedule, every answer to its full length so that both
sides draw equally many tokens; and decode steps at a long context over random keys and values,
under one budget for all layers. Times are of one decode step of the whole batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sparrow.bench import decode, timing
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.records import SamplingParams
from sparrow.sparse.rule import Rule
from sparrow.sparse.schedule import Schedule

FORMAT = 1
STEPS = 12  # decode steps of a round at a long context
Progress = Callable[[int, int, str], None]


def run(
    model: Decoder,
    schedule: Schedule,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    tokens: int,
    context: int,
    budget: int,
    batch: int,
    rounds: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Both cases, ready for JSON.

    prompts, samples, tokens   the rollout: so many answers of so many tokens to each prompt
    context, budget, batch     the decode steps: past tokens, tokens kept, rows
    """
    tell = progress or (lambda done, total, what: None)
    tell(0, 2 * rounds + 2, "rolling out, dense and sparse in turns")
    short = _rollout(model, schedule, prompts, samples, tokens, rounds, tell)
    tell(2 * rounds, 2 * rounds + 2, f"decoding at {context} tokens")
    long = _decode(model, context, budget, batch, rounds)
    tell(2 * rounds + 2, 2 * rounds + 2, "timed")
    return {
        "format": FORMAT,
        "machine": timing.machine(model.device),
        "note": f"{model.spec.parameters() / 1e6:.1f} M weights in "
        f"{str(model.dtype).removeprefix('torch.')}.",
        "cases": [short, long],
    }


def _rollout(
    model: Decoder,
    schedule: Schedule,
    prompts: Sequence[Sequence[int]],
    samples: int,
    tokens: int,
    rounds: int,
    tell: Progress,
) -> dict[str, Any]:
    longest = max(map(len, prompts)) + tokens
    rows = len(prompts) * samples
    engine = Engine(model, max_running=rows, max_context=longest, rule=Rule.like(schedule))
    params = SamplingParams(n=samples, max_tokens=tokens, ignore_eos=True, seed=0)
    ways = {"dense": None, "sparse": schedule}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    engine.generate(prompts, replace(params, max_tokens=2), schedule=schedule)  # warm
    for turn in range(rounds):
        for place, (name, own) in enumerate(ways.items()):
            begun = time.perf_counter()
            engine.generate(prompts, params, schedule=own)
            taken[name].append((time.perf_counter() - begun) / tokens * 1e3)
            tell(2 * turn + place + 1, 2 * rounds + 2, "rolling out, dense and sparse in turns")
    return {
        "name": f"Up to {longest} tokens",
        "context": longest,
        "rows": rows,
        "dense_ms": taken["dense"],
        "sparse_ms": taken["sparse"],
        "why": f"{rows} answers are rolled out under the schedule; at this length there is little "
        "to skip, and choosing pages is extra work at every step.",
    }


def _decode(model: Decoder, context: int, budget: int, batch: int, rounds: int) -> dict[str, Any]:
    # Rows end at the context, and an engine needs a little room beyond.
    shape = replace(model.spec, max_positions=max(model.spec.max_positions, context + 64))
    found = decode.run(
        model=shape,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        cases=[(batch, context, None), (batch, context, f"fixed-{budget}-all")],
        steps=STEPS,
        rounds=rounds,
        split=False,
    )
    dense, sparse = (row["ms_step_rounds"] for row in found["rows"])
    return {
        "name": f"At {context} tokens",
        "context": context,
        "rows": batch,
        "dense_ms": dense,
        "sparse_ms": sparse,
        "why": f"{batch} rows decode with {budget} tokens kept, {budget / context:.0%} of the "
        "text; its contents are random, so this is about time and says nothing about answers.",
    }
