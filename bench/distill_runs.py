"""The distillations of docs/distill.md, several at a time on one GPU (start MPS first).

small    small-rl offline under --schedule: divergences, ranks, targets, rates, the dense control
smollm2  SmolLM2 on --ids (bench/text_windows.py): budgets x flows
plan     calibrate small-rl with and without the adapter of `small`, and plan both
gate     RL on small-rl: the gate lowers budgets, without and beginning with the adapter of `small`

What a part made lies under --out/PART; what is done is not done again.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def repeated(option: str, values: Sequence[object]) -> list[str]:
    return [word for value in values for word in (option, str(value))]


def run(place: Path, name: str, words: Sequence[object]) -> str:
    """Run a command of sparrow with its output in NAME.txt; one that ended well is not repeated."""
    log, done = place / f"{name}.txt", place / f"{name}.done"
    if done.exists():
        return f"{name}: done before"
    begun = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", "sparrow", *map(str, words)]
        code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
    if code == 0:
        done.touch()
    return f"{name}: exit {code}, {time.monotonic() - begun:.0f} s"


def run_all(place: Path, commands: Mapping[str, Sequence[object]], parallel: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(parallel) as pool:
        for line in pool.map(lambda item: run(place, *item), commands.items()):
            print(line, flush=True)


def small(args: argparse.Namespace, place: Path) -> None:
    prompts, held = (32, 8) if args.quick else (1024, 256)
    model, length, steps = ("tiny", 100, 4) if args.quick else ("small-rl", 4000, 200)
    attention = ["--budget", 64] if args.quick else ["--schedule", args.schedule]
    every = 2 if args.quick else 40
    base = ["distill", model, "--task", "assignments", "--length", length, *attention]
    base += ["-n", prompts, "--held-out", held, "--check-every", every, "--patience", 99]
    base += [] if args.quick else ["--max-tokens", 3840, "--bin", 512]
    run_all(place, {"sequences": [*base, "--steps", 1, "-o", place / "sequences"]}, 1)
    reported = ["--draft-tokens", 8, *repeated("--report-budget", (256, 384, 768))]
    arms: dict[str, list[object]] = {
        "tv": reported,
        "tv-refresh": ["--refresh", every, *reported],
        "reverse-kl-refresh": ["--divergence", "reverse_kl", "--refresh", every],
        "rank-4": ["--rank", 4],
        "rank-64": ["--rank", 64],
        "attention": repeated("--targets", ATTENTION),
        "mlp": repeated("--targets", MLP),
        "rate-3e-4": ["--rate", 3e-4],
        "rate-3e-3": ["--rate", 3e-3],
        "dense": ["--attention", "dense"],
    }
    for name in arms:  # the same sequences of the same actor
        (place / name).mkdir(exist_ok=True)
        if not (place / name / "measured.jsonl").exists():
            shutil.copy(place / "sequences" / "measured.jsonl", place / name)
    commands = {
        name: [*base, "--steps", steps, *words, "-o", place / name] for name, words in arms.items()
    }
    run_all(place, commands, args.parallel)


def smollm2(args: argparse.Namespace, place: Path) -> None:
    budgets = (256,) if args.quick else (256, 512, 1024)
    count = ["-n", 3, "--held-out", 1, "--steps", 1] if args.quick else ["--held-out", 60]
    count += [] if args.quick else ["--steps", 120, "--check-every", 40, "--rate", 3e-4]
    commands = {
        f"{flow.partition('(')[0]}-{budget}": [
            *("distill", "smollm2-135m", "--ids", args.ids, "--budget", budget, "--flow", flow),
            *("--batch", 4, "--bin", 1024, *count),
            *("-o", place / f"{flow.partition('(')[0]}-{budget}"),
        ]
        for flow in ("block_mean", "fine_means(4)")
        for budget in budgets
    }
    run_all(place, commands, args.parallel)


def plan(args: argparse.Namespace, place: Path) -> None:
    actor = args.out / "small" / "tv"
    model, length, prompts = ("tiny", 100, 8) if args.quick else ("small-rl", 4000, 64)
    budgets = (64, 96) if args.quick else (128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536)
    base = ["calibrate", model, "--task", "assignments", "--length", length, "-n", prompts]
    base += ["--skip", 2000, *repeated("--budget", budgets), "--bin", 512, "--layer-groups", 0]
    base += ["--no-by-layer"] + ([] if args.quick else ["--max-tokens", 3840])
    arms = {"without": [], "with": ["--adapter", actor]}
    run_all(place, {n: [*base, *w, "-o", place / n] for n, w in arms.items()}, args.parallel)
    plans = {
        f"{name}-{target}": [
            *("plan", place / name, "--target", target, "--by", "p05", "--lengths", "published"),
            *("--allow-dense", "-o", place / f"{name}-{target}"),
        ]
        for name in arms
        for target in (0.80, 0.86)
    }
    run_all(place, plans, 1)


def gate(args: argparse.Namespace, place: Path) -> None:
    steps = 2 if args.quick else 30
    recipe = "tiny" if args.quick else "small"
    base = ["train", recipe, f"--run.steps={steps}", "--gate.mode=act", "--gate.target=0.80"]
    base += ["--validation.every=0", "--gate.lower=true", "--gate.sample=32", "--gate.slack=0.02"]
    base += ["--gate.window=4", "--gate.patience=2"]
    # docs/distill.md's runs: the default of their day
    base += ['--algorithm.corrections=[{use="token-tis",settings={cap=2.0}}]']
    if args.quick:
        base += ["--rollout.prompts=2", "--rollout.samples=4", "--rollout.max_tokens=200"]
    else:
        base += ["--schedule", args.schedule, "--rollout.prompts=16", "--optimiser.rate=3e-5"]
        base += ["--data.length=4000", "--rollout.max_tokens=3840", "--data.first=300000"]
        base += ["--rollout.max_prompt=1024", "--batch.compile=false"]
    actor = args.out / "small" / "tv"
    begun = [f"--rollout.distill.adapter={actor}", "--rollout.distill.rate=3e-4"]
    arms = {"none": [], "distilled": begun}
    run_all(
        place, {n: [*base, *w, f"--run.out={place / n}"] for n, w in arms.items()}, args.parallel
    )


PARTS = {"small": small, "smollm2": smollm2, "plan": plan, "gate": gate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schedule", type=Path, help="of small and gate")
    parser.add_argument("--ids", type=Path, help="of smollm2")
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it on a CPU")
    args = parser.parse_args()
    for part in args.part:
        place = args.out / part
        place.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        PARTS[part](args, place)
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
