"""The configuration of `sparrow study`: arms, seeds, and criteria of the outcome."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from sparrow.schema import types
from sparrow.schema.base import FieldError, Record
from sparrow.schema.options import option
from sparrow.schema.train import Choice, TrainConfig

# Rows of seeds are a million apart, and numbers of rows have 63 bits.
StudySeed = Annotated[int, Field(ge=0, le=2**40)]
ArmRole = Literal["baseline", "arm", "collapses", "flat"]
ArmKind = Literal["dense", "target", "fixed", "budget"]
LAST = 3  # evaluations at the end whose mean is a run's final accuracy
MOST_RUNS = 4096
Rule = tuple[str, object, bool, str]  # field, its value, whether it is wrong, what is allowed


class ArmConfig(Record):
    """One kind of rollout; dense without target, budget and like.

    Roles: baseline, which the others are compared with; arm; collapses, the control that must
    collapse (or the study finds nothing); flat, the control that must not change.
    """

    name: Annotated[types.FolderName, Field(max_length=128)]  # with a seed it names a folder
    role: ArmRole = "arm"
    target: types.Fraction | None = None  # a schedule planned for this p05
    budget: types.Budget | None = None  # one budget at all lengths, tokens
    like: types.Name | None = None  # one budget that reads as much as the schedule of this arm
    seeds: tuple[StudySeed, ...] | None = None  # None: the study's
    rate: types.RateOrZero | None = None  # None: the study's
    corrections: tuple[Choice, ...] | None = None  # None: the training's

    def _check(self) -> None:
        ways = {"target": self.target, "budget": self.budget, "like": self.like}
        chosen = {name: value for name, value in ways.items() if value is not None}
        allowed = "at most one of target, budget and like"
        self.require(len(chosen) <= 1, "name", allowed, chosen)

    @property
    def kind(self) -> ArmKind:
        if self.target is not None:
            return "target"
        if self.budget is not None:
            return "budget"
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
    tolerance: types.Fraction = 0.05  # gap to the baseline that counts as equal (the threshold)
    # Accuracy that every seed of the baseline must gain for a rate to be taken.
    gain: Annotated[float, Field(ge=-1, le=1)] = 0.15


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
    arms: tuple[ArmConfig, ...]
    surface: SurfaceConfig = SurfaceConfig()
    outcome: OutcomeConfig = OutcomeConfig()
    probe: ProbeConfig = ProbeConfig()
    train: TrainConfig

    @property
    def baseline(self) -> ArmConfig:
        return next(arm for arm in self.arms if arm.role == "baseline")

    def seeds_of(self, arm: ArmConfig) -> tuple[int, ...]:
        return self.seeds if arm.seeds is None else arm.seeds

    def _check(self) -> None:
        for field, value, wrong, allowed in (*self._arm_rules(), *self._training_rules()):
            if wrong:
                raise FieldError(field, value, allowed)

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
        allowed = "a baseline that is dense, at the rate of the study"
        yield f"arms: {base.name}", "otherwise", not base.dense or base.rate is not None, allowed
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
