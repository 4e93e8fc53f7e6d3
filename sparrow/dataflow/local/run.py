"""A run: its rollout side, its learner side, its ledger, and the gate between them.

State is in the learner (weights, moments), the gate (windows, schedule) and the ledger's counters;
no random state is kept, as every draw is a function of seed, step and row. So a checkpoint is
small, and a resumed run is bit-equal to an uninterrupted one (on a CPU).

`open_run` makes one from a configuration, and reports what is wrong with it before the first step.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from sparrow.dataflow.asynchronous.workers import StartWorker
from sparrow.dataflow.backend import RolloutBackend, open_backend
from sparrow.dataflow.checkpoints import Checkpoints, Damaged
from sparrow.dataflow.episodes import Episode, load_episode
from sparrow.dataflow.evaluation import open_validation
from sparrow.dataflow.language import Language, load_language
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.messages import Callbacks, Clock, RolloutRequest
from sparrow.dataflow.local.rollout import RolloutSide
from sparrow.dataflow.local.sides import LearnerProtocol, RolloutProtocol
from sparrow.dataflow.local.transformers_learner import TransformersLearner
from sparrow.dataflow.run_files import CHANGED, CHECKPOINTS, LEFT_OUT, RunFiles, import_wandb
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.engine.answer import ResolvedDecoding, resolve_decoding
from sparrow.files import has_sums, remove_unfinished, unfinished_path, write_whole
from sparrow.functions import HERE
from sparrow.gate import Gate
from sparrow.models import (
    Decoder,
    fingerprint,
    hf_views,
    load,
    model_identity,
    save,
    tokenizer_digest,
)
from sparrow.models.actor import load_actor, save_actor
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.lora import Adapter, module_sizes
from sparrow.models.sources import split_revision
from sparrow.models.spec import ModelSpec, naming
from sparrow.schema.base import to_dict
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.loading import read_resolved
from sparrow.schema.run_folder import ACTOR, ADAPTER, MODEL, SCHEDULE, flat_settings
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import (
    GateConfig,
    PolicyConfig,
    RolloutConfig,
    TrainConfig,
    code_settings,
)
from sparrow.schema.types import Report
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge
from sparrow.tasks.choosing import open_judge, open_rows
from sparrow.tasks.rows import FileRows
from sparrow.training.distillation import Distiller
from sparrow.training.learner import Learner
from sparrow.training.objectives.algorithms import Algorithm, make_algorithm
from sparrow.training.policy import Policy, shard
from sparrow.training.world import World, join_world, rank_device
from sparrow.training.world import current_rank as current_rank  # for the command line

if TYPE_CHECKING:
    from sparrow.dataflow.servers import RolloutServer

GIB = 2**30
MakeParts = Callable[..., "Run"]


@dataclass(kw_only=True)
class Run:
    """A training run. Its sides do not know each other; the loop passes messages between them.

    Leaving it (`with open_run(...) as run`) closes files, verifiers and the process group.
    """

    config: TrainConfig
    rollout: RolloutProtocol
    learner: LearnerProtocol
    gate: Gate
    ledger: Ledger
    world: World
    stopping: GracefulShutdown

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
    def step(self) -> int:
        """Steps taken so far, and so the number of the next."""
        return self.ledger.step

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that all rollouts are under now; None: there is none."""
        return self.rollout.decoding(self.gate.schedule).schedule

    @property
    def folder(self) -> Path:
        """The run directory."""
        return run_folder(self.config)

    @property
    def callbacks(self) -> Callbacks:
        return self.ledger.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Callbacks) -> None:
        self.rollout.callbacks = self.learner.callbacks = self.ledger.callbacks = callbacks

    def header(self) -> list[str]:
        """What runs, in a few lines; sparse or dense first."""
        decoding, header = self.rollout.decoding(self.gate.schedule), self.rollout.header()
        parts = describe_run(self.config, decoding, header.rows)
        parts["model"] += f" ({self.learner.header()}) | {header.engine}"
        if header.verifiers:
            parts["data"] += f" | verifiers in processes ({header.verifiers})"
        return [f"{name}: {text}" for name, text in parts.items()]

    # A step.

    def start_step(self) -> Clock:
        """Start a step; raise Stopped on all ranks if a shutdown was requested on any."""
        if any(self.world.all_gather(self.stopping.requested)):
            raise Stopped
        return Clock()

    def request(self) -> RolloutRequest:
        """The request for the next rollout."""
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
        """Copy the learner's weights to the backend; their version is the number of steps taken."""
        self.callbacks.phase("weights")
        self.rollout.wake()
        self._sync(self.step + 1)

    def _sync(self, version: int) -> None:
        weights, adapter = self.learner.weights(), self.learner.adapter
        self.rollout.sync_weights(weights, version=version, adapter=adapter)

    # After a step.

    def validate_if_due(self) -> None:
        """Validate every `validation.every` steps, and after the last."""
        every = self.config.validation.every
        self._record_validations(self.rollout.evaluations())
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.validate()

    def validate(self) -> None:
        if self.config.validation.every:
            self._record_validations(self.rollout.validate(self.step, self.gate.schedule))

    def finish_validations(self) -> None:
        """Wait for validations that run beside the steps."""
        while ended := self.rollout.evaluations(wait=True):
            self._record_validations(ended)

    def _record_validations(self, ended: Iterable[tuple[int, Evaluation]]) -> None:
        for step, evaluation in ended:
            self.ledger.record_validation(step, {"": evaluation})

    def lacks_validation(self) -> bool:
        """Whether the validation before the next step is due and was not recorded."""
        every, files = self.config.validation.every, self.ledger.files
        if not every or (self.step % every and self.step != self.config.run.steps):
            return False
        recorded = self.world.on_first_rank(lambda: files is not None and files.validated())
        return not recorded or self.step not in recorded

    def save_if_due(self) -> None:
        if self.step % self.config.run.save_every == 0:
            self.save()

    def save(self) -> None:
        """Save a checkpoint unless it exists; a collective call, the first rank writes."""
        ledger = self.ledger
        if self.world.on_first_rank(ledger.checkpoints.latest) == self.step:
            return
        self.callbacks.phase("checkpoint")
        state = self.state()
        self.world.on_first_rank(lambda: ledger.checkpoints.save(self.step, state, ledger.identity))

    def state(self) -> dict[str, Any]:
        parts = {"gate": self.gate.state(), **self.learner.state()}
        if rollout := self.rollout.state():
            parts["rollout"] = rollout
        return {**self.ledger.state(), **parts}

    def load_checkpoint(self, step: int) -> None:
        """Restore the state after a step, and give the backend its weights."""
        checkpoints = self.ledger.checkpoints
        state = checkpoints.load(step, self.ledger.identity)
        try:
            if state["step"] != step:
                raise ValueError("it belongs to another step")
            self.ledger.restore(state)
            self._restore(state)
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"step {step} in {checkpoints.folder} is not a state of this run ({reason})"
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what learns, the gate, and what samples."""
        self.learner.restore(state)
        self.gate = Gate.restore(gate_config(self.config), state["gate"])
        if self.rollout.state():
            self.rollout.restore(state["rollout"])
        if self.step:
            self._sync(self.step)

    def finish(self) -> Path:
        """Write the Hugging Face folder and return it; the learner can be used further."""
        self.callbacks.phase("writing the model")
        model = self.learner.host_model()
        return self.world.on_first_rank(lambda: self._write_model(model))

    def _write_model(self, model: Decoder) -> Path:
        """Replace the model of a shorter run; the digests come last, as they say that it ended."""
        files = self.ledger.files
        assert files is not None, "the first rank writes"
        target = files.folder / MODEL
        remove_model(target)
        save(model, target)
        if (lora := self.learner.lora) is not None:
            lora.save(files.folder / ADAPTER)
        schedule = self.schedule
        if (adapter := self.learner.adapter) is not None and schedule is not None:
            actor = unfinished_path(files.folder / ACTOR)
            save_actor(actor, adapter, schedule, model, name=files.folder.name)
            shutil.rmtree(files.folder / ACTOR, ignore_errors=True)
            os.rename(actor, files.folder / ACTOR)
        files.finish()
        return target


def remove_model(target: Path) -> None:
    """Remove the model of a shorter run, at once."""
    if target.exists():
        shorter = unfinished_path(target)
        os.rename(target, shorter)
        shutil.rmtree(shorter)


def describe_run(config: TrainConfig, decoding: ResolvedDecoding, rows: str) -> dict[str, str]:
    """A configuration in one line per part."""
    gate, rollout = config.gate, config.rollout
    batch = f"{rollout.prompts} prompts x {rollout.samples} answers <= {rollout.max_tokens} tokens"
    corrections = ", ".join(choice.use for choice in config.algorithm.corrections) or "none"
    misses = "" if gate.hard_misses is None else f", hard misses <= {gate.hard_misses:g} per 1000"
    target = f"keeps p05 >= {gate.target}{misses}, mode {gate.mode}"
    sparse = decoding.schedule is not None and decoding.speculative is None
    rollouts = f"sparse, {decoding.describe()}" if sparse else decoding.describe()
    served = f" | by {', '.join(rollout.url)}" if rollout.url else ""
    return {
        "rollout": rollouts + _describe_distillation(config) + served,
        "gate": "off" if gate.mode == "off" else target,
        "model": config.model.name + _describe_lora(config),
        "data": f"{rows} | {batch} a step",
        "algorithm": f"{config.algorithm.name}, corrections: {corrections}",
        "validation": _describe_validation(config),
    }


def _describe_lora(config: TrainConfig) -> str:
    lora = config.model.lora
    return f", LoRA of {lora.adapter or f'rank {lora.rank}'}" if lora.on else ""


def _describe_distillation(config: TrainConfig) -> str:
    distill = config.rollout.distill
    if not distill.on:
        return ""
    adapter = f"rank {distill.rank}" if distill.adapter is None else str(distill.adapter)
    steps = "step" if distill.every == 1 else f"{distill.every} steps"
    when = f"distilled every {steps}" if distill.every else "not trained"
    return f" | actor adapter {adapter}, {when} by {distill.divergence}"


def _describe_validation(config: TrainConfig) -> str:
    held = config.validation
    if not held.every:
        return "none (validation.every)"
    return f"{held.prompts} rows of {held.rows or config.data.task}, every {held.every} steps"


# From a configuration to a run.


def open_run(
    config: TrainConfig,
    *,
    episode: Episode | None = None,
    judge: Judge | None = None,
    callbacks: Callbacks | None = None,
    stopping: GracefulShutdown | None = None,
    report: Report | None = None,
    start_worker: StartWorker | None = None,
    make: MakeParts | None = None,
) -> Run:
    """Open a new run, or resume from its last checkpoint: `with open_run(config) as run`.

    episode, judge: in place of those that the configuration names. start_worker: of an asynchronous
    run; None: a process of this machine. make: the run without its files; None: `open_parts`.
    """
    folder = run_folder(config)
    _refuse_ended(folder, config.run.steps)
    if config.run.wandb is not None:
        import_wandb()
    run = (make or open_parts)(
        config,
        folder,
        episode=episode,
        judge=judge,
        stopping=stopping,
        report=report,
        start_worker=start_worker,
    )
    run.callbacks = callbacks or run.callbacks

    def open_files() -> None:
        own = config.run
        run.ledger.files = RunFiles(folder, tensorboard=own.tensorboard, wandb=own.wandb)
        remove_unfinished(folder)

    with ExitStack() as opened:
        opened.enter_context(run)
        run.world.on_first_rank(open_files)
        resume(run, folder, report or (lambda text: None))
        opened.pop_all()
    return run


def run_folder(config: TrainConfig) -> Path:
    """The run directory of a configuration."""
    return config.run.out or Path("runs") / "train" / config.run.name


def _refuse_ended(folder: Path, steps: int) -> None:
    """Refuse to open a run that has all its steps and its model; with more steps it continues."""
    if not (folder / MODEL).exists():
        return
    taken = Checkpoints(folder / CHECKPOINTS, 1).latest()
    if taken is None:
        raise ValueError(f"{folder} has a model but no checkpoint; choose another run.out")
    if taken >= steps and has_sums(folder):
        raise ValueError(
            f"{folder}: this run ended after {taken} steps. To continue it, set run.steps above "
            f"{taken}; to start a new run, choose another run.out"
        )


def open_parts(
    config: TrainConfig,
    folder: Path,
    *,
    episode: Episode | None = None,
    judge: Judge | None = None,
    stopping: GracefulShutdown | None = None,
    report: Report | None = None,
    start_worker: StartWorker | None = None,
) -> Run:
    """Make the parts of a run at its start, without its files.

    The learner comes before the engine, which takes the free memory.
    """
    report, rollout = report or (lambda text: None), config.rollout
    device = rank_device(pick_device(config.model.device))
    dtype = pick_dtype(config.model.dtype, device, {})
    world, stopping = _ranks(config, device), stopping or GracefulShutdown()
    frozen = config.model.lora.on
    model = load(
        config.model.name, dtype=dtype if frozen else "float32", device=device, report=report
    )
    sampling = Sampling.open(config, model, report)
    reference = _reference(config, model, dtype)
    ledger = Ledger(
        config=config,
        identity=run_identity(config, dtype, (model, reference), sampling.rows, sampling.schedule),
        checkpoints=Checkpoints(folder / CHECKPOINTS, config.run.keep, report=report),
        left_out=getattr(sampling.rows, "problems", ()),
    )
    learner = learner_side(config, model, reference, dtype, sampling.algorithm, world)
    if config.run.loop == "async":
        _refuse_objects(config, episode, judge)
        if device.type == "cuda" and rollout.kv_gib is None and not rollout.url:
            raise ValueError(
                "rollout.kv_gib: set it for run.loop = async on a GPU, which the learner and two "
                "engines share; --dry-run says what the learner takes"
            )
        parts: dict[str, Any] = {"dtype": dtype, "folder": folder, "stopping": stopping}
        parts["start_worker"] = start_worker
        side: RolloutProtocol = _async_side(sampling, learner, model, world, parts)
    else:
        backend = _backend(config, sampling, dtype, device, world=world, report=report)
        if learner.adapter is not None and rollout.distill.adapter is not None:
            backend.set_actor(learner.adapter)
        parts = {"world": world, "stopping": stopping}
        side = sampling.side(backend, episode=episode, judge=judge, report=report, **parts)
    decoding, exact = sampling.decoding, sampling.exact
    mass = decoding.flow.mass is not None
    # Under exact decoding the actor is the policy: the gate has nothing to change.
    schedule = None if exact else sampling.schedule
    gate = Gate(gate_config(config), schedule, longest=sampling.longest, mass=mass)
    return Run(
        config=config,
        rollout=side,
        learner=learner,
        gate=gate,
        ledger=ledger,
        world=world,
        stopping=stopping,
    )


def _refuse_objects(config: TrainConfig, *given: object) -> None:
    """Refuse functions that a worker process cannot import."""
    code = code_settings(config).items()
    local = [key for key, text in code if text.startswith(f"{HERE}:") and "dispatch." not in key]
    if local or any(part is not None for part in given):
        named = ", ".join(local) or "episodes and rewards"
        raise ValueError(f"run.loop: async needs {named} as module:function or file.py:function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the rollout side of a configuration is made of, but for its backend."""

    config: TrainConfig
    decoding: ResolvedDecoding
    algorithm: Algorithm
    rows: Examples
    language: Language
    max_prompt: int
    identity: str  # of the model, apart from its weights

    @classmethod
    def open(cls, config: TrainConfig, model: Decoder, report: Report) -> "Sampling":
        """Open rows and language; report what is wrong with them, or with the schedule."""
        rollout = config.rollout
        decoding = resolve_decoding(rollout, model.spec.family)
        max_prompt = max_prompt_tokens(rollout, model.spec)
        language = load_language(model, config.data.task in PUZZLES, chat=config.chat)
        rows: Examples = open_rows(config.data, seed=config.run.seed)
        rows = _drop_overlong(rows, language, max_prompt, report)
        longest = max_prompt + rollout.max_tokens
        for note in schedule_notes(decoding.schedule, config.model.name, longest):
            report(note)
        return cls(
            config=config,
            decoding=decoding,
            algorithm=make_algorithm(config.algorithm, max_tokens=rollout.max_tokens),
            rows=rows,
            language=language,
            max_prompt=max_prompt,
            identity=model_identity(model),
        )

    @property
    def schedule(self) -> Schedule | None:
        return self.decoding.schedule

    @property
    def exact(self) -> bool:
        return self.decoding.speculative is not None

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most."""
        return self.max_prompt + self.config.rollout.max_tokens

    def settings(self) -> dict[str, Any]:
        """Arguments of every rollout side."""
        return {
            "config": self.config,
            "exact": self.decoding if self.exact else None,
            "flow": self.decoding.flow,
            "rows": self.rows,
            "language": self.language,
            "algorithm": self.algorithm,
            "max_prompt": self.max_prompt,
        }

    def side(
        self,
        backend: RolloutBackend,
        *,
        episode: Episode | None = None,
        judge: Judge | None = None,
        report: Report,
        kind: type[RolloutSide] = RolloutSide,
        **parts: Any,
    ) -> RolloutSide:
        """The rollout side in this process, with its judges."""
        config = self.config
        with ExitStack() as judges:
            held = config.validation.every
            validation, unusable = open_validation(config, judges) if held else ([], ())
            judges.pop_all()  # the rollout side closes them
        if unusable:
            report(f"validation: {len(unusable)} rows are left out, the first: {unusable[0]}")
        return kind(
            backend=backend,
            episode=episode or load_episode(config.rollout.episode),
            judge=judge or open_judge(config.data, self.rows),
            validation=validation,
            **(self.settings() | parts),
        )


def open_rollout_side(
    config: TrainConfig, report: Report = print, *, judge: Judge | None = None
) -> RolloutSide:
    """Make the rollout side alone, for a worker process."""
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device, {})
    model = load_sampled(config, dtype, device, report)
    sampling = Sampling.open(config, model, report)
    backend = _backend(config, sampling, dtype, device, model, report=report)
    return sampling.side(backend, judge=judge, report=report)


def load_sampled(
    config: TrainConfig,
    dtype: torch.dtype | str,
    device: torch.device | str,
    report: Report | None = None,
) -> Decoder:
    """The model that samples first: with the adapter that training begins with in its weights."""
    model = load(config.model.name, dtype=dtype, device=device, report=report)
    if (adapter := config.model.lora.adapter) is not None:
        with naming("model.lora.adapter"):
            place: dict[str, Any] = {"dtype": torch.float32, "device": model.device}
            Adapter.load(adapter, model.spec, **place).merge_into(model)
    return model


def _async_side(
    sampling: Sampling,
    learner: LearnerProtocol,
    model: Decoder,
    world: World,
    parts: Mapping[str, Any],
) -> RolloutProtocol:
    from sparrow.dataflow.asynchronous.first_rank import FirstRankRollout
    from sparrow.dataflow.asynchronous.rollout import AsyncRolloutSide

    side = AsyncRolloutSide(**sampling.settings(), **parts)
    if sampling.config.dispatch.listen is not None:
        weights = learner.weights()  # by all ranks
        if world.is_first:
            side.publish(weights, model)
    return side if world.size == 1 else FirstRankRollout(side, world)


def _ranks(config: TrainConfig, device: torch.device) -> World:
    """The ranks that train together; every one samples some of the prompts of a step."""
    world, prompts = join_world(device), config.rollout.prompts
    if prompts < world.size:
        raise ValueError(f"rollout.prompts: expected at least {world.size} (ranks), got {prompts}")
    return world


def learner_side(
    config: TrainConfig,
    model: Decoder,
    reference: Decoder | None,
    dtype: torch.dtype,
    algorithm: Algorithm,
    world: World,
) -> LearnerProtocol:
    if config.run.learner == "transformers":
        if world.size > 1:
            raise ValueError(f"run.learner: expected sparrow for {world.size} ranks")
        return TransformersLearner(config, model, algorithm)
    batch, distill = config.batch, config.rollout.distill
    joined = model.device.type == "cuda" if batch.compile is None else batch.compile
    adapter = _adapter(config, model) if distill.on else None  # before weights are sharded
    lora = _lora(config, model, world) if config.model.lora.on else None
    policy = Policy(model, dtype=dtype, recompute=batch.recompute, compiled=joined, adapter=lora)
    learner = Learner(
        shard(policy) if world.size > 1 else policy,
        config.optimiser,
        steps=config.run.steps * batch.updates,
        tokens=batch.tokens,
        world=world,
        reference=None if reference is None else Policy(reference, dtype=dtype, compiled=joined),
    )
    distiller = None
    if adapter is not None:
        rate = 5 * config.optimiser.rate if distill.rate is None else distill.rate
        distiller = Distiller(
            learner.policy,
            adapter,
            rate=rate,
            tokens=batch.tokens,
            divergence=distill.divergence,
            weight=distill.weight,
            world=world,
        )
    return LearnerSide(config=config, learner=learner, algorithm=algorithm, distiller=distiller)


def _lora(config: TrainConfig, model: Decoder, world: World) -> Adapter:
    """The adapter that is trained, at the start; a new one changes nothing."""
    lora = config.model.lora
    place: dict[str, Any] = {"dtype": torch.float32, "device": model.device}
    if world.size > 1:
        raise ValueError(f"model.lora: expected 1 rank, which trains an adapter; got {world.size}")
    if lora.adapter is not None:
        with naming("model.lora.adapter"):
            return Adapter.load(lora.adapter, model.spec, **place)
    most = max(min(sizes) for sizes in module_sizes(model.spec).values())
    if lora.rank > most:
        raise ValueError(f"model.lora.rank: expected at most {most} for this model: {lora.rank}")
    new: dict[str, Any] = {"alpha": lora.alpha, "modules": lora.targets, "b_std": 0.0, **place}
    return Adapter.random(model.spec, lora.rank, seed=config.run.seed, **new)


def _adapter(config: TrainConfig, model: Decoder) -> Adapter:
    """The adapter of the sparse actor at the start; a new one changes nothing."""
    distill, place = config.rollout.distill, {"dtype": torch.float32, "device": model.device}
    if distill.adapter is not None:
        return load_actor(distill.adapter, model, dtype=torch.float32).adapter
    settings: dict[str, Any] = {"modules": distill.targets, "b_std": 0.0, **place}
    return Adapter.random(model.spec, distill.rank, seed=config.run.seed, **settings)


def gate_config(config: TrainConfig) -> GateConfig:
    """The gate's settings; it may lower budgets where the actor is distilled."""
    distill = config.rollout.distill
    return config.gate.replace(lower=config.gate.lower or (distill.on and distill.lower))


