"""The configuration and the result of `sparrow sft`."""

from pathlib import Path
from typing import ClassVar, Literal

from sparrow.schema.base import File, Record
from sparrow.schema.common import ChatConfig, Device
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.types import BatchTokens, Count, Directory, FilePath, Name, Rate, Seed, Steps

SFT = "sft.json"


class SftConfig(Record):
    """`sparrow sft`: the model, the conversations, and how long it learns from them."""

    model: Name = argument(..., HELP["model"])
    rows: FilePath = argument(
        ..., "Conversations: rows with messages, or with prompt and completion (.jsonl, .parquet)."
    )
    epochs: Count = option(1, "Passes over all conversations.")
    steps: Steps | None = option(None, "Or: optimiser steps, whatever the number of rows.")
    batch: Count = option(32, "Conversations of a step.")
    rate: Rate = option(1e-5, "Peak learning rate: warm-up over a tenth, linear decay to a tenth.")
    batch_tokens: BatchTokens = option(16384, "Tokens of a micro-batch.")
    save_every: Steps = option(25, "Steps between checkpoints.")
    seed: Seed = option(0, "Of the order of rows.")
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Of the products; weights are trained in float32."
    )
    chat: ChatConfig = ChatConfig()
    out: Directory | None = option(None, "Default: runs/sft-MODEL.")

    python_arguments: ClassVar = ("model", "rows")

    def _check(self) -> None:
        one = self.steps is None or "epochs" not in self.model_fields_set
        self.require(one, "epochs", "none with steps")

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"sft-{Path(self.model).name}"


class SftResult(File):
    """sft.json: what was learnt from, and the loss of every step."""

    what: ClassVar = "supervised fine-tuning"
    version: ClassVar = 1
    made_by: ClassVar = "sparrow sft"

    format: int = 1
    model: str  # folder of the new one
    base: str
    rows: int
    left_out: tuple[str, ...]  # rows that cannot be used, and why
    tokens: int  # learnt tokens of all rows
    losses: tuple[float, ...]  # mean negative log-prob of a step's learnt tokens
    identity: str  # digest of model, rows and settings
