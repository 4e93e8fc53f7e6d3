"""`sparrow train --dry-run`: predict memory, batch, schedule and step time of a training run.

Neither weights nor data are loaded; times are those of known machines. Answer lengths are unknown
in advance, so there are two cases: all as long as allowed (the worst), and evenly spread with half
of that on average. The time of a step:

    rollout   decode steps of a trace of sequences, by the machine's fitted times
    log-probs 2 N T + causal attention, one dense pass
    update    6 N T + causal attention three times, and the forward pass again with recompute

divided by peak x utilisation. Prefill, weight sync, verdicts and the KL of the update are left out:
they are small if answers are long and many. In an asynchronous run rollout and the rest run at the
same time, and a step takes as long as the longer of the two.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sparrow import ops
from sparrow.calibration.planning.cost import ByteModel, IntArray, rollout_seconds, trace
from sparrow.calibration.planning.hardware import Hardware, StepModel, extrapolation_notes, known
from sparrow.dataflow.asynchronous.selection import make_data_algorithms
from sparrow.dataflow.episodes import load_episode
from sparrow.dataflow.local.run import GIB, describe_run, max_prompt_tokens, schedule_notes
from sparrow.dataflow.placement import describe_placement
from sparrow.engine.answer import resolve_decoding
from sparrow.engine.memory import CPU_SHARE, GPU_SHARE, LOGITS_BYTES, host_memory
from sparrow.engine.pool import PAGE
from sparrow.files import expanded, verify
from sparrow.models.checkpoint import pick_dtype
from sparrow.models.fetch import fetched
from sparrow.models.fetch import known as fetchable
from sparrow.models.lora import CONFIG as ADAPTER_CONFIG
from sparrow.models.lora import PeftConfig, bank_size, module_sizes
from sparrow.models.sources import locate, shipped, split_revision
from sparrow.models.spec import CONFIG, SHAPES, ModelSpec, read_json, spec_from_hf
from sparrow.schema.base import Record
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.simulation import TrainDispatchConfig
from sparrow.schema.train import TrainConfig
from sparrow.sparse.budgets import check_fit
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import WORDS
from sparrow.tasks.choosing import CODE, find_task, open_rows
from sparrow.training.batching import micro_batches
from sparrow.training.costs import BACKWARD, WIDE, TrainerMemory, forward_flops, trainer_memory
from sparrow.training.objectives.algorithms import make_algorithm

ABSENT = "h200"  # the machine assumed for a GPU run where there is no GPU
ASSUMED_PROMPT = 200  # tokens, if prompts are not available
COUNTED_ROWS = 32  # whose prompts are counted
RUNNING = {"cpu": 64, "cuda": 256}  # sequences that the engine runs at once by default
# Sequences of a step that are simulated: all, unless there are more of them or of their tokens.
LEAST_SAMPLE, MOST_SAMPLE, SAMPLE_TOKENS = 64, 4096, 2**25
LENGTHS = 6  # at which budgets are shown
UTILISATION = 0.30
"""Model utilisation (MFU) of an update with recompute. Measured with Qwen3-1.7B on an H200: 0.336
with four sequences of 4096 tokens, 0.279 with one of 32768 (bench/2026-11-15-train-h200.json)."""
DISTILLATION = {"old": 0.75, "new": 0.93}
"""A step of it on every trajectory, as a share of log-probs and update, by its teacher: 0.71 and
0.89 at 4K tokens, 0.81 and 0.97 at 16K (bench/2026-11-17-distill-cost-h200.jsonl)."""


class TargetMachine(Record):
    """The machine of the prediction."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int  # bytes available
    here: bool = True
    hardware: str | None = None  # name for `Hardware.load`, if its step times are known


class EngineMemory(Record):
    """Memory of the engine, and how many tokens its pages hold."""

    weights: int
    scratch: int  # logits, prompts, graphs
    page_bytes: int
    pages: int
    context: int  # tokens of the longest sequence
    running: int  # sequences at once, at most

    @property
    def tokens(self) -> int:
        return self.pages * PAGE

    @property
    def total(self) -> int:
        return self.weights + self.scratch + self.page_bytes * self.pages


