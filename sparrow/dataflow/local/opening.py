"""From a configuration to a run: what is wrong with it is said here, before anything is played."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparrow.dataflow.episodes import Episode, episode_of
from sparrow.dataflow.language import Language, language_of
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.rollout import Rollout, validation_of
from sparrow.dataflow.local.run import MODEL, Run
from sparrow.dataflow.local.watching import Watcher
from sparrow.dataflow.place import dtype_of, prompt_room, schedule_notes
from sparrow.dataflow.runs.checkpoints import Checkpoints, Damaged
from sparrow.dataflow.runs.files import CHANGED, CHECKPOINTS, SCHEDULE, RunFiles
from sparrow.dataflow.stopping import Stopping
from sparrow.engine.answer import placed_schedule
from sparrow.engine.engine import Engine
from sparrow.files import remove_unfinished, write_whole
from sparrow.gate import Gate
from sparrow.models import Decoder, fingerprint, load, tokenizer_digest
from sparrow.models.checkpoint import pick_device
from sparrow.schema.base import to_dict
from sparrow.schema.loading import read_resolved
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import GateConfig, TrainConfig
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows
from sparrow.train.learner import Learner
from sparrow.train.objectives.algorithms import Algorithm, algorithm_of
from sparrow.train.policy import Policy, shard
from sparrow.train.world import World, join_world, own_device
from sparrow.train.world import own_rank as own_rank  # for the command line

LEFT_OUT = "left_out.txt"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a Python caller gives in place of what the configuration names."""

    episode: Episode | None = None
    rows: Examples | None = None
    judge: Judge | None = None
    algorithm: Algorithm | None = None


def run_directory(config: TrainConfig) -> Path:
    return config.run.dir or Path("runs") / "train" / config.run.name


def open_run(
    config: TrainConfig,
    *,
    parts: Parts = Parts(),  # noqa: B008 (immutable)
    watch: Watcher | None = None,
    stopping: Stopping | None = None,
    report: Callable[[str], None] | None = None,
) -> Run:
    """A run at its start, or where its last checkpoint was made. Close it by `close_run`."""
    folder = run_directory(config)
    if (folder / MODEL).exists():
        raise ValueError(
            f"{folder / MODEL} is there: this run has ended. Name another run.dir; or, to make it "
            f"longer, remove {folder / MODEL} (that folder alone) and raise run.steps"
        )
    run = open_parts(config, folder, parts=parts, stopping=stopping, report=report)
    run.watch = watch or run.watch

    def open_files() -> None:
        run.ledger.files = RunFiles(folder, tensorboard=config.run.tensorboard)
        remove_unfinished(folder)

    try:
        run.world.only_first(open_files)
        go_on(run, folder, report or (lambda text: None))
    except BaseException:
        close_run(run)
        raise
    return run


def open_parts(
    config: TrainConfig,
    folder: Path,
    *,
    parts: Parts = Parts(),  # noqa: B008 (immutable)
    stopping: Stopping | None = None,
    report: Callable[[str], None] | None = None,
) -> Run:
    """Everything of a run at its start, without its files."""
    say = report or (lambda text: None)
    device = own_device(pick_device(config.model.device))
    world, most, prompts = join_world(device), config.rollout.max_tokens, config.rollout.prompts
    if prompts < world.size:  # every rank plays some of them
        raise ValueError(f"rollout.prompts: got {prompts}, allowed: {world.size} or more, as ranks")
    algorithm = parts.algorithm or algorithm_of(config.algorithm, max_tokens=most)
    episode = parts.episode or episode_of(config.rollout.episode)
    rows = parts.rows or rows_of(config.data, seed=config.run.seed)
    dtype = dtype_of(config.model.dtype, device.type)
    model = load(config.model.name, dtype="float32", device=device, report=report)
    language = language_of(model, config.data.task in PUZZLES)
    schedule, flow = placed_schedule(config.rollout.attention, model.spec.family)
    max_prompt = prompt_room(config.rollout, model.spec)
    rows = fitting(rows, language, max_prompt, say)
    for note in schedule_notes(schedule, config.model.name, max_prompt + most):
        say(note)
    stopping = stopping or Stopping()
    validation = validation_of(config)
    ledger = Ledger(
        config=config,
        identity=identity_of(config, model, rows, schedule, dtype),
        checkpoints=Checkpoints(folder / CHECKPOINTS, config.run.keep, report=say),
        max_prompt=max_prompt,
        left_out=getattr(rows, "problems", ()),
    )
    return Run(
        config=config,
        rollout=Rollout(
            config=config,
            engine=engine_of(config, dtype, device, schedule, flow, max_prompt),
            rows=rows,
            judge=parts.judge or judge_of(config.data, rows),
            language=language,
            episode=episode,
            algorithm=algorithm,
            max_prompt=max_prompt,
            validation=validation,
            world=world,
            stopping=stopping,
        ),
        learner=LearnerSide(
            config=config, learner=learner_of(config, model, dtype, world), algorithm=algorithm
        ),
        gate=Gate(config.gate, schedule, longest=max_prompt + most, mass=flow.mass is not None),
        ledger=ledger,
        stopping=stopping,
        world=world,
    )


