"""The outcome of a whole study: arms against the baseline, the threshold, schedule against fixed.

In the fit of the threshold a cell that diverged counts with accuracy 0: it has no policy left,
whatever its last evaluations said. Everywhere else values are as measured.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparrow.report.study.cells import Outcome, Spent, judge, mean, spent, values
from sparrow.report.study.comparing import Difference, Sample, difference, pooled
from sparrow.report.study.reading import Arm, Cell, Design, Study, Tail
from sparrow.report.study.threshold import Point, Threshold, find_threshold
from sparrow.schema.study import LAST

PUBLISHED = 0.86
MOVED = 2.0  # standard errors by which a control that must not move may do so


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A value at the start and at the end, over the seeds that have both."""

    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifts:
    """How tail and entropy moved: recalibrated (worst bin), and in the steps' own numbers.

    `same_bins`: mean change of p05 over bins that both calibrations have. Steps: first and last
    quarter of the steps.
    """

    worst: Drift
    worst_uncertain: Drift
    same_bins: float | None
    entropy: Drift
    step_p05: Drift
    step_p05_uncertain: Drift
    step_uncertain: Drift
    step_entropy: Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutcome:
    """One arm over its seeds. The gap is the baseline's final accuracy less the arm's."""

    arm: Arm
    cells: tuple[Outcome, ...]
    sample: Sample | None
    gap: Difference | None
    lags: bool | None
    spent: Spent
    drifts: Drifts

    @property
    def measured(self) -> tuple[Outcome, ...]:
        return tuple(cell for cell in self.cells if cell.measured or cell.collapse)

    @property
    def missing(self) -> tuple[Outcome, ...]:
        return tuple(cell for cell in self.cells if cell not in self.measured)

    @property
    def collapsed(self) -> tuple[int, ...]:
        return tuple(cell.seed for cell in self.cells if cell.collapse)

    @property
    def p05(self) -> tuple[float, ...]:
        """Realised p05 in the worst bin, by cell."""
        return tuple(cell.worst.p05 for cell in self.cells if cell.worst is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedComparison:
    """A schedule less the fixed budget that copies its cost; positive accuracy: it is better."""

    schedule: str
    fixed: str
    accuracy: Difference | None
    better: bool | None
    worse: bool | None
    p05: float | None
    density: float | None
    kept: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A control that must not move: its mean change, and the standard error of that."""

    change: float
    error: float

    @property
    def moved(self) -> bool:
        return abs(self.change) > MOVED * self.error + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """All that is concluded. `left_out`: cells that the fit could not use, and why."""

    design: Design
    arms: tuple[ArmOutcome, ...]
    common: float | None
    points: tuple[Point, ...]
    aside: tuple[Point, ...]
    left_out: tuple[tuple[str, str], ...]
    threshold: Threshold | None
    fixed: tuple[FixedComparison, ...]
    flat: Control | None
    strangers: tuple[str, ...]

    @property
    def baseline(self) -> ArmOutcome:
        return next(arm for arm in self.arms if arm.arm.role == "baseline")

    def role(self, *roles: str) -> tuple[ArmOutcome, ...]:
        return tuple(arm for arm in self.arms if arm.arm.role in roles)


def conclude(study: Study) -> StudyOutcome:
    """Everything that a study's files say so far."""
    design = study.design
    judged = {arm.name: tuple(judge(cell, design) for cell in study.of(arm)) for arm in design.arms}
    samples = {name: _sample(cells, design) for name, cells in judged.items()}
    common = _common(design, judged, samples)
    arms = tuple(_arm(study, arm, judged[arm.name], samples, common) for arm in design.arms)
    points, aside, left_out = _points(arms)
    flat = next((arm for arm in arms if arm.arm.role == "flat"), None)
    return StudyOutcome(
        design=design,
        arms=arms,
        common=common,
        points=points,
        aside=aside,
        left_out=left_out,
        threshold=find_threshold(points, design.tolerance),
        fixed=tuple(_fixed(arm, arms, common, design) for arm in arms if arm.arm.like),
        flat=None if flat is None else _control(flat, design),
        strangers=study.strangers,
    )


def _sample(cells: Sequence[Outcome], design: Design) -> Sample | None:
    finals = {cell.seed: cell.final for cell in cells if cell.final is not None}
    if not finals:
        return None
    answers = design.problems * min(cell.evaluations for cell in cells if cell.final is not None)
    return Sample(finals=finals, answers=answers)


def _common(
    design: Design,
    judged: dict[str, tuple[Outcome, ...]],
    samples: dict[str, Sample | None],
) -> float | None:
    """The variance over seeds that an arm with one seed borrows: of arms without a collapse."""
    healthy = [
        sample
        for arm in design.arms
        if arm.role in ("baseline", "arm") and (sample := samples[arm.name]) is not None
        if not any(cell.collapse for cell in judged[arm.name])
    ]
    return pooled(healthy)


def _arm(
    study: Study,
    arm: Arm,
    cells: tuple[Outcome, ...],
    samples: dict[str, Sample | None],
    common: float | None,
) -> ArmOutcome:
    own, base = samples[arm.name], samples[study.design.baseline.name]
    gap = None
    if own is not None and base is not None and arm.role != "baseline":
        gap = difference(base, own, common)
    every = [line for cell in study.of(arm) for line in cell.steps]
    return ArmOutcome(
        arm=arm,
        cells=cells,
        sample=own,
        gap=gap,
        lags=None if gap is None else gap.above(study.design.lag),
        spent=spent(every),
        drifts=_drifts(study.of(arm)),
    )


def _points(
    arms: Sequence[ArmOutcome],
) -> tuple[tuple[Point, ...], tuple[Point, ...], tuple[tuple[str, str], ...]]:
    """Points of the fit, points shown beside it, and cells that give none with the reason."""
    base = next(arm for arm in arms if arm.arm.role == "baseline")
    finals = {} if base.sample is None else base.sample.finals
    points: list[Point] = []
    aside: list[Point] = []
    left_out: list[tuple[str, str]] = []
    for arm in arms:
        if arm.arm.role == "flat":
            continue
        same = arm.arm.correction == base.arm.correction
        for cell in arm.cells:
            reason = _unusable(cell, finals.keys())
            if reason:
                left_out.append((cell.name, reason))
                continue
            if not same:
                left_out.append((cell.name, f"correction {arm.arm.correction}; shown, not fitted"))
            assert cell.worst is not None, "cells without a tail were left out"
            own = 0.0 if "diverged" in cell.collapse or cell.final is None else cell.final
            gap = 0.0 if arm is base else finals[cell.seed] - own
            point = Point(
                arm=arm.arm.name,
                seed=cell.seed,
                p05=cell.worst.p05,
                gap=gap,
                baseline=arm is base,
            )
            (points if same else aside).append(point)
    return tuple(points), tuple(aside), tuple(left_out)


def _unusable(cell: Outcome, seeds: Collection[int]) -> str:
    """Why a cell gives no point; empty where it gives one."""
    if not cell.measured and not cell.collapse:
        return cell.status if cell.status != "done" else "no evaluation after the start"
    if cell.worst is None:
        return "no p05 by bin in its steps"
    if cell.seed not in seeds:
        return "the baseline has no final accuracy with this seed"
    return ""


def _fixed(
    fixed: ArmOutcome, arms: Sequence[ArmOutcome], common: float | None, design: Design
) -> FixedComparison:
    planned = next(arm for arm in arms if arm.arm.name == fixed.arm.like)
    found = None
    if planned.sample is not None and fixed.sample is not None:
        found = difference(planned.sample, fixed.sample, common)
    return FixedComparison(
        schedule=planned.arm.name,
        fixed=fixed.arm.name,
        accuracy=found,
        better=None if found is None else found.above(design.lag),
        worse=None if found is None else found.below(design.lag),
        p05=_less(mean(planned.p05), mean(fixed.p05)),
        density=_less(planned.spent.density, fixed.spent.density),
        kept=_less(planned.spent.kept, fixed.spent.kept),
        seconds=_less(planned.spent.seconds, fixed.spent.seconds),
    )


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _control(flat: ArmOutcome, design: Design) -> Control | None:
    """Final less start of the control that does not train, with its binomial error."""
    changes, variances = [], []
    for cell in flat.cells:
        if cell.start is None or cell.final is None:
            continue
        changes.append(cell.final - cell.start)
        ends = ((cell.start, 1), (cell.final, cell.evaluations or LAST))
        variances.append(sum(p * (1 - p) / (design.problems * count) for p, count in ends))
    if not changes:
        return None
    change = sum(changes) / len(changes)
    return Control(change=change, error=math.sqrt(sum(variances)) / len(variances))


def _drifts(cells: Sequence[Cell]) -> Drifts:
    pairs = [
        (cell.start, cell.tail)
        for cell in cells
        if cell.start is not None and cell.tail is not None
    ]
    return Drifts(
        worst=_drift([(_lowest(a, "p05"), _lowest(b, "p05")) for a, b in pairs]),
        worst_uncertain=_drift(
            [(_lowest(a, "p05_uncertain"), _lowest(b, "p05_uncertain")) for a, b in pairs]
        ),
        same_bins=mean(_change(a, b) for a, b in pairs),
        entropy=_drift([(a.entropy, b.entropy) for a, b in pairs]),
        step_p05=_quarters(cells, "sparse/step/p05"),
        step_p05_uncertain=_quarters(cells, "sparse/step/p05_uncertain"),
        step_uncertain=_quarters(cells, "sparse/step/uncertain"),
        step_entropy=_quarters(cells, "actor/entropy"),
    )


def _drift(pairs: Sequence[tuple[float | None, float | None]]) -> Drift:
    """Means over the cells that have both ends."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Drift(start=mean(a for a, _ in known), end=mean(b for _, b in known))


def _lowest(tail: Tail, field: str) -> float | None:
    known = [value for each in tail.bins if (value := getattr(each, field)) is not None]
    return min(known, default=None)


def _change(start: Tail, tail: Tail) -> float | None:
    """Mean change of p05 over the bins that both have."""
    before = {each.start: each.p05 for each in start.bins}
    return mean(_less(each.p05, before.get(each.start)) for each in tail.bins)


def _quarters(cells: Sequence[Cell], key: str) -> Drift:
    """The mean over the first and over the last quarter of each cell's steps."""
    pairs = []
    for cell in cells:
        found = values(cell.steps, key)
        part = max(1, len(found) // 4)
        pairs.append((mean(found[:part]), mean(found[-part:])))
    return _drift(pairs)
