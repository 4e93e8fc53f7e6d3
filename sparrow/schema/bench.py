"""The configurations of `sparrow bench`: attention, decode, rollout, train and trace."""

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from sparrow.schema.base import Record
from sparrow.schema.common import Device
from sparrow.schema.options import argument, option
from sparrow.schema.types import Count, Name, Several, Tokens

MOST_IN_CASE = 2**28  # tokens
DEVICE = "auto (a GPU where there is one), cuda or cpu."
SHAPE = "Published shape with random weights, such as qwen3-1.7b. Default: by the machine."
DTYPE = "bf16 or fp32. Default: bf16 on a GPU, fp32 on a CPU."


class CaseWords(NamedTuple):
    """`rows,tokens` and what follows."""

    rows: int
    tokens: int
    rest: str


def case_words(text: str) -> CaseWords:
    match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})(?:,(.+))?", text)
    if match is None or not int(match[1]) or int(match[2]) < 2:
        raise ValueError("two numbers such as 16,4096: at least 1 and at least 2")
    if int(match[1]) * int(match[2]) > MOST_IN_CASE:
        raise ValueError(f"at most {MOST_IN_CASE} tokens in all")
    return CaseWords(int(match[1]), int(match[2]), match[3] or "")


def _decode_case(text: str) -> str:
    case_words(text)
    return text


def _train_case(text: str) -> str:
    if case_words(text).rest not in ("", "recompute", "compiled", "recompute,compiled"):
        raise ValueError("sequences,tokens[,recompute][,compiled]")
    return text


class BenchAttentionConfig(Record):
    """`sparrow bench attention`."""

    device: Device = option("auto", DEVICE)


class BenchDecodeConfig(Record):
    """`sparrow bench decode`."""

    model: Name | None = option(None, SHAPE, "SHAPE", "m")
    case: Several[Annotated[str, AfterValidator(_decode_case)]] = option(
        (),
        "batch,context or batch,context,schedule, where the schedule is a preset's name or fixed-N "
        "(N tokens kept); can be given several times. Default: by the machine.",
        "CASE",
    )
    flow: Name = option(
        "block_mean", "What chooses the tokens to keep: a built-in name or FILE[:name].", "FLOW"
    )
    dtype: Name | None = option(None, DTYPE)
    steps: Count = option(64, "Steps timed in a round.")


class BenchRolloutConfig(Record):
    """`sparrow bench rollout`."""

    workload: Name | None = argument(
        None, "gpu, cpu-tiny or cpu-smollm2. Default: by the machine.", "WORKLOAD"
    )
    dtype: Name | None = option(None, DTYPE)
    peer: bool = option(True, "Also run transformers' generate.")
    peer_tokens: Tokens | None = option(None, "Its new tokens. Default: by the workload.")
    batching: bool = option(True, "On a GPU: also transformers' continuous batching.")


class BenchTrainConfig(Record):
    """`sparrow bench train`."""

    model: Name | None = option(None, SHAPE, "SHAPE", "m")
    case: Several[Annotated[str, AfterValidator(_train_case)]] = option(
        (),
        "sequences,tokens and, if wanted, ,recompute and ,compiled after it; can be given several "
        "times. Default: by the machine.",
        "CASE",
    )
    steps: Count = option(5, "Steps timed.")
    device: Device = option("auto", DEVICE)


class BenchTraceConfig(Record):
    """`sparrow bench trace`."""

    model: Name = option(
        "qwen3-1.7b", "Published shape with random weights, such as qwen3-8b.", "SHAPE", "m"
    )
    schedule: Name | None = option(
        None, "A preset, or fixed-N (N tokens kept). Default: the shape's preset at 0.86."
    )
    dtype: Name | None = option(None, "bf16 (the default) or fp32.")
    requests: Count = option(60, "Requests of the workload.")
    longest: Annotated[Tokens, Field(ge=17)] = option(32_768, "Longest request, in tokens.")
    cutoff: Annotated[Tokens, Field(ge=17)] = option(2048, "Longest request of the complete run.")
