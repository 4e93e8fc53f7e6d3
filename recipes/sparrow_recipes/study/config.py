"""The configuration of `sparrow study`: arms, seeds, criteria of the outcome, the analysis."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sparrow.schema import types
from sparrow.schema.base import FieldError, Record, problems
from sparrow.schema.loading import merge
from sparrow.schema.options import option
from sparrow.schema.train import TrainConfig

# Rows of seeds are a million apart, and numbers of rows have 63 bits.
StudySeed = Annotated[int, Field(ge=0, le=2**40)]
ArmRole = Literal["baseline", "arm", "collapses", "flat"]
ArmKind = Literal["dense", "target", "fixed", "budget", "schedule"]
Right = Literal["higher", "lower", "open", "non-inferior"]
Pair = tuple[types.Name, types.Name]  # arms
Shares = Annotated[tuple[types.Share, types.Share], Field(strict=False)]
LAST = 3  # evaluations at the end whose mean is a run's final accuracy
MOST_RUNS = 4096
OVERRIDES = {
    "algorithm",
    "batch",
    "optimiser",
    "rollout",
}  # sections of train that an arm may change
Rule = tuple[str, object, bool, str]  # field, its value, whether it is wrong, what is allowed


def _older_arm(values: Any) -> Any:
    """Older files have `rate` and `corrections` beside `train`."""
    if not isinstance(values, dict) or not {"rate", "corrections"} & values.keys():
        return values
    older = {"rate": "optimiser", "corrections": "algorithm"}
    moved = {older[key]: {key: value} for key, value in values.items() if key in older}
    others = {key: value for key, value in values.items() if key not in older}
    return {**others, "train": merge(moved, values.get("train", {}))}


class ArmConfig(Record):
    """One kind of training; rollouts are dense without target, budget, like and schedule.

    Roles: baseline, which the others are compared with; arm; collapses, the control that must
    collapse (or the study finds nothing); flat, the control that must not change.
    """

    name: Annotated[types.FolderName, Field(max_length=128)]  # with a seed it names a folder
    role: ArmRole = "arm"
    target: types.Fraction | None = None  # a schedule planned for this p05
    budget: types.Budget | None = None  # one budget at all lengths, tokens
    like: types.Name | None = None  # one budget that reads as much as the schedule of this arm
    schedule: types.Name | None = None  # a schedule by name, or a file
    seeds: tuple[StudySeed, ...] | None = None  # None: the study's
    train: dict[str, Any] = Field(default_factory=dict)  # settings of [train] that differ

    _older = model_validator(mode="before")(_older_arm)

    def _check(self) -> None:
        ways = ("target", "budget", "like", "schedule")
        chosen = {name: value for name in ways if (value := getattr(self, name)) is not None}
        self.require(len(chosen) <= 1, "name", f"at most one of {', '.join(ways)}", chosen)
        allowed = f"settings of {', '.join(sorted(OVERRIDES))}, without a budget or a schedule"
        attention = self.setting("rollout.attention") or {}
        fits = self.train.keys() <= OVERRIDES and not attention.keys() & {"budget", "schedule"}
        self.require(fits, "train", allowed)

    def setting(self, key: str) -> Any:
        """Its own value of a setting of `train`; None: the study's."""
        value: Any = self.train
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def kind(self) -> ArmKind:
        if self.target is not None:
            return "target"
        if self.budget is not None:
            return "budget"
        if self.schedule is not None:
            return "schedule"
        return "dense" if self.like is None else "fixed"

    @property
    def dense(self) -> bool:
        return self.kind == "dense"


class SurfaceConfig(Record):
    """The surface that schedules are planned from: measured first, or a file."""

    surface: types.Name | None = None  # surface.json of `sparrow calibrate`, of the same weights
    budgets: tuple[types.Budget, ...] = ()  # to measure; empty: by the lengths
    bin: types.Tokens = 512
    prompts: Annotated[int, Field(ge=8, le=2**16)] = 48  # fewer are too few for a bin
    by: Literal["p05", "low"] = "p05"  # what must reach a target: p05, or its interval's lower end
    first: types.RowNumber = 50_000  # number of the first prompt, outside the training rows


