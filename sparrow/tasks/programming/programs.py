"""Source text of programs: a right one, and wrong ones as careless people and cheats write them."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from textwrap import indent
from types import CodeType
from typing import Any

from sparrow.tasks.programming.kinds import RESULTS
from sparrow.tasks.programming.operations import ARGUMENT, Composition

# First and last lines of a function that make it wrong, by kind.
ONLY_SMALL = {
    "integer": "n = max(-9, min(9, n))",
    "pair": "a, b = max(-9, min(9, a)), max(-9, min(9, b))",
    "grid": "grid = [row[:2] for row in grid[:2]]",
    "log": "log = ';'.join(log.split(';')[:3])",
}
OFF_BY_ONE = {"integer": "x += 1"}
FIRST_THREE, ALL_BUT_LAST = "{0} = {0}[:3]", "x = x[:-1]"


def solution(composition: Composition, fn_name: str | None) -> str:
    """Write the program that does the steps; fn_name None: it reads input and prints."""
    return _program(composition, fn_name, [step.code() for step in composition.steps])


def wrong_candidates(
    composition: Composition, fn_name: str | None, examples: Sequence[tuple[Any, Any]]
) -> Iterator[str]:
    """Write programs with one mistake each; a few of them may be right by chance."""
    yield _program(composition, fn_name, [_hard_coded(composition, examples)], start=False)
    codes = [step.code() for step in composition.steps]
    for changed in _changed_steps(composition, codes):
        yield _program(composition, fn_name, changed)
    first, kind = composition.kind.arguments[0], composition.steps[0].operation.kinds[0]
    small = ONLY_SMALL.get(kind, FIRST_THREE.format(first))
    yield _program(composition, fn_name, [small, _start(composition), *codes], start=False)
    if composition.kind.edges[0] in ("", []):
        crash = f"{first}[0]  # fails for empty input"
        yield _program(composition, fn_name, [crash, _start(composition), *codes], start=False)
    off = OFF_BY_ONE.get(composition.result_kind, ALL_BUT_LAST)
    yield _program(composition, fn_name, [*codes, off])


@lru_cache(maxsize=64)
def compiled(source: str) -> CodeType:
    return compile(source, "<generated>", "exec")


def passes(program: CodeType, fn_name: str | None, test: tuple[Any, Any]) -> bool:
    """Run a program of this module, never one of a model, on the input of a test."""
    try:
        return bool(_run(program, fn_name, test[0]) == test[1])
    except Exception:  # wrong programs raise what they like
        return False


def _run(program: CodeType, fn_name: str | None, given: Any) -> Any:
    written: list[str] = []
    names: dict[str, Any] = {}
    if fn_name is not None:
        exec(program, names)
        return names[fn_name](*given)
    lines = iter(given.splitlines())
    names["input"] = lambda: next(lines)
    names["print"] = lambda *values: written.append(" ".join(map(str, values)) + "\n")
    exec(program, names)
    return "".join(written)


def _changed_steps(composition: Composition, codes: list[str]) -> Iterator[list[str]]:
    """Yield the code of the steps with a mistake in one, one left out, or two exchanged."""
    steps = composition.steps
    for i, step in enumerate(steps):
        for mistake in step.operation.mistakes:
            yield [*codes[:i], step.code(mistake), *codes[i + 1 :]]
        if step.operation.keeps_kind and len(steps) > 1:
            yield [*codes[:i], *codes[i + 1 :]]
        if i and step.operation.kinds == steps[i - 1].operation.kinds:
            yield [*codes[: i - 1], codes[i], codes[i - 1], *codes[i + 1 :]]


def _hard_coded(composition: Composition, examples: Sequence[tuple[Any, Any]]) -> str:
    names = ", ".join(composition.arguments)
    (given, first), (_, other) = examples
    return f"x = {first!r} if [{names}] == {given!r} else {other!r}"


def _start(composition: Composition) -> str:
    single = len(composition.kind.arguments) == 1
    return f"x = {composition.kind.arguments[0]}" if single else ""


def _program(
    composition: Composition, fn_name: str | None, codes: list[str], *, start: bool = True
) -> str:
    names = ", ".join(composition.arguments)
    lines = [_start(composition)] * start + codes + ["return x"]
    body = indent("\n".join(line for line in lines if line), "    ")
    function = f"def {fn_name or 'solve'}({names}):\n{body}\n"
    if fn_name is not None:
        return function
    reads = [composition.kind.read]
    if ARGUMENT in composition.arguments:
        reads.append(f"{ARGUMENT} = int(input())")
    output = RESULTS[composition.result_kind][1].format(f"solve({names})")
    return "\n".join([function, "", *reads, output, ""])
