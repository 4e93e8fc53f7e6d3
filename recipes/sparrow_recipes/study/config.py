"""The configuration of `sparrow study`: arms that differ in one thing, seeds, and what counts."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sparrow.schema.base import FieldError, Record
from sparrow.schema.options import option
from sparrow.schema.train import Choice, TrainConfig
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    FolderName,
    Fraction,
    Name,
    Rate,
    RateOrZero,
    RowNumber,
    Tokens,
    Workers,
    refuse_many,
)

# Rows of seeds are a million apart, and numbers of rows have 63 bits.
StudySeed = Annotated[int, Field(ge=0, le=2**40)]
ArmRole = Literal["baseline", "arm", "collapses", "flat"]
LAST = 3  # evaluations at the end whose mean is a run's final accuracy
MOST_RUNS = 4096


class ArmConfig(Record):
    """One way to roll out. Dense where neither target, budget nor like is given.

    Roles: baseline, what the others are compared with; arm; collapses, the control that must (or
    the study says nothing); flat, the control that must not move.
    """

    name: Annotated[FolderName, Field(max_length=128)]  # with a seed it names a folder
    role: ArmRole = "arm"
    target: Fraction | None = None  # a schedule planned for this p05
    budget: Budget | None = None  # one budget at all lengths, tokens
    like: Name | None = None  # one budget that reads as much as the schedule of this arm
    seeds: tuple[StudySeed, ...] | None = None  # None: the study's
    rate: RateOrZero | None = None  # None: the study's
    corrections: tuple[Choice, ...] | None = None  # None: the training's

    @model_validator(mode="after")
    def _refuse_several(self) -> Self:
        given = {
            name: getattr(self, name)
            for name in ("target", "budget", "like")
            if getattr(self, name) is not None
        }
        if len(given) > 1:
            raise FieldError("ArmConfig", {"name": (given, "one of target, budget, like, or none")})
        return self

    @property
    def dense(self) -> bool:
        return self.target is None and self.budget is None and self.like is None


class SurfaceConfig(Record):
    """How schedules are planned: a surface that is measured first, or one that is there."""

    surface: Name | None = None  # surface.json of `sparrow calibrate`, of the same weights
    budgets: tuple[Budget, ...] = ()  # to measure; empty: by the lengths
    bin: Tokens = 512
    prompts: Annotated[int, Field(ge=8, le=2**16)] = 48  # fewer say nothing of a bin
    by: Literal["p05", "low"] = "p05"  # what must reach a target: p05, or its interval's lower end
    first: RowNumber = 50_000  # number of the first prompt, apart from others


class OutcomeConfig(Record):
    """What counts as collapse, lag and equality; fixed before anything runs."""

    drop: Fraction = 0.10  # final accuracy this far below the start is a collapse
    length: Fraction = 0.5  # median length below this share of the start's is flagged
    lag: Annotated[float, Field(gt=0, le=1e6)] = 2.0  # standard errors below the baseline
    tolerance: Fraction = 0.05  # gap to the baseline that still counts as equal, for the threshold
    # Accuracy that every seed of the baseline must gain for a rate to be taken.
    gain: Annotated[float, Field(ge=-1, le=1)] = 0.15


class ProbeConfig(Record):
    """Answers whose acceptance is measured before and after every run, with its own schedule."""

    prompts: Count = 32
    samples: Annotated[int, Field(ge=2, le=2**16)] = 2

    @model_validator(mode="after")
    def _refuse_many(self) -> Self:
        refuse_many("ProbeConfig", {"prompts": self.prompts, "samples": self.samples})
        return self


class StudyConfig(Record):
    """`sparrow study`. `train` is what every run has in common."""

    name: FolderName = option("study", "Of the study.")
    dir: Directory | None = option(None, "Default: runs/study/NAME.", "FOLDER", "out")
    seeds: tuple[StudySeed, ...] = option((0, 1, 2), "Of the arms.")
    rates: tuple[Rate, ...] = option((1e-4, 3e-5, 1e-5), "Tried in turn, the largest first.")
    parallel: Workers = option(1, "Runs at a time, on one device.")
    arms: tuple[ArmConfig, ...]
    surface: SurfaceConfig = SurfaceConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    probe: ProbeConfig = ProbeConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _refuse_many_runs(self) -> Self:
        runs = sum(len(self.seeds if arm.seeds is None else arm.seeds) for arm in self.arms)
        if runs > MOST_RUNS:
            allowed = f"at most {MOST_RUNS} runs: arms and their seeds"
            raise FieldError("StudyConfig", {"runs of all arms": (runs, allowed)})
        return self

    @model_validator(mode="after")
    def _refuse_order(self) -> Self:
        _refuse_repeated("seeds", self.seeds)
        if not self.rates or list(self.rates) != sorted(set(self.rates), reverse=True):
            allowed = "rates that differ, the largest first"
            raise FieldError("StudyConfig", {"rates": (self.rates, allowed)})
        return self

    @model_validator(mode="after")
    def _refuse_roles(self) -> Self:
        _refuse_repeated("arms: names", [arm.name for arm in self.arms])
        roles: list[str] = [arm.role for arm in self.arms]
        for role, wrong, allowed in (
            ("baseline", roles.count("baseline") != 1, "exactly one"),
            ("flat", roles.count("flat") > 1, "one at most"),
        ):
            if wrong:
                given = roles.count(role)
                raise FieldError("StudyConfig", {f"arms of role {role}": (given, allowed)})
        own = self.baseline
        if not own.dense or own.rate is not None:
            allowed = "a baseline that is dense, at the rate of the study"
            raise FieldError("StudyConfig", {f"arms: {own.name}": ("otherwise", allowed)})
        return self

    @model_validator(mode="after")
    def _refuse_arms(self) -> Self:
        targets = [arm.name for arm in self.arms if arm.target is not None]
        for arm in self.arms:
            seeds = self.seeds if arm.seeds is None else arm.seeds
            _refuse_repeated(f"{arm.name}.seeds", seeds)
            if arm.like is not None and arm.like not in targets:
                allowed = f"an arm with a target: {', '.join(targets) or 'there is none'}"
                raise FieldError("StudyConfig", {f"{arm.name}.like": (arm.like, allowed)})
            stray = set(seeds) - set(self.baseline.seeds or self.seeds)
            if arm.role != "flat" and stray:
                allowed = "seeds of the baseline, which every run is compared with"
                raise FieldError("StudyConfig", {f"{arm.name}.seeds": (sorted(stray), allowed)})
        return self

    @property
    def baseline(self) -> ArmConfig:
        return next(arm for arm in self.arms if arm.role == "baseline")

    @model_validator(mode="after")
    def _refuse_seen(self) -> Self:
        """Prompts of the surface must not be rows of training."""
        data, own = self.train.data, self.surface
        if data.task is not None and own.surface is None and own.first + own.prompts > data.first:
            allowed = f"rows before those of training, which begin at {data.first}"
            raise FieldError("StudyConfig", {"surface.first": (own.first, allowed)})
        return self

    @model_validator(mode="after")
    def _refuse_own(self) -> Self:
        """What the arms decide is not the training's to say."""
        attention, train = self.train.rollout.attention, self.train
        if attention.budget is not None or attention.schedule is not None or attention.dense:
            raise FieldError("StudyConfig", {"train.rollout.attention": ("given", "by the arms")})
        if train.run.dir is not None:
            raise FieldError("StudyConfig", {"train.run.dir": (train.run.dir, "dir of the study")})
        if not train.validation.every:
            allowed = "steps between evaluations: they are the study's outcome"
            raise FieldError("StudyConfig", {"train.validation.every": (0, allowed)})
        if train.validation.sparse:
            raise FieldError(
                "StudyConfig", {"train.validation.sparse": (True, "dense evaluations")}
            )
        if train.gate.mode == "act":
            allowed = "warn: a gate that changes budgets changes the arms"
            raise FieldError("StudyConfig", {"train.gate.mode": ("act", allowed)})
        if train.gate.mode == "off":
            raise FieldError(
                "StudyConfig", {"train.gate.mode": ("off", "warn, which measures p05")}
            )
        return self


def _refuse_repeated(name: str, values: Sequence[object]) -> None:
    twice = sorted(str(value) for value, count in Counter(values).items() if count > 1)
    if twice or not values:
        given = f"{twice[0]} twice" if twice else "none"
        raise FieldError("StudyConfig", {name: (given, "one at least, and each once")})
