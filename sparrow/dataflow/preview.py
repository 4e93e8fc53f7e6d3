"""What `sparrow train --dry-run` says: the plan of a run, made without weights and without data.

Memory, batch, schedule and the time of a step, by counts and the step times of known machines. How
long answers will be is not known before they are there: everything is said for the worst case, all
as long as allowed, and for answers of half that on average, evenly spread. The time of a step:

    rollout   decode steps of a trace of sequences, by the machine's fitted times
    log-probs 2 N T + causal attention, one dense pass
    update    6 N T + causal attention three times, and the forward pass again with recompute

over peak x the rate at which products run. Prompts, weight transfer, verdicts and what lies between
are left out: they are small where answers are long.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparrow import ops
from sparrow.calibrate.planning.cost import ByteModel, IntArray, rollout_seconds, trace
from sparrow.calibrate.planning.hardware import Hardware, StepModel, known, stretched
from sparrow.dataflow.episodes import episode_of
from sparrow.dataflow.place import (
    TargetMachine,
    dtype_of,
    machine_of,
    model_of,
    prompt_room,
    schedule_notes,
)
from sparrow.engine.answer import placed_schedule
from sparrow.engine.memory import CPU_SHARE, GPU_SHARE, LOGITS_BYTES
from sparrow.engine.pool import PAGE
from sparrow.schema.base import Record
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.train import AlgorithmConfig, Choice, GateConfig, RowsConfig, TrainConfig
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import WORDS
from sparrow.tasks.choosing import rows_of, source_of
from sparrow.train.batching import micro_batches
from sparrow.train.costs import BACKWARD, TrainerMemory, forward_flops, trainer_memory
from sparrow.train.objectives.algorithms import PRESETS, algorithm_of

ASSUMED_PROMPT = 200  # tokens, where prompts are not at hand
LOOKED_AT = 32  # rows whose prompts are counted
RUNNING = {"cpu": 64, "cuda": 256}  # sequences that the engine runs at once by default
# Sequences of a step that are simulated: all of them where there are not more, or not more tokens.
LEAST_SAMPLE, MOST_SAMPLE, SAMPLE_TOKENS = 64, 4096, 2**25
LENGTHS = 6  # at which budgets are shown
GIB = 2**30
UTILISATION = 0.30
"""`training_flops` of an update over what the machine could do in its time, with recompute.
Measured with Qwen3-1.7B on an H200: 0.336 with four sequences of 4096 tokens, 0.279 with one of
32768 (bench/2026-11-15-train-h200.json)."""


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


class BatchPlan(Record):
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


class StepTime(Record):
    """Seconds of a step, for answers of assumed lengths."""

    case: str
    rollout: float
    dense_rollout: float
    logprobs: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.logprobs + self.update

    @property
    def dense_step(self) -> float:
        return self.dense_rollout + self.logprobs + self.update


class Preview(Record):
    """The plan of a run."""

    model: str
    shape: str  # where its shape comes from
    parameters: int
    dtype: str
    machine: TargetMachine
    rows: str
    algorithm: str
    trainer: TrainerMemory
    engine: EngineMemory
    sleeps: bool  # whether the engine gives its memory back while the trainer works
    batch: BatchPlan
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


class LengthCase(NamedTuple):
    """Total lengths of a step's sequences, as assumed; of many, a sample that stands for all."""

    name: str
    lengths: IntArray
    scale: float  # sequences of the step, over those of the sample


def preview(config: TrainConfig) -> Preview:
    """The plan of a run; ValueError for what could never run, as far as it is cheap to tell."""
    return _Planner(config).plan()


