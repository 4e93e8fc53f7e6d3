"""What `sparrow train --dry-run` says: the plan of a run, made without weights and without data.

Memory, batch, schedule and the time of a step, by counts and the step times of known machines. How
long answers will be is not known before they are there: everything is said for the worst case, all
as long as allowed, and for answers of half that on average, evenly spread.
"""

import math
from pathlib import Path

import numpy as np
import torch

from sparrow import ops
from sparrow.calibrate.planning.hardware import known, stretched
from sparrow.dataflow.episodes import episode_of
from sparrow.dataflow.place import (
    Machine,
    dtype_of,
    hardware_of,
    machine_of,
    model_of,
    prompt_room,
    schedule_notes,
)
from sparrow.dataflow.preview_words import algorithm_words, gate_words, rows_words
from sparrow.dataflow.step_time import UTILISATION, Case, StepTime, Work, step_times
from sparrow.engine.answer import placed_schedule
from sparrow.engine.memory import CPU_SHARE, GPU_SHARE, LOGITS_BYTES
from sparrow.engine.pool import PAGE
from sparrow.models.spec import ModelSpec
from sparrow.schema.base import Record
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.train import TrainConfig
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.choosing import rows_of, source_of
from sparrow.tasks.words import WORDS
from sparrow.train.batching import micro_batches
from sparrow.train.costs import TrainerMemory, trainer_memory
from sparrow.train.objectives.algorithms import algorithm_of

ASSUMED_PROMPT = 200  # tokens, where prompts are not at hand
LOOKED_AT = 32  # rows whose prompts are counted
RUNNING = {"cpu": 64, "cuda": 256}  # sequences that the engine runs at once by default
# Sequences of a step that are simulated: all of them where there are not more, or not more tokens.
LEAST_SAMPLE, MOST_SAMPLE, SAMPLE_TOKENS = 64, 4096, 2**25
LENGTHS = 6  # at which budgets are shown
GIB = 2**30


class EngineMemory(Record):
    """Bytes of the engine, and how much context its pages hold."""

    weights: int
    scratch: int  # logits, prompts, graphs
    page_bytes: int
    pages: int
    context: int  # tokens of the longest sequence
    running: int  # sequences at once, at most

    @property
    def kv(self) -> int:
        return self.page_bytes * self.pages

    @property
    def tokens(self) -> int:
        return self.pages * PAGE

    @property
    def sequences(self) -> float:
        """Of the longest kind, that fit together."""
        return self.tokens / self.context

    @property
    def total(self) -> int:
        return self.weights + self.scratch + self.kv


class Batch(Record):
    """What a step samples and learns from."""

    sequences: int
    prompt: int  # tokens of one
    counted: bool  # whether prompts were looked at, or their tokens are assumed
    longest: int  # tokens of a sequence, at most
    context: int  # that there is room for
    tokens: int  # of a step, if every answer is as long as allowed
    half_tokens: int  # if answers are half as long on average
    micro_batches: int  # of an optimiser step, likewise
    half_micro_batches: int
    updates: int  # optimiser steps of a step
    steps: int
    answers: int  # of the run


class Kept(Record):
    """At a total length: the common budget (None: all), and what layers keep on average."""

    length: int
    budget: int | None
    kept: float


class Preview(Record):
    """The plan of a run."""

    model: str
    shape: str  # where its shape comes from
    parameters: int
    dtype: str
    machine: Machine
    rows: str
    algorithm: str
    trainer: TrainerMemory
    engine: EngineMemory
    sleeps: bool  # whether the engine gives its memory back while the trainer works
    batch: Batch
    attention: str
    kept: tuple[Kept, ...]  # none where rollout is dense
    gate: str
    times: tuple[StepTime, ...]  # none where they cannot be told
    untimed: str | None  # why not
    notes: tuple[str, ...]

    @property
    def rollout_bytes(self) -> int:
        held = self.trainer.resident if self.sleeps else self.trainer.total
        return held + self.engine.total

    @property
    def update_bytes(self) -> int:
        return self.trainer.total + (0 if self.sleeps else self.engine.total)

    @property
    def fits(self) -> bool:
        room = self.engine.tokens >= self.engine.context
        return room and max(self.rollout_bytes, self.update_bytes) <= self.machine.memory


