"""The configuration of `sparrow eval`, and its result: accuracy by source and length."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field

from sparrow.schema.base import Record, Table
from sparrow.schema.code import UNSAFE, CodeConfig
from sparrow.schema.common import (
    NEEDS_BUDGET,
    ChatConfig,
    ColumnsConfig,
    Device,
    Dtype,
    check_attention,
)
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.sampling import DRAFT_TOKENS, Decoding, DraftTokens
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    FilePath,
    FolderName,
    Name,
    RowNumber,
    Seed,
    Several,
    Temperature,
    Tokens,
    refuse_many,
)

ROWS = 32  # of each task and length, where no number is given
FILE_TOKENS = 4096  # of an answer to a row of a file
LISTED = 5  # rows that were left out
NOT_COLUMNS = ("passes", "reasons", "skipped", "fault")  # of a table of cells


def _step_or_latest(value: int | str) -> int | str:
    if value != "latest" and (isinstance(value, str) or value < 0):
        raise ValueError("a step that has a checkpoint, such as 20, or latest")
    return value


Checkpoint = Annotated[int | str, AfterValidator(_step_or_latest)]
Window = Annotated[Tokens, Field(multiple_of=16)]


class EvalConfig(Record):
    """`sparrow eval`: the model, the rows, and sampling."""

    model: Name = argument(
        ..., "A name, a folder, owner/name, or the run directory of a run that has ended."
    )
    checkpoint: Checkpoint | None = option(
        None, "Of a run that has not ended: a step that has a checkpoint, or latest."
    )
    policy: FolderName | None = None
    task: Several[Name] = option((), "A puzzle, code, or gym/NAME. Default: the three puzzles.")
    rows: Name | None = option(None, f"Instead: {HELP['rows']}")
    columns: ColumnsConfig = ColumnsConfig()
    reward: Name | None = option(None, "Reward function for rows: math, code, or module:function.")
    code: CodeConfig = CodeConfig()
    length: Several[Tokens] = option(
        (),
        "About how long a puzzle's answer is (default: 200, 500 and 1000), or the most for gym "
        "(default: 512).",
    )
    prompts: Count | None = option(
        None, f"Rows of each task and length (default: {ROWS}), or of a file (default: all)."
    )
    skip: RowNumber = 0
    samples: Count = option(1, "Answers to every row: the k of pass@k.")
    temperature: Temperature = 1.0
    max_tokens: Tokens | None = option(
        None, f"Longest answer. Default: 2.5 x a puzzle's length, {FILE_TOKENS} for a file."
    )
    seed: Seed = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    schedule: Name | None = None
    budget: Budget | None = option(None, "Tokens kept at every length, in all layers.")
    window: Window | None = option(None, "For comparison: attend to the last tokens only.")
    flow: Name | None = None
    decoding: Decoding | None = None
    draft_tokens: DraftTokens = DRAFT_TOKENS
    adapter: Directory | None = None
    force: bool = False
    chat: ChatConfig = ChatConfig()
    out: FilePath | None = option(None, "Also write every answer, a JSON line each.")

    shortcuts: ClassVar = {"file": "rows"}
    python_arguments: ClassVar = ("model", "rows")
    alternatives: ClassVar = (
        {"task": ("length",), "rows": ("columns", "reward")},
        {"budget": (), "window": (), "schedule": ("force",)},
    )

    def _check(self) -> None:
        refuse_many({"prompts": self.prompts or ROWS, "samples": self.samples})
        sparse = self.budget or self.schedule or self.window
        self.require(sparse or self.adapter is None, "adapter", "only with a budget or a schedule")
        tasks, out = self.rows is None, self.out
        self.require(tasks or not self.task, "task", "one of task and rows")
        self.require(tasks or not self.length, "length", "without rows of a file")
        self.require(not (tasks and self.reward), "reward", "for rows; tasks judge their own")
        check_attention(self)
        budgets = self.budget is not None or self.schedule is not None
        self.require(budgets or self.decoding in (None, "dense"), "decoding", NEEDS_BUDGET)
        self.require(not (self.window and self.decoding), "window", "none with decoding")
        unused = self.decoding in (None, "sparse") and self.draft_tokens != DRAFT_TOKENS
        self.require(not unused, "draft_tokens", "only with decoding = exact")
        alone = self.window is None or (self.budget is None and self.schedule is None)
        self.require(alone, "window", "one of budget, window and schedule")
        same = self.samples > 1 and self.temperature == 0
        self.require(not same, "samples", "1 at temperature 0, where all answers are the same")
        new = out is None or (not out.exists() and out.absolute().parent.is_dir())
        self.require(new, "out", "a new file in a folder that exists")


class Estimate(Record):
    """A value with its 95 % interval over rows; None: a single row has no interval."""

    value: float
    low: float | None
    high: float | None


Outcome = Literal["right", "cut_off", "wrong"]


def outcome(acc: float, cut_off: bool) -> Outcome:
    """Classify an answer: right (acc of at least 1), else cut off by the limit, or wrong."""
    if acc >= 1:
        return "right"
    return "cut_off" if cut_off else "wrong"


def outcome_shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the share of each outcome; they add up to 1. Empty without outcomes."""
    if not outcomes:
        return {}
    return {name: outcomes.count(name) / len(outcomes) for name in get_args(Outcome)}