class _Planner:
    """A configuration, and what is known of its model and machine without loading either."""

    def __init__(self, config: TrainConfig) -> None:
        _check_parts(config)
        self.config, self.rollout = config, config.rollout
        self.spec, self.source = model_of(config.model.name)
        self.machine = machine_of(config.model.device)
        self.on_gpu = self.machine.kind == "cuda"
        self.dtype = dtype_of(config.model.dtype, self.machine.kind)
        self.schedule, flow = placed_schedule(self.rollout.attention, self.spec.family)
        self.field_bytes = 0  # what the schedule's flow stores with a page and KV head
        if self.schedule is not None:
            rule = Rule.of(self.schedule, flow)
            fields = rule.fields(page=PAGE, head_size=self.spec.head_size, dtype=self.dtype)
            self.field_bytes = ops.page_bytes(fields, layers=1, kv_heads=1)

    def plan(self) -> Preview:
        config, schedule = self.config, self.schedule
        batch, cases = self._batch()
        trainer = self._trainer(batch)
        engine = self._engine(trainer, batch)
        untimed = self._untimed(engine)
        return Preview(
            model=config.model.name,
            shape=self.source,
            parameters=self.spec.parameters(),
            dtype=str(self.dtype).removeprefix("torch."),
            machine=self.machine,
            rows=rows_words(config.data),
            algorithm=algorithm_words(config.algorithm),
            trainer=trainer,
            engine=engine,
            sleeps=self.rollout.sleep,
            batch=batch,
            attention="dense" if schedule is None else schedule.describe(),
            kept=() if schedule is None else self._kept(schedule, batch.longest),
            gate=gate_words(config.gate, sparse=schedule is not None),
            times=() if untimed else tuple(self._time(batch, engine, case) for case in cases),
            untimed=untimed,
            notes=(
                *schedule_notes(schedule, config.model.name, batch.context),
                *self._notes(batch),
                *([] if untimed else self._time_notes(batch, engine)),
                *_sampled(batch, cases[0]),
            ),
        )

    def _kept(self, schedule: Schedule, longest: int) -> tuple[Kept, ...]:
        """At lengths of equal distance, up to the longest."""
        lengths = np.linspace(0, longest, LENGTHS + 1)[1:].round().astype(np.int64)
        heads = self.spec.kv_heads
        layers = [schedule.kept_of_heads(lengths, n, heads) for n in range(self.spec.layers)]
        budgets = [schedule.budget(length) for length in lengths.tolist()]
        return tuple(
            Kept(length=length, budget=None if budget == DENSE else budget, kept=kept)
            for length, budget, kept in zip(
                lengths.tolist(), budgets, np.mean(layers, axis=0).tolist(), strict=True
            )
        )

    # Batch and memory.

    def _batch(self) -> tuple[BatchPlan, tuple[LengthCase, LengthCase]]:
        rollout, updates, run = self.rollout, self.config.batch.updates, self.config.run
        room = prompt_room(rollout, self.spec)
        prompt, counted = self._prompt(room)
        count = rollout.prompts * rollout.samples
        cases = _cases(count, prompt, rollout.max_tokens)
        tokens = [round(float(case.lengths.mean()) * count) for case in cases]
        limit = self.config.batch.tokens
        cut = [_micro_batches(case, count // updates, limit) for case in cases]
        context = room + rollout.max_tokens
        return BatchPlan(
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
            steps=run.steps,
            answers=count * run.steps,
        ), cases

    def _prompt(self, room: int) -> tuple[int, bool]:
        """Tokens of the longest prompt: of a puzzle in its own words counted, otherwise assumed."""
        data = self.config.data
        if data.task in PUZZLES and self.spec.vocabulary == len(WORDS):
            puzzle = PUZZLES[data.task]
            seeds = range(data.first, data.first + min(LOOKED_AT, data.rows or LOOKED_AT))
            longest = max(len(puzzle.row(seed, data.length).prompt.split()) for seed in seeds)
            return min(longest, room), True
        return min(ASSUMED_PROMPT, room), False

    def _trainer(self, batch: BatchPlan) -> TrainerMemory:
        """For the largest micro-batch: full of tokens, or one sequence that is longer."""
        full = min(self.config.batch.tokens, batch.tokens // batch.updates)
        return trainer_memory(
            self.spec,
            tokens=max(batch.longest, full),
            longest=batch.longest,
            item=self.dtype.itemsize,
            recompute=self.config.batch.recompute,
            gpu=self.on_gpu,
        )

    def _engine(self, trainer: TrainerMemory, batch: BatchPlan) -> EngineMemory:
        """What the engine takes: as much as it is given, else what its own plan would find left."""
        spec, rollout, memory = self.spec, self.rollout, self.machine.memory
        fields = ops.kv_fields(PAGE, spec.head_size, self.dtype)
        page = ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
        page += spec.layers * spec.kv_heads * self.field_bytes
        running = rollout.max_running or RUNNING[self.machine.kind]
        weights = self.dtype.itemsize * spec.parameters()
        scratch = running * spec.vocabulary * LOGITS_BYTES * 3 + GIB if self.on_gpu else 0
        held = trainer.resident if rollout.sleep else trainer.total
        left = int((memory - held - weights) * GPU_SHARE) - scratch
        usual = left if self.on_gpu else int(memory * CPU_SHARE)
        given = usual if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
        usable = running * -(-batch.context // PAGE)
        return EngineMemory(
            weights=weights,
            scratch=scratch,
            page_bytes=page,
            pages=max(0, min(usable, given // page)),
            context=batch.context,
            running=running,
        )

    # Time.

    def _untimed(self, engine: EngineMemory) -> str | None:
        if self.machine.hardware is None:
            return f"step times are known of {', '.join(known())} alone, not of {self.machine.name}"
        if engine.tokens < engine.context:
            fit = f"{engine.tokens} tokens of keys and values fit"
            return f"{fit}, one sequence has {engine.context}"
        return None

    def _hardware(self) -> Hardware:
        assert self.machine.hardware is not None
        return Hardware.load(self.machine.hardware)

    def _time(self, batch: BatchPlan, engine: EngineMemory, case: LengthCase) -> StepTime:
        """Utilisation counts three of the four passes that an update with recompute makes, so
        products run at 4 / 3 of it."""
        rate = self._hardware().flops_per_s * UTILISATION * (2 + BACKWARD) / (1 + BACKWARD)
        forward = case.scale * (forward_flops(self.spec, case.lengths.tolist()) / rate)
        passes = 1 + BACKWARD + (1 if self.config.batch.recompute else 0)
        sparse, dense = (
            case.scale * self._rollout(batch, engine, case.lengths, schedule)
            for schedule in (self.schedule, None)
        )
        return StepTime(
            case=case.name,
            rollout=sparse,
            dense_rollout=dense,
            logprobs=forward,
            update=passes * forward,
        )

    def _rollout(
        self, batch: BatchPlan, engine: EngineMemory, lengths: IntArray, schedule: Schedule | None
    ) -> float:
        """Dense and sparse run the same trace: the capacity is that of the plan."""
        over = trace(
            lengths, prompt=batch.prompt, capacity=engine.tokens, page=PAGE, most=engine.running
        )
        reads = ByteModel(
            spec=self.spec,
            schedule=schedule,
            itemsize=self.dtype.itemsize,
            page=PAGE,
            field_bytes=self.field_bytes,
        )
        return rollout_seconds(over, StepModel(self._hardware(), reads))

    # What a reader should know before believing it.

    def _notes(self, batch: BatchPlan) -> list[str]:
        said, data, rollout = [], self.config.data, self.rollout
        if not self.machine.here:
            said.append(f"there is no GPU here: planned for {self.machine.name}")
        file = data.file or ""
        if file.endswith((".parquet", ".jsonl")) and not Path(file).is_file():
            said.append(f"{file} is not here: the run will need it")
        if not batch.counted:
            said.append(f"prompts were not looked at: {batch.prompt} tokens each are assumed")
        algorithm = algorithm_of(self.config.algorithm, max_tokens=rollout.max_tokens)
        if algorithm.dynamic:
            refills = self.config.algorithm.refills
            said.append(f"dynamic sampling may take up to {refills} times as many answers")
        if algorithm.greedy:
            said.append(f"{rollout.prompts} greedy answers a step are sampled as well, not counted")
        if not rollout.sleep and rollout.kv_gib is None and self.on_gpu:
            said.append("sleep is off and kv_gib is not given: the engine would take what is free")
        return said

    def _time_notes(self, batch: BatchPlan, engine: EngineMemory) -> list[str]:
        rows = min(batch.sequences, engine.running, int(engine.sequences))
        assumed = f"log-probs and update assume a utilisation of {UTILISATION:.0%}"
        return [
            *stretched(self._hardware(), self.spec, rows),
            f"{assumed}; small models reach less",
        ]


def _check_parts(config: TrainConfig) -> None:
    """The task and the episode must be there, and a file that is there must hold rows."""
    episode_of(config.rollout.episode)
    data = config.data
    if data.task is not None:
        source_of(data.task)
    elif data.file is not None and Path(data.file).is_file():
        rows_of(data, seed=config.run.seed)


def _cases(count: int, prompt: int, longest: int) -> tuple[LengthCase, LengthCase]:
    """All answers as long as allowed, and evenly spread; of very many sequences, a sample."""
    shown = min(count, max(LEAST_SAMPLE, min(MOST_SAMPLE, SAMPLE_TOKENS // longest)))
    most = np.full(shown, prompt + longest)
    answers = np.linspace(1, longest, shown).round().astype(np.int64)
    half = prompt + np.random.default_rng(0).permutation(answers)
    return (
        LengthCase("all as long as allowed", most, count / shown),
        LengthCase("answers half as long on average", half, count / shown),
    )


def _micro_batches(case: LengthCase, share: int, tokens: int) -> int:
    """Micro-batches of an optimiser step of so many sequences."""
    lengths = case.lengths[:share].tolist()
    return math.ceil(len(micro_batches(lengths, tokens)) * share / len(lengths))


def _sampled(batch: BatchPlan, case: LengthCase) -> list[str]:
    shown, count = len(case.lengths), batch.sequences
    scaled = f"micro-batches and times are those of {shown} of the {count} answers, scaled"
    return [] if shown == count else [scaled]


# A configuration in words.


def rows_words(data: RowsConfig) -> str:
    """Where rows come from, and who judges them."""
    if data.file is not None:
        judge = data.reward or "its data_source"
        return f"{data.file}, judged by {judge}{', shuffled' if data.shuffle else ''}"
    number = "without end" if data.rows is None else f"{data.rows} rows"
    return f"{data.task}, length {data.length}, from row {data.first} on, {number}"


def algorithm_words(algorithm: AlgorithmConfig) -> str:
    """The objective, by the names of its parts."""
    preset = PRESETS[algorithm.name]
    surrogate = _choice_words(algorithm.surrogate or preset.surrogate)
    corrections = ", ".join(map(_choice_words, algorithm.corrections)) or "none"
    parts = f"{algorithm.name}; surrogate {surrogate}; corrections: {corrections}"
    usual = preset.aggregate if algorithm.surrogate is None else "aggregate of the surrogate"
    return f"{parts}; {algorithm.aggregate or usual}"


def _choice_words(choice: Choice) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in choice.settings.items())
    return f"{choice.use} ({settings})" if settings else choice.use


def gate_words(gate: GateConfig, *, sparse: bool) -> str:
    """What is done about the tail, as a sentence."""
    if gate.mode == "off":
        return "off"
    bins = "the schedule's bins" if sparse else "eighths of the longest sequence"
    if gate.bin is not None:
        bins = f"bins of {gate.bin} tokens"
    looks = (
        f"p05 of acceptance by {bins}, exact on {gate.sample} answers a step, over {gate.window} "
        f"steps; target {gate.target:g}"
    )
    if gate.mode == "warn":
        return f"{looks}; below it: a warning"
    surely = f"below it at {gate.patience} looks in a row, or surely"
    if not sparse:
        return f"{looks}; surely below it: the run stops, as rollout is dense already"
    raised = f"its budget is raised by {gate.factor:g}, up to {gate.raises} times, then "
    lower = f"; budgets fall where p05 is surely {gate.slack:g} above it" if gate.lower else ""
    act = f"{raised if gate.raises else ''}it runs dense, then the run stops"
    return f"{looks}; {surely}: {act}{lower}"
