"""Assignments: a shuffled program of modular assignments, of which one value is asked for.

    assignments mod 97 : x7 = x3 + x12 ; x3 = 45 ; ... ; find x7 <think>

A chain tries to evaluate names. A try looks up the name's assignment in the prompt and the values
of its operands in the chain so far; what is not known yet is written ?:

    x7 = x3 + x12 = 45 + ? ; x12 = 8 ; now x7 = x3 + x12 = 45 + 8 = 53 ;

After a try that failed comes one of the missing operands; after one that succeeded, one of the
tries that had missed this value. Now and then an earlier try is taken up again instead.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from sparrow.tasks.base import Data, Puzzle
from sparrow.tasks.words import NAMES, NUMBERS, number

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
}  # no products: small models learn sums modulo 97 in minutes, and products not at all
# Names needed by chains of a length, fitted for the settings below: NEEDED x length ** GROWTH.
NEEDED, GROWTH = 0.2149, 0.648
OPENERS = ((), (), (), (), (), (), ("now",), ("then",))
MOST_WALKS = 50
Line = tuple[str, ...]  # ("45",) or ("x3", "+", "x12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignments(Puzzle):
    """modulus: values are 0 to modulus - 1
    wander: how often a chain goes back to an earlier try
    revisit: whether that may be any earlier try, or must be one that failed
    constants, spare: shares of constants among the needed, and of assignments nobody needs
    """

    name: ClassVar[str] = "assignments"
    modulus: int = 97
    wander: float = 0.35
    revisit: bool = True
    constants: float = 0.35
    spare: float = 0.1

    def _check(self) -> None:
        if not 2 <= self.modulus < NUMBERS:  # the prompt names the modulus: it must be a word
            raise ValueError(f"{self.name}: modulus must be 2 to {NUMBERS - 1}, got {self.modulus}")
        if not 0 <= self.wander < 1:  # at 1 a walk never leaves its first try
            raise ValueError(f"{self.name}: wander is a share below 1, got {self.wander}")
        for what in ("constants", "spare"):
            if not 0 <= getattr(self, what) <= 1:
                raise ValueError(f"{self.name}: {what} is a share, got {getattr(self, what)}")

    def _draw(self, rng: Random, length: int) -> tuple[str, Data]:
        needed = self._needed(rng, length)
        names = rng.sample([f"x{i}" for i in range(NAMES)], NAMES)
        program = self._program(rng, names, needed)
        order = list(program)
        rng.shuffle(order)
        lines = " ; ".join(f"{name} = {' '.join(program[name])}" for name in order)
        goal = names[needed - 1]
        data = {"program": program, "goal": goal, "modulus": self.modulus}
        return f"mod {self.modulus} : {lines} ; find {goal}", data

    def _think(self, rng: Random, data: Data, low: float, high: float) -> tuple[list[str], str]:
        for _ in range(MOST_WALKS):
            walk = self._walk(rng, data, most=high)
            if walk is not None and len(walk.thoughts) >= low:
                break
        else:
            walk = self._walk(rng, data, most=math.inf)
        assert walk is not None, "a walk without an end reaches its goal"
        return walk.thoughts, str(walk.known[data["goal"]])

    def _judge(self, data: Data, answer: list[str]) -> str:
        value = number(answer[0]) if len(answer) == 1 else None
        if value is None:
            return "the answer is not one number"
        if value >= data["modulus"]:
            return f"the answer is not below the modulus {data['modulus']}"
        return "" if value == evaluate(data) else "the value is wrong"

    def _walk(self, rng: Random, data: Data, most: float) -> "_Walk | None":
        """One walk to the goal; None where it takes more than so many tokens."""
        walk, name = _Walk(data), data["goal"]
        while len(walk.thoughts) <= most:
            walk.thoughts += rng.choice(OPENERS)
            missing = walk.attempt(name)
            if data["goal"] in walk.known:
                return walk
            earlier = walk.tried if self.revisit else walk.failed
            if rng.random() < self.wander and earlier:
                name = rng.choice(earlier)
            else:
                name = rng.choice(missing or walk.waiting[name])
        return None

    def _needed(self, rng: Random, length: int) -> int:
        """How many names a goal needs, itself included, so that chains are about that long."""
        most = round(NAMES / (1 + self.spare))
        return min(most, max(3, round(NEEDED * length**GROWTH * rng.uniform(0.9, 1.1))))

    def _program(self, rng: Random, names: Sequence[str], needed: int) -> dict[str, Line]:
        """Assignments of `needed` names, all of which the last one needs, and of some spare ones.

        Unused names are used up in time: one operand of each assignment is one of them, both are
        where more of them are left than assignments.
        """
        constants = min((needed + 1) // 2, max(2, round(needed * self.constants)))
        spare = min(NAMES - needed, round(needed * self.spare))
        program: dict[str, Line] = {}
        unused: list[str] = []
        for index, name in enumerate(names[: needed + spare]):
            earlier = names[: min(index, needed - 1)]
            if index < constants or (index >= needed and rng.random() < self.constants):
                program[name] = (str(rng.randrange(self.modulus)),)
            else:
                pair = self._operands(rng, earlier, unused, left=needed - index)
                program[name] = (pair[0], rng.choice(tuple(OPERATIONS)), pair[1])
            if index < needed:
                unused.append(name)
        return program

    @staticmethod
    def _operands(rng: Random, earlier: Sequence[str], unused: list[str], left: int) -> list[str]:
        """Two names, taken out of `unused`.

        left: assignments of needed names still to come, this one included; below 1 for spare ones
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
    """What a chain has come to."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.known: dict[str, int] = {}
        self.thoughts: list[str] = []
        self.tried: list[str] = []  # the name of every try
        self.failed: list[str] = []  # of those that failed
        self.waiting: dict[str, list[str]] = defaultdict(list)  # by name: tries that missed it

    def attempt(self, name: str) -> list[str]:
        """Write one try; note its value, or the operands that it misses, which are returned."""
        line = self.data["program"][name]
        self.tried.append(name)
        self.thoughts += [name, "=", *line]
        missing: list[str] = []
        if len(line) == 1:
            self.known[name] = int(line[0])
        else:
            missing = self._combine(name, *line)
        self.thoughts.append(";")
        for operand in missing:
            self.waiting[operand].append(name)
        if missing:
            self.failed.append(name)
        return missing

    def _combine(self, name: str, left: str, sign: str, right: str) -> list[str]:
        """Write the operands' values, and the result where both are known; return the missing."""
        values = [str(self.known.get(operand, "?")) for operand in (left, right)]
        self.thoughts += ["=", values[0], sign, values[1]]
        missing = [operand for operand in (left, right) if operand not in self.known]
        if not missing:
            value = OPERATIONS[sign](self.known[left], self.known[right]) % self.data["modulus"]
            self.known[name] = value
            self.thoughts += ["=", str(value)]
        return missing


def evaluate(data: Data) -> int:
    """The value of the goal, without recursion: programs are deep."""
    program, known = data["program"], {}
    stack = [data["goal"]]
    while stack:
        line = program[stack[-1]]
        missing = [word for word in line[::2] if word in program and word not in known]
        if missing:
            stack += missing
            if len(stack) > 2 * len(program) + 1:
                raise ValueError("assignments: the program of this row goes in circles")
            continue
        name = stack.pop()
        if len(line) == 1:
            known[name] = int(line[0])
        else:
            known[name] = OPERATIONS[line[1]](known[line[0]], known[line[2]]) % data["modulus"]
    return known[data["goal"]]
