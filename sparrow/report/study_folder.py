"""The folder of a control study, read and checked: what is wrong is said with file and place.

A cell, one arm with one seed, is the directory of a training run. One without `end.json` is
unfinished; it is read as far as it goes, and never left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sparrow.files import verify
from sparrow.schema.base import File
from sparrow.schema.run_files import Metrics, read_metrics
from sparrow.schema.schedule import Schedule
from sparrow.schema.study_files import CellEnd, CellTail, StudyArm, StudyDesign

ACCURACY, LENGTH = "val-core/", "val-aux/"
F = TypeVar("F", bound=File)


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
    cells = {arm.name: [_cell(folder, arm, seed) for seed in arm.seeds] for arm in design.arms}
    plans = {name: _loaded(folder / "plans" / f"{name}.json", Schedule) for name in cells}
    own = {f"{arm.name}-{seed}" for arm in design.arms for seed in arm.seeds}
    there = {path.name for path in (folder / "cells").glob("*") if path.is_dir()}
    return StudyFolder(
        design=design,
        cells=cells,
        plans={name: plan for name, plan in plans.items() if plan is not None},
        strangers=sorted(there - own),
    )


def _cell(folder: Path, arm: StudyArm, seed: int) -> StudyCell:
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
