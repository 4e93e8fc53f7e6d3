"""From a configuration to a run: what is wrong with it is said here, before anything is played."""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import torch

from sparrow.dataflow.backend import open_backend
from sparrow.dataflow.checkpoints import Checkpoints, Damaged
from sparrow.dataflow.episodes import Episode, episode_of
from sparrow.dataflow.language import Language, language_of
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.messages import Watcher
from sparrow.dataflow.local.rollout import RolloutSide, validation_of
from sparrow.dataflow.local.run import Run
from sparrow.dataflow.run_files import CHANGED, CHECKPOINTS, RunFiles
from sparrow.dataflow.stopping import Stopping
from sparrow.engine.answer import placed_schedule
from sparrow.files import remove_unfinished, write_whole
from sparrow.gate import Gate
from sparrow.models import Decoder, fingerprint, load, tokenizer_digest
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.sources import split_revision
from sparrow.models.spec import ModelSpec
from sparrow.schema.base import to_dict
from sparrow.schema.loading import read_resolved
from sparrow.schema.run_files import flat_settings
from sparrow.schema.run_folder import MODEL, SCHEDULE
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import GateConfig, RolloutConfig, TrainConfig
from sparrow.schema.types import Report
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows
from sparrow.train.learner import Learner
from sparrow.train.objectives.algorithms import algorithm_of
from sparrow.train.policy import Policy, shard
from sparrow.train.world import World, join_world, own_device
from sparrow.train.world import own_rank as own_rank  # for the command line

LEFT_OUT = "left_out.txt"
GIB = 2**30


def open_run(
    config: TrainConfig,
    *,
    episode: Episode | None = None,
    judge: Judge | None = None,
    watch: Watcher | None = None,
    stopping: Stopping | None = None,
    report: Report | None = None,
) -> Run:
    """A run at its start, or where its last checkpoint was made: `with open_run(config) as run`.

    episode, judge: in place of what the configuration names.
    """
    folder = config.run.dir or Path("runs") / "train" / config.run.name
    if (folder / MODEL).exists():
        raise ValueError(
            f"{folder / MODEL} is there: this run has ended. Name another run.dir; or, to make it "
            f"longer, remove {folder / MODEL} (that folder alone) and raise run.steps"
        )
    run = open_parts(config, folder, episode=episode, judge=judge, stopping=stopping, report=report)
    run.watch = watch or run.watch

    def open_files() -> None:
        run.ledger.files = RunFiles(folder, tensorboard=config.run.tensorboard)
        remove_unfinished(folder)

    with ExitStack() as opened:
        opened.enter_context(run)
        run.world.only_first(open_files)
        go_on(run, folder, report or (lambda text: None))
        opened.pop_all()
    return run


def open_parts(
    config: TrainConfig,
    folder: Path,
    *,
    episode: Episode | None = None,
    judge: Judge | None = None,
    stopping: Stopping | None = None,
    report: Report | None = None,
) -> Run:
    """Everything of a run at its start, without its files."""
    say, rollout = report or (lambda text: None), config.rollout
    device = own_device(pick_device(config.model.device))
    world, stopping = join_world(device), stopping or Stopping()
    if rollout.prompts < world.size:  # every rank plays some of them
        given = f"got {rollout.prompts}, allowed: {world.size} or more, as ranks"
        raise ValueError(f"rollout.prompts: {given}")
    algorithm = algorithm_of(config.algorithm, max_tokens=rollout.max_tokens)
    episode = episode or episode_of(rollout.episode)
    every_row = rows_of(config.data, seed=config.run.seed)
    dtype = pick_dtype(config.model.dtype, device, {})
    model = load(config.model.name, dtype="float32", device=device, report=report)
    language = language_of(model, config.data.task in PUZZLES)
    schedule, flow = placed_schedule(rollout.attention, model.spec.family)
    max_prompt = prompt_room(rollout, model.spec)
    longest = max_prompt + rollout.max_tokens
    rows = _fitting(every_row, language, max_prompt, say)
    for note in schedule_notes(schedule, config.model.name, longest):
        say(note)
    identity = _identity(config, dtype, model, rows, schedule)
    validation = validation_of(config)
    learner = _learner(config, model, dtype, world)  # before the engine, which takes what it finds
    backend = open_backend(
        load(config.model.name, dtype=dtype, device=device),  # weights of its own
        None if schedule is None else Rule.of(schedule, flow),
        max_running=rollout.max_running,
        max_context=longest,
        kv_bytes=None if rollout.kv_gib is None else int(rollout.kv_gib * GIB),
    )
    return Run(
        config=config,
        rollout=RolloutSide(
            config=config,
            backend=backend,
            rows=rows,
            judge=judge or judge_of(config.data, rows),
            language=language,
            episode=episode,
            algorithm=algorithm,
            max_prompt=max_prompt,
            validation=validation,
            world=world,
            stopping=stopping,
        ),
        learner=LearnerSide(config=config, learner=learner, algorithm=algorithm),
        gate=Gate(config.gate, schedule, longest=longest, mass=flow.mass is not None),
        ledger=Ledger(
            config=config,
            identity=identity,
            checkpoints=Checkpoints(folder / CHECKPOINTS, config.run.keep, report=say),
            max_prompt=max_prompt,
            left_out=getattr(rows, "problems", ()),
        ),
        stopping=stopping,
        world=world,
    )


