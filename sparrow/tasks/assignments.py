"""Assignments: a shuffled program of modular assignments, of which one value is the answer.

    assignments mod 97 : x7 = x3 + x12 ; x3 = 45 ; ... ; find x7 <think>

A chain tries to evaluate names. A try looks up the name's assignment in the prompt and the values
of its operands in the chain so far; an unknown value is written ?:

    x7 = x3 + x12 = 45 + ? ; x12 = 8 ; now x7 = x3 + x12 = 45 + 8 = 53 ;

A failed try is followed by one of the missing operands; a successful one by a try that had missed
this value. Sometimes an earlier try is repeated instead.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from random import Random
from typing import ClassVar

from sparrow.tasks.base import NAMES, Data, Puzzle, number

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
}  # no products: small models learn sums modulo 97 in minutes, but not products
MODULUS = 97
WANDER = 0.35  # probability of repeating an earlier try
CONSTANTS, SPARE = 0.35, 0.1  # shares: constants among needed names, unneeded assignments
# Names that a chain of a length needs, fitted for these settings: NEEDED x length ** GROWTH.
NEEDED, GROWTH = 0.2149, 0.648
OPENERS = ((), (), (), (), (), (), ("now",), ("then",))
MOST_WALKS = 50
Line = tuple[str, ...]  # ("45",) or ("x3", "+", "x12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignments(Puzzle):
    """Evaluate a variable; revisit: whether chains repeat any earlier try, or failed ones only."""

    name: ClassVar[str] = "assignments"
    revisit: bool = True

    def _draw(self, rng: Random, length: int) -> tuple[str, Data]:
        needed = self._needed(rng, length)
        names = rng.sample([f"x{i}" for i in range(NAMES)], NAMES)
        program = self._program(rng, names, needed)
        order = list(program)
        rng.shuffle(order)
        lines = " ; ".join(f"{name} = {' '.join(program[name])}" for name in order)
        goal = names[needed - 1]
        data = {"program": program, "goal": goal, "modulus": MODULUS}
        return f"mod {MODULUS} : {lines} ; find {goal}", data

    def _think(self, rng: Random, data: Data, low: float, high: float) -> tuple[list[str], str]:
        for _ in range(MOST_WALKS):
            walk = self._walk(rng, data, most=high)
            if walk is not None and len(walk.thoughts) >= low:
                break
        else:
            walk = self._walk(rng, data, most=math.inf)
        assert walk is not None, "a walk without a limit reaches its goal"
        return walk.thoughts, str(walk.values[data["goal"]])

    def _judge(self, data: Data, answer: list[str]) -> str:
        value = number(answer[0]) if len(answer) == 1 else None
        if value is None:
            return "the answer is not one number"
        if value >= data["modulus"]:
            return f"the answer is not below the modulus {data['modulus']}"
        return "" if value == evaluate(data) else "the value is wrong"

    def _walk(self, rng: Random, data: Data, most: float) -> "_Walk | None":
        """Walk to the goal; None if it takes more than `most` tokens."""
        walk, name = _Walk(data), data["goal"]
        while len(walk.thoughts) <= most:
            walk.thoughts += rng.choice(OPENERS)
            missing = walk.attempt(name)
            if data["goal"] in walk.values:
                return walk
            earlier = walk.tried if self.revisit else walk.failed
            if rng.random() < WANDER and earlier:
                name = rng.choice(earlier)
            else:
                name = rng.choice(missing or walk.waiting[name])
        return None

    def _needed(self, rng: Random, length: int) -> int:
        """Return how many names the goal needs, with itself, for chains of about this length."""
        most = round(NAMES / (1 + SPARE))
        return min(most, max(3, round(NEEDED * length**GROWTH * rng.uniform(0.9, 1.1))))

    def _program(self, rng: Random, names: Sequence[str], needed: int) -> dict[str, Line]:
        """Generate assignments of `needed` names, all needed by the last, and of some spare names.

        So that no name stays unused, each assignment takes an unused operand, or two if more of
        them are left than assignments.
        """
        constants = min((needed + 1) // 2, max(2, round(needed * CONSTANTS)))
        spare = min(NAMES - needed, round(needed * SPARE))
        program: dict[str, Line] = {}
        unused: list[str] = []
        for index, name in enumerate(names[: needed + spare]):
            earlier = names[: min(index, needed - 1)]
            if index < constants or (index >= needed and rng.random() < CONSTANTS):
                program[name] = (str(rng.randrange(MODULUS)),)
            else:
                pair = self._operands(rng, earlier, unused, left=needed - index)
                program[name] = (pair[0], rng.choice(tuple(OPERATIONS)), pair[1])
            if index < needed:
                unused.append(name)
        return program

    @staticmethod
    def _operands(rng: Random, earlier: Sequence[str], unused: list[str], left: int) -> list[str]:
        """Choose two operands, and remove them from `unused`.

        left: assignments of needed names that remain, with this one; below 1 for spare names
        """
        if left < 1:
            return rng.sample(earlier, 2)
        take = 2 if len(unused) > left else 1
        pair = [unused.pop(rng.randrange(len(unused))) for _ in range(take)]
        while len(pair) < 2:
            other = rng.choice(earlier)
            if other not in pair:
                pair.append(other)
                if other in unused:
                    unused.remove(other)
        rng.shuffle(pair)
        return pair


class _Walk:
    """The state of a chain: its text, and the values and tries so far."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.values: dict[str, int] = {}
        self.thoughts: list[str] = []
        self.tried: list[str] = []  # the name of every try
        self.failed: list[str] = []  # of those that failed
        self.waiting: dict[str, list[str]] = defaultdict(list)  # by name: tries that missed it

    def attempt(self, name: str) -> list[str]:
        """Write one try; keep its value, or return the operands that it misses."""
        line = self.data["program"][name]
        self.tried.append(name)
        self.thoughts += [name, "=", *line]
        missing: list[str] = []
        if len(line) == 1:
            self.values[name] = int(line[0])
        else:
            missing = self._combine(name, *line)
        self.thoughts.append(";")
        for operand in missing:
            self.waiting[operand].append(name)
        if missing:
            self.failed.append(name)
        return missing

    def _combine(self, name: str, left: str, sign: str, right: str) -> list[str]:
        """Write the operands' values, and the result if it has both; return the missing names."""
        shown = [str(self.values.get(operand, "?")) for operand in (left, right)]
        self.thoughts += ["=", shown[0], sign, shown[1]]
        missing = [operand for operand in (left, right) if operand not in self.values]
        if not missing:
            value = OPERATIONS[sign](self.values[left], self.values[right]) % self.data["modulus"]
            self.values[name] = value
            self.thoughts += ["=", str(value)]
        return missing


def evaluate(data: Data) -> int:
    """Return the value of the goal; ValueError if the program is circular."""
    program, values = data["program"], {}
    uses = {name: [word for word in line[::2] if word in program] for name, line in program.items()}
    for name in TopologicalSorter(uses).static_order():
        left, *rest = program[name]
        if not rest:
            values[name] = int(left)
        else:
            sign, right = rest
            values[name] = OPERATIONS[sign](values[left], values[right]) % data["modulus"]
    return values[data["goal"]]
