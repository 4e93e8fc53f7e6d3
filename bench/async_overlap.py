"""Time of a step: synchronous, and asynchronous with rollout and learning on one core each.

    python bench/async_overlap.py --out /tmp/overlap

Both loops train the same model on the same rows, one thread a side. The synchronous run gives the
time of each side alone on its core; an asynchronous step should take no longer than the slower of
the two. With several `--in-flight` each runs at every staleness: what keeping, computing anew or
restarting costs, and what it does to the mismatch of the drawn and the updated weights (k3).
Prints a JSON line for each run. The first steps are left out. On a GPU both sides share it: what
they take alone is what each takes in the synchronous run. Words behind `--` are further settings of
`sparrow train`, for instance `--data.rows` (bench/random_model.py has rows for a random model).
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np

LEFT_OUT = 3  # steps while buffers fill
LEARNING = ("old_log_prob", "kl", "update_actor", "weights")


def train(args: argparse.Namespace, loop: str, staleness: int, in_flight: str = "keep") -> Path:
    out = args.out / f"{loop}-{staleness}-{in_flight}"
    settings = {
        "loop": loop,
        "staleness": staleness,
        "steps": args.steps,
        "prompts": args.prompts,
        "samples": args.samples,
        "out": out,
        "rollout.max_tokens": args.tokens,
        "gate.mode": "off",
        "validation.every": 0,
        "run.tensorboard": "false",
        "run.rollouts": 0,
        "run.save_every": args.steps,
        "rate": args.rate,
        "dispatch.in_flight": in_flight,
    }
    if "--data.rows" not in " ".join(args.more):
        settings |= {"task": args.task, "length": args.length}
    words = [f"--{name}={value}" for name, value in settings.items()]
    model = f"--model={args.model}" if "/" in args.model else args.model
    words = [sys.executable, "-m", "sparrow", "train", model, *words, *args.more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    with (args.out / f"{out.name}.txt").open("wb") as log:
        subprocess.run(words, check=True, env=environment, stdout=log, stderr=log)
    return out


def seconds(out: Path) -> dict[str, float]:
    """Median seconds of a step and its sides; shares of idle time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = lines[LEFT_OUT:]
    learning = [sum(line.get(f"timing_s/{part}", 0.0) for part in LEARNING) for line in lines]
    found = {
        "step": float(np.median([line["timing_s/step"] for line in lines])),
        "rollout": float(np.median([line["timing_s/gen"] for line in lines])),
        "learning": float(np.median(learning)),
    }
    for name in (
        "rollout_idle",
        "learner_idle",
        "staleness_mean",
        "wasted_tokens",
        "in_flight_tokens",
    ):
        if f"async/{name}" in lines[0]:
            found[name] = float(np.mean([line[f"async/{name}"] for line in lines]))
    found = {name: round(value, 4) for name, value in found.items()}
    return found | {"k3": float(np.mean([line["mismatch/k3"] for line in lines]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny", help="a recipe, or a model's folder")
    parser.add_argument("--task", default="countdown")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--staleness", type=int, action="append")
    parser.add_argument("--in-flight", action="append", help="default: keep")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("more", nargs="*", help="further settings, behind --")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    alone = seconds(train(args, "sync", 0))
    print(json.dumps({"loop": "sync", **alone}), flush=True)
    slower = max(alone["rollout"], alone["learning"])
    for staleness, in_flight in product(args.staleness or [1, 2], args.in_flight or ["keep"]):
        found = seconds(train(args, "async", staleness, in_flight))
        row = {"loop": "async", "staleness": staleness, "in_flight": in_flight, **found}
        row["step_by_slower_side"] = round(found["step"] / slower, 3)
        row["speed_up"] = round(alone["step"] / found["step"], 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