def _fitting(rows: Examples, language: Language, most: int, say: Report) -> Examples:
    """Rows of a file whose prompts fit; what is wrong with the others is said."""
    if not isinstance(rows, FileRows):
        return rows

    def fits(example: Example) -> str | None:
        tokens = len(language.encode(example.prompt))
        return None if tokens <= most else f"prompt of {tokens} tokens, over {most}"

    kept = rows.keep(fits)
    if kept.problems:
        say(f"{rows.name}: {len(kept.problems)} rows are left out (all in {LEFT_OUT}):")
        for problem in kept.problems[:10]:
            say(f"  {problem}")
    return kept


def _learner(config: TrainConfig, model: Decoder, dtype: torch.dtype, world: World) -> Learner:
    batch = config.batch
    joined = model.device.type == "cuda" if batch.compile is None else batch.compile
    policy = Policy(model, dtype=dtype, recompute=batch.recompute, compiled=joined)
    return Learner(
        shard(policy) if world.size > 1 else policy,
        config.optimiser,
        steps=config.run.steps * batch.updates,
        tokens=batch.tokens,
        world=world,
    )


def _identity(
    config: TrainConfig,
    dtype: torch.dtype,
    model: Decoder,
    rows: Examples,
    schedule: Schedule | None,
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


def go_on(run: Run, folder: Path, say: Report) -> None:
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

    def begin_files() -> list[int]:
        """Cut the files to the run's step; the steps whose metrics are missing come back."""
        files, schedule = run.ledger.files, run.gate.schedule
        assert files is not None, "the first rank has them"
        gap = files.begin(run.config, run.step)
        if problems := run.ledger.left_out:
            write_whole(folder / LEFT_OUT, (f"{problem}\n" for problem in problems))
        if schedule is not None and run.step == 0:
            schedule.save(folder / SCHEDULE)
        if other:
            files.action({"step": run.step, "kind": CHANGED, "reason": other})
        return gap

    if gap := run.world.only_first(begin_files):
        say(f"{folder}: metrics.jsonl lacks {len(gap)} steps before that, {gap[0]} first")


def changed_settings(folder: Path, config: TrainConfig) -> str:
    """In which settings a configuration differs from that of a run directory, for people."""
    try:
        before = dict(flat_settings(read_resolved(TrainConfig, folder).model_dump(mode="json")))
    except (ValueError, OSError):  # of another version, damaged or gone: nothing to tell
        return ""
    now = dict(flat_settings(config.model_dump(mode="json")))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def prompt_room(config: RolloutConfig, spec: ModelSpec) -> int:
    """Tokens that a prompt may have."""
    left = spec.max_positions - config.max_tokens
    if left < (config.max_prompt or 1):
        raise ValueError(
            f"rollout.max_tokens {config.max_tokens} and a prompt of {config.max_prompt or 1}: "
            f"allowed are the model's {spec.max_positions} positions for both"
        )
    return config.max_prompt or left


def schedule_notes(schedule: Schedule | None, model: str, longest: int) -> list[str]:
    """What of a schedule may not be what its user thinks."""
    if schedule is None:
        return []
    found, name = list[str](), Path(split_revision(model)[0]).name
    if schedule.model is not None and schedule.model.lower() != name.lower():
        found.append(
            f"schedule {schedule.name} was measured on {schedule.model}, and this is {name}: how "
            "far it strays here nobody has measured; the gate will"
        )
    rows = [schedule.budgets, *(one.budgets for one in schedule.layers)]
    if min(int(row.min()) for row in rows) >= longest:
        found.append(
            f"schedule {schedule.name} keeps all of the at most {longest} tokens: never sparse"
        )
    return found
