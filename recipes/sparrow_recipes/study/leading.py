"""Leading indicators: which metric moves before accuracy falls, over all runs of a study.

A run *falls* at the first evaluation that is more than FALL below its best one before. An indicator
*alarms* at the first step at which the mean of MEAN_OF steps lies more than SDS standard deviations
of the run's FIRST steps beyond their mean, on its bad side. In a run that fell it *leads* if the
alarm comes by the last evaluation before the fall, *follows* if it comes after the fall or never,
and otherwise counts for neither, as evaluations do not say when between them accuracy fell. An
alarm in a run that did not fall is false.

An indicator leads over all runs if the one-sided sign test of leads against follows has p <= 0.05
and at most FALSE of the runs that did not fall have an alarm.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

from sparrow.schema.base import Record
from sparrow.schema.run_folder import Metrics
from sparrow_recipes.study.files import StudyCell

FALL = 0.10
FIRST, MEAN_OF, SDS = 10, 3, 2.0
FALSE, LEVEL = 0.25, 0.05

INDICATORS = {  # metric of a step, and +1 if it is bad to rise
    "p05": ("sparse/step/p05", -1),
    "p0.1": ("sparse/step/p0_1", -1),
    "hard misses": ("sparse/step/hard_misses", 1),
    "entropy": ("actor/entropy", 1),
    "KL": ("actor/kl_new_old", 1),  # of the policy after an update from that before
}


class RunAlarms(Record):
    """A run: the evaluation at which it fell and the one before, and the alarm of each indicator.

    None: never; an indicator that was not measured is left out.
    """

    cell: str
    fell: int | None
    before: int | None
    alarms: dict[str, int | None]


class Indicator(Record):
    """An indicator over all runs. first: runs that fell in which no other alarmed earlier."""

    name: str
    metric: str
    fallen: int
    leads: int
    follows: int
    first: int
    p: float | None
    others: int  # runs that did not fall
    false: int
    missing: int  # runs without the metric
    leading: bool | None  # None: no run fell, or none has the metric


def run_alarms(cell: StudyCell) -> RunAlarms:
    """When a run fell, and when each indicator alarmed."""
    fell, before = fall(cell)
    series = {name: _series(cell.steps, metric) for name, (metric, _) in INDICATORS.items()}
    return RunAlarms(
        cell=f"{cell.arm.name}-{cell.seed}",
        fell=fell,
        before=before,
        alarms={
            name: alarm(points, INDICATORS[name][1])
            for name, points in series.items()
            if len(points) >= FIRST + MEAN_OF
        },
    )


def fall(cell: StudyCell) -> tuple[int | None, int | None]:
    """The first evaluation more than FALL below the best before it, and the one before that."""
    measured = [(e.step, e.accuracy) for e in cell.evaluations if e.accuracy is not None]
    for place, (step, accuracy) in enumerate(measured):
        best = max((value for _, value in measured[:place]), default=accuracy)
        if accuracy < best - FALL - 1e-9:
            return step, measured[place - 1][0]
    return None, None


def alarm(points: Sequence[tuple[int, float]], sign: int) -> int | None:
    """The first step at which the mean of MEAN_OF steps is beyond the band of the first steps."""
    first = [sign * value for _, value in points[:FIRST]]
    limit = fmean(first) + SDS * stdev(first)
    for end in range(FIRST + MEAN_OF, len(points) + 1):
        if fmean(sign * value for _, value in points[end - MEAN_OF : end]) > limit:
            return points[end - 1][0]
    return None


def _series(steps: Sequence[Metrics], metric: str) -> list[tuple[int, float]]:
    return [(line.step, v) for line in steps if (v := line.values.get(metric)) is not None]


def indicators(runs: Sequence[RunAlarms]) -> list[Indicator]:
    """Every indicator over the runs of a study."""
    return [_indicator(name, runs) for name in INDICATORS]


def _indicator(name: str, runs: Sequence[RunAlarms]) -> Indicator:
    from scipy.stats import binomtest  # takes a while to import

    having = [run for run in runs if name in run.alarms]
    fallen = [run for run in having if run.fell is not None]
    others = [run for run in having if run.fell is None]
    leads, follows = (sum(map(holds, fallen, [name] * len(fallen))) for holds in (_leads, _follows))
    false = sum(run.alarms[name] is not None for run in others)
    decided = leads + follows
    p = float(binomtest(leads, decided, alternative="greater").pvalue) if decided else None
    few = false <= FALSE * len(others)
    return Indicator(
        name=name,
        metric=INDICATORS[name][0],
        fallen=len(fallen),
        leads=leads,
        follows=follows,
        first=sum(_first(run, name) for run in fallen),
        p=p,
        others=len(others),
        false=false,
        missing=len(runs) - len(having),
        leading=(p is not None and p <= LEVEL and few) if fallen else None,
    )


def _leads(run: RunAlarms, name: str) -> bool:
    at = run.alarms[name]
    return at is not None and run.before is not None and at <= run.before


def _follows(run: RunAlarms, name: str) -> bool:
    at = run.alarms[name]
    return at is None or (run.fell is not None and at > run.fell)


def _first(run: RunAlarms, name: str) -> bool:
    at = run.alarms[name]
    return at is not None and at == min(step for step in run.alarms.values() if step is not None)
