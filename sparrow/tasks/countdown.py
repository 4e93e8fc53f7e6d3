"""Countdown with search: reach a target from numbers, each used exactly once.

    countdown 3 7 12 50 reach 59 <think>

A chain is a depth-first search in random order. It writes the numbers at hand, an operation on two
of them and its result, and continues with what is left; if the last two numbers do not make the
target in any way, it returns to an earlier hand and tries the next operation there:

    ( 3 7 12 50 ) 50 - 12 = 38 ; ( 3 7 38 ) 38 + 3 = 41 ; ( 7 41 ) 41 - 7 = 34 no ; ...
    then ( 3 7 38 ) 3 * 7 = 21 ; ( 21 38 ) 38 - 21 = 17 no ; ( 21 38 ) 21 + 38 = 59 yes ;

The answer is the operations that lead to the target: 50 - 12 = 38 ; 3 * 7 = 21 ; 21 + 38 = 59
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np

from sparrow.tasks.base import NUMBERS, Data, Puzzle, number

MOST_GIVEN = 50  # numbers of a question are 1 to this
LARGEST = NUMBERS - 1
Hand = tuple[int, ...]  # sorted
OPENERS = ("then", "next")  # of the line after a hand that led nowhere
MOST_SEARCHES, MOST_DRAWS = 200, 50
CHECKS: dict[str, Callable[[int, int, int], bool]] = {  # left, right, result
    "+": lambda left, right, result: left + right == result,
    "-": lambda left, right, result: left - right == result,
    "*": lambda left, right, result: left * right == result,
    "/": lambda left, right, result: right != 0 and left == right * result,
}


class Move(NamedTuple):
    """left sign right = result, and the hand that it leaves."""

    left: int
    sign: str
    right: int
    result: int
    rest: Hand

    def words(self) -> list[str]:
        return [str(self.left), self.sign, str(self.right), "=", str(self.result)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown(Puzzle):
    """Reach a target from numbers by arithmetic."""

    name: ClassVar[str] = "countdown"

    def _draw(self, rng: Random, length: int) -> tuple[str, Data]:
        """Choose numbers and a target whose random search takes about `length` tokens."""
        count = 3 if length < 300 else 4 if length < 2000 else 5
        best = None
        for _ in range(MOST_DRAWS):
            numbers = [rng.randint(1, MOST_GIVEN) for _ in range(count)]
            tokens, ways = tree(tuple(sorted(numbers)))
            targets = [int(t) for t in np.flatnonzero(ways) if t and t not in numbers]
            rng.shuffle(targets)
            for target in targets:
                off = abs(np.log(tokens / (ways[target] + 1) / length))
                if best is None or off < best[0]:
                    best = off, numbers, target
            if best is not None and best[0] < 0.1:
                break
        assert best is not None, "no numbers make any target"
        _, numbers, target = best
        question = f"{' '.join(map(str, numbers))} reach {target}"
        return question, {"numbers": numbers, "target": target}

    def _think(self, rng: Random, data: Data, low: float, high: float) -> tuple[list[str], str]:
        hand, target = tuple(sorted(data["numbers"])), data["target"]
        for _ in range(MOST_SEARCHES):
            search = Search(rng, target, most=round(high))
            if search.solve(hand) and len(search.thoughts) >= low:
                break
        else:
            search = Search(rng, target, most=None)
            search.solve(hand)
        return search.thoughts, " ; ".join(" ".join(move.words()) for move in search.path)

    def _judge(self, data: Data, answer: list[str]) -> str:
        hand = list(data["numbers"])
        for step in " ".join(answer).split(" ; "):
            reason = _apply(hand, step.split(" "))
            if reason:
                return reason
        if len(hand) > 1:
            return "a number was not used"
        return "" if hand == [data["target"]] else "the target is not reached"


class Search:
    """A depth-first search: its words, and the moves that lead to the target."""

    def __init__(self, rng: Random, target: int, most: int | None) -> None:
        self.rng, self.target, self.most = rng, target, most
        self.thoughts: list[str] = []
        self.path: list[Move] = []

    def solve(self, hand: Hand) -> bool:
        """Search from a hand; return whether the target was reached within the token limit."""
        order = list(moves(hand))
        self.rng.shuffle(order)
        for move in order:
            if self.most is not None and len(self.thoughts) > self.most:
                return False
            if move.sign in "+*" and self.rng.random() < 0.5:  # written either way round
                move = move._replace(left=move.right, right=move.left)
            self.thoughts += ["(", *map(str, hand), ")", *move.words()]
            self.path.append(move)
            if len(hand) > 2:
                self.thoughts.append(";")
                if self.solve(move.rest):
                    return True
                self.thoughts.append(self.rng.choice(OPENERS))
            else:
                reached = move.result == self.target
                self.thoughts += ["yes" if reached else "no", ";"]
                if reached:
                    return True
            self.path.pop()
        return False


def moves(hand: Hand) -> Iterator[Move]:
    """Yield every operation on two numbers of a hand whose result is 1 to the largest number."""
    seen = set()
    for i, j in combinations(range(len(hand)), 2):
        small, large = hand[i], hand[j]
        if (small, large) in seen:
            continue
        seen.add((small, large))
        others = hand[:i] + hand[i + 1 : j] + hand[j + 1 :]
        for sign, result in _results(large, small):
            if 1 <= result <= LARGEST:
                yield Move(large, sign, small, result, tuple(sorted((*others, result))))


def _results(large: int, small: int) -> Iterator[tuple[str, int]]:
    yield "+", large + small
    yield "-", large - small
    if small > 1:
        yield "*", large * small
        if large % small == 0:
            yield "/", large // small


@lru_cache(maxsize=1 << 16)
def tree(hand: Hand) -> tuple[int, np.ndarray]:
    """Return the tokens of an exhaustive search, and in how many ways it ends at each number."""
    tokens, ways = 0, np.zeros(NUMBERS, dtype=np.int64)
    line = len(hand) + 8
    for move in moves(hand):
        tokens += line
        tokens += 1  # "no", or the opener of the next line
        if len(hand) == 2:
            ways[move.result] += 1
        else:
            below, ends = tree(move.rest)
            tokens += below
            ways += ends
    return tokens, ways


def _apply(hand: list[int], step: Sequence[str]) -> str:
    """Apply a written operation to a hand; return what is wrong with it, empty: nothing."""
    values = [value for word in step[::2] if (value := number(word)) is not None]
    if len(step) != 5 or len(values) != 3 or step[1] not in CHECKS or step[3] != "=":
        return "a step is not of the form: number sign number = number"
    left, right, result = values
    for value in (left, right):
        if value not in hand:
            return "a step uses a number that is not at hand"
        hand.remove(value)
    if not CHECKS[step[1]](left, right, result):
        return "a step is false"
    hand.append(result)
    return ""
