"""The window of one bin: the acceptances of its last steps, and what was concluded so far."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sparrow.schema.gate import Figures
from sparrow.stats import TAIL, quantile_interval

Floats = npt.NDArray[np.float32]

STORED = "<f4"  # float32, least byte first, whatever the machine


class Sample(NamedTuple):
    """The tokens of one trajectory that were drawn in the bin."""

    step: int
    prompt: str
    alpha: Floats


class Sum(NamedTuple):
    """The estimates of all tokens of a step in the bin."""

    step: int
    total: float
    tokens: int


@dataclass(slots=True, kw_only=True)
class Watch:
    """One bin: its window, and what the gate remembers of it."""

    samples: list[Sample] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    below: int = 0  # looks in a row with p05 below target
    slack: int = 0  # looks in a row with p05 surely above target and slack
    ups: int = 0  # times the gate raised it or made it dense
    warned: int | None = None  # step of the last warning
    seen: bool = False  # whether a token was ever drawn in it

    def forget(self, until: int) -> None:
        """Drop what is of this step or earlier."""
        self.samples = [each for each in self.samples if each.step > until]
        self.sums = [each for each in self.sums if each.step > until]

    def fresh(self, step: int) -> bool:
        """Whether a step brought exact tokens."""
        return bool(self.samples) and self.samples[-1].step == step

    def clear(self) -> None:
        """Start anew: what was seen belongs to other budgets."""
        self.samples, self.sums = [], []
        self.below = self.slack = 0

    def state(self) -> dict[str, Any]:
        """Plain data that JSON keeps exactly; acceptances as base64 of float32."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        samples = [[step, prompt, _packed(alpha)] for step, prompt, alpha in self.samples]
        return own | {"samples": samples, "sums": [list(each) for each in self.sums]}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Watch":
        """Inverse of `state`."""
        samples = [Sample(step, prompt, _unpacked(text)) for step, prompt, text in state["samples"]]
        sums = [Sum(*each) for each in state["sums"]]
        return cls(**(state | {"samples": samples, "sums": sums}))


def figures(watches: Sequence[Watch], seed: int) -> Figures:
    """Quantiles and mean over the windows of some bins together, p05 with its interval."""
    groups = _by_prompt([sample for watch in watches for sample in watch.samples])
    estimated = sum(each.tokens for watch in watches for each in watch.sums)
    total = sum(each.total for watch in watches for each in watch.sums)
    found: dict[str, float | None] = dict.fromkeys(("p01", "p05", "low", "high", "p50", "mean"))
    if groups:
        every = np.concatenate(groups)
        tail = quantile_interval(groups, TAIL, seed=seed)
        p01, p50 = np.quantile(every, [0.01, 0.5])
        found = {"p01": p01, "p05": tail.value, "low": tail.low, "high": tail.high}
        found |= {"p50": p50, "mean": every.mean(dtype=np.float64)}
    return Figures(
        tokens=sum(map(len, groups)),
        prompts=len(groups),
        estimated=estimated,
        estimate=total / estimated if estimated else None,
        **found,
    )


def _by_prompt(samples: Sequence[Sample]) -> list[Floats]:
    """All tokens of each prompt, whichever steps they are of, in order of appearance."""
    parts: dict[str, list[Floats]] = {}
    for sample in samples:
        parts.setdefault(sample.prompt, []).append(sample.alpha)
    return [np.concatenate(each) for each in parts.values()]


def _packed(alpha: Floats) -> str:
    return base64.b64encode(alpha.astype(STORED).tobytes()).decode("ascii")


def _unpacked(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), STORED).astype(np.float32)
