"""A run of several policies: one episode, and each policy learns on its own clock.

    async def solve_and_check(actors, example):            # rollout.episode
        solver = actors["solver"].conversation(example)
        ...
        return [solver.trajectory(verdict), checker.trajectory(other)]

Tokens carry the number of the policy that sampled them. Every policy takes from the groups of an
episode the trajectories that it took part in, with the tokens of others masked; it waits until it
has the groups of a batch, and then takes its step, so one may learn twice while another waits.

Policies with weights of their own have an engine each; those that train adapters over the weights
of `model`, and frozen ones, are requests of one engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow.dataflow.local.messages import Callbacks, RolloutBatch, RolloutRequest, Unjudged
from sparrow.dataflow.local.metrics import Metrics, rollout_metrics
from sparrow.dataflow.local.run import Run, describe_run, remove_model
from sparrow.dataflow.local.sides import LearnerProtocol
from sparrow.dataflow.team.member import Member
from sparrow.dataflow.team.rollout import TeamRollout
from sparrow.gate import Gate
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.gate import GateAction
from sparrow.schema.run_folder import ADAPTER, MODEL
from sparrow.training.update import UpdateStats


@dataclass(kw_only=True)
class TeamRun(Run):
    """A run of several policies."""

    learner: LearnerProtocol = field(init=False)  # there are several
    gate: Gate = field(init=False)
    members: dict[str, Member]
    settled: bool = True  # no episode and no update is under way: a checkpoint can be saved

    @property
    def learning(self) -> list[Member]:
        return [member for member in self.members.values() if member.learner is not None]

    @property
    def schedule(self) -> None:
        """Every policy has its own."""

    @property
    def callbacks(self) -> Callbacks:
        return self.ledger.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Callbacks) -> None:
        self.rollout.callbacks = self.ledger.callbacks = callbacks
        for member in self.learning:
            assert member.learner is not None
            member.learner.callbacks = callbacks

    def header(self) -> list[str]:
        """What runs: a line for every policy, then what they share."""
        lines = []
        for member in self.members.values():
            words = describe_run(member.config, member.sampling(), "")
            kind = "frozen" if member.learner is None else words["algorithm"]
            lines.append(f"policy {member.name}: {words['model']} | {kind} | {words['rollout']}")
        rows = self.rollout.header()
        return [*lines, f"data: {rows.rows}", f"engine: {rows.engine}"]

    def request(self) -> RolloutRequest:
        """The next round; as many hidden states as the gate that measures most asks for."""
        samples = (m.config.gate.sample for m in self.learning if m.measured)
        return RolloutRequest(
            step=self.step,
            position=self.ledger.position,
            schedule=self.schedule,
            prompts=self.config.rollout.prompts,
            samples=self.config.rollout.samples,
            watched=max(samples, default=0),
        )

    def take_step(self) -> None:
        """One round of episodes; every policy that has a batch then takes its steps."""
        clock = self.start_step()
        with clock("gen"):
            rollouts = self.rollout.generate(self.request())
            self.ledger.refuse_unjudged(rollouts)
        metrics, updates, actions = self.learn(rollouts)
        metrics |= {f"timing_s/{part}": value for part, value in clock.seconds().items()}
        self.record(rollouts, updates, actions, metrics)
        self.validate_if_due()
        self.save_if_due()
        self.ledger.raise_if_stopped(actions)

    def learn(self, rollouts: RolloutBatch) -> tuple[Metrics, list[UpdateStats], list[GateAction]]:
        """Give every policy its share of a round; those that then have a batch take their steps."""
        metrics, updates, actions = (
            rollout_metrics(rollouts),
            list[UpdateStats](),
            list[GateAction](),
        )
        for member in self.members.values():
            if member.learner is not None:
                for place, group in enumerate(rollouts.groups, self.ledger.position):
                    member.take(place, group)  # in order; rows that do not fit leave gaps
                while batch := member.due():
                    taken, acted = self._learn(member, batch)
                    updates, actions = updates + taken, actions + acted
                member.forget_states()
            metrics |= member.round_metrics(rollouts.groups)
        return metrics, updates, actions

    def record(
        self,
        rollouts: RolloutBatch,
        updates: Sequence[UpdateStats],
        actions: Sequence[GateAction],
        metrics: Metrics,
    ) -> None:
        """Record a round. It ends the run if one policy has no finite loss, whatever others do."""
        number = self.step
        self.ledger.record(rollouts, updates, actions, metrics)
        self.ledger.skips = max(member.skips for member in self.learning)
        for member in self.learning:
            if not any(map(member.learns_from, rollouts.groups)):
                text = f"policy {member.name}: no samples to learn from"
                self.callbacks.event(f"step {number}: {text}", "yellow")

    def _learn(
        self, member: Member, batch: RolloutBatch
    ) -> tuple[list[UpdateStats], list[GateAction]]:
        """One step of a policy: dense log-probs, its gate, its update, its new weights."""
        assert member.learner is not None
        learnt = member.learner.learn(batch, member.gate.schedule, member.version)
        actions = member.note(batch, learnt, self.step)
        if member.learner.lora is None:  # the LM head that belongs to them is trained
            member.forget_states()
        member.sync()
        return learnt.updates, actions

    def validate(self) -> None:
        """Measure policies by themselves on the held-out rows, and together if that is wanted."""
        if not self.config.validation.every:
            return
        assert isinstance(self.rollout, TeamRollout)
        self.callbacks.phase("validation")
        found = dict[str, Evaluation]()
        chosen = self.config.validation.policies
        for member in self.learning if chosen is None else map(self.members.__getitem__, chosen):
            try:
                found[f"policy/{member.name}/"] = self.rollout.evaluate_member(member)
            except Unjudged as error:
                raise Unjudged(f"policy {member.name}: {error}") from error
        together = self.rollout.evaluate_episode() if self.config.validation.episode else {}
        self.ledger.record_validation(self.step, found, together)

    # Checkpoints and the models at the end.

    def save(self) -> None:
        """Save a checkpoint, unless something was under way when an error ended it."""
        if self.settled:
            super().save()

    def close(self) -> None:
        for member in self.learning:
            assert member.learner is not None
            member.learner.close()
        super().close()

    def state(self) -> dict[str, Any]:
        parts = {member.name: member.state() for member in self.learning}
        return {**self.ledger.state(), "policies": parts}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of all of them; steps without a finite loss are counted anew."""
        for member in self.learning:
            member.restore(state["policies"][member.name])
            member.skips = 0
        self.ledger.skips = 0

    def finish(self) -> Path:
        """Write the Hugging Face folder of every policy that learns; return the folder of all."""
        self.callbacks.phase("writing the models")
        files = self.ledger.files
        assert files is not None
        target = files.folder / MODEL
        remove_model(target)
        for member in self.learning:
            assert member.learner is not None
            member.learner.save(target / member.name, files.folder / ADAPTER / member.name)
            if not member.version:
                had = f"it had {len(member.pending)} of {member.prompts} groups"
                self.callbacks.event(f"policy {member.name} never learnt: {had}", "yellow")
        files.finish()
        return target
