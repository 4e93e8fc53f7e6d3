"""Programming tasks: a problem in words, two examples, and hidden tests that judge a program.

A problem is a composition of operations (operations.toml). Half of the rows ask for a function,
half for a program that reads standard input. Data of a row, in the form of APPS, TACO and verl:

    {"fn_name": "find_value", "inputs": [[[1, 2], 3], ...], "outputs": [5, ...], ...}
    {"inputs": ["1 2\\n3\\n", ...], "outputs": ["5\\n", ...], ...}

and level, steps and examples. Outputs are those of the reference (reference.py), which shares no
code with the solutions. Judging what a model writes needs a sandbox and is not done here.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from sparrow.tasks.base import Data, Row, check_row, check_seed, keyed_random
from sparrow.tasks.programming.cases import Case, Test, choose_tests
from sparrow.tasks.programming.kinds import RESULTS
from sparrow.tasks.programming.operations import (
    OPERATIONS,
    Composition,
    Operation,
    Step,
    TooLarge,
    draw_step,
    parse_steps,
)
from sparrow.tasks.programming.programs import compiled, passes, solution, wrong_candidates
from sparrow.tasks.programming.statements import statement


class Difficulty(NamedTuple):
    """What problems of a level have, and from which length on rows are of it."""

    shortest: int
    steps: tuple[int, ...]  # how many: one of these
    kinds: tuple[str, ...]  # of inputs
    hardest: int  # tier of operations
    algorithms: int  # operations of tier 3, at least
    about: str


LISTS = ("numbers", "text", "words")
NESTED = (*LISTS, "log", "intervals", "grid", "integer")
LEVELS = (
    Difficulty(50, (1, 2, 2), ("integer", "pair"), 1, 0, "arithmetic on one or two integers"),
    Difficulty(100, (1, 2, 2), LISTS, 1, 0, "simple operations on a list or a string"),
    Difficulty(
        150, (2, 3), (*LISTS, "log", "intervals"), 2, 0, "filter, map, sort, group, fold, parse"
    ),
    Difficulty(200, (3, 4), NESTED, 2, 0, "longer chains, grids and sequences too"),
    Difficulty(300, (3, 4, 5), (*NESTED, "program"), 3, 1, "with a small algorithm or simulation"),
    Difficulty(450, (5, 6, 7), (*NESTED, "program"), 3, 2, "with several of them in one chain"),
)
SIZES = (2, 3, 4, 4, 5, 5, 6, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 22, 25, 28)  # of drawn inputs
FEWEST_RESULTS, MOST_SAME = 6, 0.4  # different results of all inputs, share of equal ones
EXTRA_ARGUMENT = 0.4  # probability that a parameter is an argument, from level 3 on
VERBS = ("compute", "find", "get", "solve", "make", "calculate", "determine", "process")
NOUNS = ("result", "value", "answer", "outcome", "output", "solution")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgrammingTasks:
    """Problems by seed and length, with hidden tests, a right program and wrong ones."""

    name: ClassVar[str] = "code"
    lengths: ClassVar[tuple[int, int]] = (LEVELS[0].shortest, 800)

    def row(self, seed: int, length: int) -> Row:
        check_seed(self.name, seed, length, self.lengths)
        rng = keyed_random(self.name, seed, length)
        number = level_of(length)
        fn_name = None if rng.random() < 0.5 else f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
        while True:
            composition = draw_composition(rng, number)
            if composition is not None and (cases := _useful_cases(rng, composition)):
                break
        examples, tests = choose_tests(composition, fn_name, cases)
        data = {
            **({} if fn_name is None else {"fn_name": fn_name}),
            "inputs": [test.input for test in tests],
            "outputs": [test.output for test in tests],
            "level": number,
            "steps": composition.data(),
            "examples": [list(example) for example in examples],
        }
        prompt = statement(composition, fn_name, examples)
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=data)

    def solution(self, row: Row) -> str:
        """Write a right program for a row."""
        return solution(*self._problem(row))

    def wrong_solutions(self, row: Row) -> list[str]:
        """Write programs with typical mistakes, each of which fails a hidden test."""
        composition, fn_name = self._problem(row)
        tests = hidden_tests(row.data)
        candidates = dict.fromkeys(wrong_candidates(composition, fn_name, row.data["examples"]))
        return [
            source
            for source in candidates
            if not all(passes(compiled(source), fn_name, test) for test in tests)
        ]

    def _problem(self, row: Row) -> tuple[Composition, str | None]:
        """Read the steps and the function's name; code is made of them, so they are checked."""
        check_row(self.name, row)
        fn_name = row.data.get("fn_name")
        if fn_name is not None and not fn_name.isidentifier():
            raise ValueError(f"{self.name}: {fn_name!r} cannot name a function")
        return parse_steps(row.data["steps"]), fn_name


