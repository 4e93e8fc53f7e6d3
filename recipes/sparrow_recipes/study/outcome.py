"""The outcome of a study: cells, arms against the baseline, schedules against fixed budgets.

A cell collapsed where the final accuracy is more than `drop` below the start, or the run gave no
numbers any more, or answers became shorter than `length` times the start while accuracy fell below
the start. Short answers alone are no collapse, as dense training shortens answers while accuracy
rises; they are flagged for every cell.

In the fit of the threshold a cell that diverged counts with accuracy 0: it has no policy left,
whatever its last evaluations said. Everywhere else values are as measured. A value that was not
measured is None.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import ClassVar

from sparrow.schema.base import File, Record
from sparrow.schema.run_folder import Metrics
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

OFTEN = 1 / 3  # a bin counts where so many of the watched answers, or of the steps, reach it
MOVED = 2.0  # standard errors by which a control that must not move may do so
STEP_BIN, WINDOW_MIN = re.compile(r"sparse/step/p05/bin_(\d+)$"), "sparse/accept_p05_min"
SURVIVORS = "sparse/step/survivors/bin_"
MEASURES: dict[str, tuple[Callable[[Sequence[float]], float], str]] = {
    "lowest_window": (min, WINDOW_MIN),
    "p05": (fmean, "sparse/step/p05"),
    "p0_1": (fmean, "sparse/step/p0_1"),
    "hard_misses": (fmean, "sparse/step/hard_misses"),
    "p05_uncertain": (fmean, "sparse/step/p05_uncertain"),
    "uncertain": (fmean, "sparse/step/uncertain"),
    "k3": (fmean, "mismatch/k3"),
    "least_ess": (min, "mismatch/ess"),
    "skipped": (max, "faults/skipped_updates"),  # logged as how many so far
    "seconds": (fmean, "timing_s/gen"),
    "median_seconds": (median, "timing_s/gen"),
    "density": (fmean, "sparse/density"),
    "kept": (fmean, "sparse/kv_budget"),
}
DRIFTS = {
    "step_p05": "sparse/step/p05",
    "step_p05_uncertain": "sparse/step/p05_uncertain",
    "step_uncertain": "sparse/step/uncertain",
    "step_entropy": "actor/entropy",
}

Drift = tuple[float | None, float | None]  # at the start and at the end, over seeds with both


class BinTail(Record):
    """p05 in a bin of lengths, mean over steps; survivors: share of watched answers that reach it.

    Older runs did not count survivors.
    """

    p05: float
    survivors: float | None


class Worst(Record):
    """The realised tail: p05 of the steps, averaged by bin of lengths, in the worst bin.

    A bin that fewer than a third of the watched answers reach (of older runs: that fewer than a
    third of the steps have) is rare and not the worst: its p05 is of few survivors.
    """

    p05: float
    bin: int
    rare: tuple[int, ...]
    bins: Mapping[int, BinTail]


class CellOutcome(Record):
    """The outcome of a cell. Only a cell that ended has a final accuracy."""

    arm: str
    seed: int
    status: str
    message: str
    steps: int
    start: float | None
    final: float | None
    last: float | None  # accuracy at the last evaluation: a final mean hides a late fall
    evaluations: int
    cut_off: float | None  # share of answers in the last evaluations, as final
    wrong: float | None
    start_length: float | None
    final_length: float | None
    short: bool | None
    collapse: tuple[str, ...]
    worst: Worst | None
    measures: Mapping[str, float | None]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def gain(self) -> float | None:
        return None if self.final is None or self.start is None else self.final - self.start

    @property
    def measured(self) -> bool:
        return self.final is not None or bool(self.collapse)


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
    """The results of a study. left_out_of_fit: by cell, why the fit could not use it."""

    what: ClassVar[str] = "study results"
    version: ClassVar[int] = 2
    made_by: ClassVar[str] = "sparrow study"

    format: int = 2
    design: StudyDesign
    verdicts: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()
    arms: tuple[ArmOutcome, ...]
    common_variance: float | None
    threshold: comparing.Threshold | None
    points: tuple[comparing.GapPoint, ...]
    points_beside: tuple[comparing.GapPoint, ...]
    left_out_of_fit: Mapping[str, str]
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
    points, beside, left_out = _points(design, list(arms.values()))
    flat = [arm for arm in arms.values() if arm.role == "flat"]
    return StudyResults(
        design=design,
        arms=tuple(arms.values()),
        common_variance=common,
        threshold=None if design.analysis else comparing.find_threshold(points, design.tolerance),
        points=tuple(points),
        points_beside=tuple(beside),
        left_out_of_fit=left_out,
        schedule_against_fixed=tuple(
            _fixed(arms[arm.like], arms[arm.name], common, design)
            for arm in design.arms
            if arm.like
        ),
        negative_control=_control(flat[0], design) if flat else None,
        analysis=analyse(study, judged),
        start=study.start,
    )


def judge(cell: StudyCell, design: StudyDesign) -> CellOutcome:
    """The outcome of a cell, finished or not; final is the mean of the last evaluations."""
    start = next((e for e in cell.evaluations if e.step == 0), None)
    ended = cell.status in ("done", "diverged")
    last = [e for e in cell.evaluations if e.step > 0][-LAST:] if ended else []
    final, before = mean(e.accuracy for e in last), start.accuracy if start else None
    begin, end = start.median if start else None, mean(e.median for e in last)
    short = None if begin is None or end is None else end < design.collapse.length * begin
    diverged = cell.status == "diverged" or any(e.accuracy is None for e in last)
    gain = less(final, before)
    collapse = {
        "accuracy": gain is not None and gain < -design.collapse.drop - 1e-9,  # but for rounding
        "diverged": diverged,
        "length": bool(short) and gain is not None and gain < 0,
    }
    return CellOutcome(
        arm=cell.arm.name,
        seed=cell.seed,
        status=cell.status,
        message=cell.end.message or "" if cell.end else "",
        steps=len(cell.steps),
        start=before,
        final=final,
        last=last[-1].accuracy if last else None,
        evaluations=sum(e.accuracy is not None for e in last),
        cut_off=mean(e.outcomes.cut_off if e.outcomes else None for e in last),
        wrong=mean(e.outcomes.wrong if e.outcomes else None for e in last),
        start_length=begin,
        final_length=end,
        short=short,
        collapse=tuple(reason for reason, holds in collapse.items() if holds),
        worst=worst_bin(cell.steps),
        measures=measures(cell.steps),
    )


def worst_bin(steps: Sequence[Metrics]) -> Worst | None:
    """The bin of lengths with the lowest mean p05 over the steps."""
    keys = {key for line in steps for key in line.values}
    bins = {int(match[1]): values(steps, key) for key in keys if (match := STEP_BIN.match(key))}
    counted = [line for line in steps if any(key.startswith(SURVIVORS) for key in line.values)]
    tails: dict[int, BinTail] = {}
    often: list[int] = []
    for start, p05 in sorted(bins.items()):
        reached = sum(values(counted, f"{SURVIVORS}{start}")) / len(counted) if counted else None
        tails[start] = BinTail(p05=fmean(p05), survivors=reached)
        share = len(p05) / len(steps) if reached is None else reached
        often += [start] if share >= OFTEN else []
    if not often:
        return None
    lowest = min(often, key=lambda start: tails[start].p05)
    rare = tuple(start for start in tails if start not in often)
    return Worst(p05=tails[lowest].p05, bin=lowest, rare=rare, bins=tails)


def measures(steps: Sequence[Metrics]) -> dict[str, float | None]:
    """The metrics of MEASURES over steps of a cell or of an arm; and sampled tokens a second."""
    measures: dict[str, float | None] = {}
    for name, (join, metric) in MEASURES.items():
        measured = values(steps, metric)
        measures[name] = join(measured) if measured else None
    timed = [
        (tokens, taken)
        for line in steps
        if (taken := line.values.get("timing_s/gen")) and (tokens := _answered(line)) is not None
    ]
    rate = sum(tokens for tokens, _ in timed) / sum(taken for _, taken in timed) if timed else None
    return {**measures, "tokens_a_second": rate}


def _answered(line: Metrics) -> float | None:
    """Tokens of a step's answers; the logged total includes the prompts."""
    total, answer = map(line.values.get, ("perf/total_num_tokens", "response_length/mean"))
    prompt = line.values.get("prompt_length/mean") or 0.0
    return None if total is None or not answer else total * answer / (answer + prompt)