def _reference(config: TrainConfig, model: Decoder, dtype: torch.dtype) -> Decoder | None:
    """The frozen model of the KL term, in the dtype of the products; None without such a term."""
    if not config.algorithm.kl:
        return None
    name = config.algorithm.reference or config.model.name
    reference = load(name, dtype=dtype, device=model.device).requires_grad_(False)
    sizes = reference.spec.vocabulary, model.spec.vocabulary
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"algorithm.reference: {name} has {sizes[0]} tokens, {config.model.name} has "
            f"{sizes[1]}; the two must share a tokenizer"
        )
    return reference


def _backend(
    config: TrainConfig,
    sampling: Sampling,
    dtype: torch.dtype,
    device: torch.device,
    model: Decoder | None = None,
    *,
    world: World | None = None,
    report: Report,
) -> RolloutBackend:
    """The engine with its copy of the weights, or servers."""
    rollout, decoding = config.rollout, sampling.decoding
    if rollout.url:
        return _servers(config, sampling, world, report)
    kv_bytes = None if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
    limits = {"max_running": rollout.max_running, "max_context": sampling.longest}
    model = model or load_sampled(config, dtype, device)
    return open_backend(model, decoding.rule, decoding.speculative, **limits, kv_bytes=kv_bytes)


def _servers(
    config: TrainConfig, sampling: Sampling, world: World | None, report: Report
) -> RolloutBackend:
    from sparrow.dataflow.servers import ServerBackend  # needs the extra "client"

    def starts(dtype: str) -> Mapping[str, torch.Tensor]:
        return hf_views(load_sampled(config, dtype, "cpu"))

    fixed = config.rollout.fixed_weights
    backend = ServerBackend(
        config.rollout.url,
        starts=None if fixed else starts,
        check=partial(_check_server, config, sampling),
        world=world,
        report=report,
    )
    if fixed:
        report("rollout.fixed_weights: servers keep their weights, so rollouts become off-policy")
    return backend


