"""Trace benchmark: whole rollouts of the published workload, by measured steps of its trace.

60 requests of lognormal lengths up to 32 768 tokens, dense and sparse, take 6 (1.7B) to 18 minutes
(14B) of an H200 by their bytes alone; a few steps of each kind take seconds. The trace says which
requests run together at which lengths (`calibration.planning.cost`: in order, while final lengths
fit).

The kind of a step is its batch bucket and the width of its page tables: the engine has a graph for
each. Of each kind the steps that read the fewest and the most bytes are measured (of frequent kinds
a median one too), with rows at the lengths of the trace over random keys and values; in between,
time is linear in bytes. So the times include the effect of the longest row on the width of tables,
and that of different lengths. Dense and sparse share trace and engine. The published workload has
11 to 15 kinds: about 30 graphs and 70 states, of 35 steps each.

Then the same requests run once from start to end, up to a cut-off, and the sum for that trace must
agree. The benchmark admits requests itself, by the trace's rule: the engine alone would admit more
and swap. All graphs have been captured by then.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from sparrow import models
from sparrow.benchmarks import decode, timing
from sparrow.calibration.planning import cost
from sparrow.calibration.planning.cost import ByteModel, FloatArray, IntArray, Trace
from sparrow.engine.engine import Engine
from sparrow.engine.memory import host_memory
from sparrow.engine.pool import PAGE, batch_bucket
from sparrow.engine.requests import pages_for
from sparrow.engine.runner import PAGES
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import TraceBenchmark, TraceCheck, TracePoint, TraceRow
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule

TOLERANCE = 0.05  # relative difference of a complete run and its sum
PROMPT = 16
WARM = 3  # steps before the clock starts: compiling, capturing
STEPS = PAGE  # timed together: every row starts a page once
ROUNDS = 2
BACK = WARM + ROUNDS * STEPS  # steps of a state; the last is that of the trace
MIDDLE = WARM + (ROUNDS * STEPS + 1) // 2  # of the timed steps
MANY = 4096  # steps of a kind from which on three are measured
SLACK = pages_for(BACK, PAGE) + 2  # pages of a row beyond those of the trace

Report = Callable[[str], None]
Sizes = Callable[[IntArray], IntArray]  # bytes of steps, by lengths [steps, rows]


class Kind(NamedTuple):
    """Steps that share a graph: rows and table width, both rounded up."""

    batch: int
    pages: int


class TraceCase(NamedTuple):
    """An engine with dense attention or a schedule."""

    who: str
    schedule: Schedule | None
    engine: Engine
    reads: ByteModel  # bytes that its steps read

    @property
    def width(self) -> int:
        """Pages of the widest table of the engine."""
        return pages_for(self.engine.max_context, PAGE)

    @property
    def sizes(self) -> Sizes:
        """Bytes of many steps."""
        return self.reads.steps(self.engine.max_context)


def run(
    *,
    model: str | ModelSpec = "qwen3-1.7b",
    schedule: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    requests: int = 60,
    longest: int = 32_768,
    cutoff: int = 2048,
    lengths: Sequence[int] | None = None,
    progress: Report = lambda text: None,
) -> TraceBenchmark:
    """Measure one shape, dense and under a schedule.

    schedule  a preset's name or "fixed-N" (default: the model's at 0.86)
    longest   maximum length of the workload, prompts of 16 tokens included
    cutoff    maximum length of the complete run
    lengths   other lengths than the published ones
    """
    name = schedule or f"{model}-0.86"
    sparse_schedule = timing.schedule_named(name)
    assert sparse_schedule is not None
    final = cost.published_lengths(requests) if lengths is None else np.asarray(lengths)
    final = np.minimum(final, longest)
    target = pick_device(device)
    decoder = models.random(model, dtype=timing.torch_dtype(dtype), device=target)
    memory, peak = _memory(target), timing.peak_bandwidth(target)
    reads = ByteModel(spec=decoder.spec, schedule=sparse_schedule, itemsize=decoder.dtype.itemsize)
    reserve = cost.RESERVE if target.type == "cuda" else 0
    capacity = reads.capacity(memory=memory, reserve=reserve)
    whole, short = (
        cost.trace(ends, prompt=PROMPT, capacity=capacity, page=PAGE)
        for ends in (final, np.minimum(final, cutoff))
    )
    rate = peak or cost.H200_BYTES_PER_S
    limit = cost.limit(reads, whole, capacity=capacity, bytes_per_s=rate)
    cases = _cases(decoder, sparse_schedule, name, (whole, short))
    points = [measure(case, (whole, short), progress) for case in cases]
    times = [StepTimes(*pair) for pair in zip(cases, points, strict=True)]
    dense, sparse = _sums(cases, times, whole, limit, peak)
    speed_up = dense.seconds / sparse.seconds
    return TraceBenchmark(
        **timing.model_fields(decoder, model),
        schedule=name,
        prompt=PROMPT,
        lengths=tuple(final.tolist()),
        memory=memory,
        limit=asdict(limit) | {"speed_up": limit.speed_up},
        rows=(dense, sparse),
        speed_up=speed_up,
        share=speed_up / limit.speed_up,
        confirmation=_confirm(cases, times, short, limit.capacity, progress),
        points=tuple(point for measured in points for point in measured),
    )


def _sums(
    cases: Sequence[TraceCase],
    times: Sequence["StepTimes"],
    trace: Trace,
    limit: cost.Limit,
    peak: float | None,
) -> Iterator[TraceRow]:
    """Seconds of the trace, dense and sparse, and of its bytes at the peak bandwidth."""
    for case, clock, read in zip(cases, times, (limit.dense, limit.sparse), strict=True):
        seconds, ideal = cost.rollout_seconds(trace, clock), read.total / peak if peak else None
        share = ideal / seconds if ideal else None
        yield _row(case.who, trace.tokens, seconds, limit_seconds=ideal, of_limit=share)


def _row(who: str, tokens: int, seconds: float, **fields: float | None) -> TraceRow:
    rate = tokens / seconds
    return TraceRow(who=who, tokens=tokens, seconds=seconds, tokens_per_s=rate, **fields)


# The limit and the engine.


def _memory(device: torch.device) -> float:
    """Bytes of the device, but at most those of the published limit."""
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory()
    return min(total, cost.H200_MEMORY)


def _cases(
    model: Decoder, schedule: Schedule, name: str, traces: Sequence[Trace]
) -> tuple[TraceCase, TraceCase]:
    """Dense and sparse cases on one engine with a random cache, large enough for every state."""
    dense, sparse = timing.reads(model), timing.reads(model, schedule)
    engine = _engine(model, dense.page_bytes, traces)
    decode.fill(engine)
    return TraceCase("dense", None, engine, dense), TraceCase(name, schedule, engine, sparse)


def _engine(model: Decoder, page_bytes: int, traces: Sequence[Trace]) -> Engine:
    """An engine that holds every step of the traces; its rule stores what the limit counts."""
    last = [chunk[-1] for trace in traces for chunk in trace.chunks()]
    batch = max(len(lengths) for lengths in last)
    pages = max(int((-(-lengths // PAGE)).sum()) for lengths in last) + SLACK * batch
    longest = max(int(trace.lengths.max()) for trace in traces)
    context = min(model.spec.max_positions, longest + BACK + PAGE)
    kv_bytes = max(pages, pages_for(context, PAGE)) * page_bytes
    engine = Engine(model, max_running=batch, max_context=context, kv_bytes=kv_bytes, adapters=1)
    assert engine.memory.page_bytes == page_bytes, "landmarks of the limit's size"
    return engine


# Steps of each kind.


def table_widths(longest: IntArray, most: int) -> IntArray:
    """`pages_bucket` of many steps at once, by their longest rows."""
    widths = np.array([*(width for width in PAGES if width < most), most])
    return widths[np.searchsorted(widths, -(-longest // PAGE))]


def find_states(traces: Sequence[Trace], width: int, sizes: Sizes) -> list[tuple[Kind, IntArray]]:
    """The steps of each kind that read fewest and most bytes; of frequent kinds also a median."""
    states: dict[tuple[Kind, tuple[int, ...]], IntArray] = {}
    for trace in traces:
        steps: dict[Kind, list[IntArray]] = {}  # their numbers and bytes
        start = 0
        for chunk in trace.chunks():
            widths = table_widths(chunk.max(axis=1), width)
            numbered = np.stack([start + np.arange(len(chunk)), sizes(chunk)])
            for pages in np.unique(widths).tolist():
                kind = Kind(batch_bucket(chunk.shape[1]), pages)
                steps.setdefault(kind, []).append(numbered[:, widths == pages])
            start += len(chunk)
        for kind, parts in steps.items():
            for lengths in _extremes(trace, np.concatenate(parts, axis=1)):
                states[kind, tuple(lengths.tolist())] = lengths
    return [(kind, lengths) for (kind, _), lengths in states.items()]


def _extremes(trace: Trace, numbered: IntArray) -> list[IntArray]:
    number, size = numbered
    ranked, last = number[np.argsort(size, kind="stable")], len(number) - 1
    picks = (0, last // 2, last) if last >= MANY else (0, last)
    return [trace.at(step) for step in dict.fromkeys(ranked[list(picks)].tolist())]


def begin(kind: Kind, lengths: IntArray) -> IntArray:
    """Start lengths of rows that end at these lengths, or later where the kind would change."""
    narrower = max((width for width in PAGES if width < kind.pages), default=0) * PAGE
    shift = max(0, narrower + BACK - int(lengths.max()))
    return np.maximum(1, lengths + shift - BACK)


def measure(case: TraceCase, traces: Sequence[Trace], report: Report) -> list[TracePoint]:
    """Measure the states of traces: their times, and the bytes that they read."""
    points = []
    for kind, lengths in find_states(traces, case.width, case.sizes):
        mean = float(lengths.mean())
        report(f"{case.who}: {len(lengths)} rows of {mean:.0f} tokens, {kind.pages} pages")
        contexts = begin(kind, lengths)
        with decode.running(case.engine, contexts.tolist(), case.schedule, room=BACK + 2):
            seconds = _step_seconds(case.engine)
        middle = contexts + MIDDLE
        points.append(
            TracePoint(
                who=case.who,
                batch=kind.batch,
                pages=kind.pages,
                rows=len(lengths),
                mean_length=float(middle.mean()),
                longest=int(middle.max()),
                bytes=case.reads.step(middle).total,
                ms_step=median(seconds) * 1e3,
                ms_step_rounds=tuple(value * 1e3 for value in seconds),
            )
        )
    return points


def _step_seconds(engine: Engine) -> list[float]:
    """Mean seconds of a step in every round; on a GPU a call waits for the previous step."""
    timing.repeat(engine.step, WARM)
    stamps = [time.perf_counter()]
    for _ in range(ROUNDS):
        timing.repeat(engine.step, STEPS)
        stamps.append(time.perf_counter())
    return [(end - start) / STEPS for start, end in pairwise(stamps)]


class StepTimes:
    """Seconds of steps, interpolated by bytes between measured steps of the same kind."""

    def __init__(self, case: TraceCase, points: Sequence[TracePoint]) -> None:
        self.sizes, self.width = case.sizes, case.width
        self.measured: dict[Kind, tuple[list[int], list[float]]] = {}
        for point in sorted(points, key=lambda point: point.bytes):
            kind = Kind(point.batch, point.pages)
            sizes, seconds = self.measured.setdefault(kind, ([], []))
            sizes.append(point.bytes)
            seconds.append(point.ms_step / 1e3)

    def __call__(self, lengths: IntArray) -> FloatArray:
        seconds, sizes = np.empty(len(lengths)), self.sizes(lengths)
        widths = table_widths(lengths.max(axis=1), self.width)
        for pages in np.unique(widths).tolist():
            mask = widths == pages
            points = self.measured[Kind(batch_bucket(lengths.shape[1]), pages)]
            seconds[mask] = np.interp(sizes[mask], *points)
        return seconds


# The complete run.


def _confirm(
    cases: Sequence[TraceCase],
    times: Sequence[StepTimes],
    short: Trace,
    capacity: int,
    report: Report,
) -> TraceCheck:
    """Compare a complete run of the cut-off requests with the sum of measured steps."""
    cutoff, rows, sums = int(short.lengths.max()), [], []
    for case, clock in zip(cases, times, strict=True):
        report(f"{case.who}: a complete run up to {cutoff} tokens")
        complete(case, np.minimum(short.lengths, PROMPT + 2), capacity, seed=1)  # warms prompts
        seconds = complete(case, short.lengths, capacity, seed=0)
        sums.append(cost.rollout_seconds(short, clock))
        ratio = seconds / sums[-1]
        rows.append(_row(case.who, short.tokens, seconds, expected=sums[-1], ratio=ratio))
    return TraceCheck(
        cutoff=cutoff,
        steps=short.steps,
        rows=tuple(rows),
        speed_up=rows[0].seconds / rows[1].seconds,
        expected_speed_up=sums[0] / sums[1],
        confirmed=all(
            abs(row.seconds / s - 1) <= TOLERANCE for row, s in zip(rows, sums, strict=True)
        ),
    )


def complete(case: TraceCase, lengths: IntArray, capacity: int, *, seed: int) -> float:
    """Seconds of a complete run of requests with these lengths, admitted by the trace's rule."""
    engine, draw = case.engine, np.random.default_rng(seed)
    prompts = draw.integers(engine.model.spec.vocabulary, size=(len(lengths), PROMPT)).tolist()
    queue = deque(zip(prompts, lengths.tolist(), strict=True))
    held: dict[int, int] = {}  # tokens of memory by request

    def work() -> None:
        while queue or not engine.idle:
            while queue and _need(queue[0][1]) + sum(held.values()) <= capacity:
                prompt, length = queue.popleft()
                # The steps of the trace: the first token is sampled from the prompt.
                tokens = length - PROMPT + 1
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=length)
                held[engine.add(prompt, params, schedule=case.schedule)] = _need(length)
            for output in engine.step():
                if output.completion is not None:
                    del held[output.request]

    return timing.seconds(work, engine.model.device)


def _need(length: int) -> int:
    return pages_for(length, PAGE) * PAGE
