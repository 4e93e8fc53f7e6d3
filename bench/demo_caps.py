"""The demo's training with two caps of token TIS, several seeds each: does a higher cap cost?

python bench/demo_caps.py runs/demo-caps SCHEDULE --out caps.jsonl      # that of a `sparrow demo`
python bench/demo_caps.py --read bench/2026-11-17-demo-caps-x86.jsonl

As the demo trains, but the gate only warns and every seed has its own rows. A line of the file is a
run: its evaluations (dense, 48 rows x 2, before and after 12 steps). Prints the shares after
training, and cap 10 less cap 2 with Welch's 90 % interval.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from study_arms import SHARES, evaluation, welch

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.run import open_run
from sparrow.schema.train import TrainConfig
from sparrow_recipes.demo import Place, training

CAPS, SEEDS = (2.0, 10.0), range(6)


def run(folder: Path, schedule: str, cap: float, seed: int) -> dict[str, Any]:
    """Train once, unless it was done, and return the evaluations."""
    tables = training(Place(Path())).model_dump()
    tables["rollout"]["attention"]["schedule"] = schedule
    tables["algorithm"]["corrections"] = [{"use": "token-tis", "settings": {"cap": cap}}]
    tables["data"]["first"] += 1000 * seed
    tables["gate"]["mode"] = "warn"
    tables["run"] |= {"seed": seed, "out": folder / f"cap-{cap:g}-{seed}", "save_every": 100}
    config = TrainConfig.model_validate(tables)
    with open_run(config) as opened:
        train(opened)
    lines = (config.run.out / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return {"cap": cap, "seed": seed, "evaluations": [*map(evaluation, map(json.loads, lines))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("schedule", nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    given = parser.parse_args()
    if given.read is not None:
        found = [json.loads(line) for line in given.read.read_text(encoding="utf-8").splitlines()]
    else:
        found = [run(given.folder, given.schedule, cap, seed) for seed in SEEDS for cap in CAPS]
        given.out.write_text("".join(f"{json.dumps(line)}\n" for line in found), encoding="utf-8")
    for name in SHARES:
        ends = [[r["evaluations"][-1][name] for r in found if r["cap"] == cap] for cap in CAPS]
        shown = [
            f"cap {c:g}: {fmean(e):.3f} (sd {stdev(e):.3f})"
            for c, e in zip(CAPS, ends, strict=True)
        ]
        print(f"{name}: {', '.join(shown)}; less {welch(ends[1], ends[0])}")


if __name__ == "__main__":
    main()