class Kept(Record):
    """Tokens kept at a total length: the common budget (None: all), and the mean over layers."""

    length: int
    budget: int | None
    kept: float


class Overlap(Record):
    """A step whose rollout and learning run at the same time, in seconds."""

    step: float  # the longer side
    rollout: float
    learning: float
    waits: Literal["rollout", "learner"]  # the side that waits for the other one
    idle: float  # of a step, in which it waits

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> "Overlap":
        """Of the seconds of a step and its parts."""
        rollout, learning = seconds["rollout"], seconds["step"] - seconds["rollout"]
        return cls(
            step=max(rollout, learning),
            rollout=rollout,
            learning=learning,
            waits="rollout" if rollout < learning else "learner",
            idle=abs(rollout - learning),
        )


class LengthCase(Record):
    """Batch and time of a step with assumed answer lengths."""

    name: str
    tokens: int
    micro_batches: int  # of an optimiser step
    # Of the step and its parts, one after the other; empty if unknown.
    seconds: dict[str, float]
    overlap: Overlap | None = None  # of an asynchronous loop, with a staleness above 0

    @property
    def step(self) -> float:
        """Seconds of a step, whose parts may overlap."""
        return self.seconds["step"] if self.overlap is None else self.overlap.step


class Preview(Record):
    """The prediction for a run."""

    words: dict[str, str]  # the configuration in a line per part
    parameters: int
    machine: TargetMachine
    trainer: TrainerMemory
    engine: EngineMemory | None  # None: servers answer
    sleeps: bool  # whether the engine frees its memory while the trainer works
    sequences: int  # of a step
    prompt: int  # tokens of one, counted or assumed
    longest: int  # tokens of a sequence, at most
    updates: int  # optimiser steps of a step
    steps: int
    kept: tuple[Kept, ...]  # empty if the rollout is dense
    cases: tuple[LengthCase, ...]  # the worst, and answers half as long on average
    untimed: str | None  # why there is no time
    notes: tuple[str, ...]

    @property
    def rollout_bytes(self) -> int:
        held = self.trainer.resident if self.sleeps else self.trainer.total
        return held + self._engine_total

    @property
    def update_bytes(self) -> int:
        return self.trainer.total + (0 if self.sleeps else self._engine_total)

    @property
    def _engine_total(self) -> int:
        return 0 if self.engine is None else self.engine.total

    @property
    def fits(self) -> bool:
        room = self.engine is None or self.engine.tokens >= self.engine.context
        return room and max(self.rollout_bytes, self.update_bytes) <= self.machine.memory


def preview(config: TrainConfig) -> Preview:
    """Predict a run; ValueError if cheap checks show that it cannot run."""
    if config.policies:
        raise ValueError("policies: predicted by preview_policies")
    return _Planner(config).plan()


