"""Configuration and results of `sparrow flow loop`: a campaign that searches flows."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from sparrow.schema.base import File, Record, Table
from sparrow.schema.common import Device, Dtype
from sparrow.schema.evaluation import Estimate
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.types import (
    Count,
    Directory,
    LayerNumbers,
    Name,
    Seconds,
    Seed,
    Several,
    Text,
    Tokens,
)

CAMPAIGN = "campaign.json"
FRONT = "front.svg"
SHIPPED = "built in"  # how baselines were made
BASELINES = ("block_mean", "fine_means(4)", "spread_means(4)")
LAST_BASELINE = BASELINES[-1]  # what gains are told over
# scored: measured on the search texts; invalid: no flow, with the author's line; failed: two
# implementations differ, or the measurement raised; late: it took too long; duplicate: a formula
# that is there already.
CandidateStatus = Literal["scored", "invalid", "failed", "late", "duplicate"]
Objective = Literal["p05", "acceptance", "hard_misses"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def _number(given: Any) -> Any:
    """A word of the command line as a number."""
    return int(given) if isinstance(given, str) and given.isdecimal() else given


CandidateNumber = Annotated[int, Field(ge=0, lt=1 << 31), BeforeValidator(_number)]


class FlowLoopConfig(Record):
    """`sparrow flow loop`."""

    out: Directory = argument(..., "Folder of the campaign; one that is there goes on.")
    model: Name = option("smollm2-135m", HELP["model"])
    candidates: Count = option(20, "Candidates in all, those that are there included.")
    proposer: Name | None = option(
        None, "module:function or FILE.py:function that proposes; default: the built-in one."
    )
    command: Text | None = option(
        None, "Program that proposes: reads JSON from its input, writes a flow's file."
    )
    budget: Several[Tokens] = option((512,), "Tokens kept.")
    texts: Directory | None = option(
        None, "Folder of texts: search, validation and held-out. Default: those installed."
    )
    task: Name | None = option(None, "Or: gold chains of a puzzle, for the shipped models.")
    length: Count = option(500, "About how long chains of the puzzle are.")
    count: Count = option(4, "Chains of each split.")
    tokens: Annotated[Tokens, Field(ge=2)] = option(8192, "Tokens of every text.")
    objective: Objective = option(
        "p05", "What orders candidates; hard misses, per 1000 tokens, are to be few."
    )
    times: bool = option(
        False, "Also time a layer of every candidate on this GPU; the front then counts that too."
    )
    promote: Count = option(5, "Of the best on the search texts, how many are validated.")
    at_once: Count = option(
        1, "Candidates that are measured at once; proposals see those of earlier rounds."
    )
    seconds: Seconds = option(900.0, "That a candidate may take, and what proposes it.")
    minutes: Annotated[float, Field(gt=0, le=1e5)] | None = option(
        None, "End after so many minutes."
    )
    dense_layers: LayerNumbers = option((0, 1), "Layers that stay dense: such as 0,1, or none.")
    device: Device = "auto"
    dtype: Dtype = option("float32", "auto, float32 or bfloat16.")
    seed: Seed = option(0, "Of the built-in proposer.")

    def _check(self) -> None:
        one = self.proposer is None or self.command is None
        self.require(one, "command", "none with proposer")
        self.require(self.texts is None or self.task is None, "task", "none with texts")

    @property
    def identity(self) -> dict[str, Any]:
        """What all candidates of a campaign share."""
        free = {"out", "candidates", "proposer", "command", "promote", "seconds", "minutes"}
        free |= {"objective", "device", "seed", "at_once"}
        plain = self.model_dump(mode="json", exclude=free)
        return plain | ({} if self.texts is None else {"texts": str(self.texts.resolve())})


class FlowPublishConfig(Record):
    """`sparrow flow publish`."""

    out: Directory = argument(..., "Folder of a campaign.")
    number: CandidateNumber = argument(..., "Of a candidate that was validated.")
    seconds: Seconds = option(3600.0, "That a flow may take.")
    device: Device = "auto"


class FlowLanguageConfig(Record):
    """`sparrow flow language`, which has no options."""


class SplitScore(Record):
    """Figures of a flow on the texts of a split: means over texts, with 95 % from 5 texts on.

    budget       None: means over the budgets
    p05          of exact acceptance at every position
    acceptance   mean: the share of drafts that exact decoding accepts
    hard_misses  per 1000 tokens (sparrow/stats.py)
    above        each of these above that of each baseline, paired by text
    """

    budget: int | None
    p05: Estimate
    acceptance: Estimate
    hard_misses: Estimate
    above: Mapping[str, Mapping[Objective, Estimate]]

    def worth(self, objective: Objective) -> float:
        """The objective; greater is better."""
        value = getattr(self, objective).value
        return -value if objective == "hard_misses" else value


class Candidate(File):
    """A candidate and what came out; its source is the .py beside it."""

    what: ClassVar = "candidate"
    version: ClassVar = 1
    made_by: ClassVar = "sparrow flow loop"

    format: int = 1
    number: int
    name: str
    parents: tuple[int, ...] = ()
    made: str = ""  # how: built in, drawn, mutated, recombined, or what a proposer says
    genes: Mapping[str, Any] | None = None  # of the built-in proposer
    status: CandidateStatus
    error: str = ""
    program: str | None = None  # digest of its content
    bytes: int | None = (
        None  # that a step reads of a page and KV head, 16-bit keys; mean over layers
    )
    of_mean: float | None = None  # over those of one 16-bit mean key
    operations: int | None = None
    kernels: bool = False  # whether it compiles for a GPU
    microseconds: float | None = (
        None  # of a layer on the GPU of the campaign; see docs/flow-loop.md
    )
    search: tuple[SplitScore, ...] = ()  # by budget, then the means over budgets
    validation: tuple[SplitScore, ...] = ()
    held_out: tuple[SplitScore, ...] = ()
    seconds: float = 0.0

    def worth(self, objective: Objective) -> float:
        """The objective on the search texts, mean over budgets; greater is better."""
        return self.search[-1].worth(objective)

    @property
    def cost(self) -> tuple[float, float]:
        """Bytes and microseconds of a step."""
        return self.bytes or 0.0, self.microseconds or 0.0


class CampaignRow(Record):
    """A line of the leaderboard: figures by split, mean over budgets."""

    number: int
    name: str
    made: str
    bytes: int | None
    of_mean: float | None
    microseconds: float | None
    front: bool  # no other has a greater objective on the search texts at no greater cost
    search: SplitScore
    validation: SplitScore | None
    held_out: SplitScore | None
    survived: float | None  # gain over spread_means(4) held out, over a sure one while searching


class Campaign(Table, File):
    """campaign.json: what was tried, and the leaderboard, best first."""

    title: ClassVar[str] = "{0.model}, {0.tried} candidates tried"
    what: ClassVar = "campaign"
    version: ClassVar = 1
    made_by: ClassVar = "sparrow flow loop"

    format: int = 1
    model: str
    fingerprint: str
    texts: Mapping[str, str]  # digests of their tokens, by split
    settings: Mapping[str, Any]
    objective: Objective
    tried: int  # proposals, baselines not counted
    statuses: Mapping[str, int]
    published: int  # entries that were measured on the held-out texts, baselines not counted
    rows: tuple[CampaignRow, ...]

    @property
    def front(self) -> list[CampaignRow]:
        """Rows that no other beats in the objective at no greater cost, fewest bytes first."""
        return sorted((row for row in self.rows if row.front), key=lambda row: row.bytes or 0)
