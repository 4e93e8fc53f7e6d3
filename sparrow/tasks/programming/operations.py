"""Operations with their texts and code, and compositions of them: a problem's steps."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import Template
from typing import Any

from sparrow.tasks.programming.kinds import KINDS, InputKind
from sparrow.tasks.programming.reference import REFERENCE

ARGUMENT = "k"  # name of the argument that a parameter may be
LARGEST, LONGEST = 10**9, 80  # integers, and items of lists and strings, between steps


class TooLarge(ValueError):
    """A composition computes values that are too large for a problem."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One operation of operations.toml, which describes the fields."""

    name: str
    kinds: tuple[str, str]
    text: str
    code: str
    mistakes: Sequence[tuple[str, str]]
    reference: Callable[..., Any]
    parameters: Mapping[str, Sequence[Any]]
    tier: int

    @property
    def keeps_kind(self) -> bool:
        return self.kinds[0] == self.kinds[1]


@dataclass(frozen=True, slots=True)
class Step:
    """An operation with values of its parameters; None: the value is the problem's argument."""

    operation: Operation
    values: Mapping[str, Any]

    def text(self) -> str:
        named = {name: f"`{ARGUMENT}`" for name, value in self.values.items() if value is None}
        text = Template(self.operation.text).substitute(self.values, **named)
        return text[0].upper() + text[1:] + "."

    def code(self, mistake: tuple[str, str] = ("", "")) -> str:
        code = self.operation.code.replace(*mistake)
        named = {name: ARGUMENT for name, value in self.values.items() if value is None}
        return Template(code).substitute(self.values, **named)

    def result(self, x: Any, argument: Any) -> Any:
        values = {n: argument if value is None else value for n, value in self.values.items()}
        return self.operation.reference(x, **values)


@dataclass(frozen=True, slots=True)
class Composition:
    """Steps one after the other, from a kind of input to a kind of result."""

    steps: tuple[Step, ...]

    @property
    def kind(self) -> InputKind:
        return KINDS[self.steps[0].operation.kinds[0]]

    @property
    def result_kind(self) -> str:
        return self.steps[-1].operation.kinds[1]

    @property
    def argument_range(self) -> Sequence[int]:
        """Values of the extra argument; empty: there is none."""
        for step in self.steps:
            for name, value in step.values.items():
                if value is None:
                    return step.operation.parameters[name]
        return ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.kind.arguments + ((ARGUMENT,) if self.argument_range else ())

    def result(self, arguments: Sequence[Any]) -> Any:
        """Compute the result by the reference; TooLarge if a value on the way is too large."""
        x = arguments[0] if len(self.kind.arguments) == 1 else arguments[:2]
        for step in self.steps:
            x = step.result(x, arguments[-1])
            if _too_large(x):
                raise TooLarge(step.operation.name)
        return x

    def data(self) -> list[list[Any]]:
        return [[step.operation.name, dict(step.values)] for step in self.steps]


def parse_steps(data: Sequence[Any]) -> Composition:
    """Read the steps of a row; ValueError for values that no row has: code is made of them."""
    steps = [Step(OPERATIONS[name], values) for name, values in data]
    for step in steps:
        choices = step.operation.parameters
        if {*choices} != {*step.values}:
            raise ValueError(f"{step.operation.name} has other parameters: {step.values}")
        for name, value in step.values.items():
            if value is not None and value not in choices[name]:
                raise ValueError(f"{step.operation.name}: {name} cannot be {value!r}")
    return Composition(tuple(steps))


def draw_step(rng: Random, operation: Operation) -> Step:
    values = {name: rng.choice(choices) for name, choices in operation.parameters.items()}
    return Step(operation, values)


def _too_large(x: Any) -> bool:
    if isinstance(x, int):
        return abs(x) > LARGEST
    return len(x) > LONGEST or (not isinstance(x, str) and any(map(_too_large, x)))


def _read() -> dict[str, Operation]:
    text = Path(__file__).with_name("operations.toml").read_text(encoding="utf-8")
    found: list[Operation] = []
    for name, fields in tomllib.loads(text).items():
        made = _of_expression if "expression" in fields else _of_code
        found += made(name, REFERENCE[name], **fields)
    return {operation.name: operation for operation in found}


def _of_code(
    name: str,
    reference: Callable[..., Any],
    *,
    kinds: Sequence[str],
    text: str,
    code: str,
    mistakes: Sequence[Sequence[str]],
    tier: int = 1,
    parameters: Mapping[str, list[Any]] | None = None,
) -> list[Operation]:
    operation = Operation(
        name=name,
        kinds=(kinds[0], kinds[1]),
        text=text,
        code=code.strip(),
        mistakes=[(right, wrong) for right, wrong in mistakes],
        reference=reference,
        parameters={key: _choices(values) for key, values in (parameters or {}).items()},
        tier=tier,
    )
    return [operation]


def _of_expression(
    name: str, compute: Callable[..., Any], *, text: str, expression: str, **fields: Any
) -> list[Operation]:
    """Make two operations: on a number, and on every number of a list."""
    each = {
        **fields,
        "kinds": ("numbers", "numbers"),
        "text": text.replace("{it}", "every number"),
        "code": f"x = [{expression} for v in x]",
    }
    one = {
        **fields,
        "kinds": ("integer", "integer"),
        "text": text.replace("{it}", "the number"),
        "code": f"x = {_in_x(expression)}",
        "mistakes": [map(_in_x, pair) for pair in fields["mistakes"]],
    }
    return [
        *_of_code(name, compute, **one),
        *_of_code(f"{name}_each", lambda x, **values: [compute(v, **values) for v in x], **each),
    ]


def _in_x(expression: str) -> str:
    return re.sub(r"\bv\b", "x", expression)


def _choices(values: list[Any]) -> Sequence[Any]:
    whole = len(values) == 2 and all(isinstance(value, int) for value in values)
    return range(values[0], values[1] + 1) if whole else values


OPERATIONS = _read()
