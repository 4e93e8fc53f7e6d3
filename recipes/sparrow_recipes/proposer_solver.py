"""Proposer and solver: self-play in which problems are rewarded for being worth learning from.

    python -m sparrow_recipes.proposer_solver --out runs/proposer-solver
    python -m sparrow_recipes.proposer_solver --out OUT --model small-rl --length 500 ...    # GPU

The proposer reads a countdown problem and writes another one; the solver tries it several times.
The solver is rewarded for right answers, the proposer for problems that are solved about half the
time: 4 p (1 - p), where p is the share of right answers; nothing for what is no problem, or nobody
can solve, or everybody. It starts from generated problems of mixed length (`sparrow.sft`). With
`--frozen` it never learns, to compare with. Held-out accuracy is that of the solver alone, on
problems of the task.
"""

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import sparrow
from sparrow.dataflow.episodes import Actor
from sparrow.schema.episode import Trajectory
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Row, number

COUNTDOWN = PUZZLES["countdown"]
WARM_UP = 1 << 40  # seeds from here on are of the warm-up
MOST_GIVEN = 6  # numbers of a problem
TRIES = 4  # answers to a problem


def read_problem(text: str) -> Row | None:
    """The problem that was proposed, such as "countdown 3 7 12 reach 22"; None: it is none."""
    first, *words = text.split() or [""]
    given, middle, target = words[:-2], words[-2:-1], number(words[-1]) if words else None
    numbers = [number(word) for word in given]
    asks = first == COUNTDOWN.name and middle == ["reach"] and target
    if not asks or None in numbers or 0 in numbers or not 2 <= len(numbers) <= MOST_GIVEN:
        return None
    prompt, data = f"{text} <think>", {"numbers": numbers, "target": target}
    return Row(family=COUNTDOWN.name, seed=0, length=100, prompt=prompt, data=data)


async def propose_and_solve(actors: Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """Every play: a problem, and answers to it, which are compared with each other alone."""
    proposer, solver = actors["proposer"], actors["solver"]

    async def answer(row: Row, play: int, attempt: int) -> Trajectory:
        posed = Example(id=example.id, source=row.family, prompt=row.prompt, ground_truth=None)
        talk = solver.conversation(posed, play * TRIES + attempt)
        verdict = COUNTDOWN.reward(row, await talk.reply())
        return talk.trajectory(verdict).replace(node=(play, attempt), subgroup=f"problem {play}")

    async def play(sample: int) -> list[Trajectory]:
        talk = proposer.conversation(example, sample).add_text("next")
        row = read_problem(await talk.reply(max_tokens=2 * MOST_GIVEN))
        tries = (
            range(TRIES) if row is not None and solver.room(solver.encode_text(row.prompt)) else ()
        )
        answers = await asyncio.gather(*(answer(row, sample, n) for n in tries if row is not None))
        share = sum(one.acc or 0.0 for one in answers) / TRIES
        verdict = {"score": 4 * share * (1 - share), "acc": float(row is not None)}
        return [talk.trajectory(verdict), *answers]

    plays = await asyncio.gather(*map(play, range(proposer.samples)))
    return [trajectory for played in plays for trajectory in played]


def warm_up_rows(length: int, count: int) -> list[dict[str, str]]:
    """Prompts of the proposer, each with another problem, of any length up to that."""
    rows = []
    for seed in range(WARM_UP, WARM_UP + 2 * count, 2):
        shown = COUNTDOWN.row(seed, length)
        other = COUNTDOWN.row(seed + 1, Random(seed).randint(100, length))
        said = other.prompt.removesuffix(" <think>")
        rows.append({"prompt": f"{shown.prompt} next", "completion": said})
    return rows


def settings(args: argparse.Namespace, proposer: str) -> dict[str, Any]:
    """The run of both."""
    sizes = {"max_tokens": args.tokens, "max_prompt": 64, "kv_gib": args.kv_gib}
    seen = {"every": args.every, "prompts": args.held_out, "policies": ["solver"]}
    return {
        "policies": {"proposer": {"model": proposer, "frozen": args.frozen}, "solver": {}},
        "episode": "sparrow_recipes.proposer_solver:propose_and_solve",
        "data": {"task": "countdown", "length": args.length, "first": 1 << 30},
        "rollout": {"prompts": args.prompts, "samples": args.samples, "decoding": "dense", **sizes},
        "validation": seen,
        "gate": {"mode": "off"},
        "run": {"steps": args.steps, "seed": args.seed, "save_every": args.every},
        "rate": args.rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--frozen", action="store_true", help="the proposer does not learn")
    counts = {"length": 300, "tokens": 512, "prompts": 4, "samples": 4, "steps": 12, "every": 4}
    for name, value in (counts | {"held_out": 64, "warm_up": 1000, "seed": 0}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--kv-gib", type=float, default=1.0)
    args = parser.parse_args()
    rows = warm_up_rows(args.length, args.warm_up)
    warm = sparrow.sft(args.model, rows, rate=3e-4, out=args.out / "proposer")
    run = sparrow.train(model=args.model, **settings(args, warm.model), out=args.out / "run")
    (args.out / "report.html").write_text(sparrow.report(run.folder))
    print(f"{run.folder}, {args.out / 'report.html'}")


if __name__ == "__main__":
    main()
