"""Whole rollouts of the published workload: measured step times, added up over its trace.

60 requests of lognormal lengths up to 32 768 tokens, dense and sparse, take 6 (1.7B) to 18 minutes
(14B) of an H200 by their bytes alone; a few steps of each kind take seconds. The trace says who
runs beside whom at which lengths (`calibrate.planning.cost`: in order, while final lengths fit),
and a sample of its steps is measured (`bench.trace_steps`). Dense and sparse share trace and
engine.

Then the same requests run once for real, up to a cut-off, and the sum for that trace must agree.
The bench admits requests itself, by the trace's rule: the engine alone would admit more and swap.
Graphs are captured before that: every kind of step of the run has been measured by then.

The published workload has 11 to 15 kinds of steps: about 30 graphs and 70 states, of 35 steps each.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table

from sparrow import models
from sparrow.bench import decode, timing
from sparrow.bench.trace_steps import (
    BACK,
    Case,
    Report,
    StepTimes,
    measure,
    step_times,
)
from sparrow.calibrate.planning import cost
from sparrow.calibrate.planning.cost import ByteModel, IntArray, Trace
from sparrow.calibrate.tables import figures
from sparrow.engine.engine import Engine
from sparrow.engine.memory import host_memory
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import Benchmark
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule

# Shares of the bytes-only limit to reach, of the published workload.
BARS = {"qwen3-1.7b": 0.78, "qwen3-4b": 0.82, "qwen3-8b": 0.86, "qwen3-14b": 0.90}
TOLERANCE = 0.05  # between a complete run and the sum for it
DENSE = "dense"
PROMPT = 16
LONGEST, CUTOFF = 32_768, 2048
SLACK = pages_for(BACK, PAGE) + 2  # pages of a row beyond those of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The requests: as far as they go, cut short, and what bytes allow of the former."""

    whole: Trace
    short: Trace
    limit: cost.Limit
    memory: float


def run(
    *,
    model: str | ModelSpec = "qwen3-1.7b",
    schedule: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    requests: int = 60,
    longest: int = LONGEST,
    cutoff: int = CUTOFF,
    lengths: Sequence[int] | None = None,
    memory: float | None = None,
    progress: Report | None = None,
) -> Benchmark:
    """Measure one shape, dense and under a schedule.

    schedule  a preset's name or "fixed-N" (default: the model's at 0.86)
    longest   where the workload's lengths end, prompts of 16 tokens included
    cutoff    where those of the complete run end
    lengths   other lengths than the published ones
    memory    bytes of the device (default: its own, at most the 141 GB of the published limit)
    """
    name = schedule or f"{model}-0.86"
    kept = timing.schedule_named(name)
    assert kept is not None
    if cutoff <= PROMPT or longest <= PROMPT:
        raise ValueError(f"cutoff={cutoff}, longest={longest}: allowed are more than {PROMPT}")
    report = progress or (lambda text: None)
    final = cost.published_lengths(requests) if lengths is None else np.asarray(lengths)
    target = pick_device(device or "auto")
    decoder = models.random(model, dtype=timing.torch_dtype(dtype), device=target)
    work = _work(decoder, kept, np.minimum(final, longest), cutoff, memory or _memory(target))
    cases = _cases(decoder, kept, name, work)
    points = [measure(case, (work.whole, work.short), report) for case in cases]
    times = [step_times(case, own) for case, own in zip(cases, points, strict=True)]
    return Benchmark(
        **timing.of_model(decoder, model, schedule=name, prompt=PROMPT),
        lengths=work.whole.lengths.tolist(),
        memory=work.memory,
        limit=asdict(work.limit) | {"speed_up": work.limit.speed_up},
        **_sums(cases, times, work, _bar(model, name, work.whole.lengths)),
        confirmation=_confirm(cases, times, work, report),
        points=[point for own in points for point in own],
    )


def _sums(
    cases: Sequence[Case], times: Sequence[StepTimes], work: Work, bar: float | None
) -> dict[str, Any]:
    """Both attentions over the whole trace, their ratio, and its share of the limit's."""
    ideal = _ideal(work.limit, cases[0].engine.model)
    rows = [
        _row(case.who, work.whole.tokens, cost.rollout_seconds(work.whole, clock), best)
        for case, clock, best in zip(cases, times, ideal, strict=True)
    ]
    gain = rows[0]["seconds"] / rows[1]["seconds"]
    share = gain / work.limit.speed_up
    met = share >= bar if bar is not None else None
    return {"rows": rows, "speed_up": gain, "share": share, "bar": bar, "met": met}


def table(result: Benchmark) -> Table:
    """The result for a terminal; beside it the complete run, and that over the sum for it."""
    short, bar = result["confirmation"], result["bar"]
    checks = {check["who"]: check for check in short["rows"]}
    return figures(
        f"Trace, {result['model']}, {len(result['lengths'])} requests, {result.machine.describe()}",
        result["rows"],
        "who seconds tokens_per_s of_limit complete ratio",
        complete=lambda row: checks[row["who"]]["seconds"],
        ratio=lambda row: checks[row["who"]]["ratio"],
        caption=f"{result['speed_up']:.3f}x of {result['limit']['speed_up']:.3f}x that bytes "
        f"allow: {result['share']:.1%}{f', the bar is {bar:.0%}' if bar else ''}; complete: run "
        f"to {short['cutoff']} tokens",
    )


def _row(who: str, tokens: int, seconds: float, ideal: float | None) -> dict[str, Any]:
    return {
        "who": who,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "limit_seconds": ideal,
        "of_limit": ideal / seconds if ideal else None,
    }


