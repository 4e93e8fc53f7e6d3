"""Runs of several policies against one policy alone, several seeds at once; then a table.

    python bench/policy_arms.py verifier OUT --seeds 3 --seconds 400     # resumes
    python bench/policy_arms.py proposer OUT --seeds 2 --seconds 400
    python bench/policy_arms.py evaluate OUT                             # of `verifier`

verifier: solver and verifier (recipe) and a solver alone that answers the same prompts; both end by
the clock (--seconds, with the warm-up). evaluate: at the checkpoint of the solver alone that has
sampled about as many tokens as the team, all answer new rows: the first answer; another one where
the first has none ("retried", which needs no verifier); another one where the verifier says no.
proposer: the recipe with a proposer that learns, and with a frozen one.
Runs share a GPU (under MPS if that is on), so times say little. Prints a JSON line for each run.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import sparrow
from sparrow.dataflow.evaluation import load_policy
from sparrow.engine.engine import Engine
from sparrow.schema.sampling import SamplingParams
from sparrow.stats import mean_over_rows
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import decode, encode
from sparrow_recipes import proposer_solver, solver_verifier

GIB = 2**30
FIRST = 500_000  # seed of the first new row of `evaluate`
ROUND = {"prompts": 32, "samples": 8}


def recipe(args: argparse.Namespace, name: str, out: Path, seed: int, *more: str) -> list[str]:
    own = {"model": args.model, "length": args.length, "tokens": args.tokens, "seed": seed}
    own |= {"steps": args.steps, "every": args.every, "held-out": args.held_out}
    own |= {"warm-up": args.warm_up, "rate": args.rate, "kv-gib": args.kv_gib, "out": out}
    own |= {"prompts": args.prompts, "samples": args.samples}
    words = [f"--{key}={value}" for key, value in own.items()]
    return [sys.executable, "-m", f"sparrow_recipes.{name}", *words, *more]


def alone(args: argparse.Namespace, out: Path, seed: int) -> list[str]:
    """The settings of the recipe for one policy; its checkpoints stay."""
    settings = {
        "model": args.model,
        "task": "graph",
        "length": args.length,
        "data.first": 1 << 30,
        "rollout.max_tokens": args.tokens,
        "rollout.max_prompt": 256,
        "rollout.kv_gib": args.kv_gib,
        "decoding": "dense",
        "gate.mode": "off",
        "prompts": args.prompts,
        "samples": args.samples,
        "rate": args.rate,
        "validation.every": args.every,
        "validation.prompts": args.held_out,
        "run.save_every": args.every,
        "run.keep": 99,
        "run.rollouts": 0,
        "steps": 2 * args.steps,
        "seed": seed,
        "out": out / "run",
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "sparrow", "train", *words]


def start(words: list[str], out: Path, until: float) -> None:
    """Run a command, which is asked to stop at a time of `time.monotonic`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("ab") as log:
        environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        try:
            process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()


def train(args: argparse.Namespace) -> None:
    """Warm up once, then all runs at once."""
    until = time.monotonic() + args.seconds
    verifier = args.what == "verifier"
    make, part = (solver_verifier, "verifier") if verifier else (proposer_solver, "proposer")
    rows = make.warm_up_rows(args.length, args.warm_up)
    warm = args.out / part
    sparrow.sft(args.model, rows, rate=3e-4, out=warm)
    jobs = []
    for seed in range(args.seeds):
        names = ("team", "alone") if verifier else ("learns", "frozen")
        for name in names:
            out = args.out / f"{name}-{seed}"
            if name == "alone":
                jobs.append((alone(args, out, seed), out))
                continue
            if not (out / part).exists():
                shutil.copytree(warm, out / part)
            more = ["--frozen"] if name == "frozen" else []
            jobs.append((recipe(args, make.__name__.rpartition(".")[2], out, seed, *more), out))
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(lambda job: start(*job, until), jobs))
    for _, out in jobs:
        print(json.dumps({"run": out.name, **curve(out / "run")}), flush=True)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curve(run: Path) -> dict[str, Any]:
    """Tokens sampled before each evaluation, and its means with intervals."""
    spent = [0.0]
    for line in lines(run / "metrics.jsonl"):
        own = [x for name, x in line.items() if name.endswith("/tokens_sampled")]
        answers = line["response_length/mean"] * ROUND["prompts"] * ROUND["samples"]
        spent.append(spent[-1] + (sum(own) if own else answers))
    points = []
    for line in lines(run / "validation.jsonl"):
        stems = [name.removesuffix("/low") for name in line if name.endswith("/low")]
        shown = {}
        for stem in stems:
            ends = (f"{stem}/low", f"{stem}/high")
            mean = next(x for n, x in line.items() if n.startswith(f"{stem}/mean"))
            shown[stem] = [round(x, 4) for x in (mean, *(line[end] for end in ends))]
        tokens = spent[min(line["step"], len(spent) - 1)]
        points.append({"step": line["step"], "tokens": round(tokens), **shown})
    return {"steps": len(spent) - 1, "tokens": round(spent[-1]), "points": points}


