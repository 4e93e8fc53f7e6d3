"""Configurations and results of `sparrow bench`, and the timing of the demo."""

import re
from statistics import median
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, PlainValidator

from sparrow.schema.base import File, Record, Table
from sparrow.schema.common import Device
from sparrow.schema.options import argument, option
from sparrow.schema.sampling import DraftTokens, DraftWeights
from sparrow.schema.types import Count, Name, Several, Tokens

MOST_IN_CASE = 2**28  # tokens
SHAPE = "Published shape with random weights, such as qwen3-1.7b. Default: by the machine."
DTYPE = "bf16 or fp32. Default: bf16 on a GPU, fp32 on a CPU."


class BenchCase(NamedTuple):
    """A case of a benchmark: `rows,tokens[,more]`."""

    rows: int
    tokens: int
    rest: str | None = None

    @classmethod
    def of(cls, value: object) -> "BenchCase":
        text = ",".join(map(str, filter(None, value))) if isinstance(value, tuple) else str(value)
        match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})(?:,(.*))?", text)
        if match is None or not int(match[1]) or int(match[2]) < 2:
            raise ValueError("two numbers such as 16,4096: at least 1 and at least 2")
        if int(match[1]) * int(match[2]) > MOST_IN_CASE:
            raise ValueError(f"at most {MOST_IN_CASE} tokens in all")
        return cls(int(match[1]), int(match[2]), match[3] or None)


def _train_case(value: object) -> BenchCase:
    case = BenchCase.of(value)
    if case.rest not in (None, "recompute", "compiled", "recompute,compiled"):
        raise ValueError("sequences,tokens[,recompute][,compiled]")
    return case


DecodeCase = Annotated[BenchCase, PlainValidator(BenchCase.of)]
TrainCase = Annotated[BenchCase, PlainValidator(_train_case)]
RequestTokens = Annotated[Tokens, Field(ge=17)]
NewTokens = Annotated[Tokens, Field(ge=2)]
Share = Annotated[float, Field(ge=0, le=1)]


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


class BenchExactConfig(Record):
    """`sparrow bench exact`."""

    model: Name | None = option(None, SHAPE)
    case: Several[DecodeCase] = option(
        (), "batch,context,SCHEDULE of the drafts, such as fixed-512-all. Default: by machine."
    )
    draft_tokens: DraftTokens = option(8, "Drafts of a round.")
    reselect: DraftTokens = option(1, "Drafts that read the pages selected for the first of them.")
    weights: DraftWeights = option("model", "Of the drafts: model, or int8, a copy in 8 bits.")
    acceptance: Several[Share] = option(
        (0.95,), "Imposed, 0 to 1, by position in a round; the last one counts for those beyond."
    )
    compare: Name | None = option(None, "Also time sparse decoding under this schedule.")
    flow: Name = "block_mean"
    dtype: Name | None = option(None, DTYPE)
    rounds: Count = option(8, "Rounds timed.")
    new_tokens: NewTokens | None = option(
        None,
        "Also run every case to its end: prompts of half its context to all of it, and so many "
        "tokens each.",
    )


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
    """The machine of a measurement, with package versions."""

    device: str
    cpus: int | None
    threads: int | None = None
    torch: str
    triton: str | None = None
    transformers: str | None = None
    numba: str | None = None
    command: str = ""

    def describe(self) -> str:
        """Describe the machine for the title of a table."""
        return f"{self.device}, {self.cpus} CPUs, torch {self.torch}"


class Benchmark(Table, Record):
    """Base of benchmark results: a machine and its figures.

    A terminal shows `columns` of the rows; `caption` is a format string over the result.
    """

    caption: ClassVar[str] = ""
    columns: ClassVar[str]
    group: ClassVar[str | None] = None  # the column whose values separate groups of rows

    machine: Machine


class ModelBenchmark(Benchmark):
    """A benchmark of one model."""

    model: str
    parameters: int
    dtype: str


class SplitRow(Record):
    """A row with an optional breakdown of its time."""

    split: Split | None = None

    @property
    def parts(self) -> str:
        """The breakdown in percent, the longest part first."""
        parts = sorted((self.split or {}).items(), key=lambda item: -item[1])
        whole = sum(took for _, took in parts)
        return ", ".join(f"{name} {took / whole:.0%}" for name, took in parts if took > whole / 200)