def preview(config: TrainConfig) -> Preview:
    """The plan of a run; ValueError for what could never run, as far as it is cheap to tell."""
    _check_parts(config)
    spec, source = model_of(config.model.name)
    machine = machine_of(config.model.device)
    dtype = dtype_of(config.model.dtype, machine.kind)
    schedule, flow = placed_schedule(config.rollout.attention, spec.family)
    rule = None if schedule is None else Rule.of(schedule, flow)
    batch, cases = _batch(config, spec)
    trainer = _trainer(config, spec, machine, dtype, batch)
    engine = _engine(config, spec, rule, machine, dtype, trainer, batch)
    untimed = _untimed(machine, engine)
    work = _work(config, spec, schedule, rule, dtype, batch, engine)
    return Preview(
        model=config.model.name,
        shape=source,
        parameters=spec.parameters(),
        dtype=str(dtype).removeprefix("torch."),
        machine=machine,
        rows=rows_words(config.data),
        algorithm=algorithm_words(config.algorithm),
        trainer=trainer,
        engine=engine,
        sleeps=config.rollout.sleep,
        batch=batch,
        attention="dense" if schedule is None else schedule.describe(),
        kept=() if schedule is None else _kept(schedule, spec, batch.longest),
        gate=gate_words(config.gate, sparse=schedule is not None),
        times=() if untimed else step_times(hardware_of(machine), work, cases),
        untimed=untimed,
        notes=(
            *schedule_notes(schedule, config.model.name, batch.context),
            *_notes(config, spec, machine, batch, engine),
            *_sampled(batch, cases[0]),
        ),
    )


def _check_parts(config: TrainConfig) -> None:
    """The task and the episode must be there, and a file that is there must hold rows."""
    episode_of(config.rollout.episode)
    data = config.data
    if data.task is not None:
        source_of(data.task)
    elif data.file is not None and Path(data.file).is_file():
        rows_of(data, seed=config.run.seed)


def _kept(schedule: Schedule, spec: ModelSpec, longest: int) -> tuple[Kept, ...]:
    """At lengths of equal distance, up to the longest."""
    lengths = np.linspace(0, longest, LENGTHS + 1)[1:].round().astype(np.int64)
    of_layers = [schedule.kept_of_heads(lengths, n, spec.kv_heads) for n in range(spec.layers)]
    mean = np.mean(of_layers, axis=0)
    budgets = [schedule.budget(length) for length in lengths.tolist()]
    return tuple(
        Kept(length=length, budget=None if budget == DENSE else budget, kept=kept)
        for length, budget, kept in zip(lengths.tolist(), budgets, mean.tolist(), strict=True)
    )


# Batch and memory.


