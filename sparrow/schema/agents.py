"""Agents that spawn agents: limits and rewards as data, and the record of a tree."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from sparrow.schema.base import Record
from sparrow.schema.types import PolicyName, Seconds, Several, Share, Steps, Tokens

# How an agent ended: by itself; by an error, of which its parent learns; stopped by its parent;
# too late; because the budget of its tree, or the context of its model, was spent.
AgentStatus = Literal["done", "failed", "aborted", "timeout", "out_of_budget", "out_of_context"]
MOST_DEPTH = 16
LEVEL = "level "  # and a number: the subgroup of an agent's trajectory


class AgentsConfig(Record):
    """Limits of the tree of agents of one play, and whose outcome an agent is rewarded for."""

    children: Annotated[int, Field(ge=0, le=1024)] = 4  # that an agent may spawn in its life
    depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = 3  # levels; 1: no agent may spawn
    steps: Steps = 64  # replies of the whole tree
    tokens: Tokens = 8192  # that the whole tree samples
    reply: Tokens | None = None  # of one reply; None: rollout.max_tokens
    seconds: Seconds | None = None  # that an agent may take, without those of waiting for children
    parallel: bool = False  # children spawned together run at once, each with a share of the budget
    # An agent's reward: its own, mixed with that of the root (team) and of its parent.
    team: Share = 0.0
    parent: Share = 0.0
    policies: Several[PolicyName] = ()  # of several: by level, the last for those below

    def _check(self) -> None:
        fits = self.team + self.parent <= 1
        self.require(fits, "team", f"at most 1 with parent, which is {self.parent}", self.team)


class AgentNode(Record):
    """One agent of a tree, as it ended."""

    node: tuple[int, ...]  # its place: the play, then the number of a child, of that one's child
    task: str  # its prompt, shortened
    policy: str
    status: AgentStatus
    reason: str  # of an end that was not its own
    message: str  # what its parent was told
    steps: int  # its own replies
    tokens: int  # that it sampled
    context: int  # its longest sequence
    seconds: float
    reward: float
    acc: float | None

    @property
    def depth(self) -> int:
        """Its level; 1: a root."""
        return len(self.node)


def trees(nodes: Iterable[AgentNode]) -> list[tuple[AgentNode, ...]]:
    """Records by play."""
    plays: dict[int, list[AgentNode]] = {}
    for node in nodes:
        plays.setdefault(node.node[0], []).append(node)
    return [tuple(tree) for tree in plays.values()]


def audit_tree(nodes: Sequence[AgentNode], limits: AgentsConfig | None) -> list[str]:
    """What is wrong with the record of a tree; nothing if every agent ended once, within limits.

    limits: None where they are not known.
    """
    places = [node.node for node in nodes]
    known, problems = {*places}, list[str]()
    twice = {place for place in places if places.count(place) > 1}
    problems += [
        f"agent {_name(place)} ended {places.count(place)} times" for place in sorted(twice)
    ]
    roots = [place for place in known if len(place) == 1]
    if len(roots) != 1:
        problems.append(f"expected one root, got {len(roots)}")
    for place in sorted(known):
        if len(place) > 1 and place[:-1] not in known:
            problems.append(f"agent {_name(place)} has no parent")
        numbers = sorted(p[-1] for p in known if p[:-1] == place and len(p) == len(place) + 1)
        most = len(numbers) if limits is None else limits.children
        if numbers != [*range(len(numbers))] or len(numbers) > most:
            problems.append(f"agent {_name(place)} has children {numbers}")
    if limits is None:
        return problems
    if max((len(place) for place in known), default=0) > limits.depth:
        problems.append(f"an agent is deeper than {limits.depth}")
    for what in ("steps", "tokens"):
        spent = sum(getattr(node, what) for node in nodes)
        if spent > getattr(limits, what):
            problems.append(f"{spent} {what} of at most {getattr(limits, what)}")
    return problems


def _name(node: tuple[int, ...]) -> str:
    return ".".join(map(str, node))
