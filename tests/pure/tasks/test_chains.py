"""Gold chains line by line, against evaluators that share no code with the families.

What lines say must be true; in which order a search goes on is pinned by the digests of drawn text.
"""

from collections import Counter
from itertools import pairwise

import pytest

from sparrow.tasks import Assignments, Countdown, GraphPath
from sparrow.tasks.base import Puzzle, Row

SIGNS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
OPENERS = {"now", "then", "next"}
every_draw = pytest.mark.parametrize(
    ("seed", "length"), [(0, 100), (1, 100), (2, 400), (3, 400), (4, 2500)]
)
both_ways = pytest.mark.parametrize("revisit", [True, False])


def lines_of(puzzle: Puzzle, seed: int, length: int) -> tuple[Row, list[list[str]], list[str]]:
    """A row, the words of each line of a gold chain without what opens it, and the answer."""
    row = puzzle.row(seed, length)
    thoughts, answer = puzzle.chain(row, seed + 1).split(" </think> <answer> ")
    assert thoughts.endswith(" ;")
    lines = [line.split() for line in thoughts.removesuffix(" ;").split(" ; ")]
    words = [[word for word in line if word not in OPENERS] for line in lines]
    return row, words, answer.removesuffix(" </answer>").split()


def values_of(program: dict[str, list[str]], modulus: int) -> dict[str, int]:
    values: dict[str, int] = {}
    while len(values) < len(program):
        for name, line in program.items():
            if len(line) == 1:
                values[name] = int(line[0])
            elif line[0] in values and line[2] in values:
                values[name] = SIGNS[line[1]](values[line[0]], values[line[2]]) % modulus
    return values


@both_ways
@every_draw
def test_assignment_lines_state_true_values(seed: int, length: int, revisit: bool) -> None:
    """Of operands that the chain has shown before; the first value of the goal is the end."""
    row, lines, answer = lines_of(Assignments(revisit=revisit), seed, length)
    head, body = row.prompt.removesuffix(" <think>").split(" : ")
    *assigned, (_, goal) = [line.split() for line in body.split(" ; ")]
    program = {name: line for name, _, *line in assigned}
    assert len(program) == len(assigned), "every name is assigned once"
    values = values_of(program, int(head.split()[-1]))
    known: set[str] = set()
    for name, equals, *rest in lines:
        assert equals == "="
        assert goal not in known
        line = program[name]
        shown = [str(values[word]) if word in known else "?" for word in line[::2]]
        wanted = list(line)
        if len(line) == 3:
            wanted += ["=", shown[0], line[1], shown[1]]
            wanted += [] if "?" in shown else ["=", str(values[name])]
        assert rest == wanted
        if "?" not in rest:
            known.add(name)
    assert goal in known
    assert answer == [str(values[goal])]


@every_draw
def test_countdown_lines_are_true_operations_at_hand(seed: int, length: int) -> None:
    """Each hand is one that an earlier line left; the first line that reaches the target ends."""
    row, lines, answer = lines_of(Countdown(), seed, length)
    numbers, target = (
        row.prompt.removesuffix(" <think>").removeprefix("countdown ").split(" reach ")
    )
    hands = {tuple(sorted(map(int, numbers.split())))}
    for line in lines:
        close = line.index(")")
        hand = tuple(map(int, line[1:close]))
        assert hand in hands
        left, sign, right, equals, result, *verdict = line[close + 1 :]
        assert equals == "="
        assert SIGNS[sign](int(left), int(right)) == int(result)
        rest = Counter(hand)
        rest.subtract([int(left), int(right)])
        assert min(rest.values()) >= 0, "both numbers are at hand"
        hands.add(tuple(sorted([*rest.elements(), int(result)])))
        assert verdict == ([] if len(hand) > 2 else ["yes" if result == target else "no"])
    assert [line[-1] for line in lines].index("yes") == len(lines) - 1
    steps = " ".join(answer).split(" ; ")
    written = {" ".join(line[line.index(")") + 1 :]).removesuffix(" yes") for line in lines}
    assert set(steps) <= written


@both_ways
@every_draw
def test_graph_lines_state_true_distances(seed: int, length: int, revisit: bool) -> None:
    """Nearest nodes are looked at first, every edge of one; the path is a shortest one."""
    row, lines, answer = lines_of(GraphPath(revisit=revisit), seed, length)
    *edges, ask = row.prompt.removesuffix(" <think>").removeprefix("graph : ").split(" ; ")
    pairs = {frozenset(edge.split()) for edge in edges}
    assert len(pairs) == len(edges), "every edge is given once"
    _, start, _, goal = ask.split()
    far, ring = {start: 0}, {start}
    while ring:
        ring = set().union(*(pair for pair in pairs if pair & ring)) - far.keys()
        far |= dict.fromkeys(ring, max(far.values()) + 1)
    shown: dict[str, set[str]] = {}
    for line in lines[:-1]:
        match line:
            case [node, ":", distance]:
                assert far[node] == int(distance)
                shown.setdefault(node, set())
            case [node, "-", other, ":", distance, met]:
                assert frozenset((node, other)) in pairs
                assert (far[other], other == goal) == (int(distance), met == "yes")
                shown[node].add(other)
            case ["end", node]:
                assert {frozenset((node, other)) for other in shown[node]} == {
                    pair for pair in pairs if node in pair
                }
                assert goal not in shown[node], "met, and went on"
            case _:
                raise AssertionError(line)
    assert [far[node] for node in shown] == sorted(far[node] for node in shown)
    assert lines[-2][-1] == "yes"
    way_back = " by ".join(f"{node} : {far[node]}" for node in reversed(answer))
    assert lines[-1] == ["path", *way_back.split()]
    assert [far[node] for node in answer] == list(range(far[goal] + 1))
    assert (answer[0], answer[-1]) == (start, goal)
    assert all(frozenset(step) in pairs for step in pairwise(answer))
