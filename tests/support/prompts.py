"""Acceptances of prompts whose tokens go together: known populations to draw samples from.

Most tokens of a prompt are saturated (acceptance 1); a share that differs by prompt is not, and is
Beta-distributed with parameters that differ by prompt as well. Lengths differ too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

Rng = np.random.Generator
Floats = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How prompts differ: their lengths, and by length the share of bad tokens, and Beta's a, b."""

    lengths: Callable[[Rng, int], Floats]
    share: Callable[[Rng, Floats], Floats]
    a: Callable[[Rng, Floats], Floats]
    run: int = 1  # tokens in a row that share their fate

    def sample(self, rng: Rng, prompts: int) -> list[Floats]:
        lengths = self.lengths(rng, prompts).astype(int)
        shares, a = self.share(rng, lengths), self.a(rng, lengths)
        return [self._prompt(rng, *one) for one in zip(lengths, shares, a, strict=True)]

    def _prompt(self, rng: Rng, length: int, share: float, a: float) -> Floats:
        runs = rng.random(length // self.run + 1) < share
        bad = np.repeat(runs, self.run)[:length]
        alpha = np.ones(length)
        alpha[bad] = 0.999 * rng.beta(a, 2.0, int(bad.sum()))
        return alpha


def lognormal(median: float, sigma: float) -> Callable[[Rng, Floats], Floats]:
    return lambda rng, lengths: median * np.exp(rng.normal(0, sigma, len(lengths)))


def constant(value: float) -> Callable[[Rng, Floats], Floats]:
    return lambda rng, lengths: np.full(len(lengths), value)


def beta(a: float, b: float) -> Callable[[Rng, Floats], Floats]:
    return lambda rng, lengths: rng.beta(a, b, len(lengths))


def uniform(rng: Rng, prompts: int) -> Floats:
    return rng.integers(100, 500, prompts)


def of_a_bin(rng: Rng, prompts: int) -> Floats:
    """Half of the prompts pass the whole bin, the others end in it."""
    return np.where(rng.random(prompts) < 0.5, 400, rng.integers(5, 400, prompts))


def clipped(sigma: float, most: float) -> Callable[[Rng, int], Floats]:
    return lambda rng, prompts: np.clip(200 * np.exp(rng.normal(0, sigma, prompts)), 10, most)


def longer_is_worse(rng: Rng, lengths: Floats) -> Floats:
    slope = rng.uniform(0.3, 1.7, len(lengths))
    return np.clip(0.05 + 0.05 * np.log(lengths / 60) * slope, 0.005, 0.9)


def few_are_bad(rng: Rng, lengths: Floats) -> Floats:
    bad = rng.random(len(lengths)) < 0.15
    return np.where(bad, rng.beta(3, 4, len(lengths)), rng.beta(2, 38, len(lengths)))


DESIGNS = {
    "independent": Design(
        lengths=lambda rng, prompts: np.full(prompts, 60), share=constant(0.15), a=constant(6)
    ),
    "middle": Design(lengths=of_a_bin, share=beta(1.5, 8.5), a=lognormal(5, 0.4)),
    "heavy": Design(lengths=of_a_bin, share=beta(0.6, 3.4), a=lognormal(5, 0.6)),
    "longer": Design(lengths=clipped(0.6, 700), share=longer_is_worse, a=lognormal(6, 0.4)),
    "few": Design(lengths=uniform, share=few_are_bad, a=lognormal(4, 0.5)),
    "runs": Design(lengths=of_a_bin, share=beta(1.5, 8.5), a=lognormal(5, 0.4), run=10),
}


@cache
def truth(name: str, q: float = 0.05) -> float:
    """The quantile over the tokens of very many prompts."""
    return float(
        np.quantile(np.concatenate(DESIGNS[name].sample(np.random.default_rng(99), 20_000)), q)
    )
