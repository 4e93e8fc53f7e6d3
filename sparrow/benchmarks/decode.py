"""Decode benchmark: steps of the whole engine against memory bandwidth, dense and sparse.

A step reads the weights once and the keys and values of every row, so the measure is bytes per
second. Prompts are not computed: rows start at their length over random keys and values, in
shuffled pages. The cases of one batch and context share an engine and alternate in every round;
figures are medians over rounds. Rows end at the named context, so that page tables keep the
captured width of that context.

    ms_step    wall time of Engine.step: scheduling, graph, sampling, reading results
    ms_device  the same steps without the engine: the runner's decode, back to back
    idle       1 - ms_device / ms_step: on a GPU its idle share, on a CPU that of the engine loop
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from sparrow import models, ops
from sparrow.benchmarks import timing
from sparrow.engine.engine import Engine
from sparrow.engine.memory import device_memory
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import Context, Sample, pages_for
from sparrow.engine.runner import PAGES
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import DecodeBenchmark, DecodeRow, Split
from sparrow.schema.sampling import SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

Case = tuple[int, int, str | None]  # batch, context, schedule
Group = tuple[int, int, frozenset[int]]  # batch, context, dense layers of the rule
Times = list[tuple[float, float]]  # seconds of a step, engine and device alone, by round

SPARSE = "qwen3-1.7b-0.86"
GPU_CASES: tuple[Case, ...] = (
    (16, 128, None),
    (32, 2048, None),
    (32, 2048, SPARSE),
    *((32, context, name) for context in (16_384, 32_768) for name in (None, SPARSE, "fixed-4096")),
)
CPU_CASES: tuple[Case, ...] = ((16, 1024, None), (16, 1024, "fixed-256"))
WARM = 3  # steps before the clock starts: compiling, capturing
SPLIT_STEPS = 4
FILL_TOKENS = 1 << 20  # whose pages are summarised at once
SPARE_BYTES = 3 << 30  # of a GPU, for logits, scratch and graphs


def run(
    *,
    model: str | ModelSpec | None = None,
    flow: Flow = block_mean,
    dtype: str | None = None,
    device: str | None = None,
    cases: Sequence[Case] = (),
    steps: int = 64,
    rounds: int = 3,
    split: bool = True,
    progress: Callable[[str], None] | None = None,
) -> DecodeBenchmark:
    """Measure every case.

    flow     the page selection
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
    rows: list[DecodeRow] = []
    groups = _groups(cases or (GPU_CASES if on_gpu else CPU_CASES))
    for (batch, context, dense_layers), names in groups.items():
        if progress is not None:
            progress(f"batch {batch}, context {context}")
        timed = max(1, min(steps, context // 4))
        if context <= timed + WARM + SPLIT_STEPS:
            raise ValueError(f"a context of {context} tokens is too short for {timed} timed steps")
        engine = build(decoder, Rule(flow=flow, dense_layers=dense_layers), batch, context)
        timer = ScheduleTimer(engine=engine, context=context, steps=timed)
        rows += timer.measure(names, rounds, split)
        del engine, timer
        timing.free_memory(target)
    return DecodeBenchmark(
        **timing.model_fields(decoder, name),
        flow=flow.name,
        peak_bytes_per_s=timing.peak_bandwidth(target),
        rounds=rounds,
        rows=tuple(rows),
    )


def _groups(cases: Sequence[Case]) -> dict[Group, list[str | None]]:
    """Group schedules that can share an engine, in the given order.

    Dense attention joins the first schedule of its batch and context, to alternate with it.
    """
    groups: dict[Group, list[str | None]] = defaultdict(list)
    for *size, name in cases:
        sparse = [other for *others, other in cases if others == size and other is not None]
        schedule = timing.schedule_named(name or next(iter(sparse), None))
        layers = Rule().dense_layers if schedule is None else frozenset(schedule.dense_layers)
        groups[size[0], size[1], layers].append(name)
    return groups


# Engines and rows.


def build(
    model: Decoder,
    rule: Rule,
    batch: int,
    context: int,
    speculative: SpeculativeParams | None = None,
    adapter_rank: int = 64,
) -> Engine:
    """An engine for these rows, or for as many as fit, with a random cache."""
    spec, page_bytes = model.spec, timing.cache_page_bytes(model, rule)
    row_bytes = pages_for(context, PAGE) * page_bytes
    spare = SPARE_BYTES if model.device.type == "cuda" else 0
    batch = max(1, min(batch, (device_memory(model.device) - spare) // row_bytes))
    # Tables at least as wide as the narrowest that an engine of a long context captures.
    most = min(spec.max_positions, max(context, PAGES[0] * PAGE) + PAGE)
    kv_bytes = max(batch * row_bytes, pages_for(most, PAGE) * page_bytes)
    # What a rule's state takes comes off the memory for keys and values.
    states = ops.page_bytes(
        rule.states(pages_for(most, PAGE)), layers=spec.layers, kv_heads=spec.kv_heads
    )
    kv_bytes += (batch + 1) * states
    engine = Engine(
        model,
        max_running=batch,
        max_context=most,
        kv_bytes=kv_bytes,
        adapters=1,
        adapter_rank=adapter_rank,
        rule=rule,
        speculative=speculative,
    )
    fill(engine)
    return engine


def fill(engine: Engine) -> None:
    """Fill the cache with random keys and values, and their summaries."""
    cache, rule = engine.runner.cache, engine.rule
    slots_T = torch.arange(cache.pages * cache.page, device=engine.model.device)
    with torch.inference_mode():
        for layer in range(engine.model.spec.layers):
            for name in ("k", "v"):
                cache.field(name, layer).normal_()
            if rule is not None:
                for part_T in slots_T.split(FILL_TOKENS):
                    rule.summarise(cache, layer, part_T)


@contextmanager
def running(
    engine: Engine,
    contexts: Sequence[int],
    schedule: Schedule | Sequence[Schedule | None] | None,
    *,
    room: int,
    speculative: SpeculativeParams | None = None,
) -> Iterator[list[Sample]]:
    """Running samples, as if prompts of these lengths had been computed and one token sampled.

    schedule: of all, or of each. room: how many tokens a sample may draw; where it speculates, it
    has pages for them from the start. Unfinished samples are aborted at the end.
    """
    vocabulary = engine.model.spec.vocabulary
    draw = np.random.default_rng(0)
    schedules = schedule if isinstance(schedule, Sequence) else [schedule] * len(contexts)
    for seed, (context, own) in enumerate(zip(contexts, schedules, strict=True)):
        prompt = draw.integers(vocabulary, size=context).tolist()
        params = SamplingParams(max_tokens=room, ignore_eos=True, seed=seed)
        engine.add(prompt, params, schedule=own, speculative=speculative)
    ahead = 0 if speculative is None else room
    scheduler = engine.scheduler
    widths = [pages_for(context + ahead, PAGE) for context in contexts]
    pages = engine.pool.take(sum(widths))
    random.Random(0).shuffle(pages)
    samples = [sample for request in scheduler.waiting for sample in request.samples]
    scheduler.waiting.clear()
    for index, (sample, context, width) in enumerate(zip(samples, contexts, widths, strict=True)):
        sample.context, pages = Context(pages=pages[:width], computed=context), pages[width:]
        sample.started, sample.drawn = True, 1
        sample.take(index % vocabulary, 0.0, 0.0, engine.version)
        engine.runner.rows.enter(sample)
        scheduler.running.append(sample)
    yield samples
    timing.synchronize(engine.model.device)
    engine.loop.abandon([sample.request.id for sample in samples])
    engine.check_integrity()


# Measuring.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimer:
    """Times schedules in turn on one engine, with rows that end at a context."""

    engine: Engine
    context: int
    steps: int

    def measure(self, names: Sequence[str | None], rounds: int, split: bool) -> Iterator[DecodeRow]:
        """Measure schedules; yields a row of the result for each."""
        flow = block_mean if self.engine.rule is None else self.engine.rule.flow
        schedules = [timing.schedule_named(name, flow) for name in names]
        rows: list[Times] = [[] for _ in names]
        for _ in range(rounds):
            for times, schedule in zip(rows, schedules, strict=True):
                times.append(self._round(schedule))
        dense = median(step for step, _ in rows[names.index(None)]) if None in names else None
        for name, schedule, times in zip(names, schedules, rows, strict=True):
            row = self._row(name, schedule, times, dense)
            yield row.replace(split=self._split(schedule)) if split else row

    @contextmanager
    def _warm(self, schedule: Schedule | None, steps: int) -> Iterator[list[Sample]]:
        """Samples that reach the context after so many steps, after the warm-up."""
        engine, start = self.engine, self.context - WARM - steps
        contexts = [start] * engine.max_running
        with running(engine, contexts, schedule, room=WARM + steps + 2) as samples:
            timing.repeat(engine.step, WARM)
            timing.synchronize(engine.model.device)
            yield samples

    def _round(self, schedule: Schedule | None) -> tuple[float, float]:
        """One round: steps of the engine, then the same steps by the runner alone."""
        engine, steps = self.engine, self.steps
        device, rows = engine.model.device, engine.runner.rows
        with self._warm(schedule, steps) as samples:
            length_R = rows.length_R.clone()
            step = timing.seconds(partial(timing.repeat, engine.step, steps), device) / steps
            rows.length_R.copy_(length_R)  # the tables reach to the end by now
            alone = timing.device_seconds(lambda: engine.runner.decode(samples), steps, device)
        return step, alone

    def _split(self, schedule: Schedule | None) -> Split:
        """Milliseconds of a step by part."""
        with self._warm(schedule, SPLIT_STEPS):
            steps = partial(timing.repeat, self.engine.step, SPLIT_STEPS)
            by_part = timing.time_by_part(steps, self.engine.model.device)
        return {part: seconds * 1e3 / SPLIT_STEPS for part, seconds in by_part.items()}

    def _row(
        self, name: str | None, schedule: Schedule | None, times: Times, dense: float | None
    ) -> DecodeRow:
        """The figures of one schedule."""
        model, batch = self.engine.model, self.engine.max_running
        peak, (steps_s, device_s) = timing.peak_bandwidth(model.device), zip(*times, strict=True)
        step, device = median(steps_s), median(device_s)
        lengths = np.arange(self.context - self.steps, self.context) + 1  # with the step's token
        reads = timing.reads(model, schedule)
        dense_kv, kept_kv, landmarks = (round(batch * part.mean()) for part in reads.rows(lengths))
        total = reads.weights + dense_kv + kept_kv + landmarks
        return DecodeRow(
            batch=batch,
            context=self.context,
            schedule=name,
            steps=self.steps,
            mean_length=float(lengths.mean()),
            ms_step=step * 1e3,
            ms_step_rounds=tuple(seconds * 1e3 for seconds in steps_s),
            ms_device=device * 1e3,
            ms_device_rounds=tuple(seconds * 1e3 for seconds in device_s),
            idle=1 - device / step,
            tokens_per_s=batch / step,
            bytes=total,
            bytes_weights=reads.weights,
            bytes_kv=dense_kv + kept_kv,
            bytes_landmarks=landmarks,
            tb_per_s=total / step / 1e12,
            of_peak=total / step / peak if peak else None,
            speed_up=dense / step if dense is not None else None,
        )
