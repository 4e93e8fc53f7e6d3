"""The examples and the hidden tests of a problem."""

from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from sparrow.tasks.programming.kinds import printed
from sparrow.tasks.programming.operations import Composition
from sparrow.tasks.programming.programs import compiled, passes, wrong_candidates

Case = tuple[list[Any], Any]  # arguments and their value
FEWEST, MOST = 14, 20  # hidden tests
TOO_SMALL = 2  # drawn inputs after the edge cases that are too small to explain a problem


class Test(NamedTuple):
    """A test in the form of its row: arguments and value, or standard input and output."""

    input: Any
    output: Any


def choose_tests(
    composition: Composition, fn_name: str | None, cases: list[Case]
) -> tuple[list[Case], list[Test]]:
    """Choose two examples and hidden tests that wrong programs fail.

    Cases are the edge cases, then others by size. The examples are small and differ in value.
    """
    edges = len(composition.kind.edges)
    by_value = {str(value): (given, value) for given, value in reversed(cases[edges + TOO_SMALL :])}
    examples = list(by_value.values())[:-3:-1]
    edge_tests, others = (
        [case_test(composition, fn_name, *case) for case in part if case not in examples]
        for part in (cases[:edges], cases[edges:])
    )
    programs = [compiled(text) for text in wrong_candidates(composition, fn_name, examples)]
    return examples, _choose(edge_tests, others, programs, fn_name)


def case_test(composition: Composition, fn_name: str | None, given: list[Any], value: Any) -> Test:
    """Return the test of arguments and their value; fn_name None: as text."""
    if fn_name is not None:
        return Test(given, value)
    kind = composition.kind
    text = kind.write(given[0] if len(kind.arguments) == 1 else given[:2])
    return Test(text + (f"{given[-1]}\n" if composition.argument_range else ""), printed(value))


def _choose(
    edges: list[Test], others: list[Test], programs: Sequence[CodeType], fn_name: str | None
) -> list[Test]:
    """Take the edge cases and the largest inputs, what wrong programs fail, and some others."""
    chosen = edges + others[-2:]
    for program in programs:
        if len(chosen) < MOST and all(passes(program, fn_name, test) for test in chosen):
            chosen += [test for test in others if not passes(program, fn_name, test)][:1]
    more = [test for test in others if test not in chosen]
    more.sort(key=lambda test: test.output in [other.output for other in chosen])
    return chosen + more[: max(0, FEWEST - len(chosen))]