def _check_server(config: TrainConfig, sampling: Sampling, server: "RolloutServer") -> None:
    """Refuse a server that cannot answer the prompts of a run."""
    rule = None if sampling.decoding.rule is None else sampling.decoding.rule.describe()
    if server.is_sparrow and server.identity != sampling.identity:
        raise ValueError(
            f"rollout.url: {server.url} has a model of another configuration or tokenizer "
            f"than {config.model.name}"
        )
    if server.max_context is not None and server.max_context < sampling.longest:
        raise ValueError(
            f"rollout.url: a sequence may have {sampling.longest} tokens, {server.url} takes "
            f"{server.max_context}; lower rollout.max_tokens or rollout.max_prompt"
        )
    sparse = sampling.schedule is not None
    if not server.is_sparrow and (sparse or config.gate.mode == "act"):
        raise ValueError(
            f"rollout.url: {server.url} has dense decoding and returns no hidden states; it needs "
            "gate.mode = warn or off, and no budget or schedule"
        )
    if rule is not None and server.rule != rule:
        raise ValueError(
            f"rollout.url: {server.url} runs {server.rule}, this run {rule}; start it with the "
            "--schedule or --flow of this run"
        )


def _drop_overlong(rows: Examples, language: Language, most: int, report: Report) -> Examples:
    """The rows of a file whose prompts fit; the others are reported."""
    if not isinstance(rows, FileRows):
        return rows

    def fits(example: Example) -> str | None:
        tokens = len(language.encode(example.prompt))
        return None if tokens <= most else f"prompt has {tokens} tokens, at most {most} fit"

    kept = rows.keep(fits)
    if kept.problems:
        report(f"{rows.name}: {len(kept.problems)} rows are left out (all in {LEFT_OUT}):")
        for problem in kept.problems[:10]:
            report(f"  {problem}")
    return kept


