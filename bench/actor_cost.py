"""What the actor's adapter costs a decode step: none, merged weights, or rows of a mixed batch.

    python bench/actor_cost.py --json > actor.json
    python bench/actor_cost.py --model tiny --batch 4 --context 128 --budget 48 --steps 4

Mixed batches have one dense row, so the actor's rows run unmerged beside the plain weights;
`mixed` is the same batch without an adapter. Rows as in `sparrow bench decode`; times are medians
over rounds. ms_merge: from another adapter to weights that hold it, which an update costs too.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparrow import models
from sparrow.benchmarks import decode, timing
from sparrow.engine import Engine
from sparrow.models.checkpoint import pick_device
from sparrow.models.lora import Adapter
from sparrow.models.spec import SHAPES
from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

TINY = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_size": 32}


def milliseconds(
    engine: Engine, context: int, schedules: Sequence[Schedule | None], steps: int
) -> tuple[float, float]:
    """Of a step of the engine, and of the device alone."""
    device, rows = engine.model.device, engine.runner.rows
    contexts = [context - decode.WARM - steps] * len(schedules)
    room = decode.WARM + steps + 2
    with decode.running(engine, contexts, schedules, room=room) as samples:
        timing.repeat(engine.step, decode.WARM)
        length_R = rows.length_R.clone()
        step = timing.seconds(partial(timing.repeat, engine.step, steps), device) / steps
        rows.length_R.copy_(length_R)
        alone = timing.device_seconds(lambda: engine.runner.decode(samples), steps, device)
    return step * 1e3, alone * 1e3


def measure(model: models.Decoder, context: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of one context; batches alternate in every round."""
    engine = decode.build(model, Rule(), asked.batch, context, adapter_rank=asked.rank)
    batch, sparse = engine.max_running, Schedule.fixed(asked.budget)
    batches = {"sparse": [sparse] * batch, "mixed": [None, *[sparse] * (batch - 1)]}
    adapters = [
        Adapter.random(model.spec, asked.rank, seed=seed, device=model.device) for seed in range(2)
    ]
    found = []
    for adapter, names in ((None, ("sparse", "mixed")), (adapters[0], ("merged", "rows"))):
        engine.set_actor(adapter)
        decode.fill(engine)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(asked.rounds):
            for name, schedules in zip(names, batches.values(), strict=True):
                times[name].append(milliseconds(engine, context, schedules, asked.steps))
        for name in names:
            ms_step, ms_device = (median(part) for part in zip(*times[name], strict=True))
            case = {"case": name, "batch": batch, "context": context, "budget": asked.budget}
            found.append(case | {"ms_step": ms_step, "ms_device": ms_device})

    def merge(number: int) -> None:
        engine.set_actor(adapters[number])
        engine.step()  # of an idle engine: nothing but the merge

    merges = [timing.seconds(partial(merge, number % 2), model.device) for number in range(1, 4)]
    return [*found, {"case": "merge", "context": context, "ms_merge": 1e3 * median(merges)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-1.7b", choices=["tiny", *SHAPES])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    shape, sizes = ("qwen3-0.6b", TINY) if asked.model == "tiny" else (asked.model, {})
    model = models.random(shape, device=pick_device("auto"), dtype="auto", **sizes)
    rows = []
    for context in asked.context:
        rows += measure(model, context, asked)
        timing.free_memory(model.device)
    if asked.json:
        common = timing.model_fields(model, asked.model)
        common["machine"] = to_dict(common["machine"])
        print(json.dumps(common | {"rank": asked.rank, "rows": rows}, indent=1))
        return
    for row in rows:
        ms = {key: f"{value:.4g}" for key, value in row.items() if key.startswith("ms_")}
        print("  ".join(f"{key} {value}" for key, value in (row | ms).items()))


if __name__ == "__main__":
    main()
