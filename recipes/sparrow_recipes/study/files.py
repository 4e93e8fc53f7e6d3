"""The folder of a control study: its design, and how each of its runs began, went and ended.

A cell, one arm with one seed, is the directory of a training run. One without `end.json` is
unfinished; it is read as far as it goes, and never left out. What is wrong is said with the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from sparrow.files import verify
from sparrow.schema.base import File, Record
from sparrow.schema.run_files import Measured, Metrics, read_metrics
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import FolderName

ACCURACY, LENGTH = "val-core/", "val-aux/"
F = TypeVar("F", bound=File)
ArmKind = Literal["dense", "target", "fixed", "budget"]
Positive = Annotated[int, Field(ge=1)]


class StudyArm(Record):
    """One treatment. `like` names the arm whose cost a fixed budget copies."""

    name: FolderName
    kind: ArmKind
    role: Literal["baseline", "arm", "collapses", "flat"]
    target: float | None
    budget: int | None
    like: str | None = None
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    rate: float
    correction: str

    def _check(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: got {list(self.seeds)}, allowed: each once")


class Collapse(Record):
    """Final accuracy this far below the start, or answers this much shorter, is a collapse."""

    drop: float
    length: float


class StudyDesign(File):
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

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"model": "", "data": {}, "rollout": {}, "gain": None, "command": None} | data

    @property
    def baseline(self) -> StudyArm:
        return next(arm for arm in self.arms if arm.role == "baseline")

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.command,) if isinstance(self.command, str) else self.command or ()

    def _check(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"arms: got names {', '.join(names)}, allowed: each once")
        baselines = [arm.role for arm in self.arms].count("baseline")
        if baselines != 1:
            raise ValueError(f"arms: got {baselines} of role baseline, allowed: one")
        for arm in self.arms:
            if arm.like is not None and arm.like not in set(names) - {arm.name}:
                raise ValueError(f"arms: {arm.name} is like {arm.like!r}, allowed: another arm")


class CellEnd(File):
    """end.json: how a run of the study ended."""

    what: ClassVar[str] = "end"

    status: Literal["done", "diverged", "failed"]
    message: str | None
    steps: int
    seconds: Measured  # of the session that ended it
    rate: float | None = None

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"rate": None} | data


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


class CellTail(File):
    """start.json and tail.json: one schedule calibrated before and after a run."""

    what: ClassVar[str] = "tail"

    step: int
    schedule: str
    entropy: Measured
    length: Measured = None
    bins: tuple[TailBin, ...]

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"length": None} | data


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAnswers:
    """Held-out problems answered densely after so many steps; None: no number."""

    step: int
    accuracy: float | None
    median: float | None


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
    """A study's folder. `strangers`: folders among the cells that no arm of the design has."""

    design: StudyDesign
    cells: Mapping[str, Sequence[StudyCell]]  # by arm
    plans: Mapping[str, Schedule]  # by arm
    strangers: Sequence[str]


def read_study(folder: str | Path) -> StudyFolder:
    """Everything that a study has left so far."""
    folder = Path(folder)
    design = _loaded(folder / "design.json", StudyDesign)
    if design is None:
        raise ValueError(f"{folder / 'design.json'} is not there: this is no folder of a study")
    cells = {arm.name: [read_cell(folder, arm, seed) for seed in arm.seeds] for arm in design.arms}
    plans = {name: _loaded(folder / "plans" / f"{name}.json", Schedule) for name in cells}
    own = {f"{arm.name}-{seed}" for arm in design.arms for seed in arm.seeds}
    there = {path.name for path in (folder / "cells").glob("*") if path.is_dir()}
    return StudyFolder(
        design=design,
        cells=cells,
        plans={name: plan for name, plan in plans.items() if plan is not None},
        strangers=sorted(there - own),
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
        accuracy = line.values[keys[0]]
        found.append(DenseAnswers(step=line.step, accuracy=accuracy, median=median))
    return found


def _lines(file: Path) -> list[Metrics]:
    return read_metrics(file if file.exists() else None)


def _loaded(file: Path, kind: type[F]) -> F | None:
    return kind.load(file) if file.exists() else None
