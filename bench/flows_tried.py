"""Flows that were tried on the way to a better landmark; docs/log.md says what came of them.

sparrow flow score bench/flows_tried.py:rotated_means ...
"""

import math

import numpy as np

from sparrow.sparse.flows import (
    D,
    Fields,
    Flow,
    P,
    Position,
    Tensor,
    constant,
    fp8,
    fp16,
    int4,
    library,
    logsumexp,
    softmax_over_pages,
)
from sparrow.sparse.flows.functions import Among
from sparrow.sparse.flows.tensor import Summary


def split(keys: Tensor, tokens: int) -> Tensor:
    return keys.reshape(keys.shape[0] // tokens, tokens, keys.shape[1])


def logits(query: Tensor, landmarks: Tensor) -> Tensor:
    return query @ landmarks.T / math.sqrt(query.shape[1])


def hadamard(size: int) -> Tensor:
    """An orthogonal matrix that spreads every channel over all."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return constant(matrix / math.sqrt(size))


def rotated(tokens: int) -> Flow:
    """Four-bit means of rotated keys: outlier channels are spread before they are rounded."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        return {"means": split(keys, tokens).mean(1) @ hadamard(keys.shape[1])}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        turned = query @ hadamard(query.shape[1])
        return softmax_over_pages(logsumexp(logits(turned, fields.means), axis=1)).sum()

    fields = {"means": int4(P // tokens, D)}
    return Flow(name=f"rotated-means-{tokens}", fields=fields, summarise=summarise, score=score)


def valued(tokens: int) -> Flow:
    """The mass of a page times how long its values are."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        return {"means": split(keys, tokens).mean(1), "value": values.norm(1).mean()}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        mass = softmax_over_pages(logsumexp(logits(query, fields.means), axis=1)).sum()
        return mass * fields.value

    fields = {"means": int4(P // tokens, D), "value": fp16()}
    return Flow(name=f"valued-means-{tokens}", fields=fields, summarise=summarise, score=score)


def four_bits(tokens: int, name: str, best: bool = False, among: Among = "finished") -> Flow:
    """Four-bit means, scored otherwise: by the best one of a page, or among free pages only."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        return {"means": split(keys, tokens).mean(1)}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        each = logits(query, fields.means)
        page = each.max(1) if best else logsumexp(each, axis=1)
        return softmax_over_pages(page, among=among).sum()

    fields = {"means": int4(P // tokens, D)}
    return Flow(name=name, fields=fields, summarise=summarise, score=score)


def mean_query(tokens: int) -> Flow:
    """Four-bit means with the paper's mean query: what finer landmarks alone are worth."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        return {"means": split(keys, tokens).mean(1)}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        return (fields.means @ query.mean(0)).max()

    fields = {"means": int4(P // tokens, D)}
    return Flow(name=f"mean-query-{tokens}", fields=fields, summarise=summarise, score=score)


def eight_bits(tokens: int) -> Flow:
    """Half as many means in twice as many bits."""

    def summarise(keys: Tensor, values: Tensor) -> Summary:
        return {"means": split(keys, tokens).mean(1)}

    def score(query: Tensor, fields: Fields, position: Position) -> Tensor:
        return softmax_over_pages(logsumexp(logits(query, fields.means), axis=1)).sum()

    fields = {"means": fp8(P // tokens, D)}
    return Flow(name=f"fp8-means-{tokens}", fields=fields, summarise=summarise, score=score)


def by_mass(flow: Flow, mass: float) -> Flow:
    """Another flow that stops when it holds a share of the mass."""
    return Flow(
        name=f"{flow.name}-mass-{mass:g}",
        fields=flow.fields,
        summarise=flow.summarise,
        score=flow.score,
        mass=mass,
    )


rotated_means = rotated(4)
rotated_pairs = rotated(2)
valued_means = valued(4)
best_means = four_bits(4, "best-means-4", best=True)
free_means = four_bits(4, "free-means-4", among="free")
mean_query_means = mean_query(4)
one_mean = four_bits(16, "int4-mean")
eight_bit_means = eight_bits(8)
half_mass = by_mass(library.fine_means(4), 0.9)
most_mass = by_mass(library.fine_means(4), 0.97)
