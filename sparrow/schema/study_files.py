"""The files of a control study: its design, and how each of its runs began and ended."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparrow.schema.base import File, Record
from sparrow.schema.run_files import Measured
from sparrow.schema.types import FolderName

Positive = Annotated[int, Field(ge=1)]


class StudyArm(Record):
    """One treatment. `like` names the arm whose cost a fixed budget copies."""

    name: FolderName
    kind: Literal["dense", "target", "fixed", "budget"]
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
