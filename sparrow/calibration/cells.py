"""Aggregates measured tokens into the cells of a surface, and decides what to measure next.

For every bin of lengths the plan wants the smallest budget that reaches the target. Counting every
budget whose interval crosses the target as a miss gives the careful plan, counting it as a hit the
bold one. Where the two agree, nothing that is still uncertain matters; where they differ, the
budgets between them are measured on.

Layers are made sparse one group at a time, on sequences that are given. What a group loses alone
says how budgets should be shared out. If the loss of a layer falls with its budget as c * b^-g, and
losses add up, then the least total budget for a given loss has b in proportion to c^(1 / (1 + g)).
That is an assumption; the variant with those shares is measured like any other before a plan may
use it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sparrow.calibration.store import MeasuredSequence
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Estimators, LayerLoss
from sparrow.stats import (
    FAR_TAIL,
    SATURATED,
    TAIL,
    UNCERTAIN,
    Interval,
    fit_beta,
    hard_misses,
    quantile_interval,
    rate_interval,
)

DOUBT = 2.0  # intervals of few prompts are too narrow: they count as so many times as wide
LEAST_SHARE, MOST_SHARE, STEP = 0.25, 4.0, 0.05
SLOPES = (0.25, 3.0)  # of losses against budgets, clipped to this range
NO_LOSS = 1e-4
CLIPPINGS = 8  # after each the mean is brought back to 1

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
    ratio: Array  # NaN where the token was not sampled

    @classmethod
    def of(cls, trajectories: Iterable[MeasuredSequence]) -> "Tokens":
        ordered = sorted(trajectories, key=lambda sequence: (sequence.prompt, sequence.sample))
        sizes = [len(sequence.alpha) for sequence in ordered]
        ratios = [
            np.full(len(sequence.alpha), np.nan) if sequence.ratio is None else sequence.ratio
            for sequence in ordered
        ]
        return cls(
            prompt=np.repeat(np.array([sequence.prompt for sequence in ordered], np.int64), sizes),
            sequence=np.repeat(np.arange(len(ordered)), sizes),
            length=_joined([sequence.lengths for sequence in ordered], np.int64),
            position=_joined(
                [sequence.lengths - sequence.prompt_tokens for sequence in ordered], np.int64
            ),
            **{
                name: _joined([getattr(sequence, name) for sequence in ordered], np.float32)
                for name in ("alpha", "entropy", "below", "above")
            },
            ratio=_joined(ratios, np.float32),
        )

    def __len__(self) -> int:
        return len(self.alpha)

    def where(self, mask: npt.NDArray[np.bool_]) -> "Tokens":
        return Tokens(**{column.name: getattr(self, column.name)[mask] for column in fields(self)})

    def within(self, start: int, stop: int, by: By = "length") -> "Tokens":
        place = getattr(self, by)
        return self.where((place >= start) & (place < stop))

    def by_prompt(self, values: npt.NDArray[Any] | None = None) -> list[npt.NDArray[Any]]:
        """Split values (default: acceptance) by prompt."""
        edges = np.flatnonzero(np.diff(self.prompt)) + 1
        return np.split(self.alpha if values is None else values, edges) if len(self) else []


def _joined(parts: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> npt.NDArray:
    return np.concatenate([np.empty(0), *parts]).astype(dtype)


def tail_interval(tokens: Tokens) -> Interval:
    """p05 of acceptance with its interval over prompts."""
    return quantile_interval(tokens.by_prompt(), TAIL)


def hard_miss_rate(tokens: Tokens) -> Interval:
    """Hard misses per 1000 tokens with their interval over prompts."""
    return rate_interval(tokens.by_prompt(hard_misses(tokens.alpha, tokens.entropy)))


def cells(
    tokens: Tokens,
    edges: Sequence[int],
    variant: str,
    budget: int | None,
    *,
    top_k: int,
    by: By = "length",
) -> list[Cell]:
    """One cell for every bin in which a token was drawn."""
    binned = []
    for start, stop in pairwise(edges):
        inside = tokens.within(start, stop, by)
        if not len(inside):
            continue
        alpha, tail = inside.alpha.astype(np.float64), tail_interval(inside)
        doubtful = alpha[inside.entropy > UNCERTAIN]
        binned.append(
            Cell(
                variant=variant,
                budget=budget,
                start=start,
                stop=stop,
                tokens=len(alpha),
                sequences=len(np.unique(inside.sequence)),
                prompts=len(inside.by_prompt()),
                mean=float(alpha.mean()),
                p01=float(np.quantile(alpha, 0.01)),
                p05=tail.value,
                low=tail.low,
                high=tail.high,
                p50=float(np.median(alpha)),
                above=float((alpha > SATURATED).mean()),
                beta=fit_beta(alpha) or (),
                uncertain_p05=float(np.quantile(doubtful, TAIL)) if len(doubtful) else None,
                uncertain=len(doubtful),
                estimators=estimators(inside, top_k),
                p0_1=quantile_interval(inside.by_prompt(), FAR_TAIL).estimate(),
                hard_misses=hard_miss_rate(inside).estimate(),
            )
        )
    return binned


def estimators(tokens: Tokens, top_k: int) -> Estimators:
    """Estimate acceptance without the whole vocabulary: from top-K bounds, or sampled ratios."""
    # Gaps are kept in 16 bits, whose rounding can lead out of what acceptance can be.
    lower = np.clip(tokens.alpha - tokens.below, 0.0, 1.0)
    upper = np.clip(tokens.alpha + tokens.above, 0.0, 1.0)
    ratio = None if np.isnan(tokens.ratio).any() else tokens.ratio
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
    groups, mean = tokens.by_prompt(values), float(values.mean(dtype=np.float64))
    if len(groups) < 2:
        return None
    residuals = [float((group - mean).sum(dtype=np.float64)) for group in groups]
    return float(np.std(residuals, ddof=1) * len(groups) ** 0.5 / len(values))


# What to measure next.


class OpenQuestion(NamedTuple):
    """An uncertain cell that the plan still depends on."""

    cell: Cell
    target: float
    why: str

    def __str__(self) -> str:
        cell = self.cell
        place = f"{cell.variant}, {cell.budget} tokens, lengths {cell.start} to {cell.stop}"
        return f"{place}: {self.why} at target {self.target}"


def open_questions(measured: Sequence[Cell], targets: Sequence[float]) -> list[OpenQuestion]:
    """Return the uncertain cells of a variant that matter to the plan; none: measuring can stop."""
    questions = []
    for target in targets:
        careful, bold = (_choice(measured, target, crossing) for crossing in (False, True))
        for cell in sorted(measured, key=lambda cell: (cell.start, cell.budget or 0)):
            small, large, budget = bold[cell.start], careful[cell.start], cell.budget or 0
            between = small is not None and small <= budget and (large is None or budget < large)
            if between and _reaches(cell, target, True) and not _reaches(cell, target, False):
                questions.append(OpenQuestion(cell, target, "crosses"))
            elif budget == large and cell.prompts < LEAST_PROMPTS:
                questions.append(OpenQuestion(cell, target, "few prompts"))
    return questions


def _choice(cells: Sequence[Cell], target: float, crossing: bool) -> dict[int, int | None]:
    """The smallest budget of each bin that reaches the target and does not fall; None: no one."""
    chosen: dict[int, int | None] = {}
    least, beyond = 0, False
    for start in sorted({cell.start for cell in cells}):
        candidates = [cell for cell in cells if cell.start == start and (cell.budget or 0) >= least]
        hits = [cell.budget or 0 for cell in candidates if _reaches(cell, target, crossing)]
        beyond = beyond or not hits
        least = least if beyond else min(hits)
        chosen[start] = None if beyond else least
    return chosen


def _reaches(cell: Cell, target: float, crossing: bool) -> bool:
    """Whether a cell reaches the target: surely, or (crossing) possibly."""
    doubt = DOUBT if cell.prompts < LEAST_PROMPTS else 1.0
    end = cell.high if crossing else cell.low
    return cell.p05 + doubt * (end - cell.p05) >= target


# Layers.


def layer_groups(layers: int, groups: int, dense: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Layers that are not dense, in order, in so many parts of about equal size."""
    free = [layer for layer in range(layers) if layer not in dense]
    parts = np.array_split(np.array(free), min(groups, len(free))) if free else []
    return [tuple(part.tolist()) for part in parts]


