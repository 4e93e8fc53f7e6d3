"""Gold chains line by line, against evaluators that share no code with the families."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise

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
LARGEST = 127  # number of the language
DRAWS = [(0, 100), (1, 100), (2, 400), (3, 400), (4, 2500)]
every_draw = pytest.mark.parametrize(("seed", "length"), DRAWS)
both_ways = pytest.mark.parametrize("revisit", [True, False])
Lines = list[tuple[list[str], list[str]]]


def lines_of(puzzle: Puzzle, seed: int, length: int) -> tuple[Row, Lines, list[str]]:
    """A row, the lines of a gold chain, each as what it opens with and the rest, and the answer."""
    row = puzzle.row(seed, length)
    thoughts, answer = puzzle.chain(row, seed + 1).split(" </think> <answer> ")
    assert thoughts.endswith(" ;")
    lines = []
    for line in thoughts.removesuffix(" ;").split(" ; "):
        words = line.split()
        opening = next(i for i, word in enumerate(words) if word not in OPENERS)
        lines.append((words[:opening], words[opening:]))
    return row, lines, answer.removesuffix(" </answer>").split()


def program_of(prompt: str) -> tuple[dict[str, list[str]], int, str]:
    """Assignments, modulus and goal as a reader of the prompt sees them."""
    head, body = prompt.removesuffix(" <think>").split(" : ")
    *lines, find = [line.split() for line in body.split(" ; ")]
    assert all(line[1] == "=" for line in lines)
    assert find[0] == "find"
    program = {line[0]: line[2:] for line in lines}
    assert len(program) == len(lines), "every name is assigned once"
    return program, int(head.split()[-1]), find[1]


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
    row, lines, answer = lines_of(Assignments(revisit=revisit), seed, length)
    program, modulus, goal = program_of(row.prompt)
    values = values_of(program, modulus)
    known: set[str] = set()
    for opening, (name, equals, *rest) in lines:
        assert opening in ([], ["now"], ["then"])
        assert equals == "="
        assert goal not in known, "the first value of the goal is the end"
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

    follow_from_what_came_before(program, goal, lines, revisit)
    needed, stack = set(), [goal]
    while stack:
        name = stack.pop()
        needed.add(name)
        stack += [word for word in program[name][::2] if word in program and word not in needed]
    assert len(program) - len(needed) == round(0.1 * len(needed)), "all but spare names are needed"
    assert {line[1] for line in program.values() if len(line) == 3} <= {"+", "-"}


def follow_from_what_came_before(
    program: dict[str, list[str]], goal: str, lines: Lines, revisit: bool
) -> None:
    """Each try comes from the one before it, or it takes up an earlier one."""
    tries = [(words[0], "?" in words) for _, words in lines]
    missed: dict[str, set[str]] = {}  # by try that failed: the operands that it lacked
    known: set[str] = set()
    assert tries[0][0] == goal
    for place, ((name, failed), (following, _)) in enumerate(pairwise(tries)):
        if failed:
            lacking = set(program[name][::2]) - known
            missed[name] = missed.get(name, set()) | lacking
            allowed = lacking
        else:
            known.add(name)
            allowed = {other for other, lacked in missed.items() if name in lacked}
        earlier = {one for one, _ in tries[: place + 1]} if revisit else set(missed)
        assert following in allowed | earlier


@both_ways
def test_tries_that_never_failed_are_repeated_by_revisits_alone(revisit: bool) -> None:
    repeated = 0
    for seed in range(5):
        _, lines, _ = lines_of(Assignments(revisit=revisit), seed, 1000)
        tried = Counter(words[0] for _, words in lines)
        failed = {words[0] for _, words in lines if "?" in words}
        repeated += sum(tried[name] > 1 for name in tried if name not in failed)
    assert repeated >= 5 if revisit else repeated == 0


Step = tuple[int, str, int]  # the larger number first


def steps_of(hand: Sequence[int]) -> set[Step]:
    """Every operation on two numbers of a hand that a search has to try."""
    steps = set()
    for one, other in combinations(hand, 2):
        large, small = max(one, other), min(one, other)
        for sign, operation in SIGNS.items():
            idle = sign in "*/" and small == 1
            result = operation(large, small)
            if not idle and 1 <= result <= LARGEST and result == int(result):
                steps.add((large, sign, small))
    return steps


@every_draw
def test_countdown_lines_are_a_depth_first_search(seed: int, length: int) -> None:
    row, lines, answer = lines_of(Countdown(), seed, length)
    numbers, target = (
        row.prompt.removesuffix(" <think>").removeprefix("countdown ").split(" reach ")
    )
    stack: list[tuple[list[int], set[Step]]] = [(sorted(map(int, numbers.split())), set())]
    way: list[str] = []  # the operations that led to the hand at the top
    for opening, line in lines:
        assert set(opening) <= {"then", "next"}
        for _ in opening:  # one for every hand that led nowhere
            exhausted, tried = stack.pop()
            assert tried == steps_of(exhausted), "nothing is left to try there"
            way.pop()
        hand, tried = stack[-1]
        close = line.index(")")
        assert line[: close + 1] == ["(", *map(str, hand), ")"]
        left, sign, right, equals, result, *verdict = line[close + 1 :]
        step = (max(int(left), int(right)), sign, min(int(left), int(right)))
        assert equals == "="
        assert step in steps_of(hand) - tried, "allowed, and not tried here before"
        assert SIGNS[sign](int(left), int(right)) == int(result)
        tried.add(step)
        if len(hand) == 2:
            assert verdict == ["yes" if result == target else "no"]
        else:
            assert verdict == []
            rest = Counter(hand)
            rest.subtract([int(left), int(right)])
            assert min(rest.values()) >= 0, "both numbers are at hand"
            rest[int(result)] += 1
            stack.append((sorted(rest.elements()), set()))
            way.append(" ".join(line[close + 1 :]))
    assert [words[-1] for _, words in lines].count("yes") == 1
    last = lines[-1][1]
    assert last[-1] == "yes"
    assert " ".join(answer).split(" ; ") == [*way, " ".join(last[last.index(")") + 1 : -1])]


def graph_of(prompt: str) -> tuple[dict[str, set[str]], str, str]:
    """Neighbours, start and target as a reader of the prompt sees them."""
    *edges, ask = prompt.removesuffix(" <think>").removeprefix("graph : ").split(" ; ")
    around: dict[str, set[str]] = {}
    for edge in edges:
        one, other = edge.split()
        assert one != other
        around.setdefault(one, set()).add(other)
        around.setdefault(other, set()).add(one)
    assert sum(map(len, around.values())) == 2 * len(edges), "every edge is given once"
    return around, ask.split()[1], ask.split()[3]


def rings_of(around: dict[str, set[str]], start: str) -> dict[str, int]:
    """Distances, ring by ring."""
    far, ring, step = {start: 0}, {start}, 0
    while ring:
        step += 1
        ring = set().union(*(around[node] for node in ring)) - set(far)
        far |= dict.fromkeys(ring, step)
    return far


def looks_of(lines: Lines) -> list[tuple[list[str], list[list[str]], list[str]]]:
    """A search by its looks at a node: the line that begins one, those of edges, and its end."""
    looks: list[tuple[list[str], list[list[str]], list[str]]] = []
    for opening, words in lines:
        if opening:
            assert len(opening) == 1
            assert not looks or looks[-1][2], "the look before has an end"
            looks.append((words, [], []))
        elif words[0] == "end":
            assert not looks[-1][2]
            looks[-1][2].extend(words)
        else:
            assert not looks[-1][2]
            looks[-1][1].append(words)
    return looks


@both_ways
@every_draw
def test_graph_lines_are_a_search_of_nearest_nodes_first(
    seed: int, length: int, revisit: bool
) -> None:
    """True distances, every edge of a node once, and a shortest path of edges it has shown."""
    row, lines, answer = lines_of(GraphPath(revisit=revisit), seed, length)
    around, start, goal = graph_of(row.prompt)
    far = rings_of(around, start)
    assert len(far) == len(around), "every node can be reached"
    looks = looks_of(lines[:-1])
    for begin, edges, end in looks:
        node = begin[0]
        assert begin == [node, ":", str(far[node])]
        for edge in edges:
            other = edge[2]
            met = "yes" if other == goal else "no"
            assert edge == [node, "-", other, ":", str(far[other]), met]
        shown = [edge[2] for edge in edges]
        assert len(set(shown)) == len(shown), "every edge once"
        if end:
            assert end == ["end", node]
            assert set(shown) == around[node], "every edge"
            assert goal not in shown, "met, and went on"
    assert [bool(end) for _, _, end in looks] == [True] * (len(looks) - 1) + [False]
    assert {edge[2] for edge in looks[-1][1]} <= around[looks[-1][0][0]]
    assert looks[-1][1][-1][-1] == "yes"
    looked = [begin[0] for begin, _, _ in looks]
    first = list(dict.fromkeys(looked))
    assert first[0] == start
    assert [far[node] for node in first] == sorted(far[node] for node in first)
    for step in range(far[first[-1]]):
        ring = {node for node in around if far[node] == step}
        assert ring <= set(first), "no nearer node is left out"
    assert revisit or len(first) == len(looked)
    way_back = " by ".join(f"{node} : {far[node]}" for node in reversed(answer))
    assert lines[-1] == ([], ["path", *way_back.split()])
    assert [far[node] for node in answer] == list(range(far[goal] + 1))
    assert (answer[0], answer[-1]) == (start, goal)
    assert all(other in around[one] for one, other in pairwise(answer))
    shown = {frozenset(words[:3:2]) for _, words in lines if words[1] == "-"}
    # The one into the target may be of a node that the search has met and not yet looked at.
    assert all(frozenset(edge) in shown for edge in pairwise(answer[:-1])), "edges it has shown"


def test_graph_searches_look_again_at_times() -> None:
    again = total = 0
    for seed in range(10):
        _, lines, _ = lines_of(GraphPath(), seed, 2000)
        looked = [begin[0] for begin, _, _ in looks_of(lines[:-1])]
        again += len(looked) - len(set(looked))
        total += len(looked)
    assert 0.05 < again / total < 0.15
