"""Trees of agents whose lives follow a plan, over a sampler that answers at random."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from sparrow.dataflow.agents import Agent, AgentResult, AgentTree, Child
from sparrow.dataflow.episodes import Actor
from sparrow.dataflow.language import PUZZLE_LANGUAGE
from sparrow.engine.answer import DENSE
from sparrow.schema.agents import AgentsConfig
from sparrow.schema.episode import Trajectory
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.tasks.base import Example


class EngineFault(RuntimeError):
    """An engine that failed."""


@dataclass
class RandomSampler:
    """Answers of random length, after pauses; some requests fail. Counts who is under way."""

    rng: Random
    failing: float = 0.0
    slots: int | None = None  # answers at the same time
    under_way: int = 0
    most: int = 0
    started: int = 0  # tokens that were asked for
    _free: asyncio.Semaphore | None = None

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **_: Any
    ) -> list[Completion]:
        if self._free is None:
            self._free = asyncio.Semaphore(self.slots or 1 << 20)
        async with self._free:
            self.under_way, self.started = self.under_way + 1, self.started + params.max_tokens
            self.most = max(self.most, self.under_way)
            try:
                for _ in range(self.rng.randrange(3)):
                    await asyncio.sleep(0)
                if self.rng.random() < self.failing:
                    raise EngineFault
                return [self._completion(prompt, params)]
            finally:
                self.under_way -= 1

    def _completion(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        count = self.rng.randint(1, params.max_tokens)
        return Completion(
            prompt_ids=np.array(prompt, np.int32),
            token_ids=np.full(count, 20, np.int32),
            logprobs=np.full(count, -1, np.float32),
            weight_versions=np.zeros(count, np.int32),
            finish_reason="length" if count == params.max_tokens else "stop",
            attention="dense",
        )


def actor(sampler: Any, *, context: int = 200, **changes: Any) -> Actor:
    made: dict[str, Any] = {"samples": 1, "key": (0,), "agents": AgentsConfig()} | changes
    return Actor(
        engine=sampler,
        language=PUZZLE_LANGUAGE,
        judge=None,
        params=SamplingParams(max_tokens=context),
        decoding=DENSE,
        context=context,
        **made,
    )


def task(text: str = "find x1") -> Example:
    return Example(id=text, source="", prompt=text, ground_truth=None)


DOINGS = [*["reply"] * 4, *["spawn"] * 3, "start", "abort", "fail", "hang"]


@dataclass
class RandomLives:
    """What agents do is drawn: reply, be told something, spawn, start, abort, fail, hang, end."""

    rng: Random
    results: list[AgentResult] = field(default_factory=list)  # that parents got
    begun: int = 0

    async def __call__(self, agent: Agent) -> AgentResult:
        self.begun += 1
        started: list[Child] = []
        for _ in range(self.rng.randint(1, 5)):
            doing = self.rng.choice(DOINGS)
            if doing == "reply":
                await agent.reply(self.rng.choice([None, 5]))
                agent.hear("yes")
            elif doing == "spawn":
                self.results += await agent.spawn([task()] * self.rng.randint(1, 3))
            elif doing == "start":
                started.append(agent.start(task()))
            elif doing == "abort" and started:
                child = started.pop()
                child.abort()
                self.results.append(await child.result())
            elif doing == "fail" and len(agent.node) > 1 and self.rng.random() < 0.5:
                raise ValueError("the world is gone")
            elif doing == "hang" and agent.tree.limits.seconds and self.rng.random() < 0.3:
                await asyncio.sleep(60)
        for child in started if self.rng.random() < 0.5 else []:  # others are left to their fate
            self.results.append(await child.result())
        return AgentResult(message="yes", reward=float(self.rng.random() < 0.5))


def play(
    sampler: Any, life: Any, limits: AgentsConfig, **changes: Any
) -> tuple[AgentTree, list[Trajectory]]:
    """A tree that was played, and its trajectories."""
    player = actor(sampler, agents=limits, **changes)
    tree = AgentTree(actors={"": player}, limits=limits, life=life, play=0)
    return tree, asyncio.run(asyncio.wait_for(tree.run(task("from x1")), 20))
