"""The result of `sparrow plan`: budgets by length, their acceptance and cost, alternatives."""

from typing import Any, ClassVar, Literal

from sparrow.schema.base import File, Record, Table
from sparrow.schema.evaluation import Estimate
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Length

By = Literal["low", "p05"]
"""The value that must reach the target: the lower end of the interval of p05, or p05."""


class PlanBin(Record):
    """A bin of lengths. budget None: dense. p05 None: not measured."""

    start: Length
    stop: Length | None
    budget: int | None
    p05: float | None
    low: float | None
    high: float | None
    mean: float | None
    prompts: int | None
    p0_1: Estimate | None = None  # the 0.1 % quantile; plans of older versions have none
    hard_misses: Estimate | None = None  # per 1000 tokens
    kept_share: float  # of the keys and values that dense rows read
    seconds: float
    dense_seconds: float


class PlanAtTarget(Record):
    """The plan at another target; if unreachable, the nearest target that is reachable."""

    target: float
    budgets: tuple[int | None, ...] = ()
    speed_up: float | None = None
    reached: bool
    variant: str | None = None
    nearest: float | None = None


class ComparedBin(Record):
    """The p05 of the surface for the budget of another schedule, or for the next smaller one."""

    start: int
    budget: int | None
    measured: int | None
    p05: float | None


class Compared(Record):
    """Another schedule on the same workload."""

    name: str
    starts: tuple[int, ...]
    budgets: tuple[int | None, ...]
    speed_up: float
    differs: tuple[str, ...]
    bins: tuple[ComparedBin, ...]


class CheckedBin(Record):
    """The acceptance measured by a check run with the schedule of the plan."""

    start: int
    stop: int
    p05: float
    low: float
    high: float
    p0_1: Estimate | None = None
    hard_misses: Estimate | None = None
    prompts: int


class PlannedVariant(Record):
    """A variant that the plan considered."""

    name: str
    speed_up: float
    limit: float


class PlanFile(Table, File):
    """A plan, stored as plan.json: docs/calibrate.md describes every field."""

    title: ClassVar[str] = (
        "{0.model}, p05 >= {0.target:g}: {0.speed_up:.2f}x the speed of dense on {0.hardware}"
    )
    shown: ClassVar[str] = "bins"

    what: ClassVar[str] = "plan"
    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "sparrow plan"

    format: int = version
    model: str
    variant: str
    target: float
    by: By
    hard_misses: float | None = None  # most per 1000 tokens; None: not bounded
    bins: tuple[PlanBin, ...]
    sensitivity: tuple[PlanAtTarget, ...]
    speed_up: float
    limit: float
    eflops: float
    eflops_printed: float
    seconds: float
    dense_seconds: float
    steps: int
    ms_step: float
    dense_ms_step: float
    tokens: int
    capacity: int
    bytes: int
    dense_bytes: int
    hardware: str
    hardware_note: str
    workload: str
    variants: tuple[PlannedVariant, ...]
    compare: Compared | None
    check: tuple[CheckedBin, ...] | None
    notes: tuple[str, ...]
    schedule: Schedule

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"hard_misses": None} | data