def _batch(config: TrainConfig, spec: ModelSpec) -> tuple[Batch, tuple[Case, Case]]:
    rollout, updates = config.rollout, config.batch.updates
    context = _context(config, spec)
    prompt, counted = _prompt(config, context - rollout.max_tokens, spec)
    count = rollout.prompts * rollout.samples
    cases = _cases(count, prompt, rollout.max_tokens)
    tokens = [round(float(case.lengths.mean()) * count) for case in cases]
    cut = [_micro_batches(case, count // updates, config.batch.tokens) for case in cases]
    return Batch(
        sequences=count,
        prompt=prompt,
        counted=counted,
        longest=prompt + rollout.max_tokens if counted else context,
        context=context,
        tokens=tokens[0],
        half_tokens=tokens[1],
        micro_batches=cut[0],
        half_micro_batches=cut[1],
        updates=updates,
        steps=config.run.steps,
        answers=count * config.run.steps,
    ), cases


def _cases(count: int, prompt: int, longest: int) -> tuple[Case, Case]:
    """All answers as long as allowed, and evenly spread; of very many sequences, a sample."""
    shown = min(count, max(LEAST_SAMPLE, min(MOST_SAMPLE, SAMPLE_TOKENS // longest)))
    most = np.full(shown, prompt + longest)
    answers = np.linspace(1, longest, shown).round().astype(np.int64)
    half = prompt + np.random.default_rng(0).permutation(answers)
    return (
        Case("all as long as allowed", most, count / shown),
        Case("answers half as long on average", half, count / shown),
    )


def _micro_batches(case: Case, share: int, tokens: int) -> int:
    """Micro-batches of an optimiser step of so many sequences."""
    lengths = case.lengths[:share].tolist()
    return math.ceil(len(micro_batches(lengths, tokens)) * share / len(lengths))


def _context(config: TrainConfig, spec: ModelSpec) -> int:
    """Tokens of the longest prompt that is let in, and of its answer."""
    return prompt_room(config.rollout, spec) + config.rollout.max_tokens


def _prompt(config: TrainConfig, room: int, spec: ModelSpec) -> tuple[int, bool]:
    """Tokens of the longest prompt: of a puzzle in its own words counted, otherwise assumed."""
    data = config.data
    if data.task in PUZZLES and spec.vocabulary == len(WORDS):
        puzzle = PUZZLES[data.task]
        seeds = range(data.first, data.first + min(LOOKED_AT, data.rows or LOOKED_AT))
        longest = max(len(puzzle.row(seed, data.length).prompt.split()) for seed in seeds)
        return min(longest, room), True
    return min(ASSUMED_PROMPT, room), False


def _trainer(
    config: TrainConfig, spec: ModelSpec, machine: Machine, dtype: torch.dtype, batch: Batch
) -> TrainerMemory:
    """For the largest micro-batch: full of tokens, or one sequence that is longer."""
    full = min(config.batch.tokens, batch.tokens // batch.updates)
    return trainer_memory(
        spec,
        tokens=max(batch.longest, full),
        longest=batch.longest,
        item=dtype.itemsize,
        recompute=config.batch.recompute,
        gpu=machine.kind == "cuda",
    )


def _engine(
    config: TrainConfig,
    spec: ModelSpec,
    rule: Rule | None,
    machine: Machine,
    dtype: torch.dtype,
    trainer: TrainerMemory,
    batch: Batch,
) -> EngineMemory:
    """What the engine takes: as much as it is given, else what its own plan would find left."""
    rollout = config.rollout
    fields = ops.kv_fields(PAGE, spec.head_size, dtype)
    each = ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
    each += spec.layers * spec.kv_heads * _rule_bytes(rule, spec, dtype)
    running = rollout.max_running or RUNNING[machine.kind]
    weights = dtype.itemsize * spec.parameters()
    on_gpu = machine.kind == "cuda"
    scratch = running * spec.vocabulary * LOGITS_BYTES * 3 + GIB if on_gpu else 0
    held = trainer.resident if rollout.sleep else trainer.total
    left = int((machine.memory - held - weights) * GPU_SHARE) - scratch
    usual = left if on_gpu else int(machine.memory * CPU_SHARE)
    given = usual if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
    usable = running * -(-batch.context // PAGE)
    return EngineMemory(
        weights=weights,
        scratch=scratch,
        page_bytes=each,
        pages=max(0, min(usable, given // each)),
        context=batch.context,
        running=running,
    )


def _rule_bytes(rule: Rule | None, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a rule stores with a page and KV head."""
    if rule is None:
        return 0
    fields = rule.fields(page=PAGE, head_size=spec.head_size, dtype=dtype)
    return ops.page_bytes(fields, layers=1, kv_heads=1)


def _work(
    config: TrainConfig,
    spec: ModelSpec,
    schedule: Schedule | None,
    rule: Rule | None,
    dtype: torch.dtype,
    batch: Batch,
    engine: EngineMemory,
) -> Work:
    return Work(
        spec=spec,
        schedule=schedule,
        field_bytes=_rule_bytes(rule, spec, dtype),
        item=dtype.itemsize,
        prompt=batch.prompt,
        capacity=engine.tokens,
        running=engine.running,
        recompute=config.batch.recompute,
    )


# Words.


def _untimed(machine: Machine, engine: EngineMemory) -> str | None:
    if machine.hardware is None:
        names = ", ".join(known())
        return f"step times are known of {names} alone, not of {machine.name}"
    if engine.tokens < engine.context:
        return f"{engine.tokens} tokens of keys and values fit, one sequence has {engine.context}"
    return None


def _notes(
    config: TrainConfig, spec: ModelSpec, machine: Machine, batch: Batch, engine: EngineMemory
) -> list[str]:
    """What a reader should know before believing it."""
    said, data, rollout = [], config.data, config.rollout
    if not machine.here:
        said.append(f"there is no GPU here: planned for {machine.name}")
    if (data.file or "").endswith((".parquet", ".jsonl")) and not Path(str(data.file)).is_file():
        said.append(f"{data.file} is not here: the run will need it")
    if not batch.counted:
        said.append(f"prompts were not looked at: {batch.prompt} tokens each are assumed")
    algorithm = algorithm_of(config.algorithm, max_tokens=rollout.max_tokens)
    if algorithm.dynamic:
        refills = config.algorithm.refills
        said.append(f"dynamic sampling may take up to {refills} times as many answers")
    if algorithm.greedy:
        said.append(f"{rollout.prompts} greedy answers a step are sampled as well, not counted")
    if not rollout.sleep and rollout.kv_gib is None and machine.kind == "cuda":
        said.append("sleep is off and kv_gib is not given: the engine would take what is free")
    if _untimed(machine, engine) is None:
        rows = min(batch.sequences, engine.running, int(engine.sequences))
        said += stretched(hardware_of(machine), spec, rows)
        share = f"{UTILISATION:.0%}"
        said.append(
            f"log-probs and update assume a utilisation of {share}; small models reach less"
        )
    return said


def _sampled(batch: Batch, case: Case) -> list[str]:
    shown = len(case.lengths)
    if shown == batch.sequences:
        return []
    return [
        f"micro-batches and times are those of {shown} of the {batch.sequences} answers, scaled"
    ]