class _Planner:
    """A configuration with the shape of its model and its machine; nothing is loaded."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.rollout, data = config, config.rollout, config.data
        load_episode(self.rollout.episode)
        if data.task is not None:
            find_task(data.task)
        elif data.rows is not None and Path(data.rows).is_file():
            open_rows(data, seed=config.run.seed)
        self.algorithm = make_algorithm(config.algorithm, max_tokens=self.rollout.max_tokens)
        make_data_algorithms(config.dispatch)
        self.spec, self.source = find_spec(config.model.name)
        self.reference = self.spec if config.algorithm.kl else None
        if config.algorithm.reference is not None:
            self.reference, _ = find_spec(config.algorithm.reference)
        self.machine = find_machine(config.model.device)
        self.on_gpu = self.machine.kind == "cuda"
        self.dtype = pick_dtype(config.model.dtype, torch.device(self.machine.kind), {})
        self.decoding = resolve_decoding(self.rollout, self.spec.family)
        self.schedule = self.decoding.schedule
        self.field_bytes = 0  # that the schedule's flow stores per page and KV head
        if self.schedule is not None:
            check_fit(self.schedule, layers=self.spec.layers, kv_heads=self.spec.kv_heads)
            rule = Rule.of(self.schedule, self.decoding.flow)
            fields = rule.fields(page=PAGE, head_size=self.spec.head_size, dtype=self.dtype)
            self.field_bytes = ops.page_bytes(fields, layers=1, kv_heads=1)
        room = max_prompt_tokens(self.rollout, self.spec)
        self.context = room + self.rollout.max_tokens  # the most that fits
        counted = self._longest_prompt()
        self.counted, self.prompt = counted is not None, min(counted or ASSUMED_PROMPT, room)
        self.longest = self.prompt + self.rollout.max_tokens if self.counted else self.context
        self.sequences = self.rollout.prompts * self.rollout.samples
        most = max(LEAST_SAMPLE, min(MOST_SAMPLE, SAMPLE_TOKENS // self.rollout.max_tokens))
        self.sample = min(self.sequences, most)  # simulated in place of all
        self.asynchronous = config.run.loop == "async"
        self.sleeps = self.rollout.sleep and not self.asynchronous

    def _longest_prompt(self) -> int | None:
        """Tokens of the longest prompt of a puzzle in its own vocabulary; None: not available."""
        data = self.config.data
        if data.task not in PUZZLES or self.spec.vocabulary != len(WORDS):
            return None
        seeds = range(data.first, data.first + min(COUNTED_ROWS, data.prompts or COUNTED_ROWS))
        rows = (PUZZLES[data.task].row(seed, data.length) for seed in seeds)
        return max(len(row.prompt.split()) for row in rows)

    def plan(self) -> Preview:
        config, schedule = self.config, self.schedule
        longest = self.longest
        trainer = self.trainer()
        engine = None if self.rollout.url else self.engine(trainer)
        untimed = self._untimed(engine)
        hardware = None if untimed else Hardware.load(str(self.machine.hardware))
        words = describe_run(config, self.decoding, config.data.rows or str(config.data.task))
        dtype = str(self.dtype).removeprefix("torch.")
        words["model"] += f", {dtype} products ({self.source})"
        if self.asynchronous:
            words["loop"] = f"asynchronous, staleness {config.dispatch.staleness}"
        if config.run.ray is not None:
            words["ray"] = describe_placement(config)
        return Preview(
            words=words,
            parameters=self.spec.parameters(),
            machine=self.machine,
            trainer=trainer,
            engine=engine,
            sleeps=self.sleeps,
            sequences=self.sequences,
            prompt=self.prompt,
            longest=longest,
            updates=config.batch.updates,
            steps=config.run.steps,
            kept=self.kept(),
            cases=tuple(self._case(*case, engine, hardware) for case in self._lengths()),
            untimed=untimed,
            notes=(
                *schedule_notes(schedule, config.model.name, self.context),
                *self.notes(),
                *(self._time_notes(engine, hardware) if engine and hardware else ()),
            ),
        )

    def kept(self) -> tuple[Kept, ...]:
        """Budgets at lengths that occur in decoding: from the prompt to the longest answer."""
        if (schedule := self.schedule) is None:
            return ()
        ends = self.prompt, self.prompt + self.rollout.max_tokens
        lengths = np.linspace(*ends, LENGTHS + 1)[1:].round().astype(np.int64)
        heads = self.spec.kv_heads
        layers = [schedule.kept_of_heads(lengths, n, heads) for n in range(self.spec.layers)]
        means = np.mean(layers, axis=0).tolist()
        budgets = [schedule.budget(length) for length in lengths.tolist()]
        return tuple(
            Kept(length=length, budget=None if budget == DENSE else budget, kept=kept)
            for length, budget, kept in zip(lengths.tolist(), budgets, means, strict=True)
        )

    # Memory.

    def trainer(self) -> TrainerMemory:
        """Trainer memory for the largest micro-batch: full, or a single longer sequence."""
        longest = self.longest
        batch, worst = self.config.batch, self.sequences * (self.prompt + self.rollout.max_tokens)
        memory = trainer_memory(
            self.spec,
            tokens=max(longest, min(batch.tokens, worst // batch.updates)),
            longest=longest,
            item=self.dtype.itemsize,
            recompute=batch.recompute,
            gpu=self.on_gpu,
            lora=self.lora_size(),
        )
        reference = 0 if self.reference is None else self.reference.parameters()
        return memory.replace(reference=self.dtype.itemsize * reference)

    def lora_rank(self) -> int:
        """The rank of the adapter; 0: there is none."""
        lora = self.config.model.lora
        return (
            lora.rank if lora.adapter is None else PeftConfig.read(lora.adapter / ADAPTER_CONFIG).r
        )

    def lora_size(self) -> int:
        """Numbers of the adapter that is trained; 0: there is none."""
        sizes, targets = module_sizes(self.spec), self.config.model.lora.targets
        return self.spec.layers * self.lora_rank() * sum(sum(sizes[name]) for name in targets)

    def engine(self, trainer: TrainerMemory) -> EngineMemory:
        """Engine memory: `rollout.kv_gib`, or what is left, as the engine itself would plan."""
        spec, rollout, memory = self.spec, self.rollout, self.machine.memory
        fields = ops.kv_fields(PAGE, spec.head_size, self.dtype)
        page = ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
        page += spec.layers * spec.kv_heads * self.field_bytes
        running = rollout.max_running or RUNNING[self.machine.kind]
        weights = self.dtype.itemsize * spec.parameters()
        scratch = running * spec.vocabulary * LOGITS_BYTES * 3 + GIB if self.on_gpu else 0
        held = trainer.resident if self.sleeps else trainer.total
        left = int((memory - held - weights) * GPU_SHARE) - scratch
        usual = left if self.on_gpu else int(memory * CPU_SHARE)
        kv_bytes = usual if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
        usable = running * -(-self.context // PAGE)
        return EngineMemory(
            weights=weights,
            scratch=scratch,
            page_bytes=page,
            pages=max(0, min(usable, kv_bytes // page)),
            context=self.context,
            running=running,
        )

    # Batch and time.

    def _lengths(self) -> list[tuple[str, IntArray]]:
        """Total lengths: all answers as long as allowed, and evenly spread."""
        longest = self.rollout.max_tokens
        answers = np.linspace(1, longest, self.sample).round().astype(np.int64)
        half = self.prompt + np.random.default_rng(0).permutation(answers)
        return [
            ("all as long as allowed", np.full(self.sample, self.prompt + longest)),
            ("answers half as long on average", half),
        ]

    def _case(
        self, name: str, lengths: IntArray, engine: EngineMemory | None, hardware: Hardware | None
    ) -> LengthCase:
        batch = self.config.batch
        share = self.sequences // batch.updates
        shown = lengths[:share].tolist()
        cut = math.ceil(len(micro_batches(shown, batch.tokens)) * share / len(shown))
        tokens = round(float(lengths.mean()) * self.sequences)
        seconds = self._seconds(lengths, engine, hardware) if engine and hardware else {}
        overlaps = bool(seconds and self.asynchronous and self.config.dispatch.staleness)
        return LengthCase(
            name=name,
            tokens=tokens,
            micro_batches=cut,
            seconds=seconds,
            overlap=Overlap.of(seconds) if overlaps else None,
        )

    def _untimed(self, engine: EngineMemory | None) -> str | None:
        if engine is None:
            return "servers answer, whose speed is not known"
        if self.machine.hardware is None:
            return f"step times are known for {', '.join(known())}, not for {self.machine.name}"
        if engine.tokens < engine.context:
            fit = f"{engine.tokens} tokens of keys and values fit"
            return f"{fit}, one sequence has {engine.context}"
        return None

    def _seconds(
        self, lengths: IntArray, engine: EngineMemory, hardware: Hardware
    ) -> dict[str, float]:
        """Seconds of the parts of a step.

        Utilisation counts three of the four passes of an update with recompute, so products run at
        4 / 3 of it. Dense and sparse run the same trace.
        """
        scale = self.sequences / self.sample
        rate = hardware.flops_per_s * UTILISATION * (2 + BACKWARD) / (1 + BACKWARD)
        forward = scale * (forward_flops(self.spec, lengths.tolist()) / rate)
        passes = 1 + BACKWARD + (1 if self.config.batch.recompute else 0)
        over = trace(
            lengths, prompt=self.prompt, capacity=engine.tokens, page=PAGE, most=engine.running
        )

        def rollout(schedule: Schedule | None) -> float:
            reads = ByteModel(
                spec=self.spec,
                schedule=schedule,
                itemsize=self.dtype.itemsize,
                page=PAGE,
                field_bytes=self.field_bytes,
            )
            return scale * rollout_seconds(over, StepModel(hardware, reads))

        reference = self.reference
        scored = 0.0 if reference is None else forward_flops(reference, lengths.tolist()) / rate
        parts = {
            "rollout": rollout(None if self.decoding.speculative else self.schedule),
            "log-probs": forward + scale * scored,
            "update": passes * forward,
        }
        distill = self.rollout.distill
        if distill.on and distill.every:
            part = DISTILLATION[distill.teacher] * distill.share / distill.every
            parts["distillation"] = part * (forward + passes * forward)
        return {"step": sum(parts.values()), **parts, "dense rollout": rollout(None)}

    # Assumptions.

    def notes(self) -> list[str]:
        notes, rollout, file = [], self.rollout, self.config.data.rows or ""
        if not self.machine.here:
            notes.append(f"no GPU here: predicted for {self.machine.name}")
        if file.endswith((".parquet", ".jsonl")) and not Path(file).is_file():
            notes.append(f"{file} is not here: the run will need it")
        if self.decoding.speculative is not None:
            notes.append(
                "exact decoding is timed as dense: how many drafts are accepted is unknown"
            )
        if CODE in (self.config.data.task, self.config.data.reward):
            notes.append("programs in their sandbox are not counted: they may take most of a step")
        if self.asynchronous:
            notes += _worker_notes(self.config.dispatch)
        if self.config.run.learner != "sparrow":
            notes.append("memory and times are those of our learner: another one may need more")
        if not self.counted:
            notes.append(f"prompts are not counted: {self.prompt} tokens each are assumed")
        if self.algorithm.dynamic:
            refills = self.config.algorithm.refills
            notes.append(f"dynamic sampling may take up to {refills} times as many answers")
        if self.algorithm.greedy:
            notes.append(f"{rollout.prompts} greedy answers a step are sampled too, not counted")
        if not self.sleeps and rollout.kv_gib is None and self.on_gpu:
            why = "the loop is asynchronous" if self.asynchronous else "sleep is off"
            notes.append(f"{why} and kv_gib is not set: the engine would take all free memory")
        if self.sample < self.sequences:
            sampled = f"those of {self.sample} of the {self.sequences} answers, scaled"
            notes.append(f"micro-batches and times are {sampled}")
        return notes

    def _time_notes(self, engine: EngineMemory, hardware: Hardware) -> list[str]:
        rows = min(self.sequences, engine.running, engine.tokens // engine.context)
        assumed = f"log-probs and update assume a utilisation of {UTILISATION:.0%}"
        return [
            *extrapolation_notes(hardware, self.spec, rows),
            f"{assumed}; small models reach less",
            *(self._overlap_notes() if self.asynchronous else ()),
        ]

    def _overlap_notes(self) -> list[str]:
        dispatch = self.config.dispatch
        if not dispatch.staleness:
            return ["dispatch.staleness is 0: rollout and learning take turns"]
        uncounted = dispatch.replay or dispatch.oversample > 1 or dispatch.group_filter != "all"
        devices = "overlapped times are for a device of each side's own, and for groups in time"
        return [
            f"{devices}: where lengths differ, a small staleness hides less (sparrow simulate)",
            *(["replayed, aborted and filtered groups are not counted"] if uncounted else []),
        ]


# Several policies.


class PolicyPreview(Record):
    """One of several policies: how it samples and learns, and its memory."""

    name: str
    words: dict[str, str]
    parameters: int
    kept: tuple[Kept, ...]  # empty if it samples densely
    trainer: TrainerMemory | None  # None: frozen
    engine: EngineMemory | None  # of its own; None: it is requests of the shared one
    merged: int = 0  # bytes of its weights with its adapter in them, written at the end


class PoliciesPreview(Record):
    """The prediction for a run of several policies: memory and work, no times."""

    words: dict[str, str]
    machine: TargetMachine
    policies: tuple[PolicyPreview, ...]
    shared: EngineMemory | None  # of policies over the weights of model.name
    adapters: int  # bytes of theirs in the shared engine
    prompts: int  # of a round
    samples: int  # of a prompt
    longest: int  # tokens of a sequence, at most
    steps: int  # rounds
    untimed: str  # why there is no time
    notes: tuple[str, ...]
    at_once: bool = False  # policies learn at the same time, each in a process of its own

    @property
    def engines(self) -> list[EngineMemory]:
        own = [policy.engine for policy in self.policies]
        return [engine for engine in (self.shared, *own) if engine is not None]

    @property
    def held(self) -> int:
        """Bytes that are held all the time: engines, which never sleep, and what is learnt."""
        trainers = [policy.trainer for policy in self.policies if policy.trainer is not None]
        engines = sum(engine.total for engine in self.engines)
        return engines + self.adapters + sum(trainer.resident for trainer in trainers)

    @property
    def peak(self) -> int:
        """Policies learn one after the other, or at once; their models are written at the end."""
        trainers = [policy.trainer for policy in self.policies if policy.trainer is not None]
        updates = [trainer.total - trainer.resident for trainer in trainers]
        update = sum(updates) if self.at_once else max(updates)
        return self.held + max(update, sum(policy.merged for policy in self.policies))

    @property
    def fits(self) -> bool:
        room = all(engine.tokens >= engine.context for engine in self.engines)
        return room and self.peak <= self.machine.memory


def preview_policies(config: TrainConfig) -> PoliciesPreview:
    """Predict a run of several policies; ValueError if cheap checks show that it cannot run."""
    planners = {name: _Planner(config.policy(name)) for name in config.policies}
    first = next(iter(planners.values()))
    if first.on_gpu and config.rollout.kv_gib is None:
        raise ValueError("rollout.kv_gib: set it with policies on a GPU: several share its memory")
    sharing = [planners[name] for name, own in config.policies.items() if own.shares_engine]
    rows, rollout = config.data.rows or str(config.data.task), config.rollout
    batch = f"{rollout.prompts} prompts x {rollout.samples} episodes <= {rollout.max_tokens} tokens"
    notes = [note for planner in planners.values() for note in planner.notes()]
    return PoliciesPreview(
        words={"episode": str(rollout.episode), "data": f"{rows} | {batch} a round"},
        machine=first.machine,
        policies=tuple(_policy_preview(config, *item) for item in planners.items()),
        shared=_shared_engine(sharing) if sharing else None,
        adapters=_adapter_bytes(sharing),
        prompts=rollout.prompts,
        samples=rollout.samples,
        longest=max(planner.longest for planner in planners.values()),
        steps=config.run.steps,
        untimed="the episode decides how much each policy samples",
        notes=tuple(dict.fromkeys(notes)),
        at_once=config.run.loop == "async",
    )


def _policy_preview(config: TrainConfig, name: str, planner: _Planner) -> PolicyPreview:
    own, size = config.policies[name], planner.spec.parameters()
    trainer, lora = planner.trainer(), planner.lora_size()
    engine = None if own.shares_engine else planner.engine(trainer)
    merged = 0
    if own.shares_engine and lora:
        merged = planner.dtype.itemsize * size
        # The weights beside its adapter are the engine's, unless it learns in another process.
        beside = merged if config.run.loop == "async" else 0
        trainer = trainer.replace(weights=WIDE * lora + beside)
    view = planner.config
    words = describe_run(view, planner.decoding, "")
    team = f", team {own.team:g}" if own.team else ""
    learns = f"{words['algorithm']}, every {view.rollout.prompts} groups{team}"
    return PolicyPreview(
        name=name,
        words={
            "weights": words["model"] + (" (shared engine)" if own.shares_engine else ""),
            "rollout": words["rollout"],
            **({} if own.frozen else {"gate": words["gate"]}),
            "learns": "never: frozen" if own.frozen else learns,
        },
        parameters=size,
        kept=planner.kept(),
        trainer=None if own.frozen else trainer,
        engine=engine,
        merged=0 if own.frozen else merged,
    )


def _shared_engine(sharing: Sequence[_Planner]) -> EngineMemory:
    """One engine for all of them; pages have the fields of the flow of those that are sparse."""
    planner = max(sharing, key=lambda planner: planner.field_bytes)
    return planner.engine(planner.trainer())


def _adapter_bytes(sharing: Sequence[_Planner]) -> int:
    """Bytes of a bank that has room for all adapters."""
    ranks = [planner.lora_rank() for planner in sharing if planner.config.model.lora.on]
    if not ranks:
        return 0
    return sharing[0].dtype.itemsize * bank_size(sharing[0].spec, len(ranks), max(ranks))


# The shape of the model and the machine.


def find_spec(name: str) -> tuple[ModelSpec, str]:
    """A model's shape and its source: config.json, or a published shape. Nothing is downloaded."""
    at_hand = name in fetchable() and fetched(name) is not None
    here = expanded(name).is_dir() or name in shipped() or at_hand
    file = locate(name) / CONFIG if here else _downloaded(name)
    if file is not None:
        verify(file.parent, (CONFIG,))
        return spec_from_hf(read_json(file), str(file)), str(file)
    repository = split_revision(name)[0]
    short = repository.rpartition("/")[2].lower()
    if short in SHAPES and (name in fetchable() or repository.count("/") == 1):
        return SHAPES[short], f"not downloaded; by the published shape {short}"
    raise ValueError(
        f"no model {name!r} here, and no published shape of that name: give a folder, one of "
        f"{', '.join((*shipped(), *fetchable()))}, or owner/NAME of {', '.join(SHAPES)}"
    )


