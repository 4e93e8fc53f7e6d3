"""From the configuration of several policies to their run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparrow.dataflow.backend import RolloutBackend, open_backend
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.language import load_language, vocabulary
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.run import (
    GIB,
    Run,
    Sampling,
    gate_config,
    load_sampled,
    open_run,
    policy_identity,
    run_identity,
    schedule_notes,
)
from sparrow.dataflow.run_files import CHECKPOINTS
from sparrow.dataflow.stopping import GracefulShutdown
from sparrow.dataflow.team.learners import LearnerProcess, PolicyLearner, TeamLearner
from sparrow.dataflow.team.member import Member
from sparrow.dataflow.team.rollout import TeamRollout
from sparrow.dataflow.team.run import TeamRun
from sparrow.dataflow.team.shared_engine import AdapterBackend, SharedEngine
from sparrow.engine.answer import ResolvedDecoding, resolve_decoding
from sparrow.engine.engine import Engine
from sparrow.files import file_digest
from sparrow.functions import HERE
from sparrow.gate import Gate
from sparrow.models import Decoder, fingerprint, load
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from sparrow.models.lora import Adapter
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.schema.types import Report
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Judge
from sparrow.training.objectives.algorithms import make_algorithm
from sparrow.training.world import World, join_world, rank_device


def open_team(config: TrainConfig, **parts: Any) -> Run:
    """Open a run of several policies, as `open_run` opens one."""
    return open_run(config, make=open_team_parts, **parts)


def open_team_parts(
    config: TrainConfig,
    folder: Path,
    *,
    episode: Any = None,
    judge: Judge | None = None,
    stopping: GracefulShutdown | None = None,
    report: Report | None = None,
    start_worker: object = None,
) -> TeamRun:
    """Make the parts of a run at its start, without its files."""
    report, stopping = report or (lambda text: None), stopping or GracefulShutdown()
    device = rank_device(pick_device(config.model.device))
    dtype, world = pick_dtype(config.model.dtype, device, {}), join_world(device)
    if world.size > 1:
        raise ValueError(f"policies: expected one rank, got {world.size}")
    if device.type == "cuda" and config.rollout.kv_gib is None:
        raise ValueError("rollout.kv_gib: set it with policies on a GPU: several share its memory")
    base = load(config.model.name, dtype=dtype, device=device, report=report)
    base.requires_grad_(False)
    sampling = Sampling.open(config, base, report)
    parts = _TeamParts(config, sampling, base, dtype, folder, report)
    with ExitStack() as failed:
        failed.callback(parts.close)
        run = _open_run(parts, world, stopping, episode, judge)
        failed.pop_all()
    return run


def _open_run(
    parts: "_TeamParts",
    world: World,
    stopping: GracefulShutdown,
    episode: Any,
    judge: Judge | None,
) -> TeamRun:
    """The run of its parts."""
    config, sampling, report, members = parts.config, parts.sampling, parts.report, parts.members()
    settings = (config, parts.dtype, (parts.base, None), sampling.rows, sampling.schedule)
    ledger = Ledger(
        config=config,
        identity=run_identity(*settings, parts.identities(members)),
        checkpoints=Checkpoints(parts.folder / CHECKPOINTS, config.run.keep, report=report),
        left_out=getattr(sampling.rows, "problems", ()),
    )
    learning = [member for member in members.values() if member.learner is not None]
    algorithm = replace(sampling.algorithm, dynamic=False, greedy=False)
    backend = learning[0].backend
    given: dict[str, Any] = {"members": members, "algorithm": algorithm, "world": world}
    given |= {"stopping": stopping, "kind": TeamRollout, "episode": episode, "judge": judge}
    side = sampling.side(backend, report=report, **given)
    return TeamRun(
        config=config,
        rollout=side,
        ledger=ledger,
        world=world,
        stopping=stopping,
        members=members,
    )


@contextmanager
def refused_of(name: str) -> Iterator[None]:
    """Say of which policy it is that something is refused."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"policies.{name}: {error}") from error


