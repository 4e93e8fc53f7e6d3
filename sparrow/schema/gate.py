"""Records of the gate: measured acceptance, statistics by length, and actions.

Lengths are total lengths at which tokens were drawn, the variable that a schedule looks up: a token
that is number i of its sequence, from 0, prompt included, was drawn at length i.
"""

from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt

from sparrow.schema.base import Float32Array, Int32Array, Record
from sparrow.schema.evaluation import Estimate

State = Literal["sparse", "dense", "unjudged"]
Kind = Literal["raise", "dense", "lower", "stop", "warn"]

ROUNDING = 1e-3  # tolerance of sums of probabilities


class AcceptanceReading(Record):
    """Exact acceptance of the sampled tokens of one trajectory."""

    prompt: str  # the unit of resampling for intervals
    lengths: Int32Array
    alpha: Float32Array  # sum_v min(p(v), q(v))
    entropy: Float32Array | None = None  # of the policy at each token, in nats

    def _check(self) -> None:
        self._require_aligned("lengths", "alpha", "entropy")
        self._refuse("lengths", self.lengths < 0, "lengths >= 0")
        self._refuse("alpha", _outside(self.alpha), "0 to 1")


class RatioEstimate(Record):
    """min(1, p(x) / q(x)) of the sampled tokens of one trajectory.

    Its mean is an unbiased estimate of that of alpha; its quantiles are not, and are not used.
    """

    lengths: Int32Array
    ratio: Float32Array

    def _check(self) -> None:
        self._require_aligned("lengths", "ratio")
        self._refuse("lengths", self.lengths < 0, "lengths >= 0")
        self._refuse("ratio", _outside(self.ratio), "0 to 1")


class Figures(Record):
    """Statistics of acceptance over the tokens of a window; None without tokens."""

    tokens: int  # measured exactly
    prompts: int  # of these tokens
    p01: float | None
    p05: float | None
    low: float | None  # 95 % interval of p05, over prompts
    high: float | None
    p50: float | None
    mean: float | None
    estimated: int  # tokens with an estimate
    estimate: float | None  # their mean of min(1, p / q)
    p0_1: Estimate | None = None  # the 0.1 % quantile, with its interval over prompts
    hard_misses: Estimate | None = None  # per 1000 tokens; None where no entropy was measured

    @property
    def tail(self) -> tuple[float, float, float]:
        """p05 with the ends of its interval."""
        if self.p05 is None or self.low is None or self.high is None:
            raise ValueError("Figures.tail: got no tokens, allowed: at least one")
        return self.p05, self.low, self.high


class BinCheck(Figures):
    """Statistics of one bin of lengths, with the budget that its tokens were sampled with."""

    start: int
    stop: int | None  # None: open
    budget: int | None  # in common, tokens; None: dense rollout
    state: State

    @property
    def judged(self) -> bool:
        """Whether there are enough tokens and prompts to act on."""
        return self.state != "unjudged"


class Action(Record):
    """An action of the gate in one bin, with its reason. Budgets are the common ones."""

    step: int
    kind: Kind
    start: int
    stop: int | None
    before: int | None  # budgets; None: dense rollout
    after: int | None
    p05: float
    low: float
    high: float
    target: float
    hard_misses: Estimate | None = None  # per 1000 tokens
    reason: str  # one sentence, with the figures


class PolicyAction(Record):
    """A stop or warning by a rule on entropy or KL(new || old), with its reason."""

    step: int
    kind: Literal["stop", "warn"]
    metric: Literal["entropy", "kl"]
    value: float | None  # None: not finite
    bound: float  # gate.max_kl, or gate.entropy_factor
    reason: str


GateAction = Action | PolicyAction


class GateCheck(Record):
    """Statistics and actions of the gate after a step."""

    step: int
    target: float
    hard_misses: float | None = None  # the bound; None: there is none
    bins: tuple[BinCheck, ...]
    overall: Figures  # of all bins' windows together
    budget: float | None  # mean of min(budget, length) over this step's tokens; None: no tokens
    actions: tuple[GateAction, ...]


def metrics(look: GateCheck) -> dict[str, float]:
    """Return the metrics of a step. Unknown ones (no tokens, no judged bin) are left out.

    accept_* and hard_misses (per 1000) are over the exact tokens of all windows together (the last
    steps, as many as the gate looks at; less after an action), accept_estimate over all their
    tokens. */bin_START are of one judged bin; accept_p05_min is the lowest p05 among them and
    hard_misses_max the highest rate, which the target and the bound are for. kv_budget is the mean
    over this step's tokens of what the common budget lets them read, never more than their length.
    gate_violation_frac is the share of judged bins with p05 below target, or with more hard misses
    than the bound.
    """
    judged = [item for item in look.bins if item.judged]
    named = _figures(look.overall)
    named["kv_budget"] = look.budget
    if judged:
        bound = inf if look.hard_misses is None else look.hard_misses
        pairs = [(item.tail[0], item.hard_misses) for item in judged]
        rates = [misses.value for _, misses in pairs if misses is not None]
        violations = [
            p05 < look.target or (misses is not None and misses.value > bound)
            for p05, misses in pairs
        ]
        named["accept_p05_min"] = min(p05 for p05, _ in pairs)
        named["hard_misses_max"] = max(rates, default=None)
        named["gate_violation_frac"] = sum(violations) / len(violations)
    for item in judged:
        named |= {f"{name}/bin_{item.start}": value for name, value in _figures(item).items()}
    return {f"sparse/{name}": value for name, value in named.items() if value is not None}


def _figures(figures: Figures) -> dict[str, float | None]:
    fields = ("p01", "p05", "low", "high", "p50", "mean", "estimate")
    renamed = {"low": "p05_low", "high": "p05_high"}
    named = {f"accept_{renamed.get(field, field)}": getattr(figures, field) for field in fields}
    for name, estimate in (("accept_p0_1", figures.p0_1), ("hard_misses", figures.hard_misses)):
        if estimate is not None:
            ends = {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            named |= {name: estimate.value, **ends}
    return named


def _outside(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    return (values < -ROUNDING) | (values > 1 + ROUNDING)
