"""Agents that spawn agents: a tree of conversations under one budget of steps and tokens.

    async def craft(agent):                              # the life of one agent
        while True:
            said = await agent.reply()
            if said.startswith("try"):
                (result,) = await agent.spawn([world.subtask(said)])
                agent.hear(result.message)               # the parent sees this and nothing else
            elif said.startswith("end"):
                return AgentResult(message=said, reward=world.reached(agent.example))
            else:
                agent.hear((await world.step(said)).text)

    async def episode(actor, example):                   # rollout.episode
        return await play_agents(actor, example, lambda play: craft)

Limits and rewards are data (`rollout.agents`). An agent holds a place in the engine only while it
replies, never while it waits for its children: so no tree can wait for itself. How a child ended
(error, timeout, abort, spent budget) is a result that its parent gets. Every agent ends once, after
its children, and leaves an `AgentNode` in the record of its tree; what it sampled is a trajectory,
compared with those of its level.

A life may fail, return nonsense, catch its cancellation or leave coroutines behind: its tree ends
all the same, and records every agent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

from sparrow.dataflow.episodes import Actor, Conversation
from sparrow.schema.agents import LEVEL, AgentNode, AgentsConfig, AgentStatus
from sparrow.schema.episode import Trajectory
from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.judging import parse_verdict

SHOWN = 200  # characters of a task, message or reason in the record
STUBBORN = 10  # seconds, each with a cancellation, until a life that catches them is an error


class OutOfBudget(Exception):
    """Raised by `Agent.reply` where the tree has no step or token left."""


class OutOfContext(Exception):
    """Raised by `Agent.reply` where the conversation is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How an agent ended, for its parent; refused: it was not spawned, by the limits."""

    message: str = ""
    reward: float = 0.0
    acc: float | None = None  # None: the reward
    status: AgentStatus | str = "done"
    reason: str = ""

    def verdict(self) -> Verdict:
        """Reward and accuracy; ValueError if they are not finite, or the latter not from 0 to 1."""
        own = {} if self.acc is None else {"acc": self.acc}
        return parse_verdict({"score": self.reward, **own})


ABORTED = AgentResult(status="aborted", reason="its parent stopped it, or had ended")
Life = Callable[["Agent"], Awaitable[AgentResult]]


@dataclass
class Budget:
    """Steps and tokens that are left."""

    steps: int
    tokens: int

    def reserve(self, most: int) -> int:
        """Take a step and up to so many tokens; OutOfBudget if there are none."""
        assert most > 0, most
        if self.steps < 1 or self.tokens < 1:
            raise OutOfBudget(f"{self.steps} steps and {self.tokens} tokens are left")
        tokens = min(most, self.tokens)
        self.steps, self.tokens = self.steps - 1, self.tokens - tokens
        return tokens

    def split(self, count: int) -> list["Budget"]:
        """Take out parts, each as large as what stays."""
        steps, tokens = self.steps // (count + 1), self.tokens // (count + 1)
        self.steps, self.tokens = self.steps - count * steps, self.tokens - count * tokens
        return [Budget(steps, tokens) for _ in range(count)]

    def merge(self, part: "Budget") -> None:
        """Take back what is left of a part."""
        self.steps, self.tokens = self.steps + part.steps, self.tokens + part.tokens
        part.steps = part.tokens = 0


@dataclass(eq=False, kw_only=True)
class Agent:
    """One agent while it lives: its task, its conversation, its children."""

    example: Example  # its task
    node: tuple[int, ...]
    policy: str
    conversation: Conversation
    budget: Budget
    tree: "AgentTree"
    parent: "Agent | None" = None
    children: list["Child"] = field(default_factory=list)
    lives: bool = False
    is_aborted: bool = False
    clock: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    waits: int = 0  # for children, at the moment
    left: float | None = None  # seconds, when it began to wait

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.conversation.text

    @property
    def cut_off(self) -> bool:
        """Whether its last reply ended by a limit of tokens."""
        replies = self.conversation.replies
        return bool(replies) and replies[-1].finish_reason == "length"

    @property
    def can_spawn(self) -> bool:
        """Whether the limits allow it one more child."""
        return self._room_for_children > 0

    @property
    def _room_for_children(self) -> int:
        limits = self.tree.limits
        may = self.lives and not self.is_aborted and len(self.node) < limits.depth
        return limits.children - len(self.children) if may else 0

    async def reply(self, max_tokens: int | None = None) -> str:
        """Sample the next reply, within the budget of the tree and the room of the context."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
        self._check_alive()
        try:
            reserved = self._reserve(max_tokens)
        except (OutOfBudget, OutOfContext):
            await asyncio.sleep(0)  # a life that tries again and again can be stopped
            raise
        said = await self.conversation.reply(max_tokens=reserved)  # if it is stopped, all is spent
        self.budget.tokens += reserved - len(self.conversation.replies[-1].token_ids)
        self._check_alive()
        return said

    def _reserve(self, max_tokens: int | None) -> int:
        room = self.conversation.room
        if room < 1:
            raise OutOfContext(f"a context of {len(self.conversation.ids)} tokens is full")
        limits = (max_tokens, self.tree.limits.reply)
        return self.budget.reserve(min([room, *(n for n in limits if n is not None)]))

    def _check_alive(self) -> None:
        if not self.lives:
            raise RuntimeError("this agent has ended: its life left a coroutine behind")
        if self.is_aborted or self.clock.expired():  # its life caught the cancellation
            raise asyncio.CancelledError

    def hear(self, text: str, role: str = "tool") -> None:
        """Add what it is told: a chat message where the model has a template, else plain text."""
        chat = self.conversation.actor.language.tokenizer.chat_template is not None
        self.conversation.add(text, role) if chat else self.conversation.add_text(text)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop its clock while it waits for a child, or for several at once."""
        if not self.waits and self.clock.when() is not None:
            self.left = (self.clock.when() or 0.0) - asyncio.get_running_loop().time()
            self._reschedule(None)
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            if not self.waits and self.left is not None:
                self._reschedule(asyncio.get_running_loop().time() + self.left)

    def _reschedule(self, when: float | None) -> None:
        if self.lives and not self.clock.expired():
            self.clock.reschedule(when)

    async def spawn(self, tasks: Sequence[Example]) -> list[AgentResult]:
        """Have sub-agents solve tasks, and wait for their ends.

        One after the other; with `agents.parallel` at once, if the budget has a share for each.
        Those beyond the limits are refused, which is a result like others.
        """
        count = min(len(tasks), self._room_for_children)
        together = self.tree.limits.parallel and min(self.budget.steps, self.budget.tokens) > count
        if not together:
            return [await self._start(task, self.budget).result() for task in tasks]
        shares = [*self.budget.split(count), *[self.budget] * (len(tasks) - count)]
        started = [self._start(task, share) for task, share in zip(tasks, shares, strict=True)]
        return list(await asyncio.gather(*(child.result() for child in started)))

    def start(self, task: Example) -> "Child":
        """Start a sub-agent with half of the budget that is left, and go on.

        What it does not spend comes back. What still runs when its parent ends is aborted.
        """
        return self._start(task, self.budget.split(1)[0] if self.can_spawn else self.budget)

    def _start(self, task: Example, budget: Budget) -> "Child":
        if not isinstance(task, Example):
            raise TypeError(f"the task of a sub-agent is an Example, got {task!r:.80}")
        if not self.can_spawn:
            return Child(refused="the limits of depth or children allow no more")
        agent = self.tree.agent(task, (*self.node, len(self.children)), budget, self)
        child = Child(agent=agent, task=asyncio.ensure_future(self.tree.live(agent)))
        self.children.append(child)
        return child


@dataclass(eq=False, kw_only=True)
class Child:
    """A sub-agent that was started, as its parent sees it."""

    agent: Agent | None = None
    task: asyncio.Task[AgentResult] | None = None
    refused: str = ""

    async def result(self) -> AgentResult:
        """Wait for its end."""
        if self.task is None or self.agent is None or self.agent.parent is None:
            return AgentResult(status="refused", reason=self.refused)
        with self.agent.parent.waiting():
            return await asyncio.shield(self.task)

    def abort(self) -> None:
        """Stop it, and its children; its result says so."""
        if self.task is None or self.agent is None or self.task.done() or self.agent.is_aborted:
            return
        self.agent.is_aborted = True
        if self.agent.lives:  # otherwise it ends as soon as it begins
            self.task.cancel()


@dataclass(eq=False, kw_only=True)
class AgentTree:
    """The agents of one play."""

    actors: Mapping[str, Actor]  # by policy
    limits: AgentsConfig
    life: Life
    play: int
    nodes: list[AgentNode] = field(default_factory=list)  # in the order of their ends
    _said: dict[tuple[int, ...], Trajectory] = field(default_factory=dict)  # by ended agents

    def agent(
        self, task: Example, node: tuple[int, ...], budget: Budget, parent: Agent | None = None
    ) -> Agent:
        """An agent at a place; its draws are of this place."""
        names = self.limits.policies or tuple(self.actors)[:1]
        policy = names[min(len(node), len(names)) - 1]
        actor = self.actors[policy]
        watched = int(self.play < actor.watched)  # the gate measures all agents of a play
        actor = replace(actor, key=(*actor.key, "agent", *node), watched=watched)
        return Agent(
            example=task,
            node=node,
            policy=policy,
            conversation=Conversation(actor, task),
            budget=budget,
            tree=self,
            parent=parent,
        )

    async def run(self, example: Example) -> list[Trajectory]:
        """Play the tree from its root; the trajectories of all agents that said something."""
        root = self.agent(example, (self.play,), Budget(self.limits.steps, self.limits.tokens))
        await self.live(root)
        return self._trajectories(example)

    async def live(self, agent: Agent) -> AgentResult:
        """Let an agent live to its end, with all of its children; errors of the root are raised."""
        begun, is_root = time.monotonic(), agent.parent is None
        agent.lives = True
        try:
            result = await self._outcome(agent)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not agent.is_aborted and (task is None or task.cancelling()):
                raise  # the whole episode is cancelled
            if is_root:
                raise RuntimeError("an agent awaited a task that was cancelled") from error
            result = ABORTED if agent.is_aborted else _failure(error)
        except Exception as error:  # of an environment, or of the code of a life
            if is_root:
                raise
            result = _failure(error)
        finally:
            agent.lives = False  # from here on an abort comes too late, and must not stop this
            await _abort_all(agent.children)
        if agent.parent is not None and agent.budget is not agent.parent.budget:
            agent.parent.budget.merge(agent.budget)
        return self._record(agent, result, time.monotonic() - begun)

    async def _outcome(self, agent: Agent) -> AgentResult:
        if agent.is_aborted:
            return ABORTED
        try:
            async with asyncio.timeout(self.limits.seconds) as agent.clock:
                return _checked(await self.life(agent))
        except SystemExit as error:  # otherwise it ends the program, whatever is under way
            raise RuntimeError(f"SystemExit: {error}") from error
        except TimeoutError:
            if not agent.clock.expired():
                raise
            return AgentResult(status="timeout", reason=f"after {self.limits.seconds:g} s")
        except OutOfBudget as error:
            return AgentResult(status="out_of_budget", reason=str(error))
        except OutOfContext as error:
            return AgentResult(status="out_of_context", reason=str(error))

    def _record(self, agent: Agent, result: AgentResult, seconds: float) -> AgentResult:
        replies = agent.conversation.replies
        verdict = result.verdict()
        prompt = agent.example.prompt
        task = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
        self.nodes.append(
            AgentNode(
                node=agent.node,
                task=task[-SHOWN:],
                policy=agent.policy,
                status=result.status,  # type: ignore[arg-type]
                reason=result.reason[:SHOWN],
                message=result.message[:SHOWN],
                steps=len(replies),
                tokens=sum(len(reply.token_ids) for reply in replies),
                context=len(agent.conversation.ids),
                seconds=round(seconds, 4),
                reward=verdict.score,
                acc=verdict.acc,
            )
        )
        if replies:
            self._said[agent.node] = agent.conversation.trajectory(verdict)
        return result

    # What is learnt.

    def _trajectories(self, example: Example) -> list[Trajectory]:
        """One of each agent that sampled tokens, the root's first, which has the record."""
        nodes = tuple(sorted(self.nodes, key=lambda node: node.node))
        rewards = {node.node: node.reward for node in nodes}
        return [
            self._said[place].replace(
                prompt_id=example.id,
                reward=self._reward(place, rewards),
                node=place,
                subgroup=f"{LEVEL}{len(place)}",
                team_reward=rewards[place[:1]],
                agents=() if number else nodes,
            )
            for number, place in enumerate(sorted(self._said))
        ]

    def _reward(self, node: tuple[int, ...], rewards: Mapping[tuple[int, ...], float]) -> float:
        """Its own reward, mixed with that of the root and of its parent."""
        team, parent = self.limits.team, self.limits.parent
        own = (1 - team - parent) * rewards[node]
        return own + team * rewards[node[:1]] + parent * rewards[node[:-1] or node]


