"""A run: its rollout side, its learner side, its ledger, and the gate between them.

What changes is in the learner (weights, moments), the gate (windows, schedule), and the ledger's
counts; no random state is kept, as every draw is a function of seed, step and row. So a checkpoint
is small, and a resumed run goes on bit for bit (on a CPU).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.messages import Clock, RolloutRequest, Watcher
from sparrow.dataflow.local.rollout import RolloutSide
from sparrow.dataflow.stopping import Stopped, Stopping
from sparrow.gate import Gate
from sparrow.models import Decoder, provenance, save
from sparrow.schema.run_folder import MODEL
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.train.world import World


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
    stopping: Stopping
    world: World

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
