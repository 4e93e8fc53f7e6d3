"""Graph path: edges in random order; find a path from one node to another.

    graph : x3 x7 ; x9 x3 ; ... ; from x3 to x45 <think>

A chain is a breadth-first search. It writes every edge of a node with the distance of its other
end: the earlier distance if that was visited, else one more. The next node is a random one of least
distance. Sometimes the search revisits a finished node:

    next x3 : 0 ; x3 - x7 : 1 no ; x3 - x9 : 1 no ; end x3 ; now x9 : 1 ; x9 - x12 : 2 no ; ...

At the target, the way back is written: path x45 : 3 by x12 : 2 by x9 : 1 by x3 : 0 ;
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import ClassVar

from sparrow.tasks.base import NAMES, Data, Puzzle

Edge = tuple[str, str]
DEGREES = 3.0, 5.0  # edges of a node, on average, in the smallest and in the largest graphs
REACHED = 0.8  # share of a graph that a search has visited when it finds its target
MOST_SEARCHES = 20
AGAIN = 0.1  # probability of revisiting a finished node
OPENERS = ("next", "then", "now")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPath(Puzzle):
    """Find a path in a graph; revisit: whether searches sometimes revisit finished nodes."""

    name: ClassVar[str] = "graph"
    revisit: bool = True

    def _draw(self, rng: Random, length: int) -> tuple[str, Data]:
        nodes, degree = self._size(rng, length)
        edges = draw_edges(rng, nodes, degree)
        start, goal = nodes[0], late_goal(rng, edges, nodes[0])
        lines = " ; ".join(" ".join(edge) for edge in edges)
        data = {"edges": edges, "start": start, "goal": goal}
        return f": {lines} ; from {start} to {goal}", data

    def _think(self, rng: Random, data: Data, low: float, high: float) -> tuple[list[str], str]:
        start, goal, around = data["start"], data["goal"], neighbours(data["edges"])
        again = AGAIN if self.revisit else 0.0
        for _ in range(MOST_SEARCHES):
            thoughts, distance = explore(rng, around, start, goal, again=again)
            if low <= len(thoughts) <= high:
                break
        path = [goal]
        while path[-1] != start:
            nearer = distance[path[-1]] - 1
            path.append(rng.choice([n for n in around[path[-1]] if distance.get(n) == nearer]))
        way_back = " by ".join(f"{node} : {distance[node]}" for node in path)
        return [*thoughts, "path", *way_back.split(), ";"], " ".join(reversed(path))

    def _judge(self, data: Data, answer: list[str]) -> str:
        edges = {frozenset(edge) for edge in data["edges"]}
        if answer[0] != data["start"]:
            return "the path does not begin at the start"
        if answer[-1] != data["goal"]:
            return "the path does not end at the target"
        if any(frozenset(pair) not in edges for pair in pairwise(answer)):
            return "the path uses an edge that is not there"
        return "the path visits a node twice" if len(set(answer)) < len(answer) else ""

    def _size(self, rng: Random, length: int) -> tuple[list[str], float]:
        """Choose nodes, the start first, and their degree for chains of about this length."""
        least, most = DEGREES
        degree = least + (most - least) * (length / self.lengths[1]) ** 0.5
        count = round(length / (7 * degree + 8) / REACHED * rng.uniform(0.9, 1.1))
        return rng.sample([f"x{i}" for i in range(NAMES)], min(NAMES, max(6, count))), degree


def draw_edges(rng: Random, nodes: Sequence[str], degree: float) -> list[Edge]:
    """Generate a random tree, so that every node can be reached, with more random edges."""
    edges = {frozenset((node, rng.choice(nodes[:i]))) for i, node in enumerate(nodes) if i}
    most = len(nodes) * (len(nodes) - 1) // 2
    while len(edges) < min(most, round(len(nodes) * degree / 2)):
        edges.add(frozenset(rng.sample(nodes, 2)))
    pairs = [(pair[0], pair[1]) for pair in sorted(map(sorted, edges))]
    rng.shuffle(pairs)
    return [edge if rng.random() < 0.5 else (edge[1], edge[0]) for edge in pairs]


def late_goal(rng: Random, edges: Sequence[Edge], start: str) -> str:
    """Choose a goal that searches find late: of the farthest nodes, one with the fewest ways in."""
    distance, around = distances(edges, start), neighbours(edges)
    far = max(distance.values())
    ways = {
        node: sum(distance[other] < far for other in around[node])
        for node in sorted(distance)
        if distance[node] == far
    }
    return rng.choice([node for node in ways if ways[node] == min(ways.values())])


def neighbours(edges: Sequence[Edge]) -> dict[str, list[str]]:
    """Return the neighbours of every node."""
    around: dict[str, list[str]] = defaultdict(list)
    for node, other in edges:
        around[node].append(other)
        around[other].append(node)
    return around


def distances(edges: Sequence[Edge], start: str) -> dict[str, int]:
    """Return the distance of every node from the start."""
    around, distance, queue = neighbours(edges), {start: 0}, [start]
    for node in queue:
        for other in around[node]:
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance


def explore(
    rng: Random,
    around: Mapping[str, Sequence[str]],
    start: str,
    goal: str,
    *,
    again: float,
) -> tuple[list[str], dict[str, int]]:
    """Search until the goal is found; return the words of the search and all distances.

    again: probability of revisiting a finished node
    """
    distance, level = {start: 0}, [start]
    deeper: list[str] = []
    done: list[str] = []
    thoughts: list[str] = []
    while True:
        if done and again and rng.random() < again:
            node = rng.choice(done)
        else:
            node = level.pop(rng.randrange(len(level)))
            done.append(node)
        thoughts += [rng.choice(OPENERS), node, ":", str(distance[node]), ";"]
        for other in rng.sample(around[node], len(around[node])):
            if other not in distance:
                distance[other] = distance[node] + 1
                deeper.append(other)
            reached = "yes" if other == goal else "no"
            thoughts += [node, "-", other, ":", str(distance[other]), reached, ";"]
            if other == goal:
                return thoughts, distance
        thoughts += ["end", node, ";"]
        if not level:
            level, deeper = deeper, []
