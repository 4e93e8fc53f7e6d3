"""The folder of a control study: its design, and how each of its runs began, went and ended.

A cell, one arm with one seed, is the directory of a training run. One without `end.json` is
unfinished; it is read as far as it goes, and never left out. What is wrong is said with the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from sparrow.files import verify
from sparrow.schema.base import File, Record
from sparrow.schema.run_folder import Measured, Metrics, Outcomes, read_metrics
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import FolderName
from sparrow_recipes.study.config import ArmKind, ArmRole

ACCURACY, LENGTH = "val-core/", "val-aux/"
F = TypeVar("F", bound=File)
Positive = Annotated[int, Field(ge=1)]


class StudyFile(File):
    """A file of a study; fields with a default may be missing in older ones."""

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        fields = cls.model_fields.items()
        optional = {name: field for name, field in fields if not field.is_required()}
        return {
            name: field.get_default(call_default_factory=True) for name, field in optional.items()
        } | data


class StudyArm(Record):
    """One treatment. `like` names the arm whose cost a fixed budget copies."""

    name: FolderName
    kind: ArmKind
    role: ArmRole
    target: float | None
    budget: int | None
    like: str | None = None
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    rate: float
    correction: str


class Collapse(Record):
    """Final accuracy this far below the start, or answers this much shorter, is a collapse."""

    drop: float
    length: float


class StudyDesign(StudyFile):
    """design.json: what was fixed before anything ran."""

    what: ClassVar[str] = "design"

    name: str
    model: str = ""
    data: Mapping[str, Any] = Field(default_factory=dict)
    rollout: Mapping[str, Any] = Field(default_factory=dict)
    steps: Positive
    every: Positive
    problems: Positive
    rate: float
    rates: tuple[float, ...]
    tolerance: float
    collapse: Collapse
    lag: float
    gain: float | None = None  # that every seed of the baseline must reach
    bin: Positive
    command: str | tuple[str, ...] | None = None
    arms: Annotated[tuple[StudyArm, ...], Field(min_length=1)]

    @property
    def baseline(self) -> StudyArm:
        return next(arm for arm in self.arms if arm.role == "baseline")

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.command,) if isinstance(self.command, str) else self.command or ()

    def _check(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names) or [arm.role for arm in self.arms].count("baseline") != 1:
            raise ValueError(f"arms: got {', '.join(names)}, allowed: each once, one baseline")
        strange = {arm.like for arm in self.arms} - {None, *names}
        if strange:
            raise ValueError(f"arms: got like {', '.join(map(str, strange))}, allowed: an arm")


class CellEnd(StudyFile):
    """end.json: how a run of the study ended."""

    what: ClassVar[str] = "end"

    status: Literal["done", "diverged", "failed"]
    message: str | None
    steps: int
    seconds: Measured  # of the session that ended it
    rate: float | None = None


class TailBin(Record):
    """p05 of acceptance in one bin of lengths; of uncertain tokens alone beside it."""

    start: int
    stop: int | None
    tokens: int | None = None
    prompts: int | None = None
    p05: Measured
    low: Measured = None
    high: Measured = None
    uncertain: int | None = None
    p05_uncertain: Measured


class CellTail(StudyFile):
    """start.json and tail.json: one schedule calibrated before and after a run."""

    what: ClassVar[str] = "tail"

    step: int
    schedule: str
    entropy: Measured
    length: Measured = None
    bins: tuple[TailBin, ...]


class DenseAnswers(NamedTuple):
    """Held-out problems answered densely after so many steps; None: no number."""

    step: int
    accuracy: float | None
    median: float | None
    outcomes: Outcomes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCell:
    """One arm with one seed, as far as it has come."""

    arm: StudyArm
    seed: int
    began: bool
    steps: Sequence[Metrics]
    evaluations: Sequence[DenseAnswers]
    start: CellTail | None
    tail: CellTail | None
    end: CellEnd | None

    @property
    def status(self) -> str:
        """done, diverged, failed, unfinished or not begun."""
        if self.end is not None:
            return self.end.status
        return "unfinished" if self.began else "not begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFolder:
    """A study's folder."""

    design: StudyDesign
    cells: Mapping[str, Sequence[StudyCell]]  # by arm
    plans: Mapping[str, Schedule]  # by arm


def read_study(folder: str | Path) -> StudyFolder:
    """Everything that a study has left so far."""
    folder = Path(folder)
    design = _loaded(folder / "design.json", StudyDesign)
    if design is None:
        raise ValueError(f"{folder / 'design.json'} is not there: this is no folder of a study")
    cells = {arm.name: [read_cell(folder, arm, seed) for seed in arm.seeds] for arm in design.arms}
    plans = {name: _loaded(folder / "plans" / f"{name}.json", Schedule) for name in cells}
    return StudyFolder(
        design=design,
        cells=cells,
        plans={name: plan for name, plan in plans.items() if plan is not None},
    )


def read_cell(folder: Path, arm: StudyArm, seed: int) -> StudyCell:
    """One arm with one seed, as far as it has come."""
    place = folder / "cells" / f"{arm.name}-{seed}"
    verify(place, ("metrics.jsonl", "validation.jsonl"))
    steps, end = _lines(place / "metrics.jsonl"), _loaded(place / "end.json", CellEnd)
    if end is not None and end.status == "done" and len(steps) != end.steps:
        file = place / "metrics.jsonl"
        raise ValueError(f"{file}: got {len(steps)} steps, but end.json says {end.steps}")
    return StudyCell(
        arm=arm,
        seed=seed,
        began=place.is_dir(),
        steps=steps,
        evaluations=_evaluations(place / "validation.jsonl"),
        start=_loaded(place / "start.json", CellTail),
        tail=_loaded(place / "tail.json", CellTail),
        end=end,
    )


def _evaluations(file: Path) -> list[DenseAnswers]:
    """Evaluations by step; a study asks one kind of problem."""
    found = []
    for line in _lines(file):
        keys = [key for key in line.values if key.startswith(ACCURACY) and "/acc/mean@" in key]
        if len(keys) != 1:
            given = ", ".join(keys) or "no accuracy"
            raise ValueError(f"{file}, step {line.step}: got {given}, allowed: one source")
        source = keys[0].removeprefix(ACCURACY).rpartition("/acc/mean@")[0]
        median = line.values.get(f"{LENGTH}{source}/length/median")
        accuracy, outcomes = line.values[keys[0]], Outcomes.from_metrics(line.values, source)
        found.append(DenseAnswers(line.step, accuracy, median, outcomes))
    return found


def _lines(file: Path) -> list[Metrics]:
    return read_metrics(file if file.exists() else None)


def _loaded(file: Path, kind: type[F]) -> F | None:
    return kind.load(file) if file.exists() else None
