"""Arms of asynchronous training, several seeds each: accuracy by step, time, rollouts.

python bench/async_arms.py staleness runs/staleness --out FILE      # resumes
python bench/async_arms.py data runs/data --out FILE --jobs 4       # two cores each of eight
python bench/async_arms.py staleness runs/small --model small --device cuda --jobs 8 --out FILE
python bench/async_arms.py staleness --read bench/FILE

staleness: the synchronous loop, and staleness 1 to 8. data: data algorithms at staleness 2 on 32
rows that repeat: every group; informative groups; with replay; with GRESO. Runs
start from `tiny` or `small`; rollouts are dense. On a CPU each of
`--jobs` runs has cores of its own, of an asynchronous run each side half of them; on a GPU all
share it, so times compare runs of one command alone. Every seed has rows and draws of its own,
evaluations are the same (temperature 1, not part of the time). A line of FILE is a run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any

from study_arms import SHARES, evaluation, welch

ASYNC = {"run.loop": "async"}
DATA = ASYNC | {"dispatch.staleness": 2, "data.prompts": 32}
INFORMATIVE = DATA | {"dispatch.group_filter": "informative"}
REPLAY = INFORMATIVE | {"dispatch.replay": 0.25}
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "staleness": {
        "sync": {},
        **{f"staleness-{n}": ASYNC | {"dispatch.staleness": n} for n in (1, 2, 4, 8)},
    },
    "data": {
        "vanilla": DATA,
        "informative": INFORMATIVE,
        "replay": REPLAY,
        "greso": REPLAY
        | {"dispatch.prompt_filter": "greso", "dispatch.prompt_settings": "{window = 16}"},
    },
}
NOT_ROLLED_OUT = ("prompt_filter", "overlong", "failed_too_often")  # reasons of drops


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "length": 150,
        "prompts": 4,
        "rollout.max_tokens": 192,
        "rollout.max_prompt": 64,
        "rate": 2e-4,
        "validation.prompts": 64,
        "validation.samples": 2,
    },
    "small": {
        "length": 2000,
        "prompts": 16,
        "rollout.max_tokens": 3840,
        "rollout.max_prompt": 256,
        "rate": 1e-4,
        "batch.tokens": 32768,
        "validation.prompts": 128,
    },
}


class Cores:
    """Cores of this process, shared out evenly among runs at once."""

    def __init__(self, jobs: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.each = max(1, len(cores) // jobs)
        self._free = SimpleQueue[list[int]]()
        for job in range(jobs):
            start = job * self.each % len(cores)
            self._free.put(cores[start : start + self.each])

    @contextmanager
    def taken(self) -> Iterator[list[int]]:
        cores = self._free.get()
        try:
            yield cores
        finally:
            self._free.put(cores)


def train(
    folder: Path, settings: dict[str, Any], args: argparse.Namespace, seed: int, cores: list[int]
) -> None:
    base = MODELS[args.model] | {
        "model": args.model,
        "device": args.device,
        "task": "assignments",
        "samples": 8,
        "batch.recompute": "false",
        "gate.mode": "off",
        "data.first": 100_000 + 1000 * seed,
        "validation.every": args.every,
        "validation.first": 0,
        "steps": args.steps,
        "seed": seed,
        "run.save_every": args.steps,
        "run.rollouts": 0,
        "run.tensorboard": "false",
        "out": folder,
    }
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
    if args.device == "cuda":
        base |= {"rollout.kv_gib": 2, "rollout.sleep": "false"}
    words = [f"--{name}={value}" for name, value in (base | settings).items()]
    words = [sys.executable, "-m", "sparrow", "train", *words]
    if args.device == "cpu":
        words = ["taskset", "-c", ",".join(map(str, cores)), *words]
    with folder.with_suffix(".txt").open("ab") as log:
        subprocess.run(words, check=True, stdout=log, stderr=log, env=environment)


def read(folder: Path, samples: int = 8) -> dict[str, Any]:
    """Evaluations of a run with the seconds and answers until then, and means over its steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = []
    for line in (folder / "validation.jsonl").read_text().splitlines():
        found = evaluation(json.loads(line))
        before = [one for one in lines if one["step"] < found["step"]]
        seconds = sum(one["timing_s/step"] for one in before)
        rollouts = sum(answered_groups(one) for one in before) * samples
        evaluations.append(found | {"seconds": round(seconds, 1), "rollouts": rollouts})
    names = ("async/staleness_mean", "async/wasted_tokens", "mismatch/k3", "timing_s/step")
    names = (*names, "mismatch/weight_mean", "async/rollout_idle", "async/learner_idle")
    means = {name: fmean(one.get(name, 0.0) for one in lines) for name in names}
    return {"evaluations": evaluations, "means": means}


def answered_groups(line: dict[str, Any]) -> float:
    """Groups that were rolled out for a step: used for the first time, or dropped after it."""
    drops = {
        name.removeprefix("async/dropped/"): n for name, n in line.items() if "dropped/" in name
    }
    dropped = sum(count for reason, count in drops.items() if reason not in NOT_ROLLED_OUT)
    return float(line["data/groups"] - line.get("async/replayed_groups", 0.0) + dropped)


def first_at(found: dict[str, Any], target: float, by: str) -> float:
    """Where a run first reaches an accuracy, between evaluations along a line; inf: never."""
    before = None
    for here in found["evaluations"]:
        if here["right"] >= target:
            if before is None:
                return float(here[by])
            share = (target - before["right"]) / (here["right"] - before["right"])
            return float(before[by] + share * (here[by] - before[by]))
        before = here
    return float("inf")


def show(found: list[dict[str, Any]], arms: list[str], target: float) -> None:
    runs = {arm: [run for run in found if run["arm"] == arm] for arm in arms}
    for arm, own in runs.items():
        curves = zip(*(run["evaluations"] for run in own), strict=True)
        curve = " ".join(f"{at[0]['step']}:{fmean(e['right'] for e in at):.3f}" for at in curves)
        print(f"{arm}: right by step {curve}")
        for name in own[0]["means"]:
            print(f"    {name} {fmean(run['means'][name] for run in own):.4g}")
        for by in ("step", "seconds", "rollouts"):
            reached = [round(first_at(run, target, by), 1) for run in own]
            print(f"    {by} until right is {target}: {reached}")
    for arm in arms[1:]:
        for share in SHARES:
            ends = [[r["evaluations"][-1][share] for r in runs[name]] for name in (arm, arms[0])]
            print(f"{arm} less {arms[0]}, {share} at the end: {welch(*ends)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=ARMS)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--target", type=float, default=0.8)
    args = parser.parse_args()
    arms = ARMS[args.part]
    if args.read is not None:
        found = [json.loads(line) for line in args.read.read_text().splitlines()]
        show(found, [*arms], args.target)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    cores, found = Cores(args.jobs), list[dict[str, Any]]()

    def run(seed: int, arm: str) -> None:
        folder = args.folder / f"{arm}-{seed}"
        if not (folder / "model").exists():
            with cores.taken() as own:
                train(folder, arms[arm], args, seed, own)
        found.append({"arm": arm, "seed": seed, **read(folder)})
        args.out.write_text("".join(f"{json.dumps(line)}\n" for line in found))

    with ThreadPoolExecutor(args.jobs) as pool:
        wanted = [(seed, arm) for seed in range(args.seeds) for arm in arms]
        for ended in [pool.submit(run, *one) for one in wanted]:
            ended.result()
    show(found, [*arms], args.target)


if __name__ == "__main__":
    main()
