"""`sparrow bench`: configurations and results; the demo's timing."""

import re
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, PlainValidator

from sparrow.schema.base import File, Record
from sparrow.schema.common import Device
from sparrow.schema.options import argument, option
from sparrow.schema.types import Count, Name, Several, Tokens

MOST_IN_CASE = 2**28  # tokens
SHAPE = "Published shape with random weights, such as qwen3-1.7b. Default: by the machine."
DTYPE = "bf16 or fp32. Default: bf16 on a GPU, fp32 on a CPU."


class BenchCase(NamedTuple):
    """`rows,tokens` and what follows."""

    rows: int
    tokens: int
    rest: str

    @classmethod
    def of(cls, given: object) -> "BenchCase":
        text = ",".join(map(str, given)) if isinstance(given, tuple) else str(given)
        match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})(?:,(.*))?", text)
        if match is None or not int(match[1]) or int(match[2]) < 2:
            raise ValueError("two numbers such as 16,4096: at least 1 and at least 2")
        if int(match[1]) * int(match[2]) > MOST_IN_CASE:
            raise ValueError(f"at most {MOST_IN_CASE} tokens in all")
        return cls(int(match[1]), int(match[2]), match[3] or "")


def _train_case(given: object) -> BenchCase:
    case = BenchCase.of(given)
    if case.rest not in ("", "recompute", "compiled", "recompute,compiled"):
        raise ValueError("sequences,tokens[,recompute][,compiled]")
    return case


DecodeCase = Annotated[BenchCase, PlainValidator(BenchCase.of)]
TrainCase = Annotated[BenchCase, PlainValidator(_train_case)]
RequestTokens = Annotated[Tokens, Field(ge=17)]


class BenchAttentionConfig(Record):
    """`sparrow bench attention`."""

    device: Device = "auto"


class BenchDecodeConfig(Record):
    """`sparrow bench decode`."""

    model: Name | None = option(None, SHAPE)
    case: Several[DecodeCase] = option(
        (), "batch,context[,SCHEDULE]: a preset or fixed-N (N tokens kept). Default: by machine."
    )
    flow: Name = "block_mean"
    dtype: Name | None = option(None, DTYPE)
    steps: Count = option(64, "Steps timed in a round.")


class BenchRolloutConfig(Record):
    """`sparrow bench rollout`."""

    workload: Name | None = argument(None, "gpu, cpu-tiny or cpu-smollm2. Default: by the machine.")
    dtype: Name | None = option(None, DTYPE)
    peer: bool = option(True, "Also run transformers' generate.")
    peer_tokens: Tokens | None = option(None, "Its new tokens. Default: by the workload.")


class BenchTrainConfig(Record):
    """`sparrow bench train`."""

    model: Name | None = option(None, SHAPE)
    case: Several[TrainCase] = option(
        (), "sequences,tokens[,recompute][,compiled]. Default: by the machine."
    )
    steps: Count = option(5, "Steps timed.")
    device: Device = "auto"


class BenchTraceConfig(Record):
    """`sparrow bench trace`."""

    model: Name = option("qwen3-1.7b", "Published shape with random weights.")
    schedule: Name | None = option(None, "A preset, or fixed-N. Default: the shape's at 0.86.")
    dtype: Name | None = option(None, "bf16 (the default) or fp32.")
    requests: Count = option(60, "Requests of the workload.")
    longest: RequestTokens = option(32_768, "Longest request, in tokens.")
    cutoff: RequestTokens = option(2048, "Longest request of the complete run.")


# Results.


Rounds = Annotated[tuple[float, ...], Field(min_length=1)]
Split = dict[str, float]  # time by part of the work


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


class Figures(Record):
    """What was measured of one case: figures by the names that they have in the JSON."""

    model_config = ConfigDict(extra="allow")

    if TYPE_CHECKING:

        def __init__(self, **figures: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @property
    def parts(self) -> str:
        """Where its time went (`split`), the longest first, in percent; or why it `failed`."""
        given = dict(self)
        parts = sorted((given.get("split") or {}).items(), key=lambda item: -item[1])
        whole = sum(took for _, took in parts)
        told = [f"{name} {took / whole:.0%}" for name, took in parts if took > whole / 200]
        return given.get("failed") or ", ".join(told)


class Benchmark(Figures):
    """A machine and its figures: rows, and what they have in common, as each verb says."""

    verb: str
    machine: Machine
    rows: tuple[Figures, ...]

    if TYPE_CHECKING:

        def __init__(self, **figures: Any) -> None: ...


class RolloutWorkload(Record):
    """Prompts of equal length, one rollout each; transformers may be given fewer new tokens."""

    model: str
    device: str
    rollouts: int
    prompt_tokens: int
    new_tokens: int
    peer_tokens: int
    schedules: tuple[str, ...]

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens


class TrainWork(Record):
    """Sequences of one optimiser step, and how it is taken."""

    sequences: int
    length: int
    recompute: bool
    compiled: bool = False


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
