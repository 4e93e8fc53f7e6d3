"""The configurations of `sparrow calibrate` and `sparrow plan`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sparrow.schema.base import FieldError, Record
from sparrow.schema.common import Device, Dtype
from sparrow.schema.options import argument, option
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    FilePath,
    Fraction,
    LayerNumbers,
    Name,
    RowNumber,
    Seed,
    Several,
    Tokens,
    refuse_many,
)

ROOM = 2.5  # longest answer to a puzzle: so many times its length
ROW_TOKENS = 1024  # longest answer to a row of a file
OUTPUT = "Output"

Figure = Annotated[float, Field(gt=0, lt=1e30)]


class CalibrateConfig(Record):
    """`sparrow calibrate`: which model on which prompts, what is measured, and how much."""

    model: Name = argument(..., "tiny, small, smollm2-135m, a folder, owner/name.", "MODEL")
    task: Name | None = option(None, "assignments, countdown, graph or gym/NAME.")
    length: Tokens = option(500, "About how long a task's answers are.", "TOKENS", "l")
    rows: FilePath | None = option(None, '.jsonl or .parquet with a column "prompt".', "FILE")
    texts: Name | None = option(
        None,
        "Read texts instead of answering (forced mode): .txt, .py and .md files of a folder, or "
        "standard: ten known texts.",
        "FOLDER",
    )
    ids: FilePath | None = option(
        None, 'Read tokens instead of answering: JSON lines with "ids" and "start".', "FILE"
    )
    tokens: Annotated[Tokens, Field(ge=3)] = option(2048, "With --texts: tokens of each text.")
    start: Tokens = option(1, "With --texts: first tokens, not counted.")
    flow: Several[Name] = option(
        (),
        "What chooses the tokens to keep: a built-in name or FILE[:name]; can be given several "
        "times. Default: block_mean.",
        "FLOW",
    )
    budget: Several[Budget] = option(
        (),
        "Tokens kept; can be given several times. Default: 1/16 to 1/2 of the longest.",
        "TOKENS",
        "b",
    )
    target: Several[Fraction] = option(
        (),
        "The p05 of acceptance that you will plan for: more is measured near it. Default: 0.86.",
        "P05",
        "t",
    )
    bin: Annotated[Tokens, Field(ge=16)] | None = option(
        None,
        "Lengths are told apart in bins so wide. Default: an eighth of the longest.",
        "TOKENS",
    )
    schedule: Name | None = option(
        None, "Check this schedule (a file or a preset) instead of measuring budgets."
    )
    force: bool = option(False, "Check a schedule that was made for another model.")
    dense_layers: Several[LayerNumbers] = option(
        (),
        "Layers that stay dense, such as 0,1, or none (the default). Given twice, both are "
        "measured.",
        "LAYERS",
    )
    layer_groups: Annotated[int, Field(ge=0, le=2**16)] = option(
        6, "Make so many groups of layers sparse one at a time, to see which lose most; 0: none."
    )
    by_layer: bool = option(True, "Also measure larger budgets for the layers that lose most.")
    prompts: Count = option(96, "Most prompts for a budget and flow.", letter="n")
    first_round: Count = option(24, "Prompts before more go where doubt is left.")
    skip: RowNumber = option(0, "Leave out the first prompts: a check does.")
    samples: Count = option(1, "Answers to each prompt.")
    max_tokens: Annotated[Tokens, Field(ge=2)] | None = option(
        None, f"Longest answer. Default: {ROOM} x length for a task, else {ROW_TOKENS}."
    )
    temperature: Annotated[float, Field(gt=0, le=1e6)] = option(
        1.0, "Of sampling; acceptance is at the same one.", "T"
    )
    seed: Seed = option(0, "Of the random draws.")
    device: Device = option("auto", "auto (a GPU where there is one), cpu, cuda.")
    dtype: Dtype = option("auto", "auto, float32 or bfloat16: take the one that you train with.")
    out: Directory | None = option(None, "Default: runs/calibrate-MODEL.", "FOLDER", "o")

    panels: ClassVar = {
        "Prompts: give one of task, rows, texts, ids": (
            *("task", "length", "rows", "texts", "ids", "tokens", "start"),
        ),
        "What is measured": ("flow", "budget", "target", "bin", "schedule", "force"),
        "Layers": ("dense_layers", "layer_groups", "by_layer"),
        "How much": (
            *("prompts", "first_round", "skip", "samples", "max_tokens", "temperature", "seed"),
        ),
        "Machine": ("device", "dtype"),
        OUTPUT: ("out", "plots", "json"),
    }

    def _check(self) -> None:
        refuse_many("CalibrateConfig", {"prompts": self.prompts, "samples": self.samples})
        sources = {name: getattr(self, name) for name in ("task", "rows", "texts", "ids")}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            problem = (given or None, "one of task, rows, texts, ids")
            raise FieldError("CalibrateConfig", {(given or ["task"])[-1]: problem})
        for name in ("budget", "dense_layers"):
            if self.schedule is not None and getattr(self, name):
                allowed = "none with a schedule, which has its own"
                raise FieldError("CalibrateConfig", {name: (getattr(self, name), allowed)})

    @property
    def answer_tokens(self) -> int:
        return self.max_tokens or (round(ROOM * self.length) if self.task else ROW_TOKENS)

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"calibrate-{Path(self.model).name}"


class PlanConfig(Record):
    """`sparrow plan`: what to keep, on which machine, for which workload."""

    surface: FilePath = argument(..., "surface.json of `sparrow calibrate`.", "SURFACE")
    target: Fraction = option(
        0.86, "The p05 of acceptance to keep at every length, 0 to 1.", "P05", "t"
    )
    by: Literal["low", "p05"] = option(
        "low",
        "What must reach the target: low, the lower end of p05's 95 % interval, or p05 itself.",
        "low|p05",
    )
    variant: Several[Name] = option(
        (), "Choose among these variants of the surface alone; can be given several times."
    )
    allow_dense: bool = option(False, "Go dense at lengths where no budget is enough.")
    hardware: Name = option("h200", "A measured machine: h200, or a .json.")
    bandwidth: Figure | None = option(
        None,
        "For any other machine: bytes of memory that it reads in a second, such as 2e12; with "
        "--memory and --flops.",
        "BYTES",
    )
    memory: Figure | None = option(None, "Its memory for weights, keys and values.", "BYTES")
    flops: Figure | None = option(None, "Its operations in a second, such as 3e14.", "FLOPS")
    lengths: Name | None = option(
        None,
        "Lengths of the answers: surface (as measured; the default where answers were), "
        "published, or a file.",
    )
    prompts: Count | None = option(None, "Prompts of one rollout.")
    samples: Count | None = option(None, "Answers to each, with --prompts. Default: 8.")
    prompt_tokens: Tokens | None = option(None, "Length of a prompt. Default: as measured, or 16.")
    batch: Count | None = option(None, "Most sequences at once.")
    compare: Name | None = option(None, "A preset or schedule file to set beside it.")
    check: FilePath | None = option(None, "check.json of a check run to set beside it.", "FILE")
    out: Directory | None = option(None, "Default: the folder of the surface.", "FOLDER", "o")

    panels: ClassVar = {
        "What to keep": ("target", "by", "variant", "allow_dense"),
        "The machine of the rollouts": ("hardware", "bandwidth", "memory", "flops"),
        "The workload whose time is predicted": (
            *("lengths", "prompts", "samples", "prompt_tokens", "batch"),
        ),
        OUTPUT: ("compare", "check", "out", "plots", "json"),
    }

    def _check(self) -> None:
        figures = {name: getattr(self, name) for name in ("bandwidth", "memory", "flops")}
        missing = [name for name, figure in figures.items() if figure is None]
        if 0 < len(missing) < len(figures):
            allowed = f"all of {', '.join(figures)}, or none"
            raise FieldError("PlanConfig", {missing[0]: (None, allowed)})
        if self.samples is not None and self.prompts is None:
            allowed = "with prompts: together they say how many sequences run"
            raise FieldError("PlanConfig", {"samples": (self.samples, allowed)})
