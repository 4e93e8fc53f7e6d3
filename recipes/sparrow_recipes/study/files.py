"""The files of a control study: its design, and the metrics and outcome of every run.

A cell (one arm with one seed) is the directory of a training run. Without `end.json` it is
unfinished, and is read as far as it goes. Errors name the file.
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
from sparrow_recipes.study.config import AnalysisConfig, ArmKind, ArmRole

ACCURACY, LENGTH = "val-core/", "val-aux/"
F = TypeVar("F", bound=File)
Positive = Annotated[int, Field(ge=1)]


class StudyFile(File):
    """A file of a study; fields with a default may be missing in older ones."""

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            name: field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
            if not field.is_required()
        }
        return defaults | data


class StudyArm(Record):
    """An arm of the study: its rollout, role and seeds. `like`: the arm of equal cost."""

    name: FolderName
    kind: ArmKind
    role: ArmRole
    target: float | None
    budget: int | None
    like: str | None = None
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    rate: float
    correction: str
    schedule: str | None = None
    train: Mapping[str, Any] = Field(default_factory=dict)  # settings that differ


class StudyRun(Record):
    """What identifies one run of a study; results of another are never joined with it."""

    id: str
    begun: str
    version: str
    device: str


class Collapse(Record):
    """Criteria of a collapse: the drop of accuracy, and the share of the starting length."""

    drop: float
    length: float


class StudyDesign(StudyFile):
    """design.json: the arms and criteria, fixed before the first run."""

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
    cut_off: float | None = None  # share of dense answers; with more, arms are not compared
    allow_cut_off: bool = False
    analysis: AnalysisConfig | None = None
    run: StudyRun | None = None  # older studies have none
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
            raise ValueError(f"arms: names must be unique, one a baseline; got {', '.join(names)}")
        if unknown := {arm.like for arm in self.arms} - {None, *names}:
            raise ValueError(f"arms: like must name an arm, got {', '.join(map(str, unknown))}")


class StartAnswers(StudyFile):
    """start.json of the study: dense answers of the start model to the evaluated rows."""

    what: ClassVar[str] = "start"

    model: str
    answers: Positive
    right: float
    cut_off: float
    wrong: float


class CellEnd(StudyFile):
    """end.json: how a run of the study ended."""

    what: ClassVar[str] = "end"

    status: Literal["done", "diverged", "failed"]
    message: str | None
    steps: int
    seconds: Measured  # of the session that ended it
    rate: float | None = None
    study: str | None = None  # id of the study's run


class TailBin(Record):
    """p05 of acceptance in a bin of lengths, over all tokens and over the uncertain ones."""

    start: int
    stop: int | None
    tokens: int | None = None
    prompts: int | None = None
    answers: int | None = None  # that have tokens in the bin
    p05: Measured
    low: Measured = None
    high: Measured = None
    uncertain: int | None = None
    p05_uncertain: Measured


class CellTail(StudyFile):
    """start.json and tail.json: p05 under the schedule of a run, before and after training.

    outcomes: of the evaluated rows under this schedule; None if it is dense.
    """

    what: ClassVar[str] = "tail"

    step: int
    schedule: str
    entropy: Measured
    length: Measured = None
    answers: int | None = None  # whose acceptance was measured
    outcomes: Outcomes | None = None
    study: str | None = None  # id of the study's run
    bins: tuple[TailBin, ...]


class DenseAnswers(NamedTuple):
    """A dense evaluation on held-out problems after a step; None: not a finite number."""

    step: int
    accuracy: float | None
    median: float | None
    outcomes: Outcomes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCell:
    """A run of the study: one arm with one seed, finished or not."""

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
    """The content of a study's folder."""

    design: StudyDesign
    cells: Mapping[str, Sequence[StudyCell]]  # by arm
    plans: Mapping[str, Schedule]  # by arm
    start: StartAnswers | None = None


def read_study(folder: str | Path) -> StudyFolder:
    """Read the files of a study, finished or not."""
    folder = Path(folder)
    design = _loaded(folder / "design.json", StudyDesign)
    if design is None:
        raise ValueError(f"{folder / 'design.json'} does not exist: not the folder of a study")
    cells = {arm.name: [read_cell(folder, arm, seed) for seed in arm.seeds] for arm in design.arms}
    for cell in (cell for arm in cells.values() for cell in arm):
        _refuse_other_run(cell, design)
    plans = {name: _loaded(folder / "plans" / f"{name}.json", Schedule) for name in cells}
    existing = {name: plan for name, plan in plans.items() if plan is not None}
    start = _loaded(folder / "start.json", StartAnswers)
    return StudyFolder(design=design, cells=cells, plans=existing, start=start)


def _refuse_other_run(cell: StudyCell, design: StudyDesign) -> None:
    """Raise if a cell was made by another run of a study than its design."""
    run = None if design.run is None else design.run.id
    for part in (cell.start, cell.end):
        if part is not None and part.study != run:
            name = f"{cell.arm.name}-{cell.seed}"
            raise ValueError(
                f"cells/{name}: made by the study's run {part.study}, the design is of {run}; only "
                "runs of one study are compared"
            )


def read_cell(folder: Path, arm: StudyArm, seed: int) -> StudyCell:
    """Read the files of a run, finished or not."""
    run, metrics = folder / "cells" / f"{arm.name}-{seed}", "metrics.jsonl"
    verify(run, (metrics, "validation.jsonl"))
    steps, end = _lines(run / metrics), _loaded(run / "end.json", CellEnd)
    if end is not None and end.status == "done" and len(steps) != end.steps:
        raise ValueError(f"{run / metrics}: expected {end.steps} steps, got {len(steps)}")
    return StudyCell(
        arm=arm,
        seed=seed,
        began=run.is_dir(),
        steps=steps,
        evaluations=_evaluations(run / "validation.jsonl"),
        start=_loaded(run / "start.json", CellTail),
        tail=_loaded(run / "tail.json", CellTail),
        end=end,
    )


def _evaluations(file: Path) -> list[DenseAnswers]:
    """Read the evaluations of a run, which must have a single source of problems."""
    evaluations = []
    for line in _lines(file):
        keys = [key for key in line.values if key.startswith(ACCURACY) and "/acc/mean@" in key]
        if len(keys) != 1:
            raise ValueError(f"{file}, step {line.step}: expected one accuracy, got {keys}")
        source = keys[0].removeprefix(ACCURACY).rpartition("/acc/mean@")[0]
        median = line.values.get(f"{LENGTH}{source}/length/median")
        accuracy, outcomes = line.values[keys[0]], Outcomes.from_metrics(line.values, source)
        evaluations.append(DenseAnswers(line.step, accuracy, median, outcomes))
    return evaluations


def _lines(file: Path) -> list[Metrics]:
    return read_metrics(file if file.exists() else None)


def _loaded(file: Path, kind: type[F]) -> F | None:
    return kind.load(file) if file.exists() else None
