"""Sampling parameters, and the completions that the engine returns."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparrow.files import printable
from sparrow.schema.base import (
    Float32Array,
    Float32Matrix,
    Int32Array,
    Int32Matrix,
    Record,
    Table,
)
from sparrow.schema.types import Seed, Temperature

LEAST_TEMPERATURE = 1e-3
"""Below it a distribution is greedy up to rounding; write 0 instead."""

Samples = Annotated[int, Field(ge=1, le=2**16)]
Int31 = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]  # below, it is greedy
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
StopTokenIds = Annotated[tuple[Int31, ...], Field(max_length=4096)]


class SamplingParams(Record):
    """Sampling parameters. The defaults sample from the unmodified distribution, as RL needs."""

    n: Samples = 1  # samples per prompt
    temperature: Temperature = 1.0  # 0 is greedy
    top_k: Int31 = 0  # 0 is off
    top_p: TopP = 1.0  # 1 is off
    max_tokens: MaxTokens = 1024
    min_tokens: Int31 = 0
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    seed: Seed | None = None  # None: a new one for every request

    def _check(self) -> None:
        greedy = self.temperature == 0
        allowed = f"0 (greedy) or a number >= {LEAST_TEMPERATURE}"
        self.require(greedy or self.temperature >= LEAST_TEMPERATURE, "temperature", allowed)
        most = self.max_tokens
        self.require(self.min_tokens <= most, "min_tokens", f"0 to max_tokens, {most}")


Decoding = Literal["dense", "sparse", "exact"]
Acceptance = Literal["rejection", "shared_noise"]
DRAFT_TOKENS = 8
DraftTokens = Annotated[int, Field(ge=1, le=64)]
DraftWeights = Literal["model", "int8"]


class SpeculativeParams(Record):
    """Exact decoding: sparse attention drafts, dense attention verifies.

    Tokens then have the distribution of dense decoding, whatever the schedule of the drafts. By
    `rejection` a draft is accepted with probability min(1, p / q); by `shared_noise` if the
    verification draws the same token, so that tokens are those of dense decoding with this seed.
    """

    draft_tokens: DraftTokens = DRAFT_TOKENS  # of a round; the verification adds one
    acceptance: Acceptance = "rejection"
    reselect: DraftTokens = 1  # drafts that read the pages selected for the first of them
    weights: DraftWeights = "model"  # of drafts: the model's, or a copy of them in 8 bits

    def describe(self, drafter: str) -> str:
        rule = self.acceptance.replace("_", " ")
        weights = "" if self.weights == "model" else f", {self.weights} weights"
        return f"exact, {self.draft_tokens} draft tokens a round by {rule} ({drafter}{weights})"


class OutputOptions(Record):
    """Outputs of a completion beyond tokens, log-probs and entropies."""

    top_logprobs: Int31 = 0  # how many of the most likely tokens of each step; 0: none
    hidden_states: bool = False  # final hidden state that each token was drawn from
    training: bool = False  # log-probs of the untruncated distribution: top_k and top_p are refused


class SpeculationStats(Record):
    """How often the draft at each position of a round was verified, and accepted."""

    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    rounds: int = 0

    @classmethod
    def total(cls, parts: Iterable["SpeculationStats"]) -> "SpeculationStats":
        """Add up the statistics of several answers."""
        parts = list(parts)
        drafted, accepted = (
            tuple(map(sum, zip_longest(*columns, fillvalue=0)))
            for columns in (
                [part.drafted_by_position for part in parts],
                [part.accepted_by_position for part in parts],
            )
        )
        rounds = sum(part.rounds for part in parts)
        return cls(drafted_by_position=drafted, accepted_by_position=accepted, rounds=rounds)

    @property
    def draft_tokens(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)


FinishReason = Literal["stop", "length", "abort", "error"]
LOGPROB_NOISE = 1e-4  # a log-prob may lie this far above 0: fp32 log-softmax rounds both ways


class Completion(Record):
    """One sample of one prompt.

    `logprobs` and `entropies` are of the distribution each token was sampled from: after
    temperature and truncation, and under the attention that ran. `top_logprobs` are those of the
    most likely tokens after temperature and before truncation. `hidden` holds the final hidden
    state that each token was drawn from, so LM head and temperature give its whole distribution.
    `kept` is the share of the sequence's keys and values that the token's step read, over all
    layers; None under a rule that keeps by mass, where it is not counted. `recomputed` lists the
    lengths at which keys and values were recomputed densely; where weights changed elsewhere, those
    of the older ones were kept.
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
    seed: int | None = None  # of this sample: with its number of tokens it determines every draw
    adapter: str | None = None
    swaps: int = 0  # how often it was moved to host memory and back
    restarts: int = 0  # how often it was restarted because weights changed
    recomputed: tuple[int, ...] = ()
    cached_tokens: int = 0  # of the prompt: pages of earlier prompts held their keys and values
    speculation: SpeculationStats | None = None  # of exact decoding
    policy: int = 0  # number of the policy that an episode of several sampled it from
    weights_id: str | None = None  # of a server: which load of its weights it was answered with
    text: str | None = None
    error: str | None = None  # present exactly if finish_reason is "error"

    def _check(self) -> None:
        self._require_aligned(
            *("token_ids", "logprobs", "weight_versions", "entropies", "kept"),
            *("top_ids", "top_logprobs", "hidden"),
        )
        self._refuse("prompt_ids", self.prompt_ids < 0, "token ids >= 0")
        self._refuse("token_ids", self.token_ids < 0, "token ids >= 0")
        self._refuse("logprobs", self.logprobs > LOGPROB_NOISE, "log-probs <= 0")
        self._refuse("weight_versions", self.weight_versions < 0, "versions >= 0")
        fits = (self.finish_reason == "error") == (self.error is not None)
        self.require(fits, "error", "a text with finish_reason 'error' alone")

    def row(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("text", "finish_reason", "attention")}
        return fields | {"tokens": len(self.token_ids), "seed": self.seed, "error": self.error}

    def __str__(self) -> str:
        return self.text or ""

    def __repr__(self) -> str:
        text = "" if self.text is None else f"{printable(self.text)!r:.80}, "
        return f"Completion({text}{len(self.token_ids)} tokens, {self.finish_reason})"


class Completions(Table, list[Completion]):
    """Completions in the order of their prompts, the samples of a prompt side by side."""

    title: ClassVar[str] = "completions"

    def table(self, field: str = "") -> list[dict[str, Any]]:
        return [completion.row() for completion in self]

    def __repr__(self) -> str:
        return list.__repr__(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))
