"""Agents that delegate against flat ones with the same budget of tokens, several seeds at once.

    python bench/agent_arms.py OUT --model small-rl --depth 4 --tokens 512 --seconds 400   # resumes
    OMP_NUM_THREADS=1 python bench/agent_arms.py OUT --at-once 2 --loop sync ...    # two CPU cores

The recipe `recursive_crafting`: both kinds are warmed up on gold plays of the same worlds, then
learn by RL from the same rows. Runs share a GPU (under MPS if that is on), so times say little.
Prints a JSON line for each run: accuracy of held-out plays by depth with 95 % intervals, and, over
training, how often plays spawn, how plays with and without sub-agents end, tokens and contexts.
"""

import argparse
import json
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from policy_arms import lines, start

from sparrow_recipes import recursive_crafting

SHOWN = {
    "spawned": "agents/spawned",
    "agents": "agents/count/mean",
    "acc": "agents/acc/mean",
    "acc_spawned": "agents/acc/spawned",
    "acc_alone": "agents/acc/alone",
    "tokens": "agents/tokens/mean",
    "context": "agents/context/mean",
    "out_of_budget": "agents/status/out_of_budget",
}

PASSED = ("model", "loop", "depth", "warm_depth", "warm_up", "warm_steps", "warm_batch")
PASSED += (
    "warm_rate",
    "tokens",
    "prompts",
    "samples",
    "steps",
    "every",
    "held_out",
    "rate",
    "kv_gib",
)


def command(args: argparse.Namespace, out: Path, seed: int, flat: bool) -> list[str]:
    settings = {name: getattr(args, name) for name in PASSED} | {"seed": seed, "out": out}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    more = ["--flat"] if flat else []
    return [sys.executable, "-m", "sparrow_recipes.recursive_crafting", *words, *more]


def figures(run: Path) -> dict[str, Any]:
    """Accuracy by depth at each evaluation; means over tenths of the training."""
    held_out = []
    for line in lines(run / "validation.jsonl"):
        stems = [name.removesuffix("/low") for name in line if name.endswith("acc/low")]
        depths = {}
        for stem in stems:
            mean = next(x for name, x in line.items() if name.startswith(f"{stem}/mean"))
            depths[stem.split("/")[1]] = [
                round(x, 4) for x in (mean, line[f"{stem}/low"], line[f"{stem}/high"])
            ]
        held_out.append({"step": line["step"], **depths})
    steps = lines(run / "metrics.jsonl")
    tenth = max(1, len(steps) // 10)
    training = []
    for first in range(0, len(steps), tenth):
        part = steps[first : first + tenth]
        row: dict[str, Any] = {"step": first}
        for name, metric in SHOWN.items():
            values = [line[metric] for line in part if metric in line]
            row |= {name: round(sum(values) / len(values), 3)} if values else {}
        training.append(row)
    return {"steps": len(steps), "held_out": held_out, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="small-rl")
    parser.add_argument("--loop", choices=["async", "sync"], default="async")
    counts = {
        "depth": 4,
        "warm_depth": 3,
        "warm_up": 30000,
        "warm_steps": 600,
        "warm_batch": 128,
        "tokens": 512,
        "prompts": 16,
    }
    counts |= {"samples": 8, "steps": 60, "every": 20, "held_out": 128, "seeds": 3, "at_once": 6}
    for name, value in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name, number in {"rate": 1e-4, "warm_rate": 1e-3, "kv_gib": 2.0, "seconds": 1e6}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=number)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds
    jobs, kinds = [], {False: args.out / "warm-recursive", True: args.out / "warm-flat"}
    both = [argparse.Namespace(**vars(args) | {"flat": flat}) for flat in kinds]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        list(processes.map(recursive_crafting.warm_up, both, kinds.values()))
    for flat, warm in kinds.items():
        for seed in range(args.seeds):
            out = args.out / f"{'flat' if flat else 'recursive'}-{seed}"
            if not (out / "warm").exists():
                shutil.copytree(warm, out / "warm")
            jobs.append((command(args, out, seed, flat), out))
    with ThreadPoolExecutor(args.at_once) as threads:
        list(threads.map(lambda job: start(*job, until), jobs))
    for _, out in jobs:
        print(json.dumps({"run": out.name, **figures(out / "run")}), flush=True)


if __name__ == "__main__":
    main()