def go_on(run: Run, folder: Path, say: Callable[[str], None]) -> None:
    """Load the latest checkpoint, if there is one; the run directory is cut to it."""
    step, other = run.world.only_first(run.ledger.checkpoints.latest), ""
    if step is not None:
        other = changed_settings(folder, run.config)
        try:
            run.load_checkpoint(step)
        except Damaged:
            raise
        except ValueError as error:
            raise ValueError(f"{error}. Changed: {other}" if other else str(error)) from error
        run.ledger.refuse_stopped()
        if run.step > run.config.run.steps:
            raise ValueError(
                f"run.steps: got {run.config.run.steps}, but {folder} has taken {run.step} steps"
            )
        say(f"{folder}: goes on after {step} steps{f', with changes: {other}' if other else ''}")
    gap = run.world.only_first(lambda: begin_files(run, other))
    if gap:
        say(f"{folder}: metrics.jsonl lacks {len(gap)} steps before that, {gap[0]} first")


def begin_files(run: Run, changes: str) -> list[int]:
    """Cut the files to the run's step; what was changed since it stopped is noted with actions.

    The steps whose metrics are missing come back.
    """
    files, schedule = run.ledger.files, run.gate.schedule
    if files is None:
        return []
    gap = files.begin(run.config, run.step)
    if run.ledger.left_out:
        write_whole(files.folder / LEFT_OUT, (f"{problem}\n" for problem in run.ledger.left_out))
    if schedule is not None and run.step == 0:
        schedule.save(files.folder / SCHEDULE)
    if changes:
        files.action({"step": run.step, "kind": CHANGED, "reason": changes})
    return gap


def changed_settings(folder: Path, config: TrainConfig) -> str:
    """In which settings a configuration differs from that of a run directory, for people."""
    try:
        before = _flat(read_resolved(TrainConfig, folder).model_dump(mode="json"))
    except (ValueError, OSError):  # of another version, damaged or gone: nothing to tell
        return ""
    now = _flat(config.model_dump(mode="json"))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        deeper = isinstance(value, Mapping)
        found |= _flat(value, f"{above}{name}.") if deeper else {f"{above}{name}": value}
    return found


def close_run(run: Run) -> None:
    """Let go of files, verifiers and other ranks."""
    if run.ledger.files is not None:
        run.ledger.files.close()
    run.rollout.close()
    run.world.leave()


def fitting(
    rows: Examples, language: Language, max_prompt: int, say: Callable[[str], None]
) -> Examples:
    """Rows of a file whose prompts fit; what is wrong with the others is said."""
    if not isinstance(rows, FileRows):
        return rows

    def fits(example: Example) -> str | None:
        tokens = len(language.encode(example.prompt))
        return None if tokens <= max_prompt else f"prompt of {tokens} tokens, over {max_prompt}"

    kept = rows.keep(fits)
    if kept.problems:
        say(f"{rows.name}: {len(kept.problems)} rows are left out (all in {LEFT_OUT}):")
        for problem in kept.problems[:10]:
            say(f"  {problem}")
    return kept


def learner_of(config: TrainConfig, model: Decoder, dtype: torch.dtype, world: World) -> Learner:
    joined = config.batch.compile  # small kernels: on a GPU unless told otherwise
    policy = Policy(
        model,
        dtype=dtype,
        recompute=config.batch.recompute,
        compiled=model.device.type == "cuda" if joined is None else joined,
    )
    return Learner(
        shard(policy) if world.size > 1 else policy,
        config.optimiser,
        steps=config.run.steps * config.batch.updates,
        tokens=config.batch.tokens,
        world=world,
    )


def engine_of(
    config: TrainConfig,
    dtype: torch.dtype,
    device: torch.device,
    schedule: Schedule | None,
    flow: Flow,
    max_prompt: int,
) -> Engine:
    """The engine, with weights of its own."""
    rollout = config.rollout
    rule = None if schedule is None else Rule.of(schedule, flow)
    return Engine(
        load(config.model.name, dtype=dtype, device=device),
        rule=rule,
        max_running=rollout.max_running,
        max_context=max_prompt + rollout.max_tokens,
        kv_bytes=None if rollout.kv_gib is None else int(rollout.kv_gib * GIB),
    )


def identity_of(
    config: TrainConfig,
    model: Decoder,
    rows: Examples,
    schedule: Schedule | None,
    dtype: torch.dtype,
) -> str:
    """What must be equal for a run to go on.

    Not where and how it runs, what it shows and what the remedies of a run that stopped are: the
    gate's settings, the rate, memory, and the number of steps where the rate does not depend on it.
    """
    shown = {"dir", "name", "save_every", "keep", "rollouts", "tensorboard", "skips"}
    kept = config.model_dump_json(
        exclude={
            "run": shown if config.optimiser.decay else {*shown, "steps"},
            "model": {"device"},
            "data": {"workers", "deadline", "memory_gib"},
            "rollout": dict.fromkeys(("max_running", "kv_gib", "sleep"), True)
            | {"attention": {"schedule"}},  # what it holds counts, not where it lies
            "batch": {"tokens", "recompute", "compile"},
            "gate": set(GateConfig.model_fields) - {"bin"},
            "optimiser": {"rate"},
        }
    )
    budgets = "dense" if schedule is None else json.dumps(to_dict(schedule))
    tokenizer = None if model.source is None else tokenizer_digest(model.source)
    text = f"{kept} {dtype} {fingerprint(model)} {tokenizer} {rows.digest} {budgets}"
    return hashlib.sha256(text.encode()).hexdigest()