def values(steps: Iterable[Metrics], key: str) -> list[float]:
    """The values of a metric in the steps that have it."""
    return [value for line in steps if (value := line.values.get(key)) is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the measured values; None without any."""
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


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


def _points(
    design: StudyDesign, arms: Sequence[ArmOutcome]
) -> tuple[list[comparing.GapPoint], list[comparing.GapPoint], dict[str, str]]:
    """Points of the fit, points shown beside it, and cells that give none with the reason."""
    base = design.baseline
    sample = next(arm.finals for arm in arms if arm.name == base.name)
    finals: Mapping[int, float] = {} if sample is None else sample.finals
    corrections = {arm.name: arm.correction for arm in design.arms}
    points: list[comparing.GapPoint] = []
    beside: list[comparing.GapPoint] = []
    left_out: dict[str, str] = {}
    for cell in (cell for arm in arms if arm.role != "flat" for cell in arm.cells):
        reason, worst = _unusable(cell, finals), cell.worst
        if not reason and worst is not None:
            final = 0.0 if "diverged" in cell.collapse or cell.final is None else cell.final
            first = cell.arm == base.name
            gap = 0.0 if first else finals[cell.seed] - final
            point = comparing.GapPoint(
                arm=cell.arm, seed=cell.seed, p05=worst.p05, gap=gap, baseline=first
            )
            same = corrections[cell.arm] == base.correction
            (points if same else beside).append(point)
            reason = "" if same else f"correction {corrections[cell.arm]}; shown, not fitted"
        left_out |= {cell.name: reason} if reason else {}
    return points, beside, left_out


def _unusable(cell: CellOutcome, finals: Mapping[int, float]) -> str:
    """Why a cell gives no point; empty if it gives one."""
    if not cell.measured:
        return cell.status if cell.status != "done" else "no evaluation after the start"
    if cell.worst is None:
        return "no p05 by bin in its steps"
    return "" if cell.seed in finals else "the baseline has no final accuracy with this seed"


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