def _downloaded(name: str) -> Path | None:
    """The config.json of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(name)
    try:
        file = try_to_load_from_cache(repository, CONFIG, revision=revision)
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def find_machine(device: str) -> TargetMachine:
    """This machine; for a GPU device without a GPU here, the assumed one."""
    if torch.cuda.is_available() and device != "cpu":
        index = torch.device("cuda" if device == "auto" else device).index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"device {device!r}: this machine has {torch.cuda.device_count()} GPUs"
            )
        name = torch.cuda.get_device_name(index)
        hardware = next((model for model in known() if model in name.lower()), None)
        free, _ = torch.cuda.mem_get_info(index)
        return TargetMachine(name=name, kind="cuda", memory=free, hardware=hardware)
    if device.startswith("cuda"):
        memory = Hardware.load(ABSENT).memory
        return TargetMachine(name=ABSENT, kind="cuda", memory=memory, here=False, hardware=ABSENT)
    return TargetMachine(name="this CPU", kind="cpu", memory=host_memory())


def _worker_notes(settings: TrainDispatchConfig) -> list[str]:
    """Who samples where, if it is not one process of this machine."""
    notes = list[str]()
    if settings.workers > 1:
        notes.append(f"{settings.workers} rollout processes; the engine's memory is that of one")
    if settings.listen is not None:
        here = "no rollout process here; " if not settings.workers else ""
        notes.append(
            f"{here}workers of other machines: sparrow worker --connect http://{settings.listen}"
        )
    return notes
