"""A plan as it is written: budgets by length, what they keep and cost, and what stands beside."""

from typing import ClassVar, Literal

from sparrow.schema.base import File, Record, Table
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Length

By = Literal["low", "p05"]
"""What must reach the target: the lower end of p05's interval, or p05 itself."""


class PlanBin(Record):
    """One bin of lengths. budget None keeps everything, p05 None was not measured."""

    start: Length
    stop: Length | None
    budget: int | None
    p05: float | None
    low: float | None
    high: float | None
    mean: float | None
    prompts: int | None
    kept_share: float  # of the keys and values that dense rows read
    seconds: float
    dense_seconds: float


class PlanAside(Record):
    """The plan at another target; where that is out of reach, the nearest one that is not."""

    target: float
    budgets: tuple[int | None, ...] = ()
    speed_up: float | None = None
    reached: bool
    variant: str | None = None
    nearest: float | None = None


class ComparedBin(Record):
    """What the surface says of another schedule's budget, at least."""

    start: int
    budget: int | None
    measured: int | None
    p05: float | None


class Compared(Record):
    """Another schedule on the same rollout."""

    name: str
    starts: tuple[int, ...]
    budgets: tuple[int | None, ...]
    speed_up: float
    differs: tuple[str, ...]
    bins: tuple[ComparedBin, ...]


class CheckedBin(Record):
    """What a check run under the plan's schedule measured."""

    start: int
    stop: int
    p05: float
    low: float
    high: float
    prompts: int


class PlannedVariant(Record):
    """A variant that was planned with."""

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
    bins: tuple[PlanBin, ...]
    sensitivity: tuple[PlanAside, ...]
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
