"""What the engine returns."""

from dataclasses import dataclass
from typing import Literal

from sparrow.records.base import (
    Float32Array,
    Float32Matrix,
    Int32Array,
    Int32Matrix,
    Record,
)

FinishReason = Literal["stop", "length", "abort", "error"]
LOGPROB_NOISE = 1e-4  # a log-prob may lie this far above 0: fp32 log-softmax rounds both ways


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(Record):
    """What the engine returns for one sample of one prompt.

    `logprobs` and `entropies` are of the distribution each token was sampled from: after
    temperature and truncation, and under the attention that ran. `top_logprobs` are those of the
    most likely tokens after temperature and before truncation. `hidden` holds the final hidden
    state that each token was drawn from, so LM head and temperature give its whole distribution.
    `kept` is the share of the sequence's keys and values that the token's step read, over all
    layers; None under a rule that keeps by mass, where nobody counts. `recomputed` lists the
    lengths at which keys and values were computed anew, densely.
    """

    prompt_ids: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    weight_versions: Int32Array
    finish_reason: FinishReason
    attention: str  # what ran, for example "dense"
    entropies: Float32Array | None = None
    kept: Float32Array | None = None
    top_ids: Int32Matrix | None = None
    top_logprobs: Float32Matrix | None = None
    hidden: Float32Matrix | None = None
    seed: int | None = None  # that of this sample: with its number of tokens it gives every draw
    adapter: str | None = None
    swaps: int = 0  # how often it was moved to host memory and back
    restarts: int = 0  # how often it began anew, because weights changed
    recomputed: tuple[int, ...] = ()
    text: str | None = None
    error: str | None = None  # present exactly if finish_reason is "error"

    def _check(self) -> None:
        self._require_aligned(
            "token_ids",
            "logprobs",
            "weight_versions",
            "entropies",
            "kept",
            "top_ids",
            "top_logprobs",
            "hidden",
        )
        self._refuse("prompt_ids", self.prompt_ids < 0, "token ids >= 0")
        self._refuse("token_ids", self.token_ids < 0, "token ids >= 0")
        self._refuse("logprobs", self.logprobs > LOGPROB_NOISE, "log-probs <= 0")
        self._refuse("weight_versions", self.weight_versions < 0, "versions >= 0")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError(
                f"Completion.error: got {self.error!r} with finish_reason {self.finish_reason!r}, "
                "allowed: a text if the reason is 'error', None otherwise"
            )
