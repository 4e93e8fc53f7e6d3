"""Recursive agents: crafting by agents that delegate, or by a flat one, with equal budgets.

    python -m sparrow_recipes.recursive_crafting --out runs/recursive
    python -m sparrow_recipes.recursive_crafting --flat --out runs/flat
    python -m sparrow_recipes.recursive_crafting --model small-rl --depth 4 --out OUT ...    # GPU

An agent looks up recipes, takes raw items and makes others; one that has to make an item of several
levels may hand it to a sub-agent ("try x7"), of which it sees the last word alone. All agents of a
play work in one world and share one budget of tokens. The model starts from gold plays of shallow
worlds (`sparrow.sft`), of agents that delegate or of a flat one, and learns deeper ones by RL, in
the asynchronous loop. Every agent is rewarded if its item was made, and compared with those of its
level; what is there already, or is being made, is not delegated.
"""

import argparse
from pathlib import Path
from typing import Any

import sparrow
from sparrow.dataflow.agents import Agent, AgentResult, Life, play_agents
from sparrow.dataflow.episodes import Actor
from sparrow.schema.episode import Trajectory
from sparrow.schema.sft import SftResult
from sparrow.tasks.base import Example
from sparrow.tasks.environments.crafting import Crafting, CraftingEnvironment

WARM_UP = 1 << 40  # seeds from here on are of the warm-up
DELEGATED = 2  # least depth of an item that gold plays delegate
DEPTHS = range(2, 7)  # of held-out worlds
PATIENCE = 3  # refused actions in a row after which an agent gives up


def crafter(example: Example) -> Life:
    """The life of the agents of one play, who share a world."""
    world = CraftingEnvironment()

    def result(agent: Agent, message: str) -> AgentResult:
        made = float(world.reached(agent.example))
        return AgentResult(message=message, reward=made, acc=made)

    async def life(agent: Agent) -> AgentResult:
        if len(agent.node) == 1:
            await world.reset(example)
        refused = 0
        while refused < PATIENCE:
            action = world.parse(said := await agent.reply())
            if action is not None and action.kind == "end":
                return result(agent, action.text)
            spawns = action is not None and action.kind == "spawn" and agent.can_spawn
            task = world.subtask(action.items[0]) if action is not None and spawns else None
            if task is None or world.reached(task) or is_asked(agent, task):
                seen = await world.step(said)
                refused = 0 if seen.info["accepted"] else refused + 1
                agent.hear(seen.text)
            else:
                (ended,) = await agent.spawn([task])
                agent.hear(ended.message or "no")
        return result(agent, "no")

    return life


def is_asked(agent: Agent | None, task: Example) -> bool:
    """Whether a task is that of an agent, or of one above it."""
    return agent is not None and (
        agent.example.prompt == task.prompt or is_asked(agent.parent, task)
    )


async def craft(actor: Actor, example: Example) -> list[Trajectory]:
    """Every play has a world of its own."""
    return await play_agents(actor, example, lambda _: crafter(example))


def warm_up_rows(depth: int, count: int, *, flat: bool) -> list[dict[str, Any]]:
    """Gold plays of worlds up to a depth: a conversation of every agent."""
    rows = []
    for number in range(count):
        task = Crafting.named(f"crafting-book-{1 + number % depth}")
        row = task.row(WARM_UP + number, 1)
        rows += task.gold(row, spawn_from=None if flat else DELEGATED)
    return rows


def warm_up(args: argparse.Namespace, out: Path) -> SftResult:
    """Fit gold plays, of either kind for as many steps."""
    rows = warm_up_rows(args.warm_depth, args.warm_up, flat=args.flat)
    sizes = {"steps": args.warm_steps, "batch": args.warm_batch}
    return sparrow.sft(args.model, rows, **sizes, rate=args.warm_rate, out=out)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The run; a flat agent is one that may not spawn."""
    limits = {"reply": 16, "tokens": args.tokens, "steps": args.tokens // 4, "children": 8}
    limits |= {"depth": 1 if args.flat else max(DEPTHS)}
    sets = {f"depth-{depth}": f"crafting-book-{depth}" for depth in DEPTHS}
    held_out = {"rows": sets.pop(f"depth-{DEPTHS[0]}"), "sets": sets}
    return {
        "data": {"task": f"crafting-book-{args.depth}", "first": 1 << 30},
        "rollout": {
            "episode": "sparrow_recipes.recursive_crafting:craft",
            "agents": limits,
            "prompts": args.prompts,
            "samples": args.samples,
            "max_prompt": 64,
            "max_tokens": 2 * args.tokens,  # of a context: what an agent says and hears
            "kv_gib": args.kv_gib,
            "decoding": "dense",
        },
        "gate": {"mode": "off"},
        "validation": {"every": args.every, "prompts": args.held_out, "episode": True} | held_out,
        "run": {"steps": args.steps, "seed": args.seed, "loop": args.loop},
        "rate": args.rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--flat", action="store_true", help="one agent, which may not delegate")
    parser.add_argument("--loop", choices=["async", "sync"], default="async")
    counts = {"depth": 3, "warm_depth": 3, "warm_up": 1500, "tokens": 384, "prompts": 4}
    counts |= {
        "warm_steps": 400,
        "warm_batch": 32,
        "samples": 4,
        "steps": 12,
        "every": 4,
        "held_out": 24,
        "seed": 0,
    }
    for name, value in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--warm-rate", type=float, default=3e-4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--kv-gib", type=float, default=1.0)
    args = parser.parse_args()
    warm = warm_up(args, args.out / "warm")
    run = sparrow.train(model=warm.model, **settings(args), out=args.out / "run")
    (args.out / "report.html").write_text(sparrow.report(run.folder))
    print(f"{run.folder}, {args.out / 'report.html'}")


if __name__ == "__main__":
    main()