@dataclass
class _TeamParts:
    """Makes the policies of a run."""

    config: TrainConfig
    sampling: Sampling
    base: Decoder
    dtype: torch.dtype
    folder: Path
    report: Report
    digests: list[str] = field(default_factory=list)  # of weights that are not the base's
    learners: list[TeamLearner] = field(default_factory=list)

    def close(self) -> None:
        """End what was started, where the run cannot be opened."""
        for learner in self.learners:
            learner.close()

    def identities(self, members: Mapping[str, Member]) -> list[str]:
        """What must not change of each policy when a run is resumed, then of their weights."""
        own = self.config.policies
        each = [
            policy_identity(name, own[name], member.config, member.decoding.schedule)
            for name, member in members.items()
        ]
        return [*each, *self.digests]

    def members(self) -> dict[str, Member]:
        """Every policy by name; an engine for each that has weights of its own, one for others."""
        views = {name: self.config.policy(name) for name in self.config.policies}
        made = dict[str, Member]()
        for number, (name, view) in enumerate(views.items()):
            with refused_of(name):
                made[name] = self._member(name, number, view)
        words = {name: vocabulary(member.language) for name, member in made.items()}
        for name, member in made.items():
            same = (made[other].number for other in made if words[other] == words[name])
            member.vocabulary = min(same)
        sharing = [made[name] for name, own in self.config.policies.items() if own.shares_engine]
        if sharing:
            adapters = [self._adapter(member) for member in sharing]
            shared = SharedEngine(self._shared_engine(sharing, adapters))
            for member, adapter in zip(sharing, adapters, strict=True):
                member.backend = own = AdapterBackend(shared=shared, name=member.name)
                if adapter is not None:
                    own.load(adapter, 0)
        for member in made.values():
            if member not in sharing:
                with refused_of(member.name):
                    member.backend = self._backend(member.config, member.decoding)
        return made

    def _member(self, name: str, number: int, view: TrainConfig) -> Member:
        own, model = self.config.policies[name], self.base
        if not own.shares_engine:
            frozen = own.frozen or own.lora.on or self.config.run.loop == "async"
            dtype = self.dtype if frozen else torch.float32
            model = load(view.model.name, dtype=dtype, device=self.base.device, report=self.report)
        decoding = resolve_decoding(view.rollout, model.spec.family)
        exact, mass = decoding.speculative is not None, decoding.flow.mass is not None
        schedule = None if exact else decoding.schedule
        self._say_what_is_odd(name, view, decoding)
        return Member(
            name=name,
            number=number,
            config=view,
            team=own.team,
            decoding=decoding,
            algorithm=make_algorithm(view.algorithm, max_tokens=view.rollout.max_tokens),
            language=load_language(model, view.data.task in PUZZLES, chat=view.chat),
            gate=Gate(gate_config(view), schedule, longest=self.sampling.longest, mass=mass),
            learner=None if own.frozen else self._learner(name, view, model),
        )

    def _say_what_is_odd(self, name: str, view: TrainConfig, decoding: ResolvedDecoding) -> None:
        for note in schedule_notes(decoding.schedule, view.model.name, self.sampling.longest):
            self.report(f"policy {name}: {note}")
        most = self.config.rollout.prompts * self.config.run.steps
        if view.rollout.prompts > most:
            every = f"it learns from {view.rollout.prompts} groups at a time"
            self.report(f"policy {name} will not learn: {every}, the run has {most} at most")

    def _learner(self, name: str, view: TrainConfig, model: Decoder) -> TeamLearner:
        learner: TeamLearner
        if self.config.run.loop == "async":
            learner = self._process(name, view, model)
        else:
            learner = PolicyLearner.open(view, model, self.dtype)
        self.learners.append(learner)
        return learner

    def _process(self, name: str, view: TrainConfig, model: Decoder) -> LearnerProcess:
        """A learner in a process of its own; on a CPU it has its share of the threads."""
        code = code_settings(view).items()
        local = [
            key for key, text in code if key.startswith("algorithm") and text.startswith(f"{HERE}:")
        ]
        if local:
            raise ValueError(f"run.loop: async needs {', '.join(local)} as module:function")
        logs = self.folder / "workers"
        logs.mkdir(parents=True, exist_ok=True)
        sides = 1 + sum(not policy.frozen for policy in self.config.policies.values())
        threads = max(1, torch.get_num_threads() // sides)
        return LearnerProcess(
            name=name,
            config=view,
            spec=model.spec,
            dtype=self.dtype,
            threads=threads,
            log=logs / f"{name}.log",
        )

    def _limits(self) -> dict[str, Any]:
        rollout = self.config.rollout
        kv_bytes = None if rollout.kv_gib is None else int(rollout.kv_gib * GIB)
        return {
            "max_running": rollout.max_running,
            "max_context": self.sampling.longest,
            "kv_bytes": kv_bytes,
        }

    def _backend(self, view: TrainConfig, decoding: ResolvedDecoding) -> RolloutBackend:
        """An engine with weights of its own."""
        model = load_sampled(view, self.dtype, self.base.device)
        self.digests.append(fingerprint(model))
        return open_backend(model, decoding.rule, decoding.speculative, **self._limits())

    def _shared_engine(
        self, members: Sequence[Member], adapters: Sequence[Adapter | None]
    ) -> Engine:
        rules = list[Rule]()
        for rule in (member.decoding.rule for member in members):
            rules += [rule] if rule is not None and rule not in rules else []
        if len(rules) > 1:
            got = "; ".join(rule.describe() for rule in rules)
            raise ValueError(f"policies: expected one flow for all that share an engine, got {got}")
        ranks = [adapter.rank for adapter in adapters if adapter is not None]
        drafts = [m.decoding.speculative for m in members if m.decoding.speculative is not None]
        return Engine(
            self.base,
            rule=next(iter(rules), None),
            speculative=max(drafts, key=lambda d: d.draft_tokens) if drafts else None,
            adapters=max(len(ranks), 1),
            adapter_rank=max(ranks, default=1),
            **self._limits(),
        )

    def _adapter(self, member: Member) -> Adapter | None:
        """What it adds to the base at the start; None: nothing."""
        if member.learner is not None:
            with refused_of(member.name):
                return member.learner.lora
        place = member.config.model.lora.adapter
        if place is None:
            return None
        with refused_of(member.name):
            self.digests.append(file_digest(place / ADAPTER_WEIGHTS))
            return Adapter.load(place, self.base.spec, dtype=self.dtype, device=self.base.device)