class OutcomeConfig(Record):
    """Criteria of collapse, lag and equality, fixed before the first run."""

    drop: types.Fraction = 0.10  # final accuracy this far below the start is a collapse
    length: types.Fraction = 0.5  # median length below this share of the start's is flagged
    lag: Annotated[float, Field(gt=0, le=1e6)] = 2.0  # standard errors below the baseline
    tolerance: types.Fraction = 0.05  # margin of non-inferiority, in right of all answers
    # Accuracy that every seed of the baseline must gain for a rate to be taken; -1: none.
    gain: Annotated[float, Field(ge=-1, le=1)] = 0.15
    cut_off: types.Fraction = 0.05  # share of dense answers; with more, arms are not compared


class PredictionConfig(Record):
    """What a hypothesis predicts; it holds if all of its predictions do.

    right: whether the interval of `compare`, first arm less second, lies above 0, below 0, holds 0
    (open), or lies above -tolerance (non-inferior). fell: by arm, the least and the largest share
    of runs that fall.
    """

    hypothesis: types.Name
    compare: Pair | None = None
    right: Right | None = None
    fell: dict[types.Name, Shares] = Field(default_factory=dict)

    def _check(self) -> None:
        both = (self.compare is None) == (self.right is None)
        self.require(both, "right", "together with compare")
        self.require(self.fell or self.right, "hypothesis", "with right or fell")


