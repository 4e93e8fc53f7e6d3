"""How to sample, and what to return."""

from dataclasses import dataclass

from sparrow.records.base import FieldError, Record

LEAST_TEMPERATURE = 1e-3
"""Below it a distribution is a point mass in all but rounding; greedy says what is meant."""

MOST_TEMPERATURE = 1e6  # above, a distribution is uniform in all but rounding
LEAST_P = 1e-6  # below, it is greedy
MOST_SAMPLES = 2**16
MOST_STOPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