class DecodeRow(SplitRow):
    """Decode steps of one batch, context and schedule (None: dense); medians over rounds.

    `split` is in milliseconds of a step.
    """

    batch: int
    context: int
    schedule: str | None
    steps: int
    mean_length: float
    ms_step: float
    ms_step_rounds: Rounds
    ms_device: float
    ms_device_rounds: Rounds
    idle: float
    tokens_per_s: float
    bytes: int
    bytes_weights: int
    bytes_kv: int
    bytes_landmarks: int
    tb_per_s: float
    of_peak: float | None
    speed_up: float | None


class DecodeBenchmark(ModelBenchmark):
    """`sparrow bench decode`."""

    title: ClassVar[str] = "Decode, {0.model}"
    columns: ClassVar[str] = (
        "batch context schedule ms_step ms_device idle tb_per_s of_peak speed_up parts"
    )

    flow: str
    peak_bytes_per_s: float | None
    rounds: int
    rows: tuple[DecodeRow, ...]


class ExactRow(Record):
    """Exact decoding of one batch, context and schedule of the drafts, against dense.

    Milliseconds of a step; draft and verification are device time. tokens_per_round is by row.
    """

    batch: int
    context: int
    schedule: str | None
    ms_dense: float
    ms_dense_device: float
    ms_sparse: float | None
    ms_draft: float
    ms_verify: float
    ms_round: float
    verify_to_dense: float
    tokens_per_round: float
    tokens_per_s_dense: float
    tokens_per_s_sparse: float | None
    tokens_per_s: float
    speed_up: float
    speed_up_sparse: float | None


class ExactRun(Record):
    """All requests of a case to their end, beside the sum of measured steps or rounds.

    Prompts are computed before the clock starts, in `seconds_prompts`.
    """

    who: str
    batch: int
    context: int
    new_tokens: int
    seconds_prompts: float
    seconds: float
    expected: float
    ratio: float  # to what is expected
    tokens_per_s: float
    speed_up: float


class ExactBenchmark(ModelBenchmark):
    """`sparrow bench exact`: acceptance is imposed, by position in a round."""

    title: ClassVar[str] = "Exact decoding, {0.model}, {0.draft_tokens} draft tokens"
    caption: ClassVar[str] = "{0.complete}"
    columns: ClassVar[str] = (
        "batch context schedule ms_dense ms_draft ms_verify verify_to_dense ms_round "
        "tokens_per_round speed_up speed_up_sparse"
    )

    flow: str
    draft_tokens: int
    reselect: int
    weights: DraftWeights = "model"
    acceptance: tuple[float, ...]
    compare: str | None
    rows: tuple[ExactRow, ...]
    runs: tuple[ExactRun, ...]

    @property
    def complete(self) -> str:
        """What the complete runs gave, for the caption."""
        return "; ".join(
            f"{run.batch} requests to their end, {run.who}: {run.seconds:.4g} s, {run.ratio:.3f} "
            f"of what is expected, {run.speed_up:.3g}x"
            for run in self.runs
        )


class LayerRow(Record):
    """One part of a layer's decode attention; `flow` is None for dense attention."""

    flow: str | None
    part: str
    batch: int
    context: int
    kept: int
    layers: int
    calls: int
    us: float
    us_min: float
    us_max: float
    us_rounds: Rounds
    bytes: int
    tb_per_s: float
    of_peak: float | None
    of_read: float | None  # on a CPU: its speed over that of a plain read of the same memory


class StoredFlow(Record):
    """Bytes that a flow stores with a page, over all KV heads, and those of keys and values."""

    flow: str
    rule: str
    page_bytes: int
    kv_page_bytes: int
    of_kv: float


class LayerBenchmark(Benchmark):
    """`sparrow bench attention` and `sparrow flow bench`."""

    title: ClassVar[str] = "Attention of one layer, {0.dtype}"
    columns: ClassVar[str] = "flow part us us_min us_max tb_per_s of_read batch context kept"
    group: ClassVar[str | None] = "context"

    heads: dict[str, int]
    dtype: str
    peak_bytes_per_s: float | None
    replays: int
    rounds: int
    flows: tuple[StoredFlow, ...]
    rows: tuple[LayerRow, ...]