class AnalysisConfig(Record):
    """The analysis, fixed before the first run: pairs of arms, and what is predicted of them."""

    primary: Pair | None = None  # tested for non-inferiority: an arm, and what it is compared with
    compare: tuple[Pair, ...] = ()  # more pairs
    confidence: types.Fraction = 0.90  # of Welch's intervals
    # Assumed standard deviations of runs within an arm, for the power before it runs.
    sd: Annotated[tuple[types.Fraction, ...], Field(min_length=1)]
    predictions: tuple[PredictionConfig, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs of arms that are compared, the primary one first."""
        primary = () if self.primary is None else (self.primary,)
        predicted = [p.compare for p in self.predictions if p.compare is not None]
        return tuple(dict.fromkeys([*primary, *self.compare, *predicted]))

    @property
    def arms(self) -> set[str]:
        fell = {name for prediction in self.predictions for name in prediction.fell}
        return {name for pair in self.pairs for name in pair} | fell


class ProbeConfig(Record):
    """Answers whose acceptance is measured before and after every run, under its schedule."""

    prompts: types.Count = 32
    samples: Annotated[int, Field(ge=2, le=2**16)] = 2

    def _check(self) -> None:
        types.refuse_many({"prompts": self.prompts, "samples": self.samples})


class StudyConfig(Record):
    """`sparrow study`. `train` has the settings that all runs share."""

    name: types.FolderName = option("study", "Of the study.")
    out: types.Directory | None = option(None, "Default: runs/study/NAME.")
    _older = types.older_out
    seeds: tuple[StudySeed, ...] = option((0, 1, 2), "Of the arms.")
    rates: tuple[types.Rate, ...] = option((1e-4, 3e-5, 1e-5), "Tried in turn, the largest first.")
    parallel: types.Workers = option(1, "Runs at a time, on one device.")
    allow_cut_off: bool = option(
        False, "Begin although more dense answers are cut off than outcome.cut_off, and compare."
    )
    arms: tuple[ArmConfig, ...]
    surface: SurfaceConfig = SurfaceConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    analysis: AnalysisConfig | None = None  # None: arms against the baseline, with controls
    probe: ProbeConfig = ProbeConfig()
    train: TrainConfig

    @property
    def baseline(self) -> ArmConfig:
        return next(arm for arm in self.arms if arm.role == "baseline")

    def seeds_of(self, arm: ArmConfig) -> tuple[int, ...]:
        return self.seeds if arm.seeds is None else arm.seeds

    def training(self, arm: ArmConfig, schedule: str, changes: Mapping[str, Any]) -> TrainConfig:
        """The settings of an arm's run; schedule: its file, unless it is dense."""
        attention = {} if arm.dense else {"rollout": {"attention": {"schedule": schedule}}}
        merged = merge(self.train.model_dump(mode="json"), arm.train, attention, dict(changes))
        return TrainConfig.model_validate_json(json.dumps(merged))

    def _check(self) -> None:
        for field, value, wrong, allowed in (*self._arm_rules(), *self._training_rules()):
            if wrong:
                raise FieldError(field, value, allowed)
        for arm in self.arms:
            try:
                self.training(arm, arm.name, {})
            except ValidationError as error:
                allowed = f"settings of train ({problems(error)})"
                raise FieldError("arms", f"train of {arm.name}", allowed) from None

    def _arm_rules(self) -> Iterator[Rule]:
        runs = sum(len(self.seeds_of(arm)) for arm in self.arms)
        unique = "unique and non-empty"
        yield "runs of all arms", runs, runs > MOST_RUNS, f"at most {MOST_RUNS} runs"
        for field, values in (("seeds", self.seeds), ("arms: names", [a.name for a in self.arms])):
            yield field, _repeated(values), bool(_repeated(values)), unique
        ordered = sorted(set(self.rates), reverse=True)
        wrong = not self.rates or list(self.rates) != ordered
        yield "rates", self.rates, wrong, "unique and non-empty, the largest first"
        roles: list[str] = [arm.role for arm in self.arms]
        for role, least, allowed in (("baseline", 1, "exactly one"), ("flat", 0, "at most one")):
            count = roles.count(role)
            yield f"arms of role {role}", count, not least <= count <= 1, allowed
        base = next((arm for arm in self.arms if arm.role == "baseline"), ArmConfig(name="none"))
        own_rate = base.setting("optimiser.rate")
        yield f"arms: {base.name}", own_rate, own_rate is not None, "a baseline at the study's rate"
        dense, allowed = self.analysis is not None or base.dense, "a dense baseline, or an analysis"
        yield f"arms: {base.name}", base.kind, not dense, allowed
        names = {arm.name for arm in self.arms}
        unknown = sorted((self.analysis.arms if self.analysis else set()) - names)
        yield "analysis", unknown, bool(unknown), f"arms: {', '.join(sorted(names))}"
        targets = [arm.name for arm in self.arms if arm.target is not None]
        like = f"an arm with a target: {', '.join(targets) or 'none'}"
        for arm in self.arms:
            seeds = self.seeds_of(arm)
            yield f"{arm.name}.seeds", _repeated(seeds), bool(_repeated(seeds)), unique
            yield f"{arm.name}.like", arm.like, arm.like not in (None, *targets), like
            stray = sorted(set(seeds) - set(self.seeds_of(base)))
            allowed = "seeds of the baseline, which every run is compared with"
            yield f"{arm.name}.seeds", stray, arm.role != "flat" and bool(stray), allowed

    def _training_rules(self) -> Iterator[Rule]:
        """The surface needs its own prompts; `train` must leave settings to the arms."""
        train, surface = self.train, self.surface
        data, attention, mode = train.data, train.rollout.attention, train.gate.mode
        decoding = train.rollout.decoding
        measured = data.task is not None and surface.surface is None
        seen, allowed = surface.first + surface.prompts > data.first, f"rows before {data.first}"
        yield "surface.first", surface.first, measured and seen, allowed
        given = attention.budget, attention.schedule, decoding
        is_set = any(value is not None for value in given)
        yield "train.rollout.attention", "settings", is_set, "none: the arms decide"
        yield "train.run.out", train.run.out, train.run.out is not None, "out of the study"
        held_out = train.validation
        yield "train.validation.every", 0, not held_out.every, "steps between evaluations"
        yield "train.validation.sparse", True, held_out.sparse, "dense evaluations"
        allowed = "warn, which measures p05 and leaves the arms' budgets as they are"
        yield "train.gate.mode", mode, mode != "warn", allowed


def _repeated(values: Sequence[object]) -> str:
    """What is wrong with values that must be unique and non-empty; empty if nothing is."""
    twice = sorted(str(value) for value, count in Counter(values).items() if count > 1)
    return f"{twice[0]} twice" if twice else "" if values else "none"
