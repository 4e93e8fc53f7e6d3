"""What a run leaves behind line by line, its settings as reports read them, and the demo's timing.

Lines are read as far as they go: a last one without its end is being written. NaN and infinities,
which JSON does not have and some writers write, count as not measured.
"""

import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from sparrow.files import Json, check_digest_line, printable, read_lines, read_text
from sparrow.schema.base import Record, problems

LARGEST = 1e100  # numbers beyond are of no measurement


def _measured(value: object) -> object:
    """None for NaN, infinities, and numbers beyond any measurement (1e999)."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value) if abs(value) <= LARGEST else None
    return value


Measured = Annotated[float | None, BeforeValidator(_measured)]
Shown = Annotated[str, AfterValidator(printable)]  # control characters are visible
Rounds = Annotated[tuple[float, ...], Field(min_length=1)]


class Metrics(Record):
    """The metrics of one step, or of one validation; None: not measured."""

    step: int
    values: Mapping[str, Measured]

    @classmethod
    def from_line(cls, line: Json) -> Self:
        values = {key: value for key, value in line.items() if key != "step"}
        return cls(step=line.get("step"), values=values)  # type: ignore[arg-type]


class Lenient(Record):
    """Some fields of a record that another version may have written: others are left aside."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def from_line(cls, line: Json) -> Self:
        return cls.model_validate(line)


class ActionLine(Lenient):
    """What the gate did, or which settings changed, in words."""

    step: int
    kind: Shown = ""
    reason: Shown = ""


Line = TypeVar("Line", Metrics, ActionLine)


def read_metrics(file: Path | None) -> list[Metrics]:
    """Lines in the order of steps, each step once; none without a file."""
    lines = _read(file, Metrics)
    for line, later in pairwise(lines):
        if line.step == later.step:
            raise ValueError(f"{file}: step {later.step} is there twice")
    return lines


def read_actions(file: Path | None) -> list[ActionLine]:
    """In the order of steps; none without a file."""
    return _read(file, ActionLine)


def _read(file: Path | None, kind: type[Line]) -> list[Line]:
    found = []
    for number, line in enumerate([] if file is None else read_lines(file, growing=True), 1):
        try:
            found.append(kind.from_line(line))
        except ValidationError as error:
            raise ValueError(f"{file}, line {number}: {problems(error)}") from None
    return sorted(found, key=lambda line: line.step)


class ModelSettings(Lenient):
    """Which model ran."""

    name: Shown | None = None


class AttentionSettings(Lenient):
    """How the rollout attended."""

    dense: bool = False
    schedule: Shown | None = None
    budget: int | None = None


class RolloutSettings(Lenient):
    """How long sequences could get."""

    attention: AttentionSettings = AttentionSettings()
    max_prompt: int | None = None
    max_tokens: int | None = None


class GateSettings(Lenient):
    """What the gate was told."""

    mode: Shown | None = None
    target: float | None = None
    window: int | None = None
    patience: int | None = None


class RunPlace(Lenient):
    """What the draws began with."""

    seed: int | None = None


class RunSettings(Lenient):
    """What reports read of a run's configuration, of this version or another.

    given: every setting by its dotted name; empty where the run has no such file.
    """

    model: ModelSettings = ModelSettings()
    rollout: RolloutSettings = RolloutSettings()
    gate: GateSettings = GateSettings()
    run: RunPlace = RunPlace()
    given: Mapping[str, Any] = Field(default_factory=dict)


def read_settings(file: Path | None) -> RunSettings:
    """The configuration of a run as it was resolved."""
    if file is None:
        return RunSettings()
    text = read_text(file)
    try:
        check_digest_line(text)
        values = tomllib.loads(text)
        return RunSettings.model_validate({**values, "given": dict(flat_settings(values))})
    except ValidationError as error:
        raise ValueError(f"{file}: {problems(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from error


def flat_settings(values: Mapping[str, Any], above: str = "") -> Sequence[tuple[str, Any]]:
    """Nested settings by dotted names, texts made printable."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        dotted = above + printable(name)
        if isinstance(value, Mapping):
            found += flat_settings(value, f"{dotted}.")
        else:
            found.append((dotted, printable(value) if isinstance(value, str) else value))
    return found
