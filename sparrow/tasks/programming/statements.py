"""Problem statements in words."""

from typing import Any

from sparrow.tasks.programming.cases import Case, case_test
from sparrow.tasks.programming.kinds import RESULTS
from sparrow.tasks.programming.operations import ARGUMENT, Composition

FENCE = "Put the whole program into one fenced block that begins with ```python and ends with ```."
REMAINDERS = (
    "Remainders (modulo) and division with rounding down are those of Python's % and //, for "
    "negative numbers too: a remainder after division by m is from 0 to m - 1."
)
HOW_PRINTED = {
    "list": ", on one line, separated by single spaces (an empty line for an empty list)",
    "string": " (an empty line for an empty string)",
}


def statement(composition: Composition, fn_name: str | None, examples: list[Case]) -> str:
    """Write the prompt: the task, the steps, two examples."""
    steps = _steps(composition)
    note = [REMAINDERS] * any(word in steps for word in ("modulo", "remainder", "rounding"))
    task, end = _program(composition) if fn_name is None else _function(composition, fn_name)
    shown = [_example(composition, fn_name, *example) for example in examples]
    return "\n\n".join([task, steps, end, *note, "Examples:", *shown, FENCE])


def _function(composition: Composition, fn_name: str) -> tuple[str, str]:
    names = ", ".join(composition.arguments)
    meaning = f"Write a Python function `{fn_name}({names})`. {composition.kind.meaning}"
    if values := composition.argument_range:
        meaning += f" `{ARGUMENT}` is an integer from {values[0]} to {values[-1]}."
    return meaning, f"Return the result, {RESULTS[composition.result_kind][0]}."


def _program(composition: Composition) -> tuple[str, str]:
    lines = f"Input: {composition.kind.lines}."
    if values := composition.argument_range:
        lines += f" Then one line with an integer `{ARGUMENT}` from {values[0]} to {values[-1]}."
    what = RESULTS[composition.result_kind][0]
    end = f"Print the result, {what}{HOW_PRINTED.get(what.split()[1], '')}."
    return (
        f"Write a Python program that reads standard input and writes standard output.\n\n{lines}",
        end,
    )


def _steps(composition: Composition) -> str:
    first, *others = [step.text() for step in composition.steps]
    if len(others) < 2:
        return " ".join([first, *(f"Then {text[0].lower()}{text[1:]}" for text in others)])
    start = composition.kind.arguments[0]
    order = f"Start with `{start}` and do these steps, each on the result of the one before:"
    return "\n".join([order, *(f"{i}. {text}" for i, text in enumerate([first, *others], 1))])


def _example(composition: Composition, fn_name: str | None, given: list[Any], value: Any) -> str:
    if fn_name is not None:
        return f"`{fn_name}({', '.join(map(repr, given))})` returns `{value!r}`."
    test = case_test(composition, None, given, value)
    return f"Input:\n```\n{test.input}```\nOutput:\n```\n{test.output}```"
