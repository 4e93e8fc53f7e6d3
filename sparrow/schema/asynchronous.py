"""Looking at a run from its files: `sparrow status`, `sparrow audit`, and status.json."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from sparrow.files import read_document, write_document
from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.common import Device
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.run_folder import ActionLine, Measured, Shown
from sparrow.schema.sampling import Decoding
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    FolderName,
    Gib,
    Name,
    Workers,
    is_web_address,
)

PROMPTS = "prompts.sqlite"  # the ledger of prompts of an asynchronous run
WORKER_KEY = "SPARROW_WORKER_KEY"  # of the environment: the key of workers on other machines
STATUS = "status.json"  # where it is now
Number = Annotated[int, Field(ge=0, lt=2**53)]
Phase = Literal["waiting for groups", "learning", "evaluating", "ended", "stopped"]
State = Literal["running", "ended", "stopped", "stale"]


class WorkerStatus(Record):
    """A rollout worker of an asynchronous run."""

    name: Shown
    version: Number | None  # of its weights; None: it loads its first ones
    under_way: Number  # prompts
    heard: float  # seconds since its last message
    remote: bool = False
    dtype: Shown = ""
    attention: Shown = ""  # its own; "": as the gate says


class AsyncStatus(Record):
    """status.json: where an asynchronous run is, replaced about every second while it runs."""

    time: float  # when it was written, in seconds since 1970
    pid: Number
    step: Number  # steps taken
    steps: Number  # of the run
    version: Number  # weights that the workers have
    staleness: Number  # the bound
    phase: Phase
    under_way: Number  # prompts
    buffer: Number  # groups
    batch: Number  # groups of a step
    dropped: dict[Shown, Number]  # prompts by reason, so far
    again: Number  # prompts dispatched again, so far
    rollout_idle: float | None  # shares of the last step; None before the first
    learner_idle: float | None
    worker_pid: Number | None
    worker_restarts: Number
    evaluations_waiting: Number
    address: Shown | None = None  # where workers of other machines connect
    workers: tuple[WorkerStatus, ...] = ()
    advice: Shown = ""  # "more rollout workers" or "fewer rollout workers"

    def save(self, folder: Path) -> None:
        """Write status.json into the run's folder, atomically."""
        write_document(folder / STATUS, to_dict(self))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read it; None if the run has none, ValueError names a damaged file."""
        file = folder / STATUS
        if not file.exists():
            return None
        document = read_document(file, "status")
        try:
            return from_dict(cls, document)
        except ValueError as error:
            raise ValueError(f"status {file}: {error}") from error


# `sparrow worker`.


class WorkerConfig(Record):
    """`sparrow worker`: where the run is, and what differs on this machine."""

    connect: Name = option(..., "Address of the run, such as https://run.example.org.")
    name: FolderName | None = option(None, "Of this worker. Default: host and process.")
    model: Name | None = option(None, "Where the model is here. Default: as the run says.")
    device: Device | None = option(None, HELP["device"] + " Default: as the run says.")
    dtype: Literal["auto", "float32", "bfloat16"] | None = option(
        None, HELP["dtype"] + " Default: as the run says."
    )
    budget: Budget | None = option(None, "Tokens kept at every length, whatever the gate says.")
    schedule: Name | None = option(None, "Budgets by length, whatever the gate says.")
    decoding: Decoding | None = option(None, "dense, sparse or exact. Default: as the run says.")
    max_running: Count | None = option(None, "Samples decoded at once. Default: as the run says.")
    kv_gib: Gib | None = option(None, "Memory of the KV cache. Default: as the run says.")
    threads: Workers | None = option(None, "Of a CPU. Default: as they are.")
    allow_code: bool = option(False, "Import the code that the run's configuration names.")

    def _check(self) -> None:
        one = self.budget is None or self.schedule is None
        self.require(one, "budget", "one of budget and schedule")
        web = is_web_address(self.connect)
        self.require(web, "connect", "http://HOST:PORT or https://..., without a name or a key")

    @property
    def own_decoding(self) -> bool:
        return any(value is not None for value in (self.budget, self.schedule, self.decoding))


# `sparrow status`.


class StatusConfig(Record):
    """`sparrow status`."""

    run: Directory = argument(..., "A run directory of `sparrow train`.")


class StepAccuracy(Record):
    """Accuracy on held-out rows after a number of steps, with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float


class PolicyStatus(Record):
    """One of several policies of a run."""

    name: Shown
    metrics: dict[str, Measured]  # the last that were measured of each
    accuracy: tuple[StepAccuracy, ...]


class RunStatus(Record):
    """Where a training run is.

    stopped: before its last step, by whatever. stale: status.json says that it runs, but no process
    does, so it was killed.
    """

    run: str
    state: State
    loop: Literal["sync", "async"]
    process: int | None  # that holds the lock of the run; 0: unknown which
    step: int  # steps taken
    steps: int | None  # of the run
    checkpoint: int | None  # steps taken before the last one
    seconds_per_step: float | None  # median of the last steps
    seconds_left: float | None  # of a running run
    age: float | None  # seconds since it last wrote
    metrics: dict[str, Measured]  # of the last step
    accuracy: tuple[StepAccuracy, ...]
    actions: tuple[ActionLine, ...]  # of the gate
    live: AsyncStatus | None  # of an asynchronous run
    policies: tuple[PolicyStatus, ...] = ()  # of a run of several
    notes: tuple[str, ...]


# `sparrow audit`.


class AuditConfig(Record):
    """`sparrow audit`."""

    run: Directory = argument(
        ...,
        "A run directory of `sparrow train` with run.loop = async, or whose agents spawn agents.",
    )
    rollouts: bool = option(True, "Also compare saved rollouts with the ledger.")


class AuditResult(Record):
    """What the files of a run prove; problems: none if every prompt ended exactly once."""

    run: str
    running: bool  # while it was audited
    steps: int  # taken
    begun: bool  # one more has its batch, and was not learnt yet
    prompts: int  # that were ever dispatched
    used: int
    dropped: dict[Shown, int]  # by reason
    again: dict[Shown, int]  # leases that were returned, by reason
    open: int  # under way, or in the buffer
    waiting: int  # to be dispatched again
    compared: int  # steps whose rollouts were compared
    trees: int  # of agents, in those rollouts, that were audited
    oldest: int | None  # versions between a token and its update, the most in those rollouts
    notes: tuple[str, ...]  # what could not be checked
    problems: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return not self.problems