def level_of(length: int) -> int:
    """Return the level of rows of a length, from 1."""
    return sum(level.shortest <= length for level in LEVELS)


def hidden_tests(data: Data) -> list[Test]:
    return [Test(*pair) for pair in zip(data["inputs"], data["outputs"], strict=True)]


def draw_composition(rng: Random, number: int) -> Composition | None:
    """Draw steps that fit a level; None if the draw does not lead to a result of its kind."""
    level = LEVELS[number - 1]
    kind, operations = rng.choice(level.kinds), list[Operation]()
    for _ in range(rng.choice(level.steps)):
        before = operations[-1].kinds if operations else None
        fitting = [
            operation
            for operation in OPERATIONS.values()
            if operation.kinds[0] == kind and operation.tier <= level.hardest
            if operation not in operations and _goes_on(number, before, operation.kinds)
        ]
        if not fitting:
            return None
        operations.append(rng.choice(fitting))
        kind = operations[-1].kinds[1]
    if kind not in RESULTS or sum(op.tier == 3 for op in operations) < level.algorithms:
        return None
    steps = [draw_step(rng, operation) for operation in operations]
    return Composition(tuple(_with_argument(rng, steps) if number > 2 else steps))


def _goes_on(number: int, before: tuple[str, str] | None, kinds: tuple[str, str]) -> bool:
    """Return whether a step may follow: the easiest level is arithmetic, others have little."""
    if number == 1:
        return kinds[1] == "integer"
    return kinds != ("integer", "integer") or kinds != before


def _with_argument(rng: Random, steps: list[Step]) -> list[Step]:
    """Make a parameter of some step an argument of the problem, sometimes."""
    places = [
        (i, name)
        for i, step in enumerate(steps)
        for name, choices in step.operation.parameters.items()
        if isinstance(choices, range)
    ]
    if places and rng.random() < EXTRA_ARGUMENT:
        i, name = rng.choice(places)
        steps[i] = Step(steps[i].operation, {**steps[i].values, name: None})
    return steps


def _useful_cases(rng: Random, composition: Composition) -> list[Case]:
    """Draw inputs with their results, edge cases first; none if the composition is degenerate:
    results that are mostly the same, or steps that make no difference.
    """
    kind = composition.kind
    values = [*kind.edges, *(kind.draw(rng, size) for size in SIZES)]
    inputs = [list(value) if len(kind.arguments) > 1 else [value] for value in values]
    if choices := composition.argument_range:
        inputs = [[*given, rng.choice(choices)] for given in inputs]
    try:
        cases = [(given, composition.result(given)) for given in inputs]
    except TooLarge:
        return []
    counts = Counter(str(result) for _, result in cases)
    if len(counts) < FEWEST_RESULTS or max(counts.values()) > MOST_SAME * len(cases):
        return []
    return [] if any(_same(other, cases) for other in _shorter(composition)) else cases


def _shorter(composition: Composition) -> Iterator[Composition]:
    """Yield the composition without one of its steps, where something is left."""
    steps = composition.steps
    for i, step in enumerate(steps):
        if step.operation.keeps_kind and len(steps) > 1:
            yield Composition((*steps[:i], *steps[i + 1 :]))


def _same(composition: Composition, cases: list[Case]) -> bool:
    try:
        return all(composition.result(given) == result for given, result in cases)
    except TooLarge:
        return False
