"""What a rollout must read from memory: the bytes-only limit of its speed.

A decode step reads each weight once for all of its rows; of each row it reads the keys and values
that each layer keeps, and the landmarks by which they are chosen. Nothing else is counted: writes
(one token a row), activations, logits and prompts are small beside them, and time lost between
reads is what a measurement shows and a limit does not.

Choices that the limit makes:

- An embedding that is not also the LM head is looked up, a few rows a step: it does not count as
  read, but it takes memory.
- Landmarks are read of every finished page of a row, in the layers whose budget bites at its
  length. Where a row has no more pages than its budget it is dense exactly, and a perfect engine
  reads none. (`idle_landmarks` counts them there too, as the fitted step times of `hardware` do;
  our kernels skip such rows under flows without state.)
- Requests start in order. One enters when the FINAL lengths of everybody who runs fit into memory
  together with its own, in whole pages, so none is ever swapped out. (The engine itself admits by
  present lengths and swaps the youngest out, which no count of bytes read from memory can price.)
- Dense and sparse run the same trace, also where dense alone would need no memory for landmarks.

numpy and no torch: plans read this too.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparrow.schema.schedule import DENSE, Schedule

if TYPE_CHECKING:  # that room loads torch
    from sparrow.models.spec import ModelSpec

H200_BYTES_PER_S = 4.8e12  # published
H200_MEMORY = 141 * 10**9  # published; the driver shows somewhat more
RESERVE = 3 << 30  # bytes for logits, scratch and graphs
CHUNK = 4096  # steps looked at together

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
StepSeconds = Callable[[IntArray], FloatArray]
"""Seconds of steps, given the total lengths of their rows [steps, rows], this token included."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read, by what they are."""

    weights: int
    dense: int  # keys and values of layers that stay dense
    kept: int  # keys and values that budgets keep in the other layers
    landmarks: int

    @property
    def kv(self) -> int:
        return self.dense + self.kept

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.landmarks


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteModel:
    """How the bytes of a model's decode steps are counted; dense without a schedule.

    itemsize        bytes of a weight, a key's number and a value's
    page            tokens of a page
    field_bytes     of the landmark of one page and KV head (default: one mean key)
    idle_landmarks  also count landmarks where no budget bites
    """

    spec: "ModelSpec"
    schedule: Schedule | None = None
    itemsize: int = 2
    page: int = 16
    field_bytes: int | None = None
    idle_landmarks: bool = False

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule.page != self.page:
            pages = f"schedule {self.schedule.name!r} has pages of {self.schedule.page} tokens"
            raise ValueError(f"{pages}, the byte model pages of {self.page}")
        flow = "block-mean" if self.schedule is None else self.schedule.flow
        if flow != "block-mean" and self.field_bytes is None:
            raise ValueError(
                f"a schedule for the flow {flow!r}: give the bytes that it keeps with a page and "
                "KV head (field_bytes)"
            )

    @property
    def resident(self) -> int:
        """Bytes of all weights in memory."""
        return self.spec.parameters() * self.itemsize

    @property
    def weights(self) -> int:
        """Bytes of the weights that a step reads."""
        looked_up = 0 if self.spec.tied else self.spec.vocabulary * self.spec.hidden
        return self.resident - looked_up * self.itemsize

    @property
    def vector(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.spec.kv_heads * self.spec.head_size * self.itemsize

    @property
    def landmark(self) -> int:
        """Bytes of one page's landmarks in one layer."""
        field_bytes = self.field_bytes
        size = self.spec.head_size * self.itemsize if field_bytes is None else field_bytes
        return self.spec.kv_heads * size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers: keys, values, landmarks."""
        return self.spec.layers * (self.page * self.vector + self.landmark)

    def rows(self, lengths: IntArray) -> IntArray:
        """Bytes that a step reads of rows at these total lengths, which are at least 1.

        [3, rows]: dense, kept and landmarks of `Traffic`.
        """
        dense, scored = np.zeros_like(lengths), np.zeros_like(lengths)
        kept = np.zeros(lengths.shape)
        for layer in range(self.spec.layers):
            if self._stays_dense(layer):
                dense += lengths
            else:
                assert self.schedule is not None
                kept_tokens = self.schedule.kept_of_heads(lengths, layer, self.spec.kv_heads)
                kept += kept_tokens
                scored += np.where(kept_tokens < lengths, lengths // self.page, 0)
        if self.idle_landmarks:
            scored = self.scored_layers * (lengths // self.page)
        kept_bytes = np.rint(kept * self.vector).astype(np.int64)
        return np.stack([dense * self.vector, kept_bytes, scored * self.landmark])

    def _stays_dense(self, layer: int) -> bool:
        if self.schedule is None:
            return True
        heads = (self.schedule.budgets_of(layer, head) for head in range(self.spec.kv_heads))
        return all(bool((budgets == DENSE).all()) for budgets in heads)

    @property
    def scored_layers(self) -> int:
        """Layers in which the engine scores pages, whatever their budgets."""
        if self.schedule is None:
            return 0
        return sum(layer not in self.schedule.dense_layers for layer in range(self.spec.layers))

    def step(self, lengths: Sequence[int] | IntArray) -> Traffic:
        """One step of rows at these total lengths, the tokens of the step included."""
        rows = self.rows(np.asarray(lengths, dtype=np.int64))
        return Traffic(self.weights, *rows.sum(axis=1).tolist())

    def steps(self, longest: int) -> Callable[[IntArray], IntArray]:
        """A fast `step(...).total` of many steps at once, as `StepSeconds` gets them."""
        by_length = np.concatenate([[0], self.rows(np.arange(1, longest + 1)).sum(axis=0)])
        return lambda lengths: self.weights + by_length[lengths].sum(axis=1)

    def capacity(self, *, memory: float = H200_MEMORY, reserve: float = RESERVE) -> int:
        """Tokens whose keys, values and landmarks fit beside the weights, in whole pages."""
        left = memory - reserve - self.resident
        if left < self.page_bytes:
            raise ValueError(
                f"weights of {self.resident / 1e9:.3g} GB and a reserve of {reserve / 1e9:.3g} GB "
                f"leave no page of {memory / 1e9:.3g} GB"
            )
        return int(left // self.page_bytes) * self.page


# The trace: who runs when.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests under continuous batching: each makes one token a step from its start to its end.

    Request i takes part in lengths[i] - prompts[i] steps, the first of them number starts[i], at
    total lengths from prompts[i] + 1 to lengths[i].
    """

    lengths: IntArray
    prompts: IntArray
    starts: IntArray

    @property
    def ends(self) -> IntArray:
        """The first step of which each request is no longer part."""
        return self.starts + self.lengths - self.prompts

    @property
    def steps(self) -> int:
        return int(self.ends.max())

    @property
    def tokens(self) -> int:
        return int((self.lengths - self.prompts).sum())

    @property
    def mean_batch(self) -> float:
        return self.tokens / self.steps

    def at(self, step: int) -> IntArray:
        """Total lengths of the rows of a step, in the order of the requests."""
        runs = (self.starts <= step) & (step < self.ends)
        return (self.prompts + 1 + step - self.starts)[runs]

    def chunks(self, most: int = CHUNK) -> Iterator[IntArray]:
        """Lengths [steps, rows] of all steps, in order; the rows of a chunk are the same."""
        edges = np.unique(np.concatenate([self.starts, self.ends])).tolist()
        for first, end in pairwise(edges):  # in between the batch does not change
            for start in range(first, end, most):
                ahead = np.arange(min(end, start + most) - start)
                yield self.at(start)[None, :] + ahead[:, None]


def trace(
    lengths: Sequence[int] | IntArray,
    *,
    prompt: int = 0,
    capacity: int | None = None,
    page: int = 16,
    most: int | None = None,
) -> Trace:
    """Requests of these final lengths (prompt included), admitted in order by the limit's rule.

    prompt    tokens of each that are there when it enters; computing them takes no time here
    capacity  tokens that fit (default: all); final lengths of running requests never exceed it
    most      requests that run at once (default: any number)
    """
    final = np.asarray(lengths, dtype=np.int64)
    room = int(final.sum()) + page * len(final) if capacity is None else capacity
    needs = -(-final // page) * page
    if not len(final) or not 0 <= prompt < final.min() or needs.max() > room:
        raise ValueError(
            f"trace: got lengths up to {final.max(initial=0)} and a prompt of {prompt} tokens, "
            f"expected lengths above the prompt's, each of which fits into {room}"
        )
    starts: list[int] = []
    running: list[tuple[int, int]] = []  # (end, tokens of memory), the earliest end first
    now = 0
    for length, need in zip(final.tolist(), needs.tolist(), strict=True):
        while need > room or (most is not None and len(running) >= most):
            now, freed = heapq.heappop(running)
            room += freed
        starts.append(now)
        heapq.heappush(running, (now + length - prompt, need))
        room -= need
    return Trace(lengths=final, prompts=np.full_like(final, prompt), starts=np.array(starts))


def published_lengths(requests: int = 60) -> IntArray:
    """Final lengths of the workload that rollouts are judged by."""
    drawn = np.random.default_rng(0).lognormal(np.log(14_000), 0.65, requests)
    return np.clip(drawn, 800, 32_768).astype(np.int64)


# Sums over a trace.


def rollout_bytes(model: ByteModel, over: Trace) -> Traffic:
    """Everything that the steps of a trace read, exactly."""
    rows = model.rows(np.arange(1, int(over.lengths.max()) + 1))
    upto = np.pad(rows.cumsum(axis=1), ((0, 0), (1, 0)))
    parts = (upto[:, over.lengths] - upto[:, over.prompts]).sum(axis=1)
    return Traffic(over.steps * model.weights, *parts.tolist())


def rollout_seconds(over: Trace, step_seconds: StepSeconds) -> float:
    """Any model of a step's time, added up over the steps of a trace."""
    return float(sum(step_seconds(lengths).sum() for lengths in over.chunks()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What bytes alone allow of one trace, dense and under a schedule."""

    dense: Traffic
    sparse: Traffic
    steps: int
    tokens: int
    mean_batch: float
    capacity: int  # tokens that fit
    bytes_per_s: float

    @property
    def speed_up(self) -> float:
        return self.dense.total / self.sparse.total


def limit(reads: ByteModel, over: Trace, *, capacity: int, bytes_per_s: float) -> Limit:
    """The most that a schedule can gain over dense on a trace. capacity: tokens that fit."""
    return Limit(
        dense=rollout_bytes(replace(reads, schedule=None), over),
        sparse=rollout_bytes(reads, over),
        steps=over.steps,
        tokens=over.tokens,
        mean_batch=over.mean_batch,
        capacity=capacity,
        bytes_per_s=bytes_per_s,
    )


# The paper's cost: eFLOPs, operations plus intensity times bytes, comp + I * mem.


def eflops(reads: ByteModel, read: Traffic, tokens: int, intensity: float) -> float:
    """eFLOPs of drawing so many tokens that read so much, in our consistent form.

    Operations are 2 for each weight and token, 2 for each number of keys and values and query head
    that reads it, and 2 for each number of a mean key where pages are scored, whatever a landmark
    holds. Bytes are those of keys, values and landmarks. Like the printed form it leaves out
    reading the weights.

    What differs from that: steps are summed at their own lengths, with dense layers and reserved
    pages; the prompt's part of scoring has its 1 / page, and half the width (a landmark is a key
    and no value); scores are of the mean query; every sample reads the prompt's pages itself, as
    kernels do that have a program for each row; the token of a step counts in its length; an
    embedding that is only looked up is no product.
    """
    spec = reads.spec
    products = 2 * reads.weights / reads.itemsize * tokens
    attended = 2 * (spec.heads // spec.kv_heads) * read.kv / reads.itemsize
    scored = 2 * spec.kv_heads * spec.head_size * read.landmarks / reads.landmark
    return products + attended + scored + intensity * (read.kv + read.landmarks)


def printed_speed_up(
    spec: "ModelSpec",
    intensity: float,
    *,
    samples: int,
    prompt: int,
    output: int,
    budget: int,
    page: int = 16,
) -> float:
    """Dense over sparse in eFLOPs as the paper prints them, term by term, 2 bytes a number.

    With P parameters, N samples, r query heads of a KV head, B the budget, and D the numbers of one
    token's keys and values in all layers:

        dense    comp = 2 P N Lout + r (2 Lin + Lout) Lout N D     mem = 2 Lin Lout D + N Lout^2 D
        sparse   comp = 2 P N Lout + 2 r N D B Lout                mem = 2 N D B Lout
        scoring  comp = 2 N Lin D Lout + r N D Lout^2 / (2 page)   mem = 2 Lin D Lout
                                                                         + N D Lout^2 / (2 page)
    """
    width, ratio = 2 * spec.layers * spec.kv_heads * spec.head_size, spec.heads // spec.kv_heads
    products = 2 * spec.parameters() * samples * output
    square = samples * width * output**2
    attended = 2 * samples * width * budget * output
    shared = 2 * prompt * width * output
    marks = square / (2 * page)
    compared = ratio * (2 * prompt + output) * output * samples * width
    dense = products + compared + intensity * (shared + square)
    sparse = products + (ratio + intensity) * attended
    scoring = samples * shared + ratio * marks + intensity * (shared + marks)
    return dense / (sparse + scoring)
