"""Solver and verifier: two policies in one episode, each learns on its own clock.

    python -m sparrow_recipes.solver_verifier --out runs/solver-verifier
    python -m sparrow_recipes.solver_verifier --out OUT --model small-rl --length 400 ...    # GPU

The solver looks for a path in a graph. The verifier reads the graph and the path, walks along it by
listing edges of each node until the next node turns up, and ends with yes or no; at no, the solver
tries once more. Each is rewarded for being right itself, so neither depends on the other's skill;
the last answer is the team's. The verifier starts from gold checks of right and spoilt paths
(`sparrow.sft`): a model that never says yes or no has nothing to learn from.
"""

import argparse
import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import sparrow
from sparrow.dataflow.episodes import Actor
from sparrow.schema.episode import Trajectory
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import ANSWER, END_ANSWER, Example, Row
from sparrow.tasks.graph_path import neighbours

GRAPHS = PUZZLES["graph"]
WARM_UP = 1 << 40  # seeds from here on are of the warm-up
CHECK = 160  # most tokens of a check


def answer_of(text: str) -> str:
    """The path of an answer; empty: it has none, which needs no verifier."""
    _, found, rest = text.partition(ANSWER)
    path, ended, _ = rest.partition(END_ANSWER)
    return path.strip() if found and ended else ""


async def solve_and_verify(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """Every play: an answer, its check, and where that says no a second answer."""
    solver, verifier = actors["solver"], actors["verifier"]

    async def play(sample: int) -> list[Trajectory]:
        first = solver.conversation(example, sample)
        path = answer_of(await first.reply())
        final = verdict = await solver.judge(example, first.text)
        played, accepted = [first.trajectory(verdict)], False
        if path:
            check = verifier.conversation(example, sample).add_text(f"path {path} ?")
            said = await check.reply(max_tokens=CHECK) if check.room > 0 else "no"
            accepted = said.split()[-1:] == ["yes"]
            right = float(accepted == (verdict.acc == 1))
            played += [check.trajectory({"score": right, "acc": right})] if check.replies else []
        if not accepted:
            second = solver.conversation(example, solver.samples + sample)
            await second.reply()
            final = await solver.judge(example, second.text)
            played.append(second.trajectory(final))
        return [
            one.replace(node=(sample, n) if n else (sample,), team_reward=final.acc)
            for n, one in enumerate(played)
        ]

    plays = await asyncio.gather(*map(play, range(solver.samples)))
    return [trajectory for played in plays for trajectory in played]


def gold_check(row: Row, path: list[str], rng: Random) -> str:
    """Start, goal, then every step by the edges of its first node; yes if all are right."""
    if path[0] != row.data["start"]:
        return "from no no"
    if path[-1] != row.data["goal"]:
        return "from yes to no no"
    words, around = ["from yes to yes"], neighbours(row.data["edges"])
    for node, other in pairwise(path):
        for near in rng.sample(around[node], len(around[node])):
            words.append(f"{node} - {near} {'yes' if near == other else 'no'} ;")
            if near == other:
                break
        else:
            return " ".join([*words, f"end {node} no"])
    return " ".join([*words, "yes" if len({*path}) == len(path) else "no"])


def spoilt(row: Row, path: list[str], rng: Random) -> list[str]:
    """A path with a mistake: another node, one left out, or another beginning or end."""
    nodes, place = sorted(neighbours(row.data["edges"])), rng.randrange(len(path))
    other = [*path[:place], rng.choice(nodes), *path[place + 1 :]]
    kinds = [other, other, [*path[:place], *path[place + 1 :]], path[1:], path[:-1]]
    return rng.choice([wrong for wrong in kinds if wrong])


def warm_up_rows(length: int, count: int) -> list[dict[str, str]]:
    """Prompts of the verifier with gold checks, half of them of spoilt paths."""
    rows = []
    for seed in range(WARM_UP, WARM_UP + count):
        row, rng = GRAPHS.row(seed, length), Random(seed)
        path = answer_of(GRAPHS.chain(row, 0)).split()
        path = spoilt(row, path, rng) if seed % 2 else path
        prompt = f"{row.prompt} path {' '.join(path)} ?"
        rows.append({"prompt": prompt, "completion": gold_check(row, path, rng)})
    return rows


def settings(args: argparse.Namespace, verifier: str) -> dict[str, Any]:
    """The run of both; the verifier learns from half as many prompts at a time."""
    half = max(1, args.prompts // 2)
    sizes = {"max_tokens": args.tokens, "max_prompt": 256, "kv_gib": args.kv_gib}
    seen = {"every": args.every, "prompts": args.held_out}
    return {
        "policies": {"solver": {}, "verifier": {"model": verifier, "prompts": half}},
        "episode": "sparrow_recipes.solver_verifier:solve_and_verify",
        "data": {"task": "graph", "length": args.length, "first": 1 << 30},
        "rollout": {"prompts": args.prompts, "samples": args.samples, "decoding": "dense", **sizes},
        "validation": {**seen, "episode": True, "policies": ["solver"]},
        "gate": {"mode": "off"},
        "run": {"steps": args.steps, "seed": args.seed, "save_every": args.every},
        "rate": args.rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    counts = {"length": 150, "tokens": 320, "prompts": 8, "samples": 8, "steps": 12, "every": 4}
    for name, value in (counts | {"held_out": 64, "warm_up": 2000, "seed": 0}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--kv-gib", type=float, default=1.0)
    args = parser.parse_args()
    rows = warm_up_rows(args.length, args.warm_up)
    warm = sparrow.sft(args.model, rows, rate=3e-4, out=args.out / "verifier")
    run = sparrow.train(model=args.model, **settings(args, warm.model), out=args.out / "run")
    (args.out / "report.html").write_text(sparrow.report(run.folder))
    print(f"{run.folder}, {args.out / 'report.html'}")


if __name__ == "__main__":
    main()
