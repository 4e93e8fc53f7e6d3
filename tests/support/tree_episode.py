"""An episode of a run in which agents spawn one other each, until level 3."""

from collections.abc import Mapping

from sparrow.dataflow.agents import Agent, AgentResult, play_agents
from sparrow.dataflow.episodes import Actor
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example


async def tree_episode(actors: Actor | Mapping[str, Actor], example: Example) -> list[Trajectory]:
    """The reward is the judge's of what an agent says first."""
    actor = actors if isinstance(actors, Actor) else actors["solver"]

    async def life(agent: Agent) -> AgentResult:
        said = await agent.reply()
        child = Example(id="child", source="", prompt="find x1", ground_truth=None)
        for result in await agent.spawn([child] * agent.can_spawn):
            agent.hear(result.message)
        verdict = await actor.judge(example, said)
        return AgentResult(message="x3", reward=verdict.score, acc=verdict.acc)

    return await play_agents(actors, example, lambda _: life)
