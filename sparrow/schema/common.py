"""The sections of a configuration, and one root class per verb of the command line.

A field that may be None must have None as its default, because TOML cannot say None.
"""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, model_validator

from sparrow.schema.base import FieldError, Record
from sparrow.schema.options import argument, option
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.types import Budget, Directory, Name


def _known_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
        raise ValueError("'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


Device = Annotated[str, AfterValidator(_known_device)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(Record):
    """Which model runs, and where."""

    name: Name = "smollm2-135m"  # shipped (tiny, small), fetched, on the hub, or a folder
    dtype: Dtype = "auto"
    device: Device = "auto"


class GenerateSampling(SamplingParams):
    """Sampling for a reader: close to greedy, a page at most; training wants other defaults."""

    temperature: float = 0.2
    top_p: float = 0.9
    max_tokens: int = 512


class AttentionConfig(Record):
    """How decoding attends. Sparse is explicit: without a budget or a schedule it is dense."""

    # Tokens kept in all; None: dense. At least the three pages of 16 that are always kept.
    budget: Budget | None = None
    # Budgets by length: the name of a published schedule (sparrow presets), or a file.
    schedule: Name | None = None
    # The flow that chooses: FILE[:name] or a built-in name. None: the schedule's own.
    flow: Name | None = None
    # Dense, whatever budget or schedule are given: the flag that turns a recipe's sparsity off.
    dense: bool = False
    # Run the schedule on a model family, flow or page size that it was not made for.
    force: bool = False

    @model_validator(mode="after")
    def _refuse_alone(self) -> Self:
        if self.force and self.schedule is None:
            raise FieldError("AttentionConfig", {"force": (True, "true only with a schedule")})
        if self.flow is not None and self.schedule is None:
            raise FieldError("AttentionConfig", {"flow": (self.flow, "only with a schedule")})
        return self

    @model_validator(mode="after")
    def _refuse_both(self) -> Self:
        if self.budget is not None and self.schedule is not None:
            allowed = "one of budget and schedule, or neither"
            raise FieldError("AttentionConfig", {"schedule": (self.schedule, allowed)})
        return self


class RunConfig(Record):
    """What the run leaves behind."""

    dir: Directory | None = None  # None: nothing is written


class GenerateConfig(Record):
    """`sparrow generate`."""

    prompts: tuple[str, ...] = argument(
        (), "Prompts in quotes. Without a prompt, it is read from standard input.", "PROMPT"
    )
    raw: bool = option(False, "Prompts as they are, no chat template.")
    model: ModelConfig = ModelConfig()
    sampling: GenerateSampling = GenerateSampling()
    attention: AttentionConfig = AttentionConfig()
    run: RunConfig = RunConfig()

    any_text: ClassVar = True
    shortcuts: ClassVar = {
        "model": "model.name",
        "device": "model.device",
        "samples": "sampling.n",
        "temperature": "sampling.temperature",
        "max_tokens": "sampling.max_tokens",
        "seed": "sampling.seed",
        "budget": "attention.budget",
        "schedule": "attention.schedule",
        "out": "run.dir",
    }

    @model_validator(mode="after")
    def _refuse_equal_samples(self) -> Self:
        n = self.sampling.n
        if n > 1 and (self.sampling.temperature == 0 or self.sampling.top_k == 1):
            allowed = "1 where temperature is 0 or top_k is 1, since all samples would be the same"
            raise FieldError("GenerateConfig", {"sampling.n": (n, allowed)})
        return self
