"""Requests and their samples: settings, tokens drawn so far, pages held.

The prompt of a request is computed once. Each of its n samples then starts from it: full pages are
shared, the unfinished page is copied, and the first token is drawn from the prompt's logits.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparrow.models import ModelSpec
from sparrow.models.lora import NO_ADAPTER, AdapterSlot
from sparrow.schema.sampling import (
    Completion,
    FinishReason,
    OutputOptions,
    SamplingParams,
    SpeculationStats,
    SpeculativeParams,
)
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

Shares = npt.NDArray[np.float32]
ACTOR = "actor"  # the name of the adapter of sparse decoding
STOPS = 32  # stop ids of a request that asks for a minimum number of tokens


@dataclass(slots=True, kw_only=True)
class Context:
    """Tokens of one sequence in the page cache: the pages, and how many tokens are in them."""

    pages: list[int] = field(default_factory=list)
    computed: int = 0


class ScheduleHistory:
    """The schedules that decode one sample, each from so many drawn tokens on; None: dense."""

    def __init__(self, schedule: Schedule | None) -> None:
        self._starts: list[tuple[int, Schedule | None]] = [(0, schedule)]

    def change(self, drawn: int, schedule: Schedule | None) -> None:
        """Record that another schedule decodes from the next token on, after `drawn` tokens.

        The first token comes from the prompt: until a second is drawn nothing has been decoded.
        """
        if drawn < 2:
            self._starts = [(0, schedule)]
            return
        if self._starts[-1][0] == drawn:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != schedule:
            self._starts.append((drawn, schedule))

    def describe(self, prompt: int, tokens: int) -> str:
        """Describe the schedules that ran, each with the length it began at.

        prompt, tokens: lengths of the prompt and of the answer.
        """
        ran = [
            ("" if not start else f"; from length {prompt + start}: ")
            + ("dense" if schedule is None else schedule.describe())
            for start, schedule in self._starts
            if start < tokens or not start
        ]
        return "".join(ran)

    def join(self, of: Callable[[Schedule | None], Shares | None]) -> Shares | None:
        """Values by token, each from those of the schedule that drew it; None where one is None."""
        (_, first), *later = self._starts
        joined = of(first)
        for start, schedule in later:
            part = of(schedule)
            if joined is None or part is None:
                return None
            joined[start:] = part[start:]
        return joined


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt with its settings, and the state of its prompt while samples still need it."""

    id: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    options: OutputOptions = OutputOptions()  # noqa: RUF009 (immutable)
    schedule: Schedule | None = None
    speculative: SpeculativeParams | None = None  # exact decoding: the schedule is of its drafts
    adapter: str | None = None
    adapter_slot: AdapterSlot = NO_ADAPTER
    streamed: bool = True  # whether tokens are returned as they are drawn, not completions alone
    interval: float = 0.0  # seconds between the outputs of a streamed sample, but for the last
    decode: Callable[[list[int]], str] | None = None  # token ids to text; None: text is not wanted
    schedule_slot: int = 0
    cached: int = 0  # tokens of its prompt that pages of earlier prompts held
    context: Context = field(default_factory=Context)
    logits_V: Tensor | None = None  # after the prompt; None until it is computed
    hidden_C: Tensor | None = None
    samples: list["Sample"] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = [
            Sample(request=self, number=number, seed=seed)
            for number, seed in enumerate(sample_seeds(self.params))
        ]

    def check(self, spec: ModelSpec, room: int) -> None:
        """Raise ValueError if the model cannot run it in a context of `room` tokens."""
        prompt, params, most = self.prompt, self.params, spec.vocabulary
        if not prompt:
            raise ValueError("the prompt is empty")
        for token in prompt:
            if not isinstance(token, int | np.integer) or not 0 <= token < most:
                raise ValueError(f"prompt token {token!r} is not a whole number in 0..{most - 1}")
        if len(prompt) + params.max_tokens > room:
            need = f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens}"
            raise ValueError(f"{need} exceed the context of {room} tokens")
        if self.options.top_logprobs > most:
            raise ValueError(f"top_logprobs={self.options.top_logprobs}, the vocabulary has {most}")
        if self.options.training:
            self._check_training()

    def _check_training(self) -> None:
        """Training-grade log-probs are of the model's own distribution: nothing may cut it."""
        required = {"top_p": 1.0, "top_k": 0, "min_tokens": 0}
        actual = {name: getattr(self.params, name) for name in required}
        wrong = [f"{name}={value}" for name, value in actual.items() if value != required[name]]
        if self.params.temperature == 0:
            wrong.append("temperature=0")
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: training log-probs need the whole distribution")

    @property
    def unstarted(self) -> list["Sample"]:
        """Samples that have yet to start from the prompt."""
        return [sample for sample in self.samples if not sample.started and sample.live]

    @property
    def cuts(self) -> bool:
        """Whether sampling uses top-k, top-p or min_tokens."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_tokens > 0

    @property
    def decoding_schedule(self) -> Schedule | None:
        """The schedule that its tokens are drawn under: exact decoding is dense."""
        return self.schedule if self.speculative is None else None

    @property
    def policy_adapter(self) -> str | None:
        """The adapter of its keys and values, and of the distribution that tokens are drawn from.

        The actor's only drafts for exact decoding.
        """
        drafts = self.speculative is not None and self.adapter == ACTOR
        return None if drafts else self.adapter

    @property
    def policy_slot(self) -> AdapterSlot:
        return NO_ADAPTER if self.policy_adapter is None else self.adapter_slot

    @property
    def ids(self) -> list[int]:
        """The tokens to compute before samples can start."""
        return self.prompt

    @property
    def request(self) -> "Request":
        """Itself, for code that handles requests and samples alike."""
        return self


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence being generated. Lists per token are what the host has read so far."""

    request: Request
    number: int
    seed: int
    context: Context = field(default_factory=Context)
    row: int | None = None  # its place among the device's rows, while it is resident
    started: bool = False
    drawn: int = 0  # tokens whose drawing was launched, read or not (of exact decoding: at most)
    drafts: int = 0  # tokens that it drafts in the planned step
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[Any, Any]] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    emitted: int = 0  # tokens that outputs have returned
    due: float = 0.0  # when the next output may come, by the monotonic clock
    swapped: dict[str, Tensor] | None = None  # its pages in host memory, while it is out
    swaps: int = 0
    restarts: int = 0
    recomputed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # how often, by position in a round
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    history: ScheduleHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = ScheduleHistory(self.request.decoding_schedule)

    @property
    def live(self) -> bool:
        return self.finish is None

    @property
    def length(self) -> int:
        """Tokens of the sequence once everything launched is done, the newest included."""
        return len(self.request.prompt) + self.drawn

    @property
    def ids(self) -> list[int]:
        """The tokens to compute before it can continue: all but the newest."""
        return (self.request.prompt + self.tokens)[:-1]

    @property
    def can_draw(self) -> bool:
        return self.finish is None and self.drawn < self.request.params.max_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still draw."""
        return self.request.params.max_tokens - self.drawn

    def lacks_pages(self, decodes: int, page: int) -> int:
        """Pages that it lacks for the tokens that a step of so many decodes writes."""
        exact = self.request.speculative is not None
        tokens = self.drafts + 1 if exact else min(decodes, self.left)
        return pages_for(self.length - 1 + tokens, page) - len(self.context.pages)

    @property
    def forbids_stops(self) -> bool:
        known = self.drawn if self.request.speculative is None else len(self.tokens)
        return known < self.request.params.min_tokens and bool(self.request.stop_ids)

    @property
    def truncated(self) -> bool:
        """Whether the next draw uses top-k, top-p or min_tokens."""
        params = self.request.params
        return params.top_k > 0 or params.top_p < 1 or self.forbids_stops

    def take(self, token: int, logprob: float, entropy: float, version: int) -> None:
        """Record a token that was read, its weight version, and whether the sequence ends."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.versions.append(version)
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.request.params.max_tokens:
            self.finish = "length"

    def take_round(self, drafts: int, emitted: int, taken: int) -> None:
        """Record the drafts of a round, those that were accepted, and that it drew fewer tokens.

        An answer that ended within the round has taken fewer than it emitted: no more count.
        """
        drafted = drafts if taken == emitted else min(drafts, taken)
        for counts, count in ((self.drafted, drafted), (self.accepted, min(emitted - 1, taken))):
            counts += [0] * (count - len(counts))
            counts[:count] = (before + 1 for before in counts[:count])
        self.rounds += 1
        self.drawn -= drafts + 1 - emitted

    def fail(self) -> None:
        """Record that sampling failed."""
        self.finish, self.error = "error", "the model gave NaN or infinite logits"

    def restart(self) -> None:
        """Drop all tokens; the next token is the first again, of the same random stream."""
        self.started, self.drawn, self.emitted = False, 0, 0
        self.history = ScheduleHistory(self.request.decoding_schedule)
        self.restarts += 1
        self.rounds = 0
        for name in (
            *("tokens", "logprobs", "entropies", "versions", "top", "hidden", "recomputed"),
            *("drafted", "accepted"),
        ):
            getattr(self, name).clear()

    def completion(self, spec: ModelSpec, rule: Rule | None) -> Completion:
        """Return the completion, once the sample has ended."""
        assert self.finish is not None
        request, history = self.request, self.history
        sizes, top_k = (len(request.prompt), len(self.tokens)), request.options.top_logprobs
        return Completion(
            prompt_ids=np.array(request.prompt, dtype=np.int32),
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            entropies=np.array(self.entropies, dtype=np.float32),
            weight_versions=np.array(self.versions, dtype=np.int32),
            kept=history.join(lambda schedule: kept_shares(schedule, rule, *sizes, spec)),
            top_ids=_matrix([ids for ids, _ in self.top], np.int32, top_k),
            top_logprobs=_matrix([logprobs for _, logprobs in self.top], np.float32, top_k),
            hidden=_matrix(self.hidden, np.float32, request.options.hidden_states),
            finish_reason=self.finish,
            error=self.error,
            attention=self._attention(),
            text=None if request.decode is None else request.decode(self.tokens),
            adapter=request.policy_adapter,
            seed=self.seed,
            swaps=self.swaps,
            restarts=self.restarts,
            recomputed=tuple(self.recomputed),
            cached_tokens=request.cached,
            speculation=self._speculation(),
        )

    def _attention(self) -> str:
        """Describe the attention that ran."""
        request, speculative = self.request, self.request.speculative
        ran = self.history.describe(len(request.prompt), len(self.tokens))
        if speculative is None:
            return ran
        drafter = "dense" if request.schedule is None else request.schedule.describe()
        return speculative.describe(drafter)

    def _speculation(self) -> SpeculationStats | None:
        if self.request.speculative is None:
            return None
        spare = [0] * (len(self.drafted) - len(self.accepted))
        return SpeculationStats(
            drafted_by_position=tuple(self.drafted),
            accepted_by_position=(*self.accepted, *spare),
            rounds=self.rounds,
        )