class RolloutWorkload(Record):
    """Prompts of equal length, one rollout each; transformers may generate fewer tokens."""

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


class RolloutRow(SplitRow):
    """One engine and schedule, with a breakdown on a CPU, or why it `failed`."""

    who: str
    new_tokens: int
    tokens: int = 0
    seconds: float | None = None
    tokens_per_s: float | None = None
    failed: str | None = None
    ratio: float | None = None  # to transformers' generate on as many new tokens

    @property
    def parts(self) -> str:
        return self.failed or super().parts


class RolloutBenchmark(ModelBenchmark):
    """`sparrow bench rollout`."""

    title: ClassVar[str] = (
        "Rollout, {0.model} ({0.parameters} weights, {0.dtype}), {0.workload.rollouts} rollouts"
    )
    columns: ClassVar[str] = "who new_tokens seconds tokens_per_s ratio parts"

    preset: str
    workload: RolloutWorkload
    weights: str  # real or random
    rows: tuple[RolloutRow, ...]


class TrainWork(Record):
    """The batch of one optimiser step, and its options."""

    sequences: int
    length: int
    recompute: bool
    compiled: bool = False

    @classmethod
    def of(cls, case: BenchCase) -> "TrainWork":
        named = {name: name in (case.rest or "") for name in ("recompute", "compiled")}
        return cls(sequences=case.rows, length=case.tokens, **named)


class TrainRow(TrainWork):
    """Timed optimiser steps; `memory_gib` is the peak allocation of a GPU."""

    seconds: Rounds
    tokens_per_second: float
    teraflops: float
    utilisation: float | None
    memory_gib: float | None
    predicted_gib: float


class TrainBenchmark(Benchmark):
    """`sparrow bench train`; `changes` are what the model is cut to."""

    title: ClassVar[str] = "{0.model} {0.changes}, one optimiser step"
    shown: ClassVar[str] = "cases"
    columns: ClassVar[str] = (
        "sequences length recompute compiled tokens_per_second teraflops utilisation memory_gib "
        "predicted_gib"
    )

    model: str
    changes: dict[str, int]
    cases: tuple[TrainRow, ...]


class TraceRow(Record):
    """A rollout with one attention: a sum of steps, or a complete run with its `expected` sum."""

    who: str
    tokens: int
    seconds: float
    tokens_per_s: float
    limit_seconds: float | None = None
    of_limit: float | None = None
    expected: float | None = None
    ratio: float | None = None


class TraceCheck(Record):
    """A complete run of shortened requests, compared with the sum of its measured steps."""

    cutoff: int
    steps: int
    rows: tuple[TraceRow, ...]
    speed_up: float
    expected_speed_up: float
    confirmed: bool


class TracePoint(Record):
    """Measured steps of one batch size and page-table width."""

    who: str
    batch: int
    pages: int
    rows: int
    mean_length: float
    longest: int
    bytes: int
    ms_step: float
    ms_step_rounds: Rounds


class TraceBenchmark(ModelBenchmark):
    """`sparrow bench trace`; `share` is the speed-up's of that in `limit`, what bytes allow."""

    title: ClassVar[str] = "Trace, {0.model}, {0.schedule}"
    caption: ClassVar[str] = (
        "{0.speed_up:.3f}x of {0.limit[speed_up]:.3f}x that bytes allow: {0.share:.1%}; a complete "
        "run to {0.confirmation.cutoff} tokens: {0.confirmation.speed_up:.3f}x, expected "
        "{0.confirmation.expected_speed_up:.3f}x"
    )
    columns: ClassVar[str] = "who tokens seconds tokens_per_s limit_seconds of_limit"

    schedule: str
    prompt: int
    lengths: tuple[int, ...]
    memory: float
    limit: dict[str, Any]
    rows: tuple[TraceRow, ...]
    speed_up: float
    share: float
    confirmation: TraceCheck
    points: tuple[TracePoint, ...]


class SpeedCase(Record):
    """Milliseconds of decode steps, dense, sparse and exact (of a token) in turn."""

    name: str
    context: int
    what: str
    dense_ms: Rounds
    sparse_ms: Rounds
    exact_ms: Rounds | None = None
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
