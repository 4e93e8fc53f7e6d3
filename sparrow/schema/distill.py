"""The configuration and the result of `sparrow distill`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from sparrow.schema.base import File, Record
from sparrow.schema.calibrate import BinWidth, PromptsConfig
from sparrow.schema.options import HELP, option
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Cell, DraftCell
from sparrow.schema.train import DivergenceKind, Module, Rank
from sparrow.schema.types import (
    BatchTokens,
    Budget,
    Count,
    Directory,
    Name,
    Rate,
    Several,
    Steps,
    StepsOrZero,
)


class DistillConfig(PromptsConfig):
    """`sparrow distill`: the model, the sequences, and the adapter that is fitted."""

    prompts: Count = option(256, "Prompts or texts, held-out ones included.")
    held_out: Count | None = option(None, "Of them for acceptance alone. Default: a quarter.")
    schedule: Name | None = option(None, "Budgets to distil for: a schedule, file or preset.")
    budget: Budget | None = option(None, "Or: tokens kept at every length.")
    flow: Name | None = option(None, HELP["flow"])
    force: bool = False
    report_budget: Several[Budget] = option(
        (), "Further budgets whose acceptance is reported before and after."
    )
    bin: BinWidth | None = option(None, "Width of bins of lengths. Default: 1/8 of the longest.")
    rank: Rank = option(16, "Of the adapter.")
    targets: Several[Module] = option(get_args(Module), "Projections that it changes.")
    rate: Rate = option(1e-3, "Learning rate; it falls to a tenth at the last step.")
    divergence: DivergenceKind = option(
        "total_variation", f"Of sparse from dense: {', '.join(get_args(DivergenceKind))}."
    )
    steps: Steps = option(200, "Most steps.")
    batch: Count = option(16, "Sequences a step.")
    batch_tokens: BatchTokens = option(16384, "Tokens of a micro-batch.")
    check_every: Steps = option(20, "Steps between looks at the held-out prompts.")
    patience: Count = option(3, "Looks without a gain before it stops.")
    refresh: StepsOrZero = option(
        0, "Steps after which prompts are answered anew, with the adapter so far. 0: never."
    )
    attention: Literal["sparse", "dense"] = option(
        "sparse", "dense: a control; the same steps where there is nothing to learn."
    )
    draft_tokens: Annotated[int, Field(ge=0, le=64)] = option(
        0, "Also measure drafts of exact decoding, so many a round. 0: none."
    )
    out: Directory | None = option(None, "Default: runs/distill-MODEL.")

    def _check(self) -> None:
        super()._check()
        given = [name for name in ("budget", "schedule") if getattr(self, name) is not None]
        self.require(len(given) == 1, "budget", "one of budget and schedule", given)
        self.require(self.prompts > 1, "prompts", "2 at least: some are held out")
        left = self.held_out is None or self.held_out < self.prompts
        self.require(left, "held_out", f"fewer than the {self.prompts} prompts")
        looks = self.refresh % self.check_every == 0
        self.require(looks, "refresh", f"a multiple of check_every, {self.check_every}")
        answered = self.task is not None or self.rows is not None
        self.require(answered or not self.refresh, "refresh", "0 for given sequences")

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"distill-{Path(self.model).name}"


class DistillLook(Record):
    """Acceptance on the held-out prompts after some steps, teacher-forced."""

    step: int
    loss: float | None  # divergence, mean over the tokens of the steps since the last look
    p05: float
    low: float  # 95 % interval over prompts
    high: float
    mean: float
    hard_misses: float  # per 1000 tokens


class DistillArm(Record):
    """Acceptance on the held-out prompts under one budget or schedule, before and after."""

    name: str
    budget: int | None  # None: the schedule
    before: tuple[Cell, ...]  # by bin of lengths, then of all lengths
    after: tuple[Cell, ...]
    drafts_before: tuple[DraftCell, ...] = ()
    drafts_after: tuple[DraftCell, ...] = ()


class DistillResult(File):
    """distill.json: what was fitted, and what it changed."""

    what: ClassVar = "distillation"
    version: ClassVar = 1
    made_by: ClassVar = "sparrow distill"

    format: int = 1
    model: str
    base: str  # digest of the model's weights
    schedule: Schedule
    mode: str  # generated, or forced: given sequences
    prompts: str
    trained_on: int  # sequences
    held_out: int  # prompts
    settings: dict[str, str | int | float | bool | None]
    looks: tuple[DistillLook, ...]
    best: int  # the step whose adapter was taken
    seconds: float  # of the steps
    arms: tuple[DistillArm, ...]