def _failure(error: BaseException) -> AgentResult:
    return AgentResult(status="failed", reason=f"{type(error).__name__}: {error}")


def _checked(result: AgentResult) -> AgentResult:
    """What a life returned; TypeError or ValueError if that is no result."""
    if not isinstance(result, AgentResult) or result.status not in get_args(AgentStatus):
        raise TypeError(f"the life of an agent must return an AgentResult, got {result!r}")
    for name in ("message", "reason"):
        if not isinstance(getattr(result, name), str):
            raise TypeError(f"AgentResult.{name} must be a text, got {getattr(result, name)!r:.80}")
    result.verdict()
    return result


async def _abort_all(children: Sequence[Child]) -> None:
    """Abort the children that still run, and wait for their ends."""
    for child in children:
        child.abort()
    running = {child.task for child in children if child.task is not None}
    tasks, tries = set(running), 0
    while running:
        _, running = await asyncio.wait(running, timeout=1.0)
        stubborn = [c for c in children if c.task in running and c.agent and c.agent.lives]
        tries += bool(stubborn)
        if tries > STUBBORN:
            raise RuntimeError("a sub-agent does not end: it catches CancelledError")
        for child in stubborn:
            assert child.task is not None
            child.task.cancel()
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # all that a life can do is data: an error of our own


async def play_agents(
    actor: Actor | Mapping[str, Actor], example: Example, life: Callable[[int], Life]
) -> list[Trajectory]:
    """Play `samples` trees of a row; life: makes what agents of a play do (its world).

    The first trajectory of a play has the record of its tree; the first of all also those of plays
    in which nobody said anything.
    """
    actors = actor if isinstance(actor, Mapping) else {"": actor}
    first = next(iter(actors.values()))
    trees = [
        AgentTree(actors=actors, limits=first.agents, life=life(play), play=play)
        for play in range(first.samples)
    ]
    tasks = [asyncio.ensure_future(tree.run(example)) for tree in trees]
    try:
        played = await asyncio.gather(*tasks)
    finally:  # where one root failed, no other goes on
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    trajectories = [trajectory for tree in played for trajectory in tree]
    silent = [n for tree, said in zip(trees, played, strict=True) if not said for n in tree.nodes]
    if silent and trajectories:
        whole = (*trajectories[0].agents, *sorted(silent, key=lambda node: node.node))
        trajectories[0] = trajectories[0].replace(agents=whole)
    return trajectories