def run_identity(
    config: TrainConfig,
    dtype: torch.dtype,
    models: tuple[Decoder, Decoder | None],
    rows: Examples,
    schedule: Schedule | None,
    policies: Iterable[str] = (),
) -> str:
    """A digest of what must not change when a run is resumed.

    models: policy and reference. policies: `policy_identity` of each of several.
    """
    source = models[0].source
    tokenizer = None if source is None else tokenizer_digest(source)
    weights = " ".join(fingerprint(model) for model in models if model is not None)
    kept, budgets = _lasting(config), _budgets(schedule)
    text = f"{kept} {dtype} {weights} {tokenizer} {rows.digest} {budgets}"
    return hashlib.sha256("\n".join([text, *policies]).encode()).hexdigest()


def _budgets(schedule: Schedule | None) -> str:
    return "dense" if schedule is None else json.dumps(to_dict(schedule))


def policy_identity(
    name: str, config: PolicyConfig, view: TrainConfig, schedule: Schedule | None
) -> str:
    """What must not change of one of several policies. view: as of a run with it alone."""
    return f"{name} {config.frozen} {config.team} {_lasting(view)} {_budgets(schedule)}"


def _lasting(config: TrainConfig) -> str:
    """The settings that must not change when a run is resumed.

    Left out: where and how it runs, what it shows, and what may be changed when a run has stopped:
    the gate's settings, the rate, memory, and the number of steps where the rate does not depend on
    it. Settings at their defaults are left out too, so that a version with more settings resumes,
    and so are sections of which nothing is left.
    """
    shown = {"out", "name", "save_every", "keep", "rollouts", "tensorboard", "wandb", "skips"}
    shown |= {"ray", "ranks", "gpu_share"}
    text = config.model_dump_json(
        exclude_defaults=True,
        exclude={
            "run": shown if config.optimiser.decay else {*shown, "steps"},
            "model": {"device"},
            "data": {"workers", "deadline", "memory_gib"},
            "rollout": dict.fromkeys(("max_running", "kv_gib", "sleep", "url"), True)
            | {"attention": {"schedule"}},  # its content counts, not its path
            "batch": {"tokens", "recompute", "compile", "kl_sample"},
            "gate": set(GateConfig.model_fields) - {"bin"},
            "dispatch": {"attempts", "deadline", "workers", "listen", "worker_timeout"},
            "optimiser": {"rate"},
            "policies": True,  # each has an identity
        },
    )
    return without_empty(text)


