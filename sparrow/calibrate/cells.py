"""From measured tokens to the cells of a surface."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sparrow.calibrate.trajectories import Measured
from sparrow.schema.surface import Cell, Estimators
from sparrow.stats import SATURATED, TAIL, Interval, fit_beta, quantile_interval

UNCERTAIN = 0.1  # nats of dense entropy above which a token was a decision

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
By = Literal["length", "position"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Measured tokens side by side, in the order of prompts; one entry a token in every array."""

    prompt: Ints
    sequence: Ints
    length: Ints
    position: Ints
    alpha: Array
    entropy: Array
    below: Array
    above: Array
    ratio: Array | None

    @classmethod
    def of(cls, trajectories: Iterable[Measured]) -> "Tokens":
        found = sorted(trajectories, key=lambda one: (one.prompt, one.sample))
        sizes = [len(one.alpha) for one in found]
        ratios = [one.ratio for one in found]
        drawn = bool(found) and all(ratio is not None for ratio in ratios)
        return cls(
            prompt=np.repeat(np.array([one.prompt for one in found], np.int64), sizes),
            sequence=np.repeat(np.arange(len(found)), sizes),
            length=_joined([one.lengths for one in found], np.int64),
            position=_joined([one.positions for one in found], np.int64),
            **{
                name: _joined([getattr(one, name) for one in found], np.float32)
                for name in ("alpha", "entropy", "below", "above")
            },
            ratio=_joined([r for r in ratios if r is not None], np.float32) if drawn else None,
        )

    def __len__(self) -> int:
        return len(self.alpha)

    def where(self, mask: npt.NDArray[np.bool_]) -> "Tokens":
        kept: dict[str, Any] = {
            each.name: None if (part := getattr(self, each.name)) is None else part[mask]
            for each in fields(self)
        }
        return Tokens(**kept)

    def within(self, start: int, stop: int, by: By = "length") -> "Tokens":
        place = getattr(self, by)
        return self.where((place >= start) & (place < stop))

    def by_prompt(self, values: Array | None = None) -> list[Array]:
        """Values (acceptance, unless told otherwise) of each prompt's tokens."""
        edges = np.flatnonzero(np.diff(self.prompt)) + 1
        return np.split(self.alpha if values is None else values, edges) if len(self) else []


def _joined(parts: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> npt.NDArray:
    return np.concatenate(parts).astype(dtype) if len(parts) else np.empty(0, dtype)


def tail_of(tokens: Tokens) -> Interval:
    """p05 of acceptance with its interval over prompts."""
    return quantile_interval(tokens.by_prompt(), TAIL)


def cells(
    tokens: Tokens,
    edges: Sequence[int],
    *,
    variant: str,
    budget: int | None,
    top_k: int,
    by: By = "length",
) -> list[Cell]:
    """One cell for every bin in which a token was drawn."""
    found = []
    for start, stop in pairwise(edges):
        own = tokens.within(start, stop, by)
        if len(own):
            figures = cell(own, variant=variant, budget=budget, top_k=top_k, start=start, stop=stop)
            found.append(figures)
    return found


def cell(
    tokens: Tokens, *, variant: str, budget: int | None, top_k: int, start: int, stop: int
) -> Cell:
    """Everything that a surface says of some tokens."""
    alpha, tail = tokens.alpha.astype(np.float64), tail_of(tokens)
    fitted = fit_beta(alpha[alpha <= SATURATED])
    doubtful = alpha[tokens.entropy > UNCERTAIN]
    return Cell(
        variant=variant,
        budget=budget,
        start=start,
        stop=stop,
        tokens=len(alpha),
        sequences=len(np.unique(tokens.sequence)),
        prompts=len(tokens.by_prompt()),
        mean=float(alpha.mean()),
        p01=float(np.quantile(alpha, 0.01)),
        p05=tail.value,
        low=tail.low,
        high=tail.high,
        p50=float(np.median(alpha)),
        above=float((alpha > SATURATED).mean()),
        beta=() if fitted is None else (fitted.a, fitted.b, fitted.ks),
        uncertain_p05=float(np.quantile(doubtful, TAIL)) if len(doubtful) else None,
        uncertain=len(doubtful),
        estimators=estimators(tokens, top_k),
    )


def estimators(tokens: Tokens, top_k: int) -> Estimators:
    """What one would think of these tokens without the whole vocabulary."""
    # Gaps are kept in 16 bits, whose rounding can lead out of what acceptance can be.
    lower = np.clip(tokens.alpha - tokens.below, 0.0, 1.0)
    upper = np.clip(tokens.alpha + tokens.above, 0.0, 1.0)
    ratio = tokens.ratio
    return Estimators(
        top_k=top_k,
        lower_p05=float(np.quantile(lower, TAIL)),
        upper_p05=float(np.quantile(upper, TAIL)),
        lower_mean=float(lower.mean(dtype=np.float64)),
        upper_mean=float(upper.mean(dtype=np.float64)),
        widest=float((tokens.below + tokens.above).max()),
        ratio_mean=None if ratio is None else float(ratio.mean(dtype=np.float64)),
        ratio_error=None if ratio is None else _standard_error(tokens, ratio - tokens.alpha),
        ratio_p05=None if ratio is None else float(np.quantile(ratio, TAIL)),
    )


def _standard_error(tokens: Tokens, values: Array) -> float | None:
    """Of the mean over tokens, with prompts as what was drawn; None of a single prompt."""
    groups = tokens.by_prompt(values)
    if len(groups) < 2:
        return None
    mean = float(values.mean(dtype=np.float64))
    residuals = np.array([float((group - mean).sum(dtype=np.float64)) for group in groups])
    spread = residuals.std(ddof=1) * len(groups) ** 0.5
    return float(spread / len(values))
