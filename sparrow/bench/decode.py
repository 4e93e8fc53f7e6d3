"""Decode steps of the whole engine, against what the memory can deliver; dense beside sparse.

A step reads the weights once and keys and values of every row, so the yardstick is bytes per
second. Prompts are not computed: rows are put at their length over random keys and values, in
shuffled pages. The cases of one batch and context share an engine and take turns in every round;
figures are medians over rounds. A row's length ends at the named context, so that page tables stay
in the captured width of that context.

    ms_step    wall time of Engine.step: scheduling, graph, sampling, reading results
    ms_device  the same steps without the engine: the runner's decode, back to back
    idle       1 - ms_device / ms_step: on a GPU its idle share, on a CPU that of the engine loop
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table

from sparrow import models, ops
from sparrow.bench import timing
from sparrow.calibrate.planning.cost import ByteModel, Traffic
from sparrow.calibrate.tables import figures
from sparrow.engine.engine import Engine
from sparrow.engine.memory import device_memory
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import Context, Sample, pages_for
from sparrow.engine.runner import PAGES
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import Benchmark
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

Case = tuple[int, int, str | None]  # batch, context, schedule

SPARSE = "qwen3-1.7b-0.86"
GPU_CASES: tuple[Case, ...] = (
    (16, 128, None),
    (32, 2048, None),
    (32, 2048, SPARSE),
    *((32, context, name) for context in (16_384, 32_768) for name in (None, SPARSE, "fixed-4096")),
)
CPU_CASES: tuple[Case, ...] = ((16, 1024, None), (16, 1024, "fixed-256"))
NARROWEST = PAGES[0]
WARM = 3  # steps before the clock starts: compiling, capturing
SPLIT_STEPS = 4
FILL_TOKENS = 1 << 20  # whose pages are summarised in one go
SPARE_BYTES = 3 << 30  # of a GPU, for logits, scratch and graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step, engine and device alone, in one round."""

    step: float
    device: float