def without_empty(text: str) -> str:
    """JSON without empty objects; other values keep their text."""
    while (less := re.sub(r',"\w+":\{\}|"\w+":\{\},?', "", text)) != text:
        text = less
    return text


def resume(run: Run, folder: Path, report: Report) -> None:
    """Load the latest checkpoint, if there is one, and cut the run's files to its step."""
    step, changes = run.world.on_first_rank(run.ledger.checkpoints.latest), ""
    if step is not None:
        changes = changed_settings(folder, run.config)
        try:
            run.load_checkpoint(step)
        except Damaged:
            raise
        except ValueError as error:
            raise ValueError(f"{error}. Changed: {changes}" if changes else str(error)) from error
        run.ledger.refuse_stopped()
        if run.step > run.config.run.steps:
            raise ValueError(
                f"run.steps: expected at least {run.step}, the steps that {folder} has taken; got "
                f"{run.config.run.steps}"
            )
        changed = f", with changes: {changes}" if changes else ""
        report(f"{folder}: resuming after {step} steps{changed}")

    def begin_files() -> list[int]:
        """Cut the files to the run's step; return the steps whose metrics are missing."""
        files, schedule = run.ledger.files, run.schedule
        assert files is not None, "the first rank has them"
        gap = files.begin(run.config, run.step)
        if problems := run.ledger.left_out:
            write_whole(folder / LEFT_OUT, (f"{problem}\n" for problem in problems))
        if schedule is not None and run.step == 0:
            schedule.save(folder / SCHEDULE)
        if changes:
            files.action({"step": run.step, "kind": CHANGED, "reason": changes})
        return gap

    if gap := run.world.on_first_rank(begin_files):
        report(f"{folder}: metrics.jsonl lacks {len(gap)} earlier steps, the first is {gap[0]}")