def _matrix(rows: list[Any], dtype: type, requested: int) -> Any:
    if not requested:
        return None
    return np.array(rows, dtype=dtype) if rows else np.empty((0, 0), dtype)


def kept_shares(
    schedule: Schedule | None, rule: Rule | None, prompt: int, tokens: int, spec: ModelSpec
) -> Shares | None:
    """The share of keys and values that each token's step read, over all layers.

    None under a rule that keeps by mass: there the scores decide, and kept tokens are not counted.
    The first token comes from the prompt, which is dense; token i from a step at length prompt + i.
    """
    shares = np.ones(tokens, dtype=np.float32)
    if schedule is not None and rule is not None and rule.mass is not None:
        return None
    sparse = schedule is not None and (rule is None or rule.flow.score is not None)
    if schedule is not None and sparse and tokens > 1:
        length = prompt + np.arange(1, tokens)
        heads, layers = spec.kv_heads, range(spec.layers)
        kept = sum(schedule.kept_of_heads(length, layer, heads) for layer in layers)
        shares[1:] = kept / (spec.layers * length)
    return shares


def sample_seeds(params: SamplingParams) -> list[int]:
    """A seed for each sample of a prompt; those of neighbouring seeds are unrelated."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    children = np.random.SeedSequence(seed).spawn(params.n)
    return [int(child.generate_state(1, np.uint64)[0] >> np.uint64(1)) for child in children]


def stop_ids(spec: ModelSpec, params: SamplingParams) -> frozenset[int]:
    """The tokens that end an answer; ValueError if the model or the sampler cannot have them."""
    stops, most = frozenset(params.stop_token_ids), spec.vocabulary
    if max(stops, default=0) >= most:
        raise ValueError(f"stop_token_ids: {max(stops)} is not in 0..{most - 1}")
    stops = stops if params.ignore_eos else stops | frozenset(spec.eos_ids)
    if params.min_tokens and len(stops) > STOPS:
        raise ValueError(f"{len(stops)} stop ids with min_tokens, at most {STOPS}")
    return stops


def pages_for(tokens: int, page: int) -> int:
    return -(-tokens // page)
