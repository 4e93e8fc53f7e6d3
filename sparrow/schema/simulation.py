"""The configuration and the result of `sparrow simulate`."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from sparrow.schema.base import File, Record, Table
from sparrow.schema.options import option
from sparrow.schema.types import (
    Count,
    InFlight,
    Name,
    Seconds,
    Seed,
    Setting,
    Several,
    Share,
    Tokens,
    Workers,
)

Staleness = Annotated[int, Field(ge=0, le=1000)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]
LateChoice = Literal["wait", "abort"]


class DispatchConfig(Record):
    """Which prompts start, and which groups are a batch."""

    prompt_filter: Name = option(
        "all", "Which prompts: all, drop_solved, greso or module:function."
    )
    prompt_settings: dict[str, Setting] = option({}, "Of prompt_filter, such as {step = 0.02}.")
    group_filter: Name = option(
        "all", "Which groups: all, informative (their rewards differ) or module:function."
    )
    group_settings: dict[str, Setting] = option({}, "Of group_filter.")
    order: Name = option("earliest_deadline", "earliest_deadline, fifo or module:function.")
    late: LateChoice = option("wait", "Groups that are due and under way: wait, or abort them.")
    oversample: Annotated[float, Field(ge=1, le=16)] = option(
        1.0, "Times the prompts that are needed; the rest is aborted."
    )
    replay: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "Share of a batch that was used before."
    )
    in_flight: InFlight = option(
        "keep", "Keys and values under new weights: keep, recompute, or restart the sample."
    )

    def _check(self) -> None:
        fits = self.oversample == 1 or self.late == "abort"
        self.require(fits, "oversample", "1 with late = wait, where nothing is aborted")


def fresh_groups(batch: int, replay: float) -> int:
    """Groups of a batch that are not replayed."""
    return batch - int(batch * replay)


def listening_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not bare or (":" in bare) != (bare != host) or not port.isascii() or not port.isdigit():
        raise ValueError("HOST:PORT, such as 127.0.0.1:7777 or [::1]:7777")
    if int(port) > 65535:
        raise ValueError("a port up to 65535")
    return bare, int(port)


def _checked_address(text: str) -> str:
    listening_address(text)
    return text


class TrainDispatchConfig(DispatchConfig):
    """`run.loop = "async"`: how rollout and learning overlap."""

    staleness: Staleness = option(1, "Versions between a token and its update, at most.")
    attempts: Annotated[int, Field(ge=1, le=100)] = option(
        3, "Times that a prompt is tried before it is dropped."
    )
    deadline: Seconds | None = option(None, "Of a group; then it is tried again. None: no limit.")
    workers: Annotated[int, Field(ge=0, le=64)] = option(
        1, "Rollout processes of this machine; 0 only with listen."
    )
    listen: Annotated[Name, AfterValidator(_checked_address)] | None = option(
        None, "HOST:PORT for `sparrow worker` of other machines; port 0: any that is free."
    )
    worker_timeout: Seconds = option(
        60.0, "Without a request, after which a worker of another machine is lost."
    )

    def _check(self) -> None:
        super()._check()
        some = self.workers > 0 or self.listen is not None
        self.require(some, "workers", "1 or more without dispatch.listen")


class SimulateConfig(DispatchConfig):
    """`sparrow simulate`: workers, a learner, lengths, failures, and the staleness to try."""

    staleness: Several[Staleness] = option(
        (0, 1, 2, 4, 8), "Versions between a token and its update, at most."
    )
    hours: Annotated[float, Field(gt=0, le=24 * 365)] = option(24.0, "Simulated time.")
    workers: Workers = option(8, "Rollout workers.")
    slots: Count = option(32, "Prompts that a worker answers at once.")
    batch: Count = option(64, "Prompts of a step.")
    samples: Count = option(8, "Answers to a prompt.")
    tokens: Tokens = option(14_000, "Median answer.")
    spread: Annotated[float, Field(ge=0, le=3)] = option(
        0.65, "Of the logarithm of its length: standard deviation."
    )
    max_tokens: Tokens = option(32_768, "Longest answer.")
    token_ms: Positive = option(20.0, "Milliseconds that a token takes.")
    learn_seconds: Seconds = option(120.0, "Of an update, with its log-probs.")
    sync_seconds: NotNegative = option(2.0, "Until workers have new weights; they do not stop.")
    recompute_seconds: NotNegative = option(2.0, "Of a prompt under way, with in_flight recompute.")
    solved: Annotated[float, Field(gt=0, lt=1)] = option(0.5, "Mean share of right answers.")
    rows: Annotated[int, Field(ge=1, le=2**40)] = option(10_000, "Of the data.")
    failure_hours: NotNegative = option(0.0, "Mean time between failures of a worker. 0: none.")
    repair_seconds: NotNegative = option(300.0, "Until a worker is back.")
    lose: Share = option(0.0, "Share of the workers that is lost for good.")
    lose_hour: NotNegative = option(1.0, "The hour in which they are lost.")
    seed: Seed = option(0, "Of the random draws.")

    def _check(self) -> None:
        super()._check()
        self.require(bool(self.staleness), "staleness", "one at least")
        self.require(self.tokens <= self.max_tokens, "tokens", "at most max_tokens")
        self.require(self.lose < 1, "lose", "below 1: some workers must stay")


class SimulatedRun(Record):
    """What came out for one staleness."""

    staleness: int
    steps: int
    seconds_per_step: float | None  # of the second half of the time; None: no step ended
    speed_up: float | None  # over the first staleness that was asked for
    learner_idle: float  # shares
    rollout_idle: float
    token_staleness: float  # mean over used tokens
    oldest: int  # largest, over used groups
    buffered: float  # groups, mean over time
    wasted: float  # share of the generated tokens that no step used
    dropped: dict[str, int]  # prompts by reason
    again: int  # prompts that were dispatched again


class SimulateResult(Table, File):
    """Runs by staleness, and what to choose."""

    title: ClassVar[str] = "{0.workers} workers, {0.hours:g} simulated hours"
    what: ClassVar[str] = "simulation"
    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "sparrow simulate"

    format: int = 1
    workers: int
    hours: float
    rows: tuple[SimulatedRun, ...]
    advice: tuple[str, ...]
