"""A run: its rollout side, its learner side, its ledger, and the gate between them.

What changes is in the learner (weights, moments), the gate (windows, schedule), and the ledger's
counts; no random state is kept, as every draw is a function of seed, step and row. So a checkpoint
is small, and a resumed run goes on bit for bit (on a CPU).

`open_run` makes one from a configuration; what is wrong with that is said before a step is played.
"""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from sparrow.dataflow.backend import RolloutBackend, open_backend
from sparrow.dataflow.checkpoints import Checkpoints, Damaged
from sparrow.dataflow.episodes import Episode, episode_of
from sparrow.dataflow.language import Language, language_of
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.messages import Clock, RolloutRequest, Watcher
from sparrow.dataflow.local.rollout import RolloutSide, validation_of
from sparrow.dataflow.run_files import CHANGED, CHECKPOINTS, RunFiles
from sparrow.dataflow.stopping import Stopped, Stopping
from sparrow.engine.answer import placed_schedule
from sparrow.files import remove_unfinished, write_whole
from sparrow.gate import Gate
from sparrow.models import Decoder, fingerprint, load, provenance, save, tokenizer_digest
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.sources import split_revision
from sparrow.models.spec import ModelSpec
from sparrow.schema.base import to_dict
from sparrow.schema.loading import read_resolved
from sparrow.schema.run_folder import MODEL, SCHEDULE, flat_settings
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import GateConfig, RolloutConfig, TrainConfig
from sparrow.schema.types import Report
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows
from sparrow.training.learner import Learner
from sparrow.training.objectives.algorithms import Algorithm, algorithm_of
from sparrow.training.policy import Policy, shard
from sparrow.training.world import World, join_world, own_device
from sparrow.training.world import own_rank as own_rank  # for the command line

LEFT_OUT = "left_out.txt"
GIB = 2**30


@dataclass(kw_only=True)
class Run:
    """See the module. The sides know nothing of each other; the loop takes messages between.

    Leaving it (`with open_run(...) as run`) lets go of files, verifiers and other ranks.
    """

    config: TrainConfig
    rollout: RolloutSide
    learner: LearnerSide
    gate: Gate
    ledger: Ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.ledger.files is not None:
            self.ledger.files.close()
        self.rollout.close()
        self.world.leave()

    @property
    def world(self) -> World:
        return self.rollout.world

    @property
    def step(self) -> int:
        """Steps that were taken, and with it the number of the next."""
        return self.ledger.step

    @property
    def watch(self) -> Watcher:
        return self.ledger.watch

    @watch.setter
    def watch(self, watch: Watcher) -> None:
        self.rollout.watch = self.learner.watch = self.ledger.watch = watch

    def header(self) -> list[str]:
        """What runs, in a few lines for people. Sparse or dense is said first."""
        said = run_words(self.config, self.gate.schedule, self.rollout.rows.name)
        origin = provenance(self.learner.learner.policy.model)
        isolation = getattr(self.rollout.judge, "isolation", None)
        said["model"] += f" ({origin}) | {self.rollout.backend.header()}"
        said["data"] += f" | verifiers in processes ({isolation})" if isolation else ""
        return [f"{name}: {text}" for name, text in said.items()]

    # A step.

    def begin(self) -> Clock:
        """The beginning of a step, unless the run is to end, which all ranks decide together."""
        if any(self.world.collect(self.rollout.stopping.wanted)):
            raise Stopped
        return Clock()

    def request(self) -> RolloutRequest:
        """What the rollout side is to play next."""
        rollout, gate = self.config.rollout, self.config.gate
        return RolloutRequest(
            step=self.step,
            position=self.ledger.position,
            schedule=self.gate.schedule,
            prompts=rollout.prompts,
            samples=rollout.samples,
            watched=0 if gate.mode == "off" else gate.sample,
        )

    def sync_weights(self) -> None:
        """The backend gets the learner's weights; their version is the number of steps taken."""
        self.watch.phase("weights")
        self.rollout.backend.wake()
        self.rollout.backend.sync_weights(self.learner.weights(), version=self.step + 1)

    # After a step.

    def validate_if_due(self) -> None:
        """Measure accuracy every so many steps, and after the last."""
        every = self.config.validation.every
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.validate()

    def validate(self) -> None:
        if self.rollout.validation:
            self.ledger.validated(self.rollout.validate(self.gate.schedule))

    def save_if_due(self) -> None:
        if self.step % self.config.run.save_every == 0:
            self.save()

    def save(self) -> None:
        """A checkpoint of now, unless it is there; all ranks must ask, the first one writes."""
        ledger = self.ledger
        if self.world.only_first(ledger.checkpoints.latest) == self.step:
            return
        self.watch.phase("checkpoint")
        state = self.state()
        self.world.only_first(lambda: ledger.checkpoints.save(self.step, state, ledger.identity))

    def state(self) -> dict[str, Any]:
        parts = {"gate": self.gate.state(), "learner": self.learner.learner.state()}
        return {**self.ledger.state(), **parts}

    def load_checkpoint(self, step: int) -> None:
        """Be as the run was after so many steps."""
        checkpoints = self.ledger.checkpoints
        state = checkpoints.load(step, self.ledger.identity)
        try:
            if state["step"] != step:
                raise ValueError("it is of another step")
            self.ledger.restore(state)
            self.learner.learner.restore(state["learner"])
            self.gate = Gate.restore(self.config.gate, state["gate"])
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"step {step} in {checkpoints.folder} is no state of this run ({told})"
            ) from error
        if self.step:
            self.rollout.backend.sync_weights(self.learner.weights(), version=self.step)

    def finish(self) -> Path:
        """Write the Hugging Face folder; the learner stays as it is, who called may go on."""
        self.watch.phase("writing the model")
        model = self.learner.host_model()
        return self.world.only_first(lambda: self._write_model(model))

    def _write_model(self, model: Decoder) -> Path:
        files = self.ledger.files
        assert files is not None, "the first rank writes"
        files.finish()
        return save(model, files.folder / MODEL)


