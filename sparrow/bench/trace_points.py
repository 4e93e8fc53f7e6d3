"""The steps behind a result of `sparrow bench trace`, row by row.

A result names what it measured by rows, mean length and bytes. The trace is a function of what the
result also holds, so the lengths of every row follow, and the bytes prove them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from sparrow.bench import timing
from sparrow.bench.trace import PROMPT
from sparrow.bench.trace_steps import BACK, ROUNDS, STEPS, WARM, Kind, find_states
from sparrow.calibrate.planning import cost
from sparrow.calibrate.planning.cost import ByteModel, IntArray, Trace
from sparrow.calibrate.planning.hardware_fit import Point
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.engine.runner import PAGES
from sparrow.models.shapes import shape

Result = Mapping[str, Any]


def points(result: Result) -> list[Point]:
    """Every measured step of a result, dense ones first, as the result lists them.

    Its time is that of the faster round: the first may still hold work of starting up.
    """
    return [
        _point(given, reads, lengths)
        for given, (reads, lengths) in zip(result["points"], _states(result), strict=True)
    ]


def reads_of(result: Result) -> tuple[ByteModel, ByteModel]:
    """How the bytes of its steps were counted, dense and sparse."""
    schedule, spec = timing.schedule_named(result["schedule"]), shape(result["model"])
    itemsize = getattr(torch, result["dtype"]).itemsize
    settings: dict[str, Any] = {"itemsize": itemsize, "page": PAGE, "idle_landmarks": True}
    return ByteModel(spec=spec, **settings), ByteModel(spec=spec, schedule=schedule, **settings)


def traces(result: Result) -> tuple[Trace, Trace]:
    """Who ran when: all of the workload, and the part of it that was run for real."""
    final, capacity = np.asarray(result["lengths"]), result["limit"]["capacity"]
    cut = np.minimum(final, result["confirmation"]["cutoff"])
    whole, short = (
        cost.trace(ends, prompt=PROMPT, capacity=capacity, page=PAGE) for ends in (final, cut)
    )
    return whole, short


def _states(result: Result) -> Iterator[tuple[ByteModel, IntArray]]:
    both = traces(result)
    for reads in reads_of(result):
        context = min(reads.spec.max_positions, int(both[0].lengths.max()) + BACK + PAGE)
        found: dict[tuple[Kind, tuple[int, ...]], IntArray] = {}
        for over in both:
            states = find_states(over, pages_for(context, PAGE), reads.steps(context))
            for kind, several in states.items():
                found |= {(kind, tuple(lengths.tolist())): lengths for lengths in several}
        for (kind, _), lengths in found.items():
            yield reads, _middle(kind, lengths)


def _middle(kind: Kind, lengths: IntArray) -> IntArray:
    """Lengths in the middle of what was timed for a state (`trace_steps`)."""
    narrower = max((width for width in PAGES if width < kind.pages), default=0) * PAGE
    shift = max(0, narrower + BACK - int(lengths.max()))
    return np.maximum(1, lengths + shift - BACK) + WARM + (ROUNDS * STEPS + 1) // 2


def _point(given: Result, reads: ByteModel, lengths: IntArray) -> Point:
    found = len(lengths), int(lengths.max()), reads.step(lengths).total
    told = given["rows"], given["longest"], given["bytes"]
    if found != told:
        raise ValueError(
            f"a point of {told[0]} rows, the longest of {told[1]} tokens, reads {told[2]} bytes, "
            f"but the trace has {found}: the result was not made by this version of the benchmark"
        )
    return Point(reads=reads, lengths=lengths, seconds=min(given["ms_step_rounds"]) / 1e3)
