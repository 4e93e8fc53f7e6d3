"""How to sample, what to return, and what the engine returns."""

from typing import Literal

from sparrow.schema.base import (
    FieldError,
    Float32Array,
    Float32Matrix,
    Int32Array,
    Int32Matrix,
    Record,
)

LEAST_TEMPERATURE = 1e-3
"""Below it a distribution is a point mass in all but rounding; greedy says what is meant."""

MOST_TEMPERATURE = 1e6  # above, a distribution is uniform in all but rounding
LEAST_P = 1e-6  # below, it is greedy
MOST_SAMPLES = 2**16
MOST_STOPS = 4096


class SamplingParams(Record):
    """How to sample. The defaults are those of RL training: the model's own distribution."""

    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    max_tokens: int = 1024
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: a fresh one for every request

    def _check(self) -> None:
        most = self.max_tokens
        rules = {
            "n": (1 <= self.n <= MOST_SAMPLES, f"an integer >= 1 and <= {MOST_SAMPLES}"),
            "temperature": (
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE,
                f"0 (greedy) or a number >= {LEAST_TEMPERATURE} and <= {MOST_TEMPERATURE:g}",
            ),
            "top_k": (0 <= self.top_k < 2**31, "an integer >= 0 (0 is off) and < 2**31"),
            "top_p": (LEAST_P <= self.top_p <= 1, f"a number >= {LEAST_P} and <= 1 (1 is off)"),
            "max_tokens": (1 <= most < 2**31, "an integer >= 1 and < 2**31"),
            "min_tokens": (
                0 <= self.min_tokens <= most,
                f"an integer from 0 to max_tokens, {most}",
            ),
            "stop_token_ids": (
                len(self.stop_token_ids) <= MOST_STOPS
                and all(0 <= token < 2**31 for token in self.stop_token_ids),
                f"at most {MOST_STOPS} integers >= 0 and < 2**31",
            ),
            "seed": (0 <= (self.seed or 0) < 2**63, "an integer >= 0 and < 2**63"),
        }
        broken = {name: text for name, (holds, text) in rules.items() if not holds}
        if broken:
            problems = {name: (getattr(self, name), text) for name, text in broken.items()}
            raise FieldError("SamplingParams", problems)


class OutputOptions(Record):
    """What a completion shall carry beyond tokens, log-probs and entropies."""

    top_logprobs: int = 0  # how many of the most likely tokens of each step; 0: none
    hidden_states: bool = False  # final hidden state that each token was drawn from
    training: bool = False  # log-probs of the model's own distribution: nothing may truncate it

    @property
    def extras(self) -> bool:
        """Whether more than the draws themselves is wanted of each step."""
        return self.hidden_states or self.top_logprobs > 0

    def _check(self) -> None:
        if self.top_logprobs < 0:
            allowed = "an integer >= 0 (0 is none)"
            raise FieldError("OutputOptions", {"top_logprobs": (self.top_logprobs, allowed)})


FinishReason = Literal["stop", "length", "abort", "error"]
LOGPROB_NOISE = 1e-4  # a log-prob may lie this far above 0: fp32 log-softmax rounds both ways


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
