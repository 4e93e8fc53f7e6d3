"""Two workers of an asynchronous run, here or behind a bad line: tokens a second and accuracy.

    python bench/regions.py /tmp/regions --out FILE.jsonl --steps 16 --seeds 2

Arms: `here` (workers connect directly), `far` (through bench/faults/proxy.py: 150 ms each way,
limited bandwidth), `mixed` (far, and one of the two decodes densely in its own dtype). A line of
FILE is a run: evaluations, tokens a second after the first two steps, bytes over the line.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from faults.proxy import Line, bad_line
from study_arms import evaluation

BASE = {
    "model": "tiny",
    "task": "assignments",
    "length": 150,
    "prompts": 4,
    "samples": 8,
    "rollout.max_tokens": 192,
    "rollout.max_prompt": 64,
    "rate": 2e-4,
    "batch.recompute": "false",
    "gate.mode": "warn",
    "validation.prompts": 64,
    "validation.samples": 2,
    "run.rollouts": 1,
    "run.tensorboard": "false",
    "loop": "async",
    "dispatch.workers": 0,
    "dispatch.listen": "127.0.0.1:0",
}
FIRST = 2  # steps that are left out: workers load their models


def address(folder: Path, process: "subprocess.Popen[bytes]") -> str:
    """Where workers of the run connect, once it says so."""
    while process.poll() is None:
        try:
            if found := json.loads((folder / "status.json").read_text()).get("address"):
                return str(found)
        except (OSError, ValueError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"{folder}: the run has ended; see its log")


def play(arm: str, folder: Path, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    line = Line(delay=args.delay_ms / 1000, bytes_per_s=args.mbit * 1e6 / 8)
    own = {"seed": seed, "steps": args.steps, "validation.every": args.every, "out": folder}
    own |= {"data.first": 100_000 + 1000 * seed, "staleness": args.staleness}
    words = [f"--{name}={value}" for name, value in {**BASE, **own}.items()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SPARROW_WORKER_KEY": "a key of this benchmark"}
    with ExitStack() as opened:
        log = opened.enter_context(folder.with_suffix(".txt").open("ab"))

        def start(*words: str) -> "subprocess.Popen[bytes]":
            words = (sys.executable, "-m", "sparrow", *words)
            return subprocess.Popen(words, stdout=log, stderr=log, env=environment)

        run = start("train", *words)
        opened.callback(run.kill)
        there = address(folder, run)
        if arm != "here":
            there = opened.enter_context(bad_line(there, line))
        for number in (1, 2):
            differs = ("--decoding=dense", f"--dtype={args.dtype}") if arm == "mixed" else ()
            options = differs if number == 2 else ()
            name = f"--name=region-{number}"
            worker = start("worker", f"--connect={there}", name, "--threads=1", *options)
            opened.callback(worker.kill)
        if run.wait() != 0:
            raise SystemExit(f"{folder}: the run failed; see its log")
    return {"arm": arm, "seed": seed, "bytes": dict(line.passed), **read(folder)}


def read(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = lines[FIRST:]
    seconds = sum(one["timing_s/step"] for one in late)
    validations = _lines(folder / "validation.jsonl")
    accept = {
        name: round(fmean(one[name] for one in late if name in one), 4)
        for name in sorted({name for one in late for name in one})
        if name.startswith(("async/accept/", "mismatch/k3", "async/staleness_mean"))
    }
    return {
        "tokens_per_s": round(sum(one["perf/total_num_tokens"] for one in late) / seconds, 1),
        "seconds_per_step": round(seconds / len(late), 2),
        "evaluations": [evaluation(json.loads(line)) for line in validations],
        "means": accept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="*", default=["here", "far", "mixed"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=150.0)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    done = {tuple(json.loads(x)[k] for k in ("arm", "seed")) for x in _lines(args.out)}
    for seed in range(args.seeds):
        for arm in args.arms:
            if (arm, seed) not in done:
                found = play(arm, args.folder / f"{arm}-{seed}", args, seed)
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    for text in _lines(args.out):
        print(text.strip())


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    main()
