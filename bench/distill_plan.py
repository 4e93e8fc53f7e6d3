"""Speed-up at an equal tail with and without a distilled actor: one trace, cut where both end.

`PYTHONPATH=. python bench/distill_plan.py OUT` reads the plans of `bench/distill_runs.py plan`. The
published lengths are cut at the end of the shorter surface. A shape beside small-rl's shows what
budgets measured on small-rl would save there; they were not measured on such a model.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparrow import models
from sparrow.calibration.planning import cost
from sparrow.calibration.planning.hardware import Hardware, StepModel
from sparrow.models.spec import SHAPES, ModelSpec
from sparrow.schema.schedule import Schedule

PROMPT = 100  # tokens


def speed_ups(spec: ModelSpec, schedule: Schedule, hardware: Hardware, cut: int) -> str:
    reads = cost.ByteModel(spec=spec, schedule=schedule)
    lengths = np.minimum(cost.published_lengths(), cut)
    capacity = reads.capacity()
    over = cost.trace(lengths, prompt=PROMPT, capacity=capacity)
    limit = cost.limit(reads, over, capacity=capacity, bytes_per_s=hardware.bytes_per_s)
    dense, sparse = (
        cost.rollout_seconds(over, StepModel(hardware, one))
        for one in (replace(reads, schedule=None), reads)
    )
    kept = limit.dense.kv / limit.sparse.kv
    return f"keys and values {kept:.2f}x, bytes {limit.speed_up:.2f}x, time {dense / sparse:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="--out of bench/distill_runs.py")
    parser.add_argument("--cut", type=int, default=3072, help="longest answer")
    args = parser.parse_args()
    hardware = Hardware.load("h200")
    specs = {"small-rl": models.load("small-rl").spec, "1.7B shape": SHAPES["qwen3-1.7b"]}
    for target in ("0.8", "0.86"):
        for name, spec in specs.items():
            for arm in ("without", "with"):
                schedule = Schedule.load(args.out / "plan" / f"{arm}-{target}" / "schedule.json")
                print(target, name, arm, speed_ups(spec, schedule, hardware, args.cut), sep="; ")


if __name__ == "__main__":
    main()
