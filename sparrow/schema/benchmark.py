"""What benchmarks measured, and where: `sparrow bench ... --json` and the demo's timing."""

from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from sparrow.schema.base import File, Record

Rounds = Annotated[tuple[float, ...], Field(min_length=1)]


class Machine(Record):
    """Where figures were taken, and with which versions."""

    device: str
    cpus: int | None
    threads: int | None = None
    torch: str
    triton: str | None = None
    transformers: str | None = None
    numba: str | None = None
    command: str = ""

    def describe(self) -> str:
        """In a table's title."""
        return f"{self.device}, {self.cpus} CPUs, torch {self.torch}"


class Benchmark(Record):
    """A machine, the settings of a benchmark, and its rows of figures, by the names of its JSON."""

    model_config = ConfigDict(extra="allow")

    machine: Machine

    if TYPE_CHECKING:

        def __init__(self, *, machine: Machine, **figures: Any) -> None: ...

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class SpeedCase(Record):
    """Milliseconds of decode steps, dense and sparse, that took turns."""

    name: str
    context: int
    what: str
    dense_ms: Rounds
    sparse_ms: Rounds
    why: str

    @property
    def speed_up(self) -> float:
        return median(self.dense_ms) / median(self.sparse_ms)


class Speed(File):
    """speed.json of the demo: dense against sparse on one machine."""

    what: ClassVar[str] = "timing"
    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "sparrow demo"

    format: int = 1
    machine: Machine
    note: str
    cases: Annotated[tuple[SpeedCase, ...], Field(min_length=1)]
