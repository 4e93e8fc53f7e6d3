"""The outcome of a study: arms against the baseline, schedules against fixed budgets, controls.

Values are as measured; one that was not measured is None.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from sparrow.schema.base import File, Record
from sparrow_recipes.study import comparing
from sparrow_recipes.study.analysis import Analysis, analyse
from sparrow_recipes.study.config import LAST
from sparrow_recipes.study.files import (
    CellTail,
    StartAnswers,
    StudyArm,
    StudyCell,
    StudyDesign,
    StudyFolder,
)
from sparrow_recipes.study.judging import CellOutcome, judge, less, mean, measures, values

MOVED = 2.0  # standard errors by which a control that must not move may do so
DRIFTS = {
    "step_p05": "sparse/step/p05",
    "step_p05_uncertain": "sparse/step/p05_uncertain",
    "step_uncertain": "sparse/step/uncertain",
    "step_entropy": "actor/entropy",
}

Drift = tuple[float | None, float | None]  # at the start and at the end, over seeds with both


class Spread(Record):
    """Statistics of a value over the cells of an arm."""

    mean: float
    low: float
    high: float


class ArmOutcome(Record):
    """One arm over its seeds. The gap is the baseline's final accuracy less the arm's."""

    name: str
    role: str
    target: float | None
    finals: comparing.FinalAccuracies | None
    gap: comparing.Difference | None
    lags: bool | None
    start: float | None  # mean accuracy before training
    p05: Spread | None  # realised in the worst bin, over cells
    collapsed: tuple[int, ...]  # seeds
    without_result: tuple[str, ...]  # cells
    rollout: Mapping[str, float | None]  # measures of all its steps
    start_against_end: Mapping[str, Drift]
    same_bins: float | None  # mean change of p05 over bins that both calibrations have
    cells: tuple[CellOutcome, ...]

    @property
    def runs(self) -> int:
        """That have a result."""
        return len(self.cells) - len(self.without_result)


class FixedComparison(Record):
    """A schedule minus the fixed budget of equal cost; positive accuracy: it is better."""

    schedule: str
    fixed: str
    accuracy: comparing.Difference | None
    better: bool | None
    worse: bool | None
    less: Mapping[str, float | None]  # p05 of the worst bin, density, kept, seconds


class Control(Record):
    """A control that must not change: its mean change, and the standard error."""

    change: float
    error: float
    moved: bool


class StudyResults(File):
    """The results of a study."""

    what: ClassVar[str] = "study results"
    version: ClassVar[int] = 3
    made_by: ClassVar[str] = "sparrow study"

    format: int = 3
    design: StudyDesign
    verdicts: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()
    arms: tuple[ArmOutcome, ...]
    common_variance: float | None
    schedule_against_fixed: tuple[FixedComparison, ...]
    negative_control: Control | None
    analysis: Analysis | None = None
    start: StartAnswers | None = None

    @property
    def baseline(self) -> ArmOutcome:
        return self.role("baseline")[0]

    def role(self, role: str) -> list[ArmOutcome]:
        return [arm for arm in self.arms if arm.role == role]


def conclude(study: StudyFolder) -> StudyResults:
    """Compute the results of a study from its files so far, without verdicts."""
    design = study.design
    judged = {name: [judge(cell, design) for cell in cells] for name, cells in study.cells.items()}
    samples = {name: _sample(cells, design) for name, cells in judged.items()}
    healthy = [
        sample
        for arm in design.arms
        if arm.role in ("baseline", "arm") and (sample := samples[arm.name]) is not None
        if not any(cell.collapse for cell in judged[arm.name])
    ]
    common = comparing.pooled(
        healthy
    )  # what an arm with one seed borrows: of arms without a collapse
    arms = {arm.name: _arm(study, arm, judged[arm.name], samples, common) for arm in design.arms}
    flat = [arm for arm in arms.values() if arm.role == "flat"]
    return StudyResults(
        design=design,
        arms=tuple(arms.values()),
        common_variance=common,
        schedule_against_fixed=tuple(
            _fixed(arms[arm.like], arms[arm.name], common, design)
            for arm in design.arms
            if arm.like
        ),
        negative_control=_control(flat[0], design) if flat else None,
        analysis=analyse(study, judged),
        start=study.start,
    )


def _sample(cells: Sequence[CellOutcome], design: StudyDesign) -> comparing.FinalAccuracies | None:
    finals = {cell.seed: cell.final for cell in cells if cell.final is not None}
    least = min((cell.evaluations for cell in cells if cell.final is not None), default=0)
    return comparing.sample(finals, design.problems * least) if finals else None


def _arm(
    study: StudyFolder,
    arm: StudyArm,
    judged: Sequence[CellOutcome],
    samples: Mapping[str, comparing.FinalAccuracies | None],
    common: float | None,
) -> ArmOutcome:
    sample, base = samples[arm.name], samples[study.design.baseline.name]
    cells = study.cells[arm.name]
    gap = None
    if sample is not None and base is not None and arm.role != "baseline":
        gap = comparing.difference(base, sample, common)
    pairs = [(cell.start, cell.tail) for cell in cells if cell.start and cell.tail]
    tails = [cell.worst.p05 for cell in judged if cell.worst is not None]
    return ArmOutcome(
        name=arm.name,
        role=arm.role,
        target=arm.target,
        finals=sample,
        gap=gap,
        lags=None if gap is None else comparing.exceeds(gap.value, gap.error, study.design.lag),
        start=mean(cell.start for cell in judged),
        p05=Spread(mean=fmean(tails), low=min(tails), high=max(tails)) if tails else None,
        collapsed=tuple(cell.seed for cell in judged if cell.collapse),
        without_result=tuple(cell.name for cell in judged if not cell.measured),
        rollout=measures([line for cell in cells for line in cell.steps]),
        start_against_end=_drifts(cells, pairs),
        same_bins=mean(_change(start, tail) for start, tail in pairs),
        cells=tuple(judged),
    )


def _drifts(
    cells: Sequence[StudyCell], pairs: Sequence[tuple[CellTail, CellTail]]
) -> dict[str, Drift]:
    """How tail and entropy moved: recalibrated, and by the first and last quarter of the steps."""
    quarters = {
        name: _drift(_quarters(values(cell.steps, key)) for cell in cells)
        for name, key in DRIFTS.items()
    }
    return {
        "worst": _drift((_lowest(a, "p05"), _lowest(b, "p05")) for a, b in pairs),
        "worst_uncertain": _drift(
            (_lowest(a, "p05_uncertain"), _lowest(b, "p05_uncertain")) for a, b in pairs
        ),
        "entropy": _drift((a.entropy, b.entropy) for a, b in pairs),
        **quarters,
    }


def _drift(pairs: Iterable[Drift]) -> Drift:
    """Means over the cells that have both ends."""
    measured = [(a, b) for a, b in pairs if a is not None and b is not None]
    return mean(a for a, _ in measured), mean(b for _, b in measured)


def _quarters(values: Sequence[float]) -> Drift:
    part = max(1, len(values) // 4)
    return mean(values[:part]), mean(values[-part:])


def _lowest(tail: CellTail, field: str) -> float | None:
    values = (getattr(bin, field) for bin in tail.bins)
    return min((value for value in values if value is not None), default=None)


def _change(start: CellTail, tail: CellTail) -> float | None:
    """Mean change of p05 over the bins that both have."""
    before = {bin.start: bin.p05 for bin in start.bins}
    return mean(less(bin.p05, before.get(bin.start)) for bin in tail.bins)


def _fixed(
    planned: ArmOutcome, fixed: ArmOutcome, common: float | None, design: StudyDesign
) -> FixedComparison:
    gap = None
    if planned.finals is not None and fixed.finals is not None:
        gap = comparing.difference(planned.finals, fixed.finals, common)
    costs = ("density", "kept", "seconds")
    return FixedComparison(
        schedule=planned.name,
        fixed=fixed.name,
        accuracy=gap,
        better=None if gap is None else comparing.exceeds(gap.value, gap.error, design.lag),
        worse=None if gap is None else comparing.exceeds(-gap.value, gap.error, design.lag),
        less={
            "p05": less(*(arm.p05.mean if arm.p05 else None for arm in (planned, fixed))),
            **{name: less(planned.rollout[name], fixed.rollout[name]) for name in costs},
        },
    )


def _control(flat: ArmOutcome, design: StudyDesign) -> Control | None:
    """Final minus start of the control that does not train, with its binomial error."""
    changes, variances = [], []
    for cell in flat.cells:
        if cell.start is not None and cell.final is not None:
            changes.append(cell.final - cell.start)
            ends = ((cell.start, 1), (cell.final, cell.evaluations or LAST))
            variances.append(sum(p * (1 - p) / (design.problems * count) for p, count in ends))
    if not changes:
        return None
    change, error = fmean(changes), math.sqrt(sum(variances)) / len(variances)
    return Control(change=change, error=error, moved=comparing.exceeds(abs(change), error, MOVED))
