"""The flows that come with Sparrow, each a few lines; docs/flows.md compares them.

Letters: c the mean key of a page, M and m its greatest and least by channel, q_h the query heads
of a group, qbar their mean.
"""

import math
from collections.abc import Callable

from sparrow.sparse.flows.flow import Fields, Flow, Position
from sparrow.sparse.flows.formats import D, P, as_keys, fp16, int4
from sparrow.sparse.flows.tensor import Summary, Tensor, logsumexp, maximum, softmax_over_pages


def _mean(keys: Tensor, values: Tensor) -> Summary:
    return {"mean": keys.mean(0)}


def _logits(query: Tensor, landmarks: Tensor) -> Tensor:
    """q_h . c / sqrt d for every query head and landmark, [R, landmarks]."""
    return query @ landmarks.T / math.sqrt(query.shape[1])


# The paper's: qbar . c.


def _block_mean(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return query.mean(0) @ fields.mean


block_mean = Flow(
    name="block-mean", fields={"mean": as_keys(D)}, summarise=_mean, score=_block_mean
)


# The mean key by head: max_h or sum_h of softmax over pages of q_h . c / sqrt d.


def _softmax(query: Tensor, fields: Fields) -> Tensor:
    return softmax_over_pages(query @ fields.mean / math.sqrt(query.shape[1]))


def _softmax_max(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return _softmax(query, fields).max()


def _softmax_sum(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return _softmax(query, fields).sum()


softmax_max = Flow(
    name="softmax-max", fields={"mean": as_keys(D)}, summarise=_mean, score=_softmax_max
)
softmax_sum = Flow(
    name="softmax-sum", fields={"mean": as_keys(D)}, summarise=_mean, score=_softmax_sum
)


# Quest's bound: max_h sum_d max(q_hd M_d, q_hd m_d).


def _extremes(keys: Tensor, values: Tensor) -> Summary:
    return {"most": keys.max(0), "least": keys.min(0)}


def _quest(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return maximum(query * fields.most, query * fields.least).sum(1).max()


quest = Flow(
    name="quest",
    fields={"most": as_keys(D), "least": as_keys(D)},
    summarise=_extremes,
    score=_quest,
)


def sub_quest(tokens: int = 16) -> Flow:
    """LServe's: the bound of each `tokens` tokens of a larger page, the greatest of them."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        parts = keys.reshape(keys.shape[0] // tokens, tokens, keys.shape[1])
        return {"most": parts.max(1), "least": parts.min(1)}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        q = query.reshape(query.shape[0], 1, query.shape[1])
        return maximum(q * fields.most, q * fields.least).sum(2).max()

    box = as_keys(P // tokens, D)
    fields = {"most": box, "least": box}
    return Flow(
        name=f"sub-quest-{tokens}",
        fields=fields,
        summarise=summarise,
        score=score,
        probe=(max(16, tokens), 128, 2),
    )


# Means of a few keys each: a finer picture of the page.


def _means_of(tokens: int) -> Callable[[Tensor, Tensor], Summary]:
    def summarise(keys: Tensor, values: Tensor) -> Summary:
        parts = keys.reshape(keys.shape[0] // tokens, tokens, keys.shape[1])
        return {"means": parts.mean(1)}

    return summarise


def sub_means(tokens: int = 4) -> Flow:
    """The best sub-page by head, softmax over pages, summed over heads; as precise as keys."""

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        return softmax_over_pages(_logits(query, fields.means).max(1)).sum()

    return Flow(
        name=f"sub-means-{tokens}",
        fields={"means": as_keys(P // tokens, D)},
        summarise=_means_of(tokens),
        score=score,
    )


def fine_means(tokens: int = 4) -> Flow:
    """Ours: means of `tokens` keys in 4 bits, their attention mass by head, summed over heads.

    At four tokens a page takes the bytes of one 16-bit mean, but for the scales.
    """

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        return softmax_over_pages(logsumexp(_logits(query, fields.means), axis=1)).sum()

    return Flow(
        name=f"fine-means-{tokens}",
        fields={"means": int4(P // tokens, D)},
        summarise=_means_of(tokens),
        score=score,
    )


def spread_means(tokens: int = 4) -> Flow:
    """Ours: the same, and how far keys lie from their mean; the mass of a few keys to second order.

    The mean of exp(x) exceeds exp of the mean: by half the variance of x in the exponent, which is
    |q|^2 / d times that of the keys by channel, if no channel stands out.
    """

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        parts = keys.reshape(keys.shape[0] // tokens, tokens, keys.shape[1])
        away = parts - parts.mean(1, keepdims=True)
        return {"means": parts.mean(1), "away": (away * away).sum(2).mean(1) / keys.shape[1]}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        length = (query * query).sum(1, keepdims=True) / query.shape[1]
        mass = logsumexp(_logits(query, fields.means) + 0.5 * length * fields.away, axis=1)
        return softmax_over_pages(mass).sum()

    return Flow(
        name=f"spread-means-{tokens}",
        fields={"means": int4(P // tokens, D), "away": fp16(P // tokens)},
        summarise=summarise,
        score=score,
    )


# Others.


def _mean_and_value(keys: Tensor, values: Tensor) -> Summary:
    return {"mean": keys.mean(0), "value": values.norm(1).mean()}


def _value_gated(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return query.mean(0) @ fields.mean * fields.value


value_gated = Flow(
    name="value-gated",
    fields={"mean": as_keys(D), "value": as_keys()},
    summarise=_mean_and_value,
    score=_value_gated,
)


def running_average(keep: float = 0.5) -> Flow:
    """Block-mean scores that remember: r <- keep r + qbar . c, and the choice is by r."""

    def score(query: Tensor, fields: Fields, position: Position) -> tuple[Tensor, Summary]:
        r = keep * fields.r + query.mean(0) @ fields.mean
        return r, {"r": r}

    return Flow(
        name=f"running-average-{keep:g}",
        fields={"mean": as_keys(D)},
        state={"r": 0.0},
        summarise=_mean,
        score=score,
    )


def _recent(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return position.page


window = Flow(name="window", score=_recent)
"""The first pages and the most recent ones, as far as the budget goes; nothing is kept."""


def _all_keys(keys: Tensor, values: Tensor) -> Summary:
    return {"every": keys}


def _mass(query: Tensor, fields: Fields, position: Position) -> Tensor:
    return softmax_over_pages(logsumexp(_logits(query, fields.every), axis=1)).sum()


oracle = Flow(name="oracle", fields={"every": as_keys(P, D)}, summarise=_all_keys, score=_mass)
"""The attention mass of the page among finished ones, from all its keys: what landmarks aim at."""

dense = Flow(name="dense", score=None)
"""Every page."""