def changed_settings(folder: Path, config: TrainConfig) -> str:
    """Describe the settings that differ from those of a run directory."""
    try:
        before = dict(flat_settings(read_resolved(TrainConfig, folder).model_dump(mode="json")))
    except (ValueError, OSError):  # of another version, damaged or missing
        return ""
    now = dict(flat_settings(config.model_dump(mode="json")))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def max_prompt_tokens(config: RolloutConfig, spec: ModelSpec) -> int:
    """The most tokens that a prompt may have."""
    left = spec.max_positions - config.max_tokens
    if left < (config.max_prompt or 1):
        raise ValueError(
            f"rollout.max_tokens {config.max_tokens} and a prompt of {config.max_prompt or 1} "
            f"tokens exceed the model's {spec.max_positions} positions"
        )
    return config.max_prompt or left


def schedule_notes(schedule: Schedule | None, model: str, longest: int) -> list[str]:
    """Warnings about a schedule: measured on another model, or never sparse."""
    if schedule is None:
        return []
    notes, name = list[str](), Path(split_revision(model)[0]).name
    if schedule.model is not None and schedule.model.lower() != name.lower():
        notes.append(
            f"schedule {schedule.name} was measured on {schedule.model}, this is {name}: its "
            "acceptance here is unknown until the gate measures it"
        )
    rows = [schedule.budgets, *(layer.budgets for layer in schedule.layers)]
    if min(int(row.min()) for row in rows) >= longest:
        notes.append(
            f"schedule {schedule.name} keeps all of the at most {longest} tokens: never sparse"
        )
    return notes
