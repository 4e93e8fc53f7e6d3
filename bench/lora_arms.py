"""LoRA against full training: the same run with all weights and with adapters, all arms at once.

    python bench/lora_arms.py --out OUT --task countdown --full 1e-4 --lora 8:1e-3 --seeds 2
    python bench/lora_arms.py --out OUT --model smollm2 --full 1e-5 --lora 16:1e-4

small-rl: puzzles. smollm2: sums of two numbers, which it gets wrong at first because it goes on
talking; rows are written to OUT. Rows, draws and evaluations of a seed are the same in all arms.
Arms run beside each other, so their times say little. It resumes; `--limit` ends runs after so many
seconds. Prints a JSON line for each run: accuracy of held-out rows by step, with 95 % intervals.
Words behind `--` are further settings of `sparrow train`.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
COMMON: dict[str, Any] = {
    "decoding": "dense",
    "gate.mode": "off",
    "run.tensorboard": "false",
    "run.rollouts": 0,
    "run.keep": 1,
    "batch.kl_sample": 0,
    "batch.compile": "false",
}
PUZZLES: dict[str, Any] = {
    "model": "small-rl",
    "length": 1000,
    "rollout.max_tokens": 2048,
    "rollout.max_prompt": 256,
    "prompts": 32,
    "samples": 8,
    "batch.tokens": 32768,
    "validation.prompts": 512,
    "validation.every": 10,
    "run.save_every": 10,
}
SUMS: dict[str, Any] = {
    "model": "smollm2-135m",
    "reward": f"{HERE.parent / 'deltas.py'}:last_number",
    "rollout.max_tokens": 16,
    "rollout.max_prompt": 64,
    "prompts": 32,
    "samples": 8,
    "batch.tokens": 16384,
    "validation.prompts": 512,
    "validation.every": 10,
    "run.save_every": 10,
}


def write_sums(file: Path, count: int, seed: int) -> None:
    """Rows of sums from 1 + 1 to 49 + 49; held-out ones may repeat those of training."""
    draw = random.Random(seed)
    with file.open("w") as lines:
        for _ in range(count):
            a, b = draw.randint(1, 49), draw.randint(1, 49)
            chat = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
            lines.write(json.dumps({"prompt": chat, "answer": str(a + b)}) + "\n")


def arms(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found = {f"full-{rate:g}": {"rate": rate} for rate in args.full}
    for text in args.lora:
        rank, rate = text.split(":")
        found[f"lora{rank}-{float(rate):g}"] = {"lora": rank, "rate": rate}
    return found


def train(args: argparse.Namespace, arm: str, seed: int, settings: dict[str, Any]) -> Path:
    out = args.out / f"{arm}-{seed}"
    more = dict(word.removeprefix("--").split("=", 1) for word in args.more)
    words = [f"--{name}={value}" for name, value in (settings | more).items()]
    words = [sys.executable, "-m", "sparrow", "train", *words, f"--out={out}"]
    with (args.out / f"{out.name}.txt").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"TERM": "dumb"})
        try:
            process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return out


def accuracy(out: Path) -> dict[str, Any]:
    """Held-out accuracy by step, [mean, low, high], and steps taken."""
    file = out / "validation.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {}
    for line in lines:
        core = {name.rsplit("/", 1)[-1]: x for name, x in line.items() if "/acc/" in name}
        mean = next(x for name, x in core.items() if name.startswith("mean"))
        found[str(line["step"])] = [round(x, 4) for x in (mean, core["low"], core["high"])]
    metrics = out / "metrics.jsonl"
    steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    return {"steps": steps, "accuracy": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["small-rl", "smollm2"], default="small-rl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="countdown", help="of small-rl")
    parser.add_argument("--full", type=float, action="append", default=[], help="a rate")
    parser.add_argument("--lora", action="append", default=[], help="RANK:RATE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, help="seconds of a run")
    parser.add_argument("more", nargs="*", help="further settings, behind --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = COMMON | {"steps": args.steps}
    if args.model == "small-rl":
        settings |= PUZZLES | {"task": args.task}
    else:
        rows, held = args.out / "sums.jsonl", args.out / "held.jsonl"
        write_sums(rows, 4096, 1)
        write_sums(held, 512, 2)
        settings |= SUMS | {"rows": rows, "validation.rows": held}
    chosen = [(arm, seed, own) for seed in range(args.seeds) for arm, own in arms(args).items()]
    with ThreadPoolExecutor(len(chosen)) as threads:
        starts = [settings | own | {"seed": seed} for _, seed, own in chosen]
        ended = threads.map(lambda one, start: train(args, one[0], one[1], start), chosen, starts)
        for (arm, seed, _), out in zip(chosen, ended, strict=True):
            line = {"model": args.model, "arm": arm, "seed": seed, **accuracy(out)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
