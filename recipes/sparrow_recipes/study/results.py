"""What came of a control study: results.json. A value that was not measured is None."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from sparrow.schema.base import File, Record
from sparrow_recipes.study.files import StudyDesign

PUBLISHED = 0.86  # the realised p05 that is said to suffice
Interval = tuple[float, float]  # at 95 %
End = float | Literal["open below", "open above"]  # of an interval
Drift = tuple[float | None, float | None]
"""A value at the start and at the end, over the seeds that have both."""


def interval_text(low: End, high: End) -> str:
    """Both ends; a round bracket is an open one."""
    ends = [end if isinstance(end, str) else f"{end:.3f}" for end in (low, high)]
    left, right = "[" if isinstance(low, float) else "(", "]" if isinstance(high, float) else ")"
    return f"{left}{', '.join(ends)}{right}"


class FinalAccuracies(Record):
    """Final accuracies of an arm by seed, and how many answers each is the mean of."""

    finals: Mapping[int, float]
    answers: int
    mean: float
    variance: float | None  # over seeds; None for one


class Difference(Record):
    """One arm's mean less another's, with Welch's interval; and between runs of the same seed."""

    value: float
    error: float
    errors: float | None  # how many standard errors it is from 0
    interval: Interval | None
    by_seed: Mapping[int, float]
    paired: float | None
    paired_interval: Interval | None


class GapPoint(Record):
    """One cell: realised p05 in the worst bin, and the gap to the baseline of its seed."""

    arm: str
    seed: int
    p05: float
    gap: float
    baseline: bool = False


class Threshold(Record):
    """The realised p05 at which the fitted gap comes within the tolerance, with its intervals.

    value lies in the bracket lower to upper. low, high: of the bracket, over draws of seeds;
    value_low, value_high: of the estimate alone. open_below and open_above count draws whose
    estimate was; empty: draws without an arm. fit: the gap at every observed p05.
    """

    value: End
    lower: End
    upper: End
    low: End
    high: End
    value_low: End
    value_high: End
    draws: int
    open_below: int
    open_above: int
    empty: int
    fit: tuple[tuple[float, float], ...]
    published: float
    holds_published: bool


class Worst(Record):
    """The realised tail: p05 of the steps, averaged by bin of lengths, in the worst bin."""

    p05: float
    bin: int
    rare: tuple[int, ...]  # bins that too few steps have


class CellOutcome(Record):
    """One cell, judged. Only one that came to its own end has a final accuracy."""

    arm: str
    seed: int
    status: str
    message: str
    steps: int
    start: float | None
    final: float | None
    last: float | None  # accuracy at the last evaluation: a final mean hides a late fall
    evaluations: int
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
    """A value over the cells of an arm."""

    mean: float
    low: float
    high: float


class ArmOutcome(Record):
    """One arm over its seeds. The gap is the baseline's final accuracy less the arm's."""

    name: str
    role: str
    target: float | None
    finals: FinalAccuracies | None
    gap: Difference | None
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
    """A schedule less the fixed budget that copies its cost; positive accuracy: it is better."""

    schedule: str
    fixed: str
    accuracy: Difference | None
    better: bool | None
    worse: bool | None
    less: Mapping[str, float | None]  # p05 of the worst bin, density, kept, seconds


class Control(Record):
    """A control that must not move: its mean change, and the standard error of that."""

    change: float
    error: float
    moved: bool


class StudyResults(File):
    """All that is concluded. `left_out_of_fit`: by cell, why the fit could not use it."""

    what: ClassVar[str] = "study results"
    version: ClassVar[int] = 2
    made_by: ClassVar[str] = "sparrow study"

    format: int = 2
    design: StudyDesign
    verdicts: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()
    arms: tuple[ArmOutcome, ...]
    common_variance: float | None
    threshold: Threshold | None
    points: tuple[GapPoint, ...]
    points_beside: tuple[GapPoint, ...]
    left_out_of_fit: Mapping[str, str]
    schedule_against_fixed: tuple[FixedComparison, ...]
    negative_control: Control | None

    @property
    def baseline(self) -> ArmOutcome:
        return self.role("baseline")[0]

    def role(self, role: str) -> list[ArmOutcome]:
        return [arm for arm in self.arms if arm.role == role]
