"""The design of a study from its configuration: cells (an arm and a seed), settings and paths.

DIR/design.json             the arms, the criteria, and the learning rate
DIR/calibration/            the surface that schedules are planned from
DIR/plans/ARM.json          the schedule of an arm that is not dense
DIR/cells/ARM-SEED/         a run directory, with start.json, tail.json and end.json
DIR/rejected/RATE/          cells of a rate at which the baseline did not learn
"""

from pathlib import Path
from typing import Any, NamedTuple

from sparrow.schema.loading import merge
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import Choice, TrainConfig
from sparrow_recipes.study.config import ArmConfig, StudyConfig
from sparrow_recipes.study.files import Collapse, StudyArm, StudyDesign

APART = 1_000_000  # rows between the first rows of two seeds: prompts differ by seed
END = "end.json"
ORDER = {"baseline": 0, "flat": 1, "collapses": 1, "arm": 2}  # the baseline decides the rate


class Cell(NamedTuple):
    """An arm with a seed."""

    arm: ArmConfig
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.seed}"


class Study:
    """A study: its configuration, cells and paths."""

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self.folder = config.out or Path("runs") / "study" / config.name
        self.calibration, self.plans = self.folder / "calibration", self.folder / "plans"
        self.design = self.folder / "design.json"
        cells = [Cell(arm, seed) for arm in config.arms for seed in config.seeds_of(arm)]
        self.cells = sorted(cells, key=lambda cell: (ORDER[cell.arm.role], cell.seed))
        self.baseline_cells = [cell for cell in self.cells if cell.arm.role == "baseline"]

    def plan_of(self, arm: ArmConfig) -> Path:
        return self.plans / f"{arm.name}.json"

    def folder_of(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def rejected(self, rate: float) -> Path:
        return self.folder / "rejected" / f"{rate:g}"

    def ended(self, cell: Cell) -> bool:
        return (self.folder_of(cell) / END).exists()

    def planned(self) -> bool:
        """Whether every arm has its schedule."""
        return all(arm.dense or self.plan_of(arm).exists() for arm in self.config.arms)

    def cell(self, name: str) -> Cell:
        by_name = {cell.name: cell for cell in self.cells}
        if name not in by_name:
            raise ValueError(f"no cell {name!r}; expected one of {', '.join(by_name)}")
        return by_name[name]

    def training(self, cell: Cell, rate: float) -> TrainConfig:
        """The settings of a run: the common ones, changed by its arm and seed."""
        base, arm, run = self.config.train, cell.arm, {"name": cell.name, "seed": cell.seed}
        changes: dict[str, Any] = {
            "optimiser": {"rate": rate if arm.rate is None else arm.rate},
            "gate": {"bin": base.gate.bin or self.config.surface.bin},  # the same in all
            "run": {**run, "out": self.folder_of(cell)},
        }
        if base.data.task is not None:
            changes["data"] = {"first": base.data.first + cell.seed * APART}
        if not arm.dense:
            changes["rollout"] = {"attention": {"schedule": str(self.plan_of(arm))}}
        if arm.corrections is not None:
            changes["algorithm"] = {"corrections": arm.corrections}
        return TrainConfig.model_validate(merge(base.model_dump(), changes))

    def write_design(self, rate: float, command: str) -> None:
        """Write design.json for the report, with the budgets of the plans."""
        config, train, outcome = self.config, self.config.train, self.config.outcome
        design = StudyDesign(
            name=config.name,
            model=train.model.name,
            data=train.data.model_dump(mode="json", exclude_none=True),
            rollout=train.rollout.model_dump(include={"prompts", "samples", "max_tokens"}),
            steps=train.run.steps,
            every=train.validation.every,
            problems=train.validation.prompts * train.validation.samples,
            rate=rate,
            rates=config.rates,
            **outcome.model_dump(include={"tolerance", "lag", "gain"}),
            collapse=Collapse(drop=outcome.drop, length=outcome.length),
            bin=config.surface.bin,
            command=command,
            arms=tuple(self._arm(arm, rate) for arm in config.arms),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        design.save(self.design)

    def _arm(self, arm: ArmConfig, rate: float) -> StudyArm:
        budget, plan = arm.budget, self.plan_of(arm)
        if arm.like is not None and plan.exists():
            budget = int(Schedule.load(plan).budgets[0])
        corrections = self.config.train.algorithm.corrections
        return StudyArm(
            **arm.model_dump(include={"name", "role", "target", "like"}),
            kind=arm.kind,
            budget=budget,
            seeds=self.config.seeds_of(arm),
            rate=rate if arm.rate is None else arm.rate,
            correction=_describe(corrections if arm.corrections is None else arm.corrections),
        )


def _describe(corrections: tuple[Choice, ...]) -> str:
    """Names and settings of corrections: "token-tis, cap 2"."""
    parts = []
    for choice in corrections:
        settings = choice.settings.items()
        numbers = [
            f"{name} {v:g}" if isinstance(v, float) else f"{name} {v}" for name, v in settings
        ]
        parts.append(", ".join([choice.use, *numbers]))
    return "; ".join(parts) or "none"
