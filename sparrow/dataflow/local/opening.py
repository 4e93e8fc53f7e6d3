"""From a configuration to a run: what is wrong with it is said here, before anything is played."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.dataflow.episodes import Episode, episode_of
from sparrow.dataflow.language import language_of
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.rollout import RolloutSide, validation_of
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
from sparrow.models import fingerprint, load, tokenizer_digest
from sparrow.models.checkpoint import pick_device
from sparrow.schema.base import to_dict
from sparrow.schema.loading import read_resolved
from sparrow.schema.train import GateConfig, TrainConfig
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows
from sparrow.train.learner import Learner
from sparrow.train.objectives.algorithms import Algorithm, algorithm_of
from sparrow.train.policy import Policy, shard
from sparrow.train.world import join_world, own_device
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
    return _Opening(config, parts, report).run(folder, stopping or Stopping())


class _Opening:
    """What the sides of a run are made of: a model, its schedule, rows that fit."""

    def __init__(
        self, config: TrainConfig, parts: Parts, report: Callable[[str], None] | None
    ) -> None:
        self.config, self.parts, self.say = config, parts, report or (lambda text: None)
        self.device = own_device(pick_device(config.model.device))
        self.world = join_world(self.device)
        rollout = config.rollout
        if rollout.prompts < self.world.size:  # every rank plays some of them
            given, ranks = rollout.prompts, self.world.size
            raise ValueError(f"rollout.prompts: got {given}, allowed: {ranks} or more, as ranks")
        self.algorithm = parts.algorithm or algorithm_of(
            config.algorithm, max_tokens=rollout.max_tokens
        )
        self.episode = parts.episode or episode_of(rollout.episode)
        rows = parts.rows or rows_of(config.data, seed=config.run.seed)
        self.dtype = dtype_of(config.model.dtype, self.device.type)
        self.model = load(config.model.name, dtype="float32", device=self.device, report=report)
        self.language = language_of(self.model, config.data.task in PUZZLES)
        self.schedule, self.flow = placed_schedule(rollout.attention, self.model.spec.family)
        self.max_prompt = prompt_room(rollout, self.model.spec)
        self.longest = self.max_prompt + rollout.max_tokens
        self.rows = self._fitting(rows)
        for note in schedule_notes(self.schedule, config.model.name, self.longest):
            self.say(note)

    def run(self, folder: Path, stopping: Stopping) -> Run:
        """The learner comes before the engine, which takes what memory it finds."""
        config, validation = self.config, validation_of(self.config)
        ledger = Ledger(
            config=config,
            identity=self._identity(),
            checkpoints=Checkpoints(folder / CHECKPOINTS, config.run.keep, report=self.say),
            max_prompt=self.max_prompt,
            left_out=getattr(self.rows, "problems", ()),
        )
        learner = LearnerSide(config=config, learner=self._learner(), algorithm=self.algorithm)
        rollout = RolloutSide(
            config=config,
            engine=self._engine(),
            rows=self.rows,
            judge=self.parts.judge or judge_of(config.data, self.rows),
            language=self.language,
            episode=self.episode,
            algorithm=self.algorithm,
            max_prompt=self.max_prompt,
            validation=validation,
            world=self.world,
            stopping=stopping,
        )
        mass = self.flow.mass is not None
        return Run(
            config=config,
            rollout=rollout,
            learner=learner,
            gate=Gate(config.gate, self.schedule, longest=self.longest, mass=mass),
            ledger=ledger,
            stopping=stopping,
            world=self.world,
        )

    def _fitting(self, rows: Examples) -> Examples:
        """Rows of a file whose prompts fit; what is wrong with the others is said."""
        if not isinstance(rows, FileRows):
            return rows
        most = self.max_prompt

        def fits(example: Example) -> str | None:
            tokens = len(self.language.encode(example.prompt))
            return None if tokens <= most else f"prompt of {tokens} tokens, over {most}"

        kept = rows.keep(fits)
        if kept.problems:
            self.say(f"{rows.name}: {len(kept.problems)} rows are left out (all in {LEFT_OUT}):")
            for problem in kept.problems[:10]:
                self.say(f"  {problem}")
        return kept

    def _learner(self) -> Learner:
        batch, world = self.config.batch, self.world
        joined = self.device.type == "cuda" if batch.compile is None else batch.compile
        policy = Policy(self.model, dtype=self.dtype, recompute=batch.recompute, compiled=joined)
        return Learner(
            shard(policy) if world.size > 1 else policy,
            self.config.optimiser,
            steps=self.config.run.steps * batch.updates,
            tokens=batch.tokens,
            world=world,
        )

    def _engine(self) -> Engine:
        """The engine, with weights of its own."""
        rollout = self.config.rollout
        return Engine(
            load(self.config.model.name, dtype=self.dtype, device=self.device),
            rule=None if self.schedule is None else Rule.of(self.schedule, self.flow),
            max_running=rollout.max_running,
            max_context=self.longest,
            kv_bytes=None if rollout.kv_gib is None else int(rollout.kv_gib * GIB),
        )

    def _identity(self) -> str:
        """What must be equal for a run to go on.

        Not where and how it runs, what it shows and what the remedies of a run that stopped are:
        the gate's settings, the rate, memory, and the number of steps where the rate does not
        depend on it.
        """
        config, model, schedule = self.config, self.model, self.schedule
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
        text = f"{kept} {self.dtype} {fingerprint(model)} {tokenizer} {self.rows.digest} {budgets}"
        return hashlib.sha256(text.encode()).hexdigest()


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
