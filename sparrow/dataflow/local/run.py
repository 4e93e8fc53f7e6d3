"""A run: its rollout side, its learner side, its ledger, and the gate between them.

What changes is in the learner (weights, moments), the gate (windows, schedule), and the ledger's
counts; no random state is kept, as every draw is a function of seed, step and row. So a checkpoint
is small, and a resumed run goes on bit for bit (on a CPU).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger, Number
from sparrow.dataflow.local.messages import Diverged as Diverged  # for the command line
from sparrow.dataflow.local.messages import EpisodeFailed as EpisodeFailed
from sparrow.dataflow.local.messages import GateStop as GateStop
from sparrow.dataflow.local.messages import RolloutRequest
from sparrow.dataflow.local.messages import Unjudged as Unjudged
from sparrow.dataflow.local.rollout import RolloutSide
from sparrow.dataflow.local.watching import Clock, Watcher
from sparrow.dataflow.stopping import Stopped, Stopping
from sparrow.gate import Gate
from sparrow.models import Decoder, provenance, save
from sparrow.schema.base import Record, from_dict
from sparrow.schema.train import TrainConfig
from sparrow.train.world import World

MODEL = "model"
TAKEN = {"gate": "step", "learner": "taken"}


class _Taken(Record):
    """Counts in a checkpoint that its parts do not check themselves."""

    gate: Annotated[int, Field(ge=-1, lt=2**53)]  # its last step: -1 before the first
    learner: Number


@dataclass(kw_only=True)
class Run:
    """See the module. The sides know nothing of each other; the loop takes messages between."""

    config: TrainConfig
    rollout: RolloutSide
    learner: LearnerSide
    gate: Gate
    ledger: Ledger
    stopping: Stopping
    world: World

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
        schedule, gate, rollout = self.gate.schedule, self.config.gate, self.config.rollout
        attention = "dense" if schedule is None else f"sparse, {schedule.describe()}"
        policy = f"p05 >= {gate.target} is watched, mode {gate.mode}"
        batch = (
            f"{rollout.prompts} prompts x {rollout.samples} answers <= {rollout.max_tokens} tokens"
        )
        used = ", ".join(one.use for one in self.config.algorithm.corrections)
        origin = provenance(self.learner.learner.policy.model)
        isolation = getattr(self.rollout.judge, "isolation", None)
        verifiers = f" | verifiers in processes ({isolation})" if isolation else ""
        return [
            f"rollout: {attention}",
            f"gate: {'off' if gate.mode == 'off' else policy}",
            f"model: {self.config.model.name} ({origin}) | {self.rollout.engine.header()}",
            f"data: {self.rollout.rows.name} | {batch} a step{verifiers}",
            f"algorithm: {self.config.algorithm.name}, corrections: {used or 'none'}",
        ]

    # A step.

    def begin(self) -> Clock:
        """The beginning of a step, unless the run is to end, which all ranks decide together."""
        if any(self.world.collect(self.stopping.wanted)):
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
        """The engine gets the learner's weights; their version is the number of steps taken."""
        self.rollout.wake()
        self.rollout.update(self.learner.weights(), version=self.step + 1)

    # After a step.

    def validate_if_due(self) -> None:
        """Measure accuracy every so many steps, and after the last."""
        every = self.config.validation.every
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.validate()

    def validate(self) -> None:
        if self.rollout.validation is not None:
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
        parts = {"gate": self.gate.state(), "learner": self.learner.state()}
        return {**self.ledger.state(), **parts}

    def load_checkpoint(self, step: int) -> None:
        """Be as the run was after so many steps."""
        checkpoints = self.ledger.checkpoints
        state = checkpoints.load(step, self.ledger.identity)
        try:
            if state["step"] != step:
                raise ValueError("it is of another step")
            self._restore(state)
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"step {step} in {checkpoints.folder} is no state of this run ({told})"
            ) from error
        if self.step:
            self.rollout.update(self.learner.weights(), version=self.step)

    def _restore(self, state: dict[str, Any]) -> None:
        from_dict(_Taken, {name: state[name][key] for name, key in TAKEN.items()})
        self.ledger.restore(state)
        self.learner.restore(state["learner"])
        self.gate = Gate.restore(self.config.gate, state["gate"])

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
