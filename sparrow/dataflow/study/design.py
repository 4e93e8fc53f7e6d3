"""What a study runs, from its configuration alone: cells (an arm under a seed), their settings,
and where everything is kept.

    DIR/design.json             the arms, what counts as what, and the rate that was taken
    DIR/calibration/            the surface that schedules are planned from
    DIR/plans/ARM.json          the schedule of an arm that is not dense
    DIR/cells/ARM-SEED/         a run directory, with start.json, tail.json and end.json
    DIR/rejected/RATE/          cells of a rate at which the baseline did not learn
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparrow.files import read_document
from sparrow.schema.study import ArmConfig, StudyConfig
from sparrow.schema.study_files import Collapse, StudyArm, StudyDesign
from sparrow.schema.train import Choice, TrainConfig

APART = 1_000_000  # rows between those of one seed and the next: prompts differ by seed
END = "end.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An arm under a seed."""

    arm: ArmConfig
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A configuration, and where its parts are kept."""

    config: StudyConfig

    @property
    def folder(self) -> Path:
        return self.config.dir or Path("runs") / "study" / self.config.name

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration"

    @property
    def plans(self) -> Path:
        return self.folder / "plans"

    @property
    def design(self) -> Path:
        return self.folder / "design.json"

    def plan_of(self, arm: ArmConfig) -> Path:
        return self.plans / f"{arm.name}.json"

    def folder_of(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def rejected(self, rate: float) -> Path:
        return self.folder / "rejected" / f"{rate:g}"

    def ended(self, cell: Cell) -> bool:
        return (self.folder_of(cell) / END).exists()

    @property
    def cells(self) -> list[Cell]:
        """The baseline first, as its gain decides on the rate; then seed by seed."""
        rank = {"baseline": 0, "flat": 1, "collapses": 1, "arm": 2}
        found = [
            Cell(arm=arm, seed=seed)
            for arm in self.config.arms
            for seed in arm.seeds or self.config.seeds
        ]
        return sorted(found, key=lambda cell: (rank[cell.arm.role], cell.seed))

    def cell(self, name: str) -> Cell:
        for cell in self.cells:
            if cell.name == name:
                return cell
        known = ", ".join(cell.name for cell in self.cells)
        raise ValueError(f"no cell {name!r}; there are {known}")

    @property
    def baseline_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.arm.role == "baseline"]

    def training(self, cell: Cell, rate: float) -> TrainConfig:
        """The settings of one run: what all have in common, and what its arm and seed decide."""
        base, arm = self.config.train, cell.arm
        attention: dict[str, Any] = {} if arm.dense else {"schedule": str(self.plan_of(arm))}
        data: dict[str, Any] = {}
        if base.data.task is not None:
            data = {"first": base.data.first + cell.seed * APART}
        algorithm = {} if arm.corrections is None else {"corrections": arm.corrections}
        own_rate = rate if arm.rate is None else arm.rate
        gate = {} if base.gate.bin is not None else {"bin": self.config.surface.bin}  # alike in all
        return base.model_copy(
            update={
                "data": base.data.model_copy(update=data),
                "rollout": base.rollout.model_copy(
                    update={"attention": base.rollout.attention.model_copy(update=attention)}
                ),
                "algorithm": base.algorithm.model_copy(update=algorithm),
                "gate": base.gate.model_copy(update=gate),
                "optimiser": base.optimiser.model_copy(update={"rate": own_rate}),
                "run": base.run.model_copy(
                    update={"dir": self.folder_of(cell), "name": cell.name, "seed": cell.seed}
                ),
            }
        )

    def write_design(self, rate: float, command: str) -> None:
        """What the study is, for its report; budgets as the plans have them."""
        config, train = self.config, self.config.train
        outcome = config.outcome
        design = StudyDesign(
            name=config.name,
            model=train.model.name,
            data=train.data.model_dump(mode="json", exclude_none=True),
            rollout={
                "prompts": train.rollout.prompts,
                "samples": train.rollout.samples,
                "max_tokens": train.rollout.max_tokens,
            },
            steps=train.run.steps,
            every=train.validation.every,
            problems=train.validation.rows * train.validation.samples,
            rate=rate,
            rates=config.rates,
            tolerance=outcome.tolerance,
            collapse=Collapse(drop=outcome.drop, length=outcome.length),
            lag=outcome.lag,
            gain=outcome.gain,
            bin=config.surface.bin,
            command=command,
            arms=tuple(self._arm(arm, rate) for arm in config.arms),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        design.save(self.design)

    def _arm(self, arm: ArmConfig, rate: float) -> StudyArm:
        kind: Literal["dense", "target", "fixed", "budget"] = "dense"
        if not arm.dense:
            kind = "target" if arm.target else "budget" if arm.budget else "fixed"
        budget = arm.budget
        if kind == "fixed" and self.plan_of(arm).exists():
            budget = _first_budget(self.plan_of(arm))
        corrections = self.config.train.algorithm.corrections
        return StudyArm(
            name=arm.name,
            kind=kind,
            target=arm.target,
            budget=budget,
            like=arm.like,
            role=arm.role,
            seeds=arm.seeds or self.config.seeds,
            rate=rate if arm.rate is None else arm.rate,
            correction=_told(corrections if arm.corrections is None else arm.corrections),
        )


def _first_budget(file: Path) -> int:
    try:
        return int(read_document(file, "schedule")["budgets"][0])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"schedule {file}: no budgets ({error!r})") from error


def _told(corrections: tuple[Choice, ...]) -> str:
    found = []
    for one in corrections:
        settings = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in one.settings.items()
        )
        found.append(f"{one.use}, {settings}" if settings else one.use)
    return "; ".join(found) or "none"