# Answers to new rows, and what becomes of them.


def evaluate(args: argparse.Namespace) -> None:
    for seed in range(args.seeds):
        team, single = args.out / f"team-{seed}" / "run", args.out / f"alone-{seed}" / "run"
        spent = curve(team)
        kept = [int(folder.name[5:]) for folder in (single / "checkpoints").glob("step_*")]
        at = curve(single)
        tokens = {point["step"]: point["tokens"] for point in at["points"]}
        step = min((n for n in kept if n in tokens), key=lambda n: abs(tokens[n] - spent["tokens"]))
        solvers = {"team": _policy(team, "solver"), "alone": _policy(single, None, step)}
        verifier = _policy(team, "verifier")
        print(json.dumps({"seed": seed, "team": spent["tokens"], "alone": tokens[step]}))
        for name, solver in solvers.items():
            found = _answers(args, solver, verifier)
            print(json.dumps({"seed": seed, "solver": name, **found}), flush=True)


def _policy(run: Path, policy: str | None, step: int | str = "latest") -> Any:
    return load_policy(run, step, policy=policy, dtype="auto", device="auto")


def _engine(model: Any) -> Engine:
    return Engine(model, max_context=2048, kv_bytes=4 * GIB)


def _answers(args: argparse.Namespace, solver: Any, verifier: Any) -> dict[str, Any]:
    """Two answers to each new row, a check of the first; accuracy and tokens of the choices."""
    rows = [PUZZLES["graph"].row(FIRST + n, args.length) for n in range(args.rows)]
    params = [SamplingParams(n=2, max_tokens=args.tokens, seed=n) for n in range(args.rows)]
    flat = _engine(solver).generate([encode(row.prompt) for row in rows], params)
    answers = [flat[n : n + 2] for n in range(0, len(flat), 2)]
    texts = [[decode(a.token_ids.tolist()) for a in pair] for pair in answers]
    judged = zip(rows, texts, strict=True)
    right = np.array([[PUZZLES["graph"].reward(r, t).acc for t in pair] for r, pair in judged])
    length = np.array([[len(answer.token_ids) for answer in pair] for pair in answers])
    paths = [solver_verifier.answer_of(first) for first, _ in texts]
    asked = [n for n, path in enumerate(paths) if path]
    prompts = [encode(f"{rows[n].prompt} path {paths[n]} ?") for n in asked]
    limit = SamplingParams(max_tokens=solver_verifier.CHECK)
    seeded = [limit.replace(seed=n) for n in asked]
    checks = _engine(verifier).generate(prompts, seeded)
    says = np.zeros(args.rows, bool)
    says[asked] = [decode(c.token_ids.tolist()).split()[-1:] == ["yes"] for c in checks]
    checked = np.zeros(args.rows)
    checked[asked] = [len(check.token_ids) for check in checks]
    has = np.array([bool(path) for path in paths])
    first, second = right.T
    chosen = {
        "first": (first, length[:, 0]),
        "retried": (np.where(has, first, second), length[:, 0] + ~has * length[:, 1]),
        "verified": (np.where(says, first, second), length[:, 0] + checked + ~says * length[:, 1]),
        "either": (np.maximum(first, second), length.sum(1)),
    }
    found: dict[str, Any] = {"checked_right": round(float((says == first)[has].mean()), 4)}
    found |= {"wrong_found": round(float((~says)[has & (first == 0)].mean()), 4)}
    found |= {"right_refused": round(float((~says)[has & (first == 1)].mean()), 4)}
    for name, (values, tokens) in chosen.items():
        mean = mean_over_rows(values)
        figures = (mean.value, mean.low, mean.high)
        found[name] = [*(round(float(x or 0), 4) for x in figures), round(float(tokens.mean()))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["verifier", "proposer", "evaluate"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="small-rl")
    counts = {"length": 400, "tokens": 1024, "prompts": 32, "samples": 8, "steps": 60, "every": 10}
    counts |= {"held_out": 256, "warm_up": 12800, "seeds": 3, "rows": 1024}
    for name, value in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name, number in {"rate": 1e-4, "kv_gib": 3.0, "seconds": 1e6}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=number)
    args = parser.parse_args()
    ROUND.update(prompts=args.prompts, samples=args.samples)
    args.out.mkdir(parents=True, exist_ok=True)
    evaluate(args) if args.what == "evaluate" else train(args)


if __name__ == "__main__":
    main()
