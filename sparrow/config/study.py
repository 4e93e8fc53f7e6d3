"""The configuration of `sparrow study`: arms that differ in one thing, seeds, and what counts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sparrow.config.schema import Directory, Name, Section
from sparrow.config.train import Choice, Positive, TrainConfig
from sparrow.config.warmup import Seed, Whole
from sparrow.records import FieldError

Fraction = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Folder = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]  # an arm's name names a folder
Role = Literal["baseline", "arm", "collapses", "flat"]


class ArmConfig(Section):
    """One way to roll out. Dense where neither target, budget nor like is given.

    Roles: baseline, what the others are compared with; arm; collapses, the control that must (or
    the study says nothing); flat, the control that must not move.
    """

    name: Folder
    role: Role = "arm"
    target: Fraction | None = None  # a schedule planned for this p05
    budget: Annotated[int, Field(ge=48)] | None = None  # one budget at all lengths, tokens
    like: Name | None = None  # one budget that reads as much as the schedule of this arm
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None  # None: the study's
    rate: Annotated[float, Field(ge=0, lt=1)] | None = None  # None: the study's
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


class SurfaceConfig(Section):
    """How schedules are planned: a surface that is measured first, or one that is there."""

    surface: Name | None = None  # surface.json of `sparrow calibrate`, of the same weights
    budgets: tuple[Annotated[int, Field(ge=48)], ...] = ()  # to measure; empty: by the lengths
    bin: Whole = 512
    prompts: Whole = 48
    by: Literal["p05", "low"] = "p05"  # what must reach a target: p05, or its interval's lower end
    first: Annotated[int, Field(ge=0)] = 50_000  # number of the first prompt, apart from others


class OutcomeConfig(Section):
    """What counts as collapse, lag and equality; fixed before anything runs."""

    drop: Fraction = 0.10  # final accuracy this far below the start is a collapse
    length: Fraction = 0.5  # median length below this share of the start's is flagged
    lag: Positive = 2.0  # standard errors below the baseline
    tolerance: Fraction = 0.05  # gap to the baseline that still counts as equal, for the threshold
    gain: Annotated[float, Field(ge=-1, le=1)] = (
        0.15  # accuracy that every baseline seed must gain for a rate to be taken
    )


class ProbeConfig(Section):
    """Answers whose acceptance is measured before and after every run, with its own schedule."""

    prompts: Whole = 32
    samples: Annotated[int, Field(ge=2)] = 2


class StudyConfig(Section):
    """`sparrow study`. `train` is what every run has in common."""

    name: Name = "study"
    dir: Directory | None = None  # None: runs/study/NAME
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0, 1, 2)
    rates: Annotated[tuple[Rate, ...], Field(min_length=1)] = (1e-4, 3e-5, 1e-5)
    parallel: Whole = 1  # runs at a time, on one device
    arms: Annotated[tuple[ArmConfig, ...], Field(min_length=1)]
    surface: SurfaceConfig = SurfaceConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    probe: ProbeConfig = ProbeConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _refuse_arms(self) -> Self:
        names = [arm.name for arm in self.arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FieldError("StudyConfig", {"arms": (twice[0], "names that differ")})
        roles = [arm.role for arm in self.arms]
        if roles.count("baseline") != 1:
            given = roles.count("baseline")
            raise FieldError("StudyConfig", {"arms of role baseline": (given, "exactly one")})
        if roles.count("flat") > 1:
            given = roles.count("flat")
            raise FieldError("StudyConfig", {"arms of role flat": (given, "one at most")})
        baseline = next(arm for arm in self.arms if arm.role == "baseline")
        if not baseline.dense:
            raise FieldError("StudyConfig", {"arms": (baseline.name, "a baseline that is dense")})
        targets = [arm.name for arm in self.arms if arm.target is not None]
        for arm in self.arms:
            if arm.like is not None and arm.like not in targets:
                allowed = f"an arm with a target: {', '.join(targets) or 'there is none'}"
                raise FieldError("StudyConfig", {f"{arm.name}.like": (arm.like, allowed)})
            stray = set(arm.seeds or self.seeds) - set(baseline.seeds or self.seeds)
            if arm.role != "flat" and stray:
                allowed = "seeds of the baseline, which every run is compared with"
                raise FieldError("StudyConfig", {f"{arm.name}.seeds": (sorted(stray), allowed)})
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