def run(
    *,
    model: str | ModelSpec | None = None,
    flow: Flow = block_mean,
    dtype: str | None = None,
    device: str | None = None,
    cases: Sequence[Case] | None = None,
    steps: int = 64,
    rounds: int = 3,
    split: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Benchmark:
    """Measure every case.

    flow     what chooses pages
    model    a published shape (default: qwen3-1.7b on a GPU, smollm2-135m on a CPU)
    dtype    bf16, fp32 (default: bf16 on a GPU, fp32 on a CPU)
    cases    (batch, context, schedule): None is dense, else a preset's name or "fixed-N", or
             "fixed-N-all" for one without dense layers, "fixed-N-dense-0,3" for one with these
    steps    timed in a round, at most a quarter of the context
    split    also time the parts of a step
    """
    target = pick_device(device or "auto")
    on_gpu = target.type == "cuda"
    name = model or ("qwen3-1.7b" if on_gpu else "smollm2-135m")
    decoder = models.random(name, dtype=timing.torch_dtype(dtype), device=target)
    rows: list[dict[str, Any]] = []
    groups = _groups(cases or (GPU_CASES if on_gpu else CPU_CASES))
    for (batch, context, dense_layers), names in groups.items():
        if progress is not None:
            progress(f"batch {batch}, context {context}")
        rule = Rule(flow=flow, dense_layers=dense_layers)
        rows += _measure(decoder, rule, batch, context, names, steps, rounds, split)
        timing.free_memory(target)
    settings = {"flow": flow.name, "peak_bytes_per_s": timing.peak_of(target), "rounds": rounds}
    return Benchmark(**timing.of_model(decoder, name, **settings, rows=rows))


def table(result: Benchmark) -> Table:
    """The result for a terminal; of the split of the device's time, shares."""
    return figures(
        f"Decode, {result['model']}, {result.machine.describe()}",
        result["rows"],
        "batch context schedule ms_step ms_device idle gb tb_per_s of_peak of_weights speed_up "
        "split",
        schedule=lambda row: row["schedule"] or "dense",
        gb=lambda row: row["bytes"] / 1e9,
        split=lambda row: timing.shares(row["split"] or {}),
    )


# Engines and rows.


Group = tuple[int, int, frozenset[int]]  # batch, context, dense layers of the rule


def _groups(cases: Sequence[Case]) -> dict[Group, list[str | None]]:
    """Schedules by what they can share an engine for, in the order given.

    Dense attention goes with the first schedule of its batch and context, to take turns with it.
    """
    layers = [_dense_layers(name) for _, _, name in cases]
    first: dict[tuple[int, int], frozenset[int]] = {}
    for (batch, context, _), dense in zip(cases, layers, strict=True):
        if dense is not None:
            first.setdefault((batch, context), dense)
    groups: dict[Group, list[str | None]] = defaultdict(list)
    for (batch, context, name), dense in zip(cases, layers, strict=True):
        if dense is None:
            dense = first.get((batch, context), Rule().dense_layers)
        groups[batch, context, dense].append(name)
    return groups


def _dense_layers(name: str | None) -> frozenset[int] | None:
    schedule = timing.schedule_named(name)
    return None if schedule is None else frozenset(schedule.dense_layers)


def _build(model: Decoder, rule: Rule, batch: int, context: int) -> Engine:
    """An engine with room for these rows, or for as many as fit, and random contents."""
    spec, page_bytes = model.spec, timing.pages_bytes(model, rule)
    row_bytes = pages_for(context, PAGE) * page_bytes
    spare = SPARE_BYTES if model.device.type == "cuda" else 0
    batch = max(1, min(batch, (device_memory(model.device) - spare) // row_bytes))
    # Tables at least as wide as the narrowest that an engine of a long context captures.
    most = min(spec.max_positions, max(context, NARROWEST * PAGE) + PAGE)
    kv_bytes = max(batch * row_bytes, pages_for(most, PAGE) * page_bytes)
    # What a rule's state takes comes off the memory for keys and values.
    states = ops.page_bytes(
        rule.states(pages_for(most, PAGE)), layers=spec.layers, kv_heads=spec.kv_heads
    )
    kv_bytes += (batch + 1) * states
    engine = Engine(
        model, max_running=batch, max_context=most, kv_bytes=kv_bytes, adapters=1, rule=rule
    )
    fill(engine)
    return engine


def fill(engine: Engine) -> None:
    """Random keys and values, and what the rule keeps of them."""
    cache, rule = engine.runner.cache, engine.rule
    slots_T = torch.arange(cache.pages * cache.page, device=engine.model.device)
    with torch.inference_mode():
        for layer in range(engine.model.spec.layers):
            for name in ("k", "v"):
                cache.field(name, layer).normal_()
            if rule is not None:
                for part_T in slots_T.split(FILL_TOKENS):
                    rule.summarise(cache, layer, part_T)


def place(
    engine: Engine, contexts: Sequence[int], schedule: Schedule | None, *, room: int
) -> list[Sample]:
    """Samples that run as if prompts of these tokens had been computed and one token drawn."""
    vocabulary = engine.model.spec.vocabulary
    draw = np.random.default_rng(0)
    for seed, context in enumerate(contexts):
        prompt = draw.integers(vocabulary, size=context).tolist()
        params = SamplingParams(max_tokens=room, ignore_eos=True, seed=seed)
        engine.add(prompt, params, schedule=schedule)
    scheduler, widths = engine.scheduler, [pages_for(context, PAGE) for context in contexts]
    pages = engine.pool.take(sum(widths))
    random.Random(0).shuffle(pages)
    samples = [sample for request in scheduler.waiting for sample in request.samples]
    scheduler.waiting.clear()
    for index, (sample, context, width) in enumerate(zip(samples, contexts, widths, strict=True)):
        own, pages = pages[:width], pages[width:]
        sample.context = Context(pages=own, computed=context)
        sample.started, sample.drawn = True, 1
        sample.take(index % vocabulary, 0.0, 0.0, engine.version)
        engine.runner.rows.enter(sample)
        scheduler.running.append(sample)
    return samples


def remove(engine: Engine, samples: Sequence[Sample]) -> None:
    timing.synchronize(engine.model.device)
    engine.loop.abandon([sample.request.id for sample in samples])
    engine.check_integrity()


# Measuring.


def _measure(
    model: Decoder,
    rule: Rule,
    batch: int,
    context: int,
    names: Sequence[str | None],
    steps: int,
    rounds: int,
    split: bool,
) -> list[dict[str, Any]]:
    """Rows of the result for the schedules of one batch and context."""
    engine = _build(model, rule, batch, context)
    steps = max(1, min(steps, context // 4))
    if context <= steps + WARM + SPLIT_STEPS:
        raise ValueError(f"a context of {context} tokens is too short to measure {steps} steps")
    schedules = [timing.schedule_named(name, rule.flow) for name in names]
    taken: list[list[Times]] = [[] for _ in names]
    for _ in range(rounds):
        for times, schedule in zip(taken, schedules, strict=True):
            times.append(_round(engine, context, schedule, steps))
    splits = [_split(engine, context, schedule) if split else None for schedule in schedules]
    dense = median(t.step for t in taken[names.index(None)]) if None in names else None
    return [
        {"asked_batch": batch, "batch": engine.max_running, "context": context, "schedule": name}
        | _figures(engine, context, schedule, steps, times, dense)
        | {"split": parts}
        for name, schedule, times, parts in zip(names, schedules, taken, splits, strict=True)
    ]


def _round(engine: Engine, context: int, schedule: Schedule | None, steps: int) -> Times:
    """One turn of a case: steps of the engine, then the same steps by the runner alone."""
    device, rows = engine.model.device, engine.runner.rows
    start = context - WARM - steps
    samples = place(engine, [start] * engine.max_running, schedule, room=context - start + 2)
    _repeat(engine.step, WARM)
    timing.synchronize(device)
    length_R = rows.length_R.clone()
    step = timing.seconds(partial(_repeat, engine.step, steps), device) / steps
    rows.length_R.copy_(length_R)  # the tables reach to the end by now
    alone = timing.device_seconds(lambda: engine.runner.decode(samples), steps, device)
    remove(engine, samples)
    return Times(step=step, device=alone)


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _split(engine: Engine, context: int, schedule: Schedule | None) -> dict[str, float]:
    """Milliseconds of a step by part."""
    start = context - WARM - SPLIT_STEPS
    samples = place(engine, [start] * engine.max_running, schedule, room=context - start + 2)
    _repeat(engine.step, WARM)
    taken = timing.split_of(partial(_repeat, engine.step, SPLIT_STEPS), engine.model.device)
    remove(engine, samples)
    return {part: took * 1e3 / SPLIT_STEPS for part, took in taken.items()}


def _figures(
    engine: Engine,
    context: int,
    schedule: Schedule | None,
    steps: int,
    times: Sequence[Times],
    dense: float | None,
) -> dict[str, Any]:
    step, device = median(t.step for t in times), median(t.device for t in times)
    batch, peak = engine.max_running, timing.peak_of(engine.model.device)
    lengths = np.arange(context - steps, context) + 1  # with the token of the step
    read = traffic(engine.model.spec, engine.model.dtype.itemsize, batch, lengths, schedule)
    return {
        "steps": steps,
        "mean_length": float(lengths.mean()),
        "ms_step": step * 1e3,
        "ms_step_rounds": [t.step * 1e3 for t in times],
        "ms_device": device * 1e3,
        "ms_device_rounds": [t.device * 1e3 for t in times],
        "idle": 1 - device / step,
        "tokens_per_s": batch / step,
        "bytes": read.total,
        "bytes_weights": read.weights,
        "bytes_kv": read.kv,
        "bytes_landmarks": read.landmarks,
        "tb_per_s": read.total / step / 1e12,
        "of_peak": read.total / step / peak if peak else None,
        "of_weights": step * peak / read.weights if peak else None,
        "speed_up": dense / step if dense is not None else None,
    }


def traffic(
    spec: ModelSpec,
    itemsize: int,
    batch: int,
    lengths: np.ndarray[Any, np.dtype[np.int64]],
    schedule: Schedule | None,
) -> Traffic:
    """Mean bytes of a step over these lengths, the token of the step included.

    Landmarks count wherever the engine reads them, also where no budget bites.
    """
    model = ByteModel(
        spec=spec, schedule=schedule, itemsize=itemsize, page=PAGE, idle_landmarks=True
    )
    dense, kept, landmarks = (round(batch * part.mean()) for part in model.rows(lengths))
    return Traffic(weights=model.weights, dense=dense, kept=kept, landmarks=landmarks)