def run_words(config: TrainConfig, schedule: Schedule | None, rows: str) -> dict[str, str]:
    """What a configuration asks for, in a line for each part."""
    gate, rollout = config.gate, config.rollout
    batch = f"{rollout.prompts} prompts x {rollout.samples} answers <= {rollout.max_tokens} tokens"
    corrections = ", ".join(one.use for one in config.algorithm.corrections) or "none"
    watched = f"p05 >= {gate.target} is watched, mode {gate.mode}"
    return {
        "rollout": "dense" if schedule is None else f"sparse, {schedule.describe()}",
        "gate": "off" if gate.mode == "off" else watched,
        "model": config.model.name,
        "data": f"{rows} | {batch} a step",
        "algorithm": f"{config.algorithm.name}, corrections: {corrections}",
    }


# From a configuration to a run.


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
    folder = config.run.out or Path("runs") / "train" / config.run.name
    if (folder / MODEL).exists():
        raise ValueError(
            f"{folder / MODEL} is there: this run has ended. Name another run.out; or, to make it "
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
    """Everything of a run at its start, without its files.

    The learner comes before the engine, which takes the memory that it finds.
    """
    say, rollout = report or (lambda text: None), config.rollout
    device = own_device(pick_device(config.model.device))
    dtype = pick_dtype(config.model.dtype, device, {})
    world, stopping = _ranks(config, device), stopping or Stopping()
    algorithm = algorithm_of(config.algorithm, max_tokens=rollout.max_tokens)
    episode = episode or episode_of(rollout.episode)
    rows: Examples = rows_of(config.data, seed=config.run.seed)
    model = load(config.model.name, dtype="float32", device=device, report=report)
    schedule, flow = placed_schedule(rollout.attention, model.spec.family)
    max_prompt = prompt_room(rollout, model.spec)
    longest = max_prompt + rollout.max_tokens
    language = language_of(model, config.data.task in PUZZLES, chat=config.chat)
    rows = _fitting(rows, language, max_prompt, say)
    for note in schedule_notes(schedule, config.model.name, longest):
        say(note)
    ledger = Ledger(
        config=config,
        identity=_identity(config, dtype, model, rows, schedule),
        checkpoints=Checkpoints(folder / CHECKPOINTS, config.run.keep, report=say),
        left_out=getattr(rows, "problems", ()),
    )
    validation = validation_of(config)
    learner = _learner_side(config, model, dtype, algorithm, world)
    rule = None if schedule is None else Rule.of(schedule, flow)
    side = RolloutSide(
        config=config,
        backend=_backend(config, rule, dtype, device, longest),
        rows=rows,
        judge=judge or judge_of(config.data, rows),
        language=language,
        episode=episode,
        algorithm=algorithm,
        max_prompt=max_prompt,
        validation=validation,
        world=world,
        stopping=stopping,
    )
    gate = Gate(config.gate, schedule, longest=longest, mass=flow.mass is not None)
    return Run(config=config, rollout=side, learner=learner, gate=gate, ledger=ledger)


def _ranks(config: TrainConfig, device: torch.device) -> World:
    """The processes that train together; every one plays some of the prompts of a step."""
    world, prompts = join_world(device), config.rollout.prompts
    if prompts < world.size:
        allowed = f"{world.size} or more, as ranks"
        raise ValueError(f"rollout.prompts: got {prompts}, allowed: {allowed}")
    return world


def _learner_side(
    config: TrainConfig, model: Decoder, dtype: torch.dtype, algorithm: Algorithm, world: World
) -> LearnerSide:
    batch = config.batch
    joined = model.device.type == "cuda" if batch.compile is None else batch.compile
    policy = Policy(model, dtype=dtype, recompute=batch.recompute, compiled=joined)
    learner = Learner(
        shard(policy) if world.size > 1 else policy,
        config.optimiser,
        steps=config.run.steps * batch.updates,
        tokens=batch.tokens,
        world=world,
    )
    return LearnerSide(config=config, learner=learner, algorithm=algorithm)


def _backend(
    config: TrainConfig, rule: Rule | None, dtype: torch.dtype, device: torch.device, longest: int
) -> RolloutBackend:
    """The engine, with weights of its own."""
    rollout = config.rollout
    kv_bytes = None if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
    limits = {"max_running": rollout.max_running, "max_context": longest, "kv_bytes": kv_bytes}
    return open_backend(load(config.model.name, dtype=dtype, device=device), rule, **limits)


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
    shown = {"out", "name", "save_every", "keep", "rollouts", "tensorboard", "skips"}
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
