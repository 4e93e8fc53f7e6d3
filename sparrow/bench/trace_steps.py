"""The steps of a trace by the graphs that run them, and how long they take.

Steps fall into kinds, a batch bucket and a width of page tables each, which are what the engine
captures graphs for. Of each kind the steps that read the fewest and the most bytes are measured (of
frequent kinds one between them too), with rows at the very lengths of the trace over random keys
and values; between those the time is taken as linear in the bytes. So the effect of the longest row
on the table's width is in the times, as is the spread of lengths.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from sparrow.bench import decode
from sparrow.calibrate.planning.cost import ByteModel, FloatArray, IntArray, Trace
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.engine.runner import PAGES, batch_bucket
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import Report

WARM = 3  # steps before the clock starts: compiling, capturing
STEPS = PAGE  # timed together: each row begins a page once
ROUNDS = 2
BACK = WARM + ROUNDS * STEPS  # steps of a state, of which the last is that of the trace
MIDDLE = WARM + (ROUNDS * STEPS + 1) // 2  # of what is timed
MANY = 4096  # steps of a kind from which on three of them are measured

Sizes = Callable[[IntArray], IntArray]  # bytes of steps, by lengths [steps, rows]


class Kind(NamedTuple):
    """Steps that share a graph: rows and table width, both rounded up."""

    batch: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: an engine, and one of the attentions that it runs."""

    who: str
    schedule: Schedule | None
    engine: Engine
    reads: ByteModel  # what the engine reads, beside its times

    @property
    def width(self) -> int:
        """Pages of the engine's widest table."""
        return pages_for(self.engine.max_context, PAGE)

    @property
    def sizes(self) -> Sizes:
        """Bytes of many steps."""
        return self.reads.steps(self.engine.max_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of steps: those of their kind, between measured ones by bytes. A `StepSeconds`."""

    measured: dict[Kind, tuple[list[int], list[float]]]  # bytes in order, seconds
    sizes: Sizes
    width: int

    def __call__(self, lengths: IntArray) -> FloatArray:
        seconds, sizes = np.empty(len(lengths)), self.sizes(lengths)
        widths = table_widths(lengths.max(axis=1), self.width)
        for pages in np.unique(widths).tolist():
            here = widths == pages
            known = self.measured[Kind(batch_bucket(lengths.shape[1]), pages)]
            seconds[here] = np.interp(sizes[here], *known)
        return seconds


def table_widths(longest: IntArray, most: int) -> IntArray:
    """`pages_bucket` of many steps at once, by the longest row of each."""
    widths = np.array([*(width for width in PAGES if width < most), most])
    return widths[np.searchsorted(widths, -(-longest // PAGE))]


def find_states(traces: Sequence[Trace], width: int, sizes: Sizes) -> list[tuple[Kind, IntArray]]:
    """Of each kind of step: rows of those that read least and most, of many also between."""
    found: dict[tuple[Kind, tuple[int, ...]], IntArray] = {}
    for trace in traces:
        steps: dict[Kind, list[IntArray]] = {}  # number and bytes of each
        start = 0
        for chunk in trace.chunks():
            widths = table_widths(chunk.max(axis=1), width)
            numbered = np.stack([start + np.arange(len(chunk)), sizes(chunk)])
            for pages in np.unique(widths).tolist():
                kind = Kind(batch_bucket(chunk.shape[1]), pages)
                steps.setdefault(kind, []).append(numbered[:, widths == pages])
            start += len(chunk)
        for kind, own in steps.items():
            for lengths in _extremes(trace, np.concatenate(own, axis=1)):
                found[kind, tuple(lengths.tolist())] = lengths
    return [(kind, lengths) for (kind, _), lengths in found.items()]


def _extremes(trace: Trace, numbered: IntArray) -> list[IntArray]:
    number, size = numbered
    ranked, last = number[np.argsort(size, kind="stable")], len(number) - 1
    picks = (0, last // 2, last) if last >= MANY else (0, last)
    return [trace.at(step) for step in dict.fromkeys(ranked[list(picks)].tolist())]


def measure(case: Case, traces: Sequence[Trace], report: Report) -> list[dict[str, Any]]:
    """Points: states of these traces, each once, with their times and the bytes they read."""
    points = []
    for kind, lengths in find_states(traces, case.width, case.sizes):
        mean = float(lengths.mean())
        report(f"{case.who}: {len(lengths)} rows of {mean:.0f} tokens, {kind.pages} pages")
        points.append({"who": case.who} | kind._asdict() | _measured(case, kind, lengths))
    return points


def begin(kind: Kind, lengths: IntArray) -> IntArray:
    """Where rows begin that end at these lengths, or a little later where the kind would change."""
    narrower = max((width for width in PAGES if width < kind.pages), default=0) * PAGE
    shift = max(0, narrower + BACK - int(lengths.max()))
    return np.maximum(1, lengths + shift - BACK)


def _measured(case: Case, kind: Kind, lengths: IntArray) -> dict[str, Any]:
    contexts = begin(kind, lengths)
    samples = decode.place(case.engine, contexts.tolist(), case.schedule, room=BACK + 2)
    seconds = _step_seconds(case.engine)
    decode.remove(case.engine, samples)
    middle = contexts + MIDDLE
    return {
        "rows": len(lengths),
        "mean_length": float(middle.mean()),
        "longest": int(middle.max()),
        "bytes": case.reads.step(middle).total,
        "ms_step": median(seconds) * 1e3,
        "ms_step_rounds": [each * 1e3 for each in seconds],
    }


def _step_seconds(engine: Engine) -> list[float]:
    """Mean seconds of a step in every round; on a GPU each call waits for the step before."""
    for _ in range(WARM):
        engine.step()
    stamps = [time.perf_counter()]
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            engine.step()
        stamps.append(time.perf_counter())
    return [(end - start) / STEPS for start, end in pairwise(stamps)]


def step_times(case: Case, points: list[dict[str, Any]]) -> StepTimes:
    """What was measured of a case, as the time of any step of the traces."""
    measured: dict[Kind, tuple[list[int], list[float]]] = {}
    for point in sorted(points, key=lambda point: point["bytes"]):
        sizes, seconds = measured.setdefault(Kind(point["batch"], point["pages"]), ([], []))
        sizes.append(point["bytes"])
        seconds.append(point["ms_step"] / 1e3)
    return StepTimes(measured=measured, sizes=case.sizes, width=case.width)
