"""The design of a study from its configuration: cells (an arm and a seed), settings and paths.

DIR/design.json             the arms, the criteria, the learning rate, and the id of this run
DIR/start.json              dense answers of the start model: right, cut off, wrong
DIR/calibration/            the surface that schedules are planned from
DIR/plans/ARM.json          the schedule of an arm that is not dense
DIR/cells/ARM-SEED/         a run directory, with start.json, tail.json and end.json
DIR/rejected/RATE/          cells of a rate at which the baseline did not learn
"""

from pathlib import Path
from typing import Any, NamedTuple

from sparrow.schema.schedule import Schedule
from sparrow.schema.train import Choice, TrainConfig
from sparrow_recipes.study.config import ArmConfig, StudyConfig
from sparrow_recipes.study.files import Collapse, StartAnswers, StudyArm, StudyDesign, StudyRun

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
    """A study: its configuration, cells and paths.

    Where a rate must be found, the baseline comes first; otherwise cells go seed by seed, so that a
    study that is cut short has as many runs of every arm.
    """

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self.folder = config.out or Path("runs") / "study" / config.name
        self.calibration, self.plans = self.folder / "calibration", self.folder / "plans"
        self.design, self.start = self.folder / "design.json", self.folder / "start.json"
        cells = [Cell(arm, seed) for arm in config.arms for seed in config.seeds_of(arm)]
        by_role = len(config.rates) > 1
        self.cells = sorted(cells, key=lambda c: (by_role and ORDER[c.arm.role], c.seed))
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

    def started(self) -> bool:
        """Whether the start model was evaluated, and few enough of its answers are cut off."""
        return self.start.exists() and not self.refusal()

    def refusal(self) -> str:
        """Why the study may not begin from this model; empty if it may."""
        start, most = StartAnswers.load(self.start), self.config.outcome.cut_off
        if start.cut_off <= most or self.config.allow_cut_off:
            return ""
        limit = self.config.train.rollout.max_tokens
        return (
            f"{start.model}: {start.cut_off:.1%} of {start.answers} dense answers are cut off at "
            f"{limit} tokens, allowed: {most:.0%}. A comparison would measure the limit: raise "
            "train.rollout.max_tokens, take another start, or set --allow-cut-off"
        )

    def cell(self, name: str) -> Cell:
        by_name = {cell.name: cell for cell in self.cells}
        if name not in by_name:
            raise ValueError(f"no cell {name!r}; expected one of {', '.join(by_name)}")
        return by_name[name]

    def training(self, cell: Cell, rate: float) -> TrainConfig:
        """The settings of a run: the common ones, changed by its arm and seed."""
        base, run = self.config.train, {"name": cell.name, "seed": cell.seed}
        changes: dict[str, Any] = {
            "optimiser": {"rate": self._rate(cell.arm, rate)},
            "gate": {"bin": base.gate.bin or self.config.surface.bin},  # the same in all
            "run": {**run, "out": str(self.folder_of(cell))},
        }
        if base.data.task is not None:
            changes["data"] = {"first": base.data.first + cell.seed * APART}
        return self.config.training(cell.arm, str(self.plan_of(cell.arm)), changes)

    def _rate(self, arm: ArmConfig, rate: float) -> float:
        own: float | None = arm.setting("optimiser.rate")
        return rate if own is None else own

    def run(self) -> StudyRun | None:
        """What identifies this run; None before its design is written, and of older studies."""
        return StudyDesign.load(self.design).run if self.design.exists() else None

    def write_design(self, rate: float, command: str, run: StudyRun | None = None) -> None:
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
            cut_off=outcome.cut_off,
            allow_cut_off=config.allow_cut_off,
            analysis=config.analysis,
            run=run or self.run(),
            arms=tuple(self._arm(arm, rate) for arm in config.arms),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        design.save(self.design)

    def _arm(self, arm: ArmConfig, rate: float) -> StudyArm:
        budget, plan = arm.budget, self.plan_of(arm)
        if arm.like is not None and plan.exists():
            budget = int(Schedule.load(plan).budgets[0])
        corrections = self.training(Cell(arm, 0), rate).algorithm.corrections
        return StudyArm(
            **arm.model_dump(include={"name", "role", "target", "like", "schedule", "train"}),
            kind=arm.kind,
            budget=budget,
            seeds=self.config.seeds_of(arm),
            rate=self._rate(arm, rate),
            correction=describe(corrections),
        )


def describe(corrections: tuple[Choice, ...]) -> str:
    """Names and settings of corrections: "token-tis, cap 2"."""
    parts = []
    for choice in corrections:
        settings = choice.settings.items()
        numbers = [
            f"{name} {v:g}" if isinstance(v, float) else f"{name} {v}" for name, v in settings
        ]
        parts.append(", ".join([choice.use, *numbers]))
    return "; ".join(parts) or "none"