class PassAt(Record):
    """pass@k: the probability that at least one of k answers to a row is right."""

    k: int
    estimate: Estimate


class Reason(Record):
    """A reason given by verdicts, and how often."""

    text: str
    count: int


class EvaluationCell(Record):
    """Accuracy on the rows of one source, and of one length where the task has one.

    mean: mean@k of all samples. right + cut_off + wrong = 1; an answer is right if its acc is at
    least 1. Files of older versions have neither right nor wrong, and their cut_off includes right
    answers that ran into the limit.
    """

    source: str
    length: int | None
    rows: int
    samples: int  # answers to a row
    mean: Estimate
    passes: tuple[PassAt, ...]
    tokens: float  # mean length of an answer
    median: float  # of the lengths
    entropy: float | None  # nats per sampled token; None: nothing was sampled
    right: float | None = None  # share of the answers
    cut_off: float  # share that ran into the token limit without being right
    wrong: float | None = None  # share that ended in time and is not right
    reasons: tuple[Reason, ...]  # most frequent first
    skipped: tuple[str, ...]  # rows whose prompts do not fit, and why
    failed: int = 0  # answers that could not be judged; they count as wrong
    fault: str = ""  # why the first of them could not

    @property
    def name(self) -> str:
        """The source, with the length of its puzzles where it has one."""
        return self.source if self.length is None else f"{self.source} {self.length}"

    def row(self) -> dict[str, Any]:
        columns = super().row()
        columns |= {f"pass@{attempt.k}": attempt.estimate.value for attempt in self.passes}
        return {key: value for key, value in columns.items() if key not in NOT_COLUMNS}


class Evaluation(Table, Record):
    """The result of `sparrow eval`: accuracy by source and length."""

    title: ClassVar[str] = "{0.model}, {0.attention}: {0.summary}"
    shown: ClassVar[str] = "cells"

    model: str
    attention: str
    temperature: float
    samples: int
    seed: int | None
    left_out: tuple[str, ...]  # rows of a file that cannot be used, and why
    isolation: str = ""  # of the processes that judged; "": this one
    cells: tuple[EvaluationCell, ...]

    @property
    def summary(self) -> str:
        """The accuracy of every cell, in one line."""
        return ", ".join(f"{cell.name} {cell.mean.value:.2f}" for cell in self.cells)

    @property
    def problems(self) -> list[str]:
        """Judging without isolation, rows that were left out and judgements that failed."""
        left_out = [*self.left_out, *(problem for cell in self.cells for problem in cell.skipped)]
        judged = sum(cell.rows * cell.samples for cell in self.cells)
        fault = next((cell.fault for cell in self.cells if cell.failed), "")
        found = describe_problems(left_out, sum(cell.failed for cell in self.cells), judged, fault)
        return [*([self.isolation] if UNSAFE in self.isolation else []), *found]


def describe_problems(left_out: Sequence[str], failed: int, judged: int, fault: str) -> list[str]:
    """Describe rows that were left out and verdicts that failed, with the first reasons."""
    rows = f"{len(left_out)} rows are left out: {'; '.join(left_out[:LISTED])}"
    verdicts = f"{failed} of {judged} verdicts failed and gave 0: {fault}"
    return [*([rows] if left_out else []), *([verdicts] if failed else [])]
