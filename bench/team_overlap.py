"""Steps a second of two policies: in lock-step, and asynchronously, in one run after the other.

    python bench/team_overlap.py --out /tmp/team

Two policies with weights of their own (or, with `--lora RANK`, adapters over one base) answer the
same rows; each learns from its own answers. In lock-step a round is sampled, then one learns, then
the other. Asynchronously all three go on at once, within the staleness. Prints a JSON line for each
run: seconds a round, and the parts that they would take alone. The first rounds are left out. Words
behind `--` are further settings of `sparrow train`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.dataflow.episodes import Actor
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example

LEFT_OUT = 3  # rounds while graphs are captured and buffers fill
POLICIES = ("one", "two")


async def both_answer(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """Both policies answer the row, at once."""

    async def play(name: str, sample: int) -> Trajectory:
        talk = actors[name].conversation(example, sample)
        return talk.trajectory(await actors[name].judge(example, await talk.reply()))

    samples = range(actors[POLICIES[0]].samples)
    return await asyncio.gather(*(play(name, n) for name in POLICIES for n in samples))


def train(args: argparse.Namespace, loop: str, staleness: int) -> Path:
    out = args.out / f"{loop}-{staleness}"
    policy = f"lora = {{ rank = {args.lora} }}" if args.lora else "team = 0.0"
    recipe = args.out / "policies.toml"
    recipe.write_text("".join(f"[policies.{name}]\n{policy}\n" for name in POLICIES))
    settings: dict[str, Any] = {
        "model": args.model,
        "task": args.task,
        "length": args.length,
        "loop": loop,
        "staleness": staleness,
        "steps": args.steps,
        "prompts": args.prompts,
        "samples": args.samples,
        "out": out,
        "rollout.max_tokens": args.tokens,
        "rollout.episode": f"{Path(__file__).resolve()}:both_answer",
        "decoding": "dense",
        "gate.mode": "off",
        "validation.every": 0,
        "run.tensorboard": "false",
        "run.rollouts": 0,
        "run.save_every": args.steps,
        "rate": args.rate,
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    words = [sys.executable, "-m", "sparrow", "train", str(recipe), *words, *args.more]
    environment = os.environ | {"TERM": "dumb"}
    if args.threads:
        environment["OMP_NUM_THREADS"] = str(args.threads)
    with (args.out / f"{out.name}.txt").open("wb") as log:
        subprocess.run(words, check=True, env=environment, stdout=log, stderr=log)
    return out


def figures(out: Path) -> dict[str, float]:
    """Seconds of a round, and of its parts; rounds of an asynchronous run end in bursts."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = lines[LEFT_OUT:]
    found = {"round": np.mean([line["timing_s/step"] for line in lines])}
    if "timing_s/gen" in lines[0]:
        found["rollout"] = np.mean([line["timing_s/gen"] for line in lines])
    for name in POLICIES:
        own = [line.get(f"policy/{name}/timing_s/step") for line in lines]
        found[f"learning_{name}"] = np.mean([seconds for seconds in own if seconds is not None])
        stale = [line.get(f"policy/{name}/staleness_mean", 0.0) for line in lines]
        found[f"staleness_{name}"] = np.mean(stale)
    found["tokens"] = np.mean([line["response_length/mean"] for line in lines])
    return {name: round(float(value), 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="assignments")
    parser.add_argument("--length", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--staleness", type=int, action="append")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: weights of their own")
    parser.add_argument("--threads", type=int, default=0, help="of OpenMP; 0: as it likes")
    parser.add_argument("more", nargs="*", help="further settings, behind --")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    begun = time.monotonic()
    alone = figures(train(args, "sync", 0))
    print(json.dumps({"loop": "sync", **alone}), flush=True)
    for staleness in args.staleness or [1, 2]:
        found = figures(train(args, "async", staleness))
        row = {"loop": "async", "staleness": staleness, **found}
        row["speed_up"] = round(alone["round"] / found["round"], 3)
        print(json.dumps(row), flush=True)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