def layer_loss(tokens: Tokens, variant: str, budget: int, group: tuple[int, ...]) -> LayerLoss:
    """p05 of the tokens at lengths above the budget."""
    sparse = tokens.where(tokens.length > budget)
    assert len(sparse), "sequences are longer than the budget"
    tail = tail_interval(sparse)
    return LayerLoss(
        variant=variant,
        budget=budget,
        layers=group,
        p05=tail.value,
        low=tail.low,
        high=tail.high,
        mean=float(sparse.alpha.mean(dtype=np.float64)),
        tokens=len(sparse),
        prompts=len(sparse.by_prompt()),
    )


def shares(losses: Sequence[LayerLoss], cells: Sequence[Cell], layers: int) -> tuple[float, ...]:
    """By layer, the multiple of the budget that it should get; their mean is 1, but for rounding.

    A group's loss is taken as the sum of its layers', in equal parts.
    """
    power = 1 / (1 + slope(cells))
    weight = np.ones(layers)
    for loss in losses:
        weight[list(loss.layers)] = max((1 - loss.p05) / len(loss.layers), NO_LOSS) ** power
    free = [layer for loss in losses for layer in loss.layers]
    for _ in range(CLIPPINGS):
        weight[free] = np.clip(weight[free] / weight[free].mean(), LEAST_SHARE, MOST_SHARE)
    return tuple(round(float(share), 2) for share in np.rint(weight / STEP) * STEP)


def slope(cells: Sequence[Cell]) -> float:
    """How fast the loss 1 - p05 falls with the budget, on log scales, within bins."""
    above, beside = 0.0, 0.0
    for start in {cell.start for cell in cells}:
        points = [c for c in cells if c.start == start and c.budget and c.budget < c.start]
        if len(points) < 2:
            continue
        x = np.log([c.budget or 1 for c in points])
        y = np.log([max(1 - c.p05, NO_LOSS) for c in points])
        above += float(((x - x.mean()) * (y - y.mean())).sum())
        beside += float(((x - x.mean()) ** 2).sum())
    return float(np.clip(-above / beside, *SLOPES)) if beside else 1.0
