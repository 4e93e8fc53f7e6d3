"""The configurations of `sparrow calibrate` and `sparrow plan`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from sparrow.schema.base import Record
from sparrow.schema.common import ChatConfig, ColumnsConfig, Device, Dtype
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.sampling import DraftTokens
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    FilePath,
    Fraction,
    HardMisses,
    LayerNumbers,
    Name,
    RowNumber,
    Seed,
    Several,
    Tokens,
    refuse_many,
)

ROOM = 2.5  # longest answer to a puzzle, in multiples of its length
ROW_TOKENS = 1024  # longest answer to a row of a file

Figure = Annotated[float, Field(gt=0, lt=1e30)]
BinWidth = Annotated[Tokens, Field(ge=16)]
AnswerTokens = Annotated[Tokens, Field(ge=2)]


def _in_folder(name: str) -> Callable[[Path], Path]:
    """A file, which may be named by the folder that holds it."""
    return lambda path: path / name if path.is_dir() else path


class PromptsConfig(Record):
    """A model and the prompts that it answers, or sequences that it reads."""

    model: Name = argument(..., HELP["model"])
    task: Name | None = option(None, "Prompts of assignments, countdown, graph or gym/NAME.")
    rows: FilePath | None = option(None, f"Or: {HELP['rows']}")
    columns: ColumnsConfig = ColumnsConfig()
    texts: Name | None = option(None, "Or teacher-forced texts: a folder, or standard: ten texts.")
    ids: FilePath | None = option(
        None, 'Or teacher-forced tokens: JSON lines with "ids" and "start".'
    )
    rollouts: Directory | None = option(
        None, "Or teacher-forced rollouts of a run of sparrow train: the first answer to a prompt."
    )
    length: Tokens = option(500, "About how long a task's answers are.")
    tokens: Annotated[Tokens, Field(ge=3)] = option(2048, "With --texts: tokens of each text.")
    start: Tokens = option(1, "With --texts: number of first tokens that are not measured.")
    prompts: Count = option(96, "Maximum number of prompts for a budget and flow.")
    skip: RowNumber = option(0, "Skip the first prompts, as a check run should.")
    samples: Count = 1
    max_tokens: AnswerTokens | None = option(
        None, f"Longest answer. Default: {ROOM} x length for a task, else {ROW_TOKENS}."
    )
    temperature: Annotated[float, Field(gt=0, le=1e6)] = option(
        1.0, "Of sampling and of acceptance."
    )
    seed: Seed = 0
    device: Device = "auto"
    dtype: Dtype = option("auto", "auto, float32 or bfloat16: use that of the training.")
    chat: ChatConfig = ChatConfig()

    python_arguments: ClassVar = ("model", "rows")
    alternatives: ClassVar = (
        {"task": ("length",), "rows": ("columns",), "texts": (), "ids": (), "rollouts": ()},
    )

    def _check(self) -> None:
        refuse_many({"prompts": self.prompts, "samples": self.samples})
        names = ("task", "rows", "texts", "ids", "rollouts")
        sources = {name: getattr(self, name) for name in names}
        chosen = [name for name, value in sources.items() if value is not None]
        last = (chosen or ["task"])[-1]
        self.require(len(chosen) == 1, last, f"one of {', '.join(names)}", chosen)

    @property
    def answer_tokens(self) -> int:
        return self.max_tokens or (round(ROOM * self.length) if self.task else ROW_TOKENS)


class CalibrateConfig(PromptsConfig):
    """`sparrow calibrate`: the model, the prompts, and what is measured."""

    first_round: Count = option(
        24, "Prompts of the first round; more follow where the plan is undecided."
    )
    adapter: Directory | None = None
    flow: Several[Name] = option((), f"{HELP['flow']} Default: block_mean.")
    budget: Several[Budget] = option((), "Tokens kept. Default: 1/16 to 1/2 of the longest.")
    target: Several[Fraction] = option(
        (), "The p05 to plan for: measured more precisely near it. Default: 0.86."
    )
    bin: BinWidth | None = option(None, "Width of bins of lengths. Default: 1/8 of the longest.")
    schedule: Name | None = option(
        None, "Check a schedule (file or preset) instead of measuring budgets."
    )
    force: bool = False
    dense_layers: Several[LayerNumbers] = option(
        (), "Layers that stay dense: such as 0,1, or none (default)."
    )
    layer_groups: Annotated[int, Field(ge=0, le=2**16)] = option(
        6, "Groups of layers that are measured one at a time, to find the sensitive ones; 0: none."
    )
    draft_tokens: Annotated[int, Field(ge=0, le=64)] = option(
        0, "Also measure drafts of exact decoding, so many a round. 0: none."
    )
    reselect: Several[DraftTokens] = option(
        (1,), "With --draft-tokens: drafts that read the pages selected for the first of them."
    )
    by_layer: bool = option(True, "Also measure larger budgets for the layers that lose most.")
    out: Directory | None = option(None, "Default: runs/calibrate-MODEL.")

    def _check(self) -> None:
        super()._check()
        unused = not self.draft_tokens and self.reselect != (1,)
        self.require(not unused, "reselect", "only with draft_tokens")
        for name in ("budget", "dense_layers"):
            free = self.schedule is None or not getattr(self, name)
            self.require(free, name, "none with a schedule, which has its own")

    @property
    def first_flow(self) -> str | None:
        """The first flow that is set; None: that of the schedule."""
        return self.flow[0] if self.flow else None

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"calibrate-{Path(self.model).name}"


class PlanConfig(Record):
    """`sparrow plan`: the target, the machine and the workload."""

    surface: Annotated[FilePath, AfterValidator(_in_folder("surface.json"))] = argument(
        ..., "The folder of `sparrow calibrate`, or its surface.json."
    )
    target: Fraction = 0.86
    by: Literal["low", "p05"] = option(
        "low", "What must reach the target: p05, or low, the lower end of its 95 % interval."
    )
    hard_misses: HardMisses | None = option(
        None, "Most hard misses per 1000 tokens, beside the target: by low their upper end."
    )
    variant: Several[Name] = option((), "Choose among these variants of the surface only.")
    allow_dense: bool = option(False, "Use dense attention at lengths where no budget is enough.")
    hardware: Name = option("h200", "A measured machine: h200, or a .json.")
    bandwidth: Figure | None = option(
        None, "For any other machine: bytes of memory that it reads in a second, such as 2e12."
    )
    memory: Figure | None = option(None, "Its bytes of memory for weights, keys and values.")
    flops: Figure | None = option(None, "Its operations in a second, such as 3e14.")
    lengths: Name | None = option(
        None, "Lengths of answers: surface (as measured, the default), published, or a file."
    )
    prompts: Count | None = option(None, "Prompts of one rollout.")
    samples: Count | None = option(None, "Answers to each, with --prompts. Default: 8.")
    prompt_tokens: Tokens | None = option(None, "Length of a prompt. Default: as measured, or 16.")
    batch: Count | None = option(None, "Most sequences at once.")
    compare: Name | None = option(None, "A preset or schedule file to compare with.")
    check: Annotated[FilePath, AfterValidator(_in_folder("check.json"))] | None = option(
        None, "check.json of a check run to compare with, or its folder."
    )
    out: Directory | None = option(None, "Default: the folder of the surface.")

    def _check(self) -> None:
        figures = {name: getattr(self, name) for name in ("bandwidth", "memory", "flops")}
        missing = [name for name, figure in figures.items() if figure is None]
        complete = len(missing) in (0, len(figures))
        self.require(complete, (missing or ["flops"])[0], f"all of {', '.join(figures)}, or none")
        known = self.samples is None or self.prompts is not None
        self.require(known, "samples", "with prompts: together they say how many sequences run")

    @property
    def folder(self) -> Path:
        """Where the schedule and the plan are written."""
        return self.out or self.surface.parent