def _bar(model: str | ModelSpec, schedule: str, final: IntArray) -> float | None:
    """The share to reach, where this is the workload that it was set for."""
    published = np.array_equal(final, cost.published_lengths())
    if not isinstance(model, str) or schedule != f"{model}-0.86" or not published:
        return None
    return BARS.get(model)


# The limit, the engine, and the states to measure.


def _memory(device: torch.device) -> float:
    """Bytes of the device, or of the one that the published limit is for if that has less."""
    if device.type != "cuda":
        return min(host_memory(), cost.H200_MEMORY)
    return min(torch.cuda.get_device_properties(device).total_memory, cost.H200_MEMORY)


def _work(model: Decoder, schedule: Schedule, final: IntArray, cutoff: int, memory: float) -> Work:
    reads = ByteModel(spec=model.spec, schedule=schedule, itemsize=model.dtype.itemsize)
    reserve = cost.RESERVE if model.device.type == "cuda" else 0
    capacity = reads.capacity(memory=memory, reserve=reserve)
    whole, short = (
        cost.trace(ends, prompt=PROMPT, capacity=capacity, page=PAGE)
        for ends in (final, np.minimum(final, cutoff))
    )
    peak = timing.peak_of(model.device) or cost.H200_BYTES_PER_S
    limit = cost.limit(reads, whole, capacity=capacity, bytes_per_s=peak)
    return Work(whole=whole, short=short, limit=limit, memory=memory)


def _ideal(limit: cost.Limit, model: Decoder) -> list[float | None]:
    """Seconds that the bytes take, dense and sparse, where the memory's speed is published."""
    peak = timing.peak_of(model.device)
    return [read.total / peak if peak else None for read in (limit.dense, limit.sparse)]


def _cases(model: Decoder, schedule: Schedule, name: str, work: Work) -> tuple[Case, Case]:
    """Both attentions over one engine, with random contents, that holds every state."""
    reads = partial(
        ByteModel,
        spec=model.spec,
        itemsize=model.dtype.itemsize,
        page=PAGE,
        idle_landmarks=True,
    )
    engine = _engine(model, reads().page_bytes, (work.whole, work.short))
    decode.fill(engine)
    return (
        Case(who=DENSE, schedule=None, engine=engine, reads=reads()),
        Case(who=name, schedule=schedule, engine=engine, reads=reads(schedule=schedule)),
    )


def _engine(model: Decoder, page_bytes: int, traces: Sequence[Trace]) -> Engine:
    """Room for every step of the traces; its rule stores what the limit counts."""
    last = [chunk[-1] for trace in traces for chunk in trace.chunks()]
    batch = max(len(lengths) for lengths in last)
    pages = max(int((-(-lengths // PAGE)).sum()) for lengths in last) + SLACK * batch
    longest = max(int(trace.lengths.max()) for trace in traces)
    context = min(model.spec.max_positions, longest + BACK + PAGE)
    kv_bytes = max(pages, pages_for(context, PAGE)) * page_bytes
    engine = Engine(model, max_running=batch, max_context=context, kv_bytes=kv_bytes, adapters=1)
    assert engine.memory.page_bytes == page_bytes, "landmarks of another size than the limit's"
    return engine


# The complete run.


def _confirm(
    cases: Sequence[Case], times: Sequence[StepTimes], work: Work, report: Report
) -> dict[str, Any]:
    """Requests cut short, from prompts to ends, against the sum of measured steps for them."""
    short, capacity, rows = work.short, work.limit.capacity, []
    cutoff = int(short.lengths.max())
    for case, clock in zip(cases, times, strict=True):
        report(f"{case.who}: a complete run up to {cutoff} tokens")
        complete(case, np.minimum(short.lengths, PROMPT + 2), capacity, seed=1)  # warms prompts
        took = complete(case, short.lengths, capacity, seed=0)
        expected = cost.rollout_seconds(short, clock)
        row = _row(case.who, short.tokens, took, None)
        rows.append(row | {"expected": expected, "ratio": took / expected})
    return {
        "cutoff": cutoff,
        "steps": short.steps,
        "rows": rows,
        "speed_up": rows[0]["seconds"] / rows[1]["seconds"],
        "expected_speed_up": rows[0]["expected"] / rows[1]["expected"],
        "confirmed": all(abs(row["ratio"] - 1) <= TOLERANCE for row in rows),
    }


def complete(case: Case, lengths: IntArray, capacity: int, *, seed: int) -> float:
    """Seconds of a run of requests with these final lengths, admitted by the trace's rule."""
    engine, draw = case.engine, np.random.default_rng(seed)
    prompts = draw.integers(engine.model.spec.vocabulary, size=(len(lengths), PROMPT)).tolist()
    queue = deque(zip(prompts, lengths.tolist(), strict=True))
    held: dict[int, int] = {}  # tokens of memory by request

    def work() -> None:
        while queue or not engine.idle:
            while queue and _need(queue[0][1]) + sum(held.values()) <= capacity:
                prompt, length = queue.popleft()
                held[_add(case, prompt, length)] = _need(length)
            for output in engine.step():
                if output.completion is not None:
                    del held[output.request]

    return timing.seconds(work, engine.model.device)


def _need(length: int) -> int:
    return pages_for(length, PAGE) * PAGE


def _add(case: Case, prompt: list[int], length: int) -> int:
    """A request of as many steps as the trace has: its first token comes from the prompt."""
    params = SamplingParams(max_tokens=length - PROMPT + 1, ignore_eos=True, seed=length)
    return case.engine.add(prompt, params, schedule=case.schedule)
