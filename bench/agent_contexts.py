"""Contexts of a flat agent and of agents that delegate, and what decoding them costs.

    python bench/agent_contexts.py plays --depths 3 4 5 6 --distractors 90 > plays.json
    sparrow bench exact --model qwen3-1.7b --compare fixed-512-all --flow "fine_means(4)" \
        --case 32,640,fixed-512-all --case 32,2048,fixed-512-all --case 32,8192,fixed-512-all \
        --acceptance 0.962 --acceptance 0.957 --acceptance 0.951 --json > times.json
    python bench/agent_contexts.py table plays.json times.json

plays: gold plays of the crafting world in English, whose recipes are looked up, as a chat of
SmolLM2: of every token that an agent says, how many stand before it. table: by depth, the longest
context, keys and values read (all tokens before each, or at most 512 of them) and the time at the
measured milliseconds of a token in a batch of 32 (between contexts along a line; below the smallest
as there). Prompts and what agents are told are left out: they are read densely, once.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sparrow import load
from sparrow.dataflow.language import load_language
from sparrow.dataflow.sft import conversation_sample
from sparrow.tasks.environments.crafting import Crafting

KEPT = 512
MODES = ("dense", "sparse", "exact")


def plays(args: argparse.Namespace) -> None:
    language = load_language(load(args.model, device="cpu"))
    found: list[dict[str, Any]] = []
    for depth in args.depths:
        task = Crafting.named(f"crafting-text-book-{depth}-{args.distractors}")
        for seed in range(args.plays):
            row = task.row(seed, 1)
            for kind, spawn_from in (("flat", None), ("recursive", 2)):
                agents = [
                    conversation_sample(a, language) for a in task.gold(row, spawn_from=spawn_from)
                ]
                before = [np.flatnonzero(agent.loss_mask).tolist() for agent in agents]
                found.append({"depth": depth, "kind": kind, "seed": seed, "before": before})
    json.dump(found, sys.stdout)


def table(args: argparse.Namespace) -> None:
    rows = json.loads(args.times.read_text())["rows"]
    at = np.array([row["context"] for row in rows], float)
    times = {mode: np.array([token_time(row, mode) for row in rows]) for mode in MODES}
    found = json.loads(args.plays.read_text())
    for depth in sorted({play["depth"] for play in found}):
        for kind in ("flat", "recursive"):
            own = [p["before"] for p in found if (p["depth"], p["kind"]) == (depth, kind)]
            before = [np.concatenate(agents) for agents in own]
            line: dict[str, Any] = {"depth": depth, "kind": kind}
            line["agents"] = round(fmean(len(agents) for agents in own), 1)
            line["said"] = round(fmean(len(tokens) for tokens in before))
            line["longest_context"] = round(fmean(int(tokens.max()) + 1 for tokens in before))
            line["read_dense"] = round(fmean(int(tokens.sum()) for tokens in before))
            line["read_sparse"] = round(
                fmean(int(tokens.clip(max=KEPT).sum()) for tokens in before)
            )
            for mode in MODES:
                ms = [np.interp(tokens, at, times[mode]).sum() for tokens in before]
                line[f"ms_{mode}"] = round(fmean(ms), 1)
            print(json.dumps(line))


def token_time(row: dict[str, Any], mode: str) -> float:
    """Milliseconds of a token of one row."""
    if mode == "exact":
        return float(row["ms_round"] / row["tokens_per_round"] / row["batch"])
    return float(row["ms_dense" if mode == "dense" else "ms_sparse"] / row["batch"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    own = parts.add_parser("plays")
    own.set_defaults(run=plays)
    own.add_argument("--model", default="smollm2-135m", help="whose tokenizer and chat template")
    own.add_argument("--depths", type=int, nargs="+", default=[3, 4, 5, 6])
    own.add_argument("--distractors", type=int, default=90)
    own.add_argument("--plays", type=int, default=32)
    own = parts.add_parser("table")
    own.set_defaults(run=table)
    own.add_argument("plays", type=Path)
    own.add_argument("times", type=Path)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
