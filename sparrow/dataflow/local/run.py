"""A run: everything that the loop works with, what of it changes, and where it is kept.

What changes is in the learner (weights, moments), the gate (windows, schedule), and a few counts;
no random state is kept, as every draw is a function of seed, step and row. So a checkpoint is
small, and a resumed run goes on bit for bit (on a CPU).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparrow.dataflow.episodes import Episode
from sparrow.dataflow.language import Language
from sparrow.dataflow.local.validating import Validation, told
from sparrow.dataflow.local.watching import Clock, Watcher
from sparrow.dataflow.runs.checkpoints import Checkpoints
from sparrow.dataflow.runs.files import RunFiles
from sparrow.dataflow.stopping import Stopped, Stopping
from sparrow.engine.engine import Engine
from sparrow.gate import Gate
from sparrow.models import Decoder, hf_views, provenance, save
from sparrow.schema.base import to_dict
from sparrow.schema.episode import Group
from sparrow.schema.gate import Look
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import Examples, Judge
from sparrow.train.learner import Learner, UpdateStats
from sparrow.train.objectives.algorithms import Algorithm
from sparrow.train.world import World

MODEL = "model"
NAMED = 5  # rows that are named one by one
FAULTS = (
    "overlong_prompts",
    "skipped_updates",
    "verifier_timeouts",
    "verifier_crashes",
    "verifier_errors",
)


class GateStop(Exception):
    """The gate found a tail that no budget mends. Its message says where, and by how much."""


class Diverged(Exception):
    """Too many steps in a row without a finite loss and gradient."""


class Unjudged(Exception):
    """Not one verdict of a step came about: there is nothing to learn from."""


class EpisodeFailed(Exception):
    """An episode raised, or gave what is none. The step in which it was played is not taken."""


@dataclass(kw_only=True)
class Run:
    """See the module. Where `validation` is None, none is asked for."""

    config: TrainConfig
    identity: str
    learner: Learner
    engine: Engine
    rows: Examples
    judge: Judge
    language: Language
    episode: Episode
    algorithm: Algorithm
    gate: Gate
    max_prompt: int
    files: RunFiles | None  # None: another rank writes, or nobody
    checkpoints: Checkpoints
    watch: Watcher
    stopping: Stopping
    validation: Validation | None = None
    world: World = field(default_factory=World)
    step: int = 0
    position: int = 0
    skips: int = 0  # steps in a row without a finite loss
    counts: Counter[str] = field(default_factory=Counter)
    unjudged: bool = False  # whether all verdicts of the last step failed
    stopped: dict[str, str] = field(default_factory=dict)  # by the gate: why, and its settings
    _verdicts: Counter[str] = field(default_factory=Counter)  # before the step that is under way

    def header(self) -> list[str]:
        """What runs, in a few lines for people. Sparse or dense is said first."""
        schedule, gate, rollout = self.gate.schedule, self.config.gate, self.config.rollout
        attention = "dense" if schedule is None else f"sparse, {schedule.describe()}"
        policy = f"p05 >= {gate.target} is watched, mode {gate.mode}"
        batch = (
            f"{rollout.prompts} prompts x {rollout.samples} answers <= {rollout.max_tokens} tokens"
        )
        used = ", ".join(one.use for one in self.config.algorithm.corrections)
        origin = provenance(self.learner.policy.model)
        isolation = getattr(self.judge, "isolation", None)
        verifiers = f" | verifiers in processes ({isolation})" if isolation else ""
        return [
            f"rollout: {attention}",
            f"gate: {'off' if gate.mode == 'off' else policy}",
            f"model: {self.config.model.name} ({origin}) | {self.engine.header()}",
            f"data: {self.rows.name} | {batch} a step{verifiers}",
            f"algorithm: {self.config.algorithm.name}, corrections: {used or 'none'}",
        ]

    # Weights between learner and engine.

    def engine_out(self) -> None:
        """The engine gives its memory back while the learner works."""
        if self.config.rollout.sleep:
            self.engine.sleep(weights="drop")

    def engine_in(self) -> None:
        """The engine gets the learner's weights; their version is the number of steps taken."""
        self.watch.phase("weights")
        if self.engine.asleep:
            if self.learner.device.type == "cuda":
                torch.cuda.empty_cache()  # what the learner let go of: the engine counts free bytes
            self.engine.wake()
        self.engine.update(self.hf_weights(), version=self.step + 1)

    def hf_weights(self) -> dict[str, torch.Tensor]:
        """Every weight whole, by Hugging Face names; all ranks must ask."""
        if self.world.size == 1:
            return hf_views(self.learner.policy.model)
        return hf_views(self._decoder(self.learner.named_weights()))

    def _decoder(self, weights: dict[str, torch.Tensor]) -> Decoder:
        """The learner's model around other tensors."""
        with torch.device("meta"):
            model = Decoder(self.learner.policy.model.spec)
        model.load_state_dict(weights, assign=True)
        model.source = self.learner.policy.model.source
        return model

    # The end of a step.

    def clock(self) -> Clock:
        """The beginning of a step, unless the run is to end, which all ranks decide together."""
        if any(self.world.collect(self.stopping.wanted)):
            raise Stopped
        self._verdicts = self._all_verdicts()
        return Clock()

    def _all_verdicts(self) -> Counter[str]:
        """What judges have counted in this session, on all ranks."""
        return sum(self.world.collect(Counter(getattr(self.judge, "counts", {}))), Counter())

    def advance(
        self, position: int, overlong: Sequence[str], updates: Sequence[UpdateStats]
    ) -> None:
        """The step has been taken: move on, and count what went wrong in it."""
        self.step += 1
        self.position = position
        self._count_verdicts(self._all_verdicts() - self._verdicts)
        self.counts["overlong_prompts"] += len(overlong)
        if overlong:
            named = ", ".join(overlong[:NAMED]) + (" ..." if len(overlong) > NAMED else "")
            self.watch.event(
                f"step {self.step - 1}: {len(overlong)} prompts over {self.max_prompt} tokens were "
                f"left out: {named}",
                "yellow",
            )
        self._count_skips(updates)

    def _count_verdicts(self, new: Counter[str]) -> None:
        for name, count in new.items():
            self.counts[f"verifier_{name}"] += count
        faults = {name: new[name] for name in ("timeouts", "crashes", "errors") if new[name]}
        failed = sum(faults.values())
        self.unjudged = bool(failed) and failed == new["judged"]
        if failed:
            kinds = ", ".join(f"{count} {name}" for name, count in faults.items())
            why = getattr(self.judge, "last_fault", "")
            self.watch.event(
                f"step {self.step - 1}: {failed} of {new['judged']} verdicts failed and gave 0 "
                f"({kinds}): {why}",
                "red",
            )

    def _count_skips(self, updates: Sequence[UpdateStats]) -> None:
        skipped = [one for one in updates if one.skipped]
        self.counts["skipped_updates"] += len(skipped)
        if not updates:
            self.watch.event(f"step {self.step - 1}: nothing to learn from, no update", "yellow")
            return
        if not skipped:
            self.skips = 0
            return
        self.skips += 1
        worst = skipped[0]
        self.watch.event(
            f"step {self.step - 1}: loss {worst.loss:g}, gradient {worst.gradient:g}: the update "
            f"was skipped, weights are as before ({self.skips} in a row)",
            "red",
        )

    def record(self, metrics: dict[str, float], groups: Sequence[Group], look: Look) -> None:
        """Write the step down, which has been taken. Steps are numbered from 0."""
        number = self.step - 1
        metrics |= {f"faults/{name}": float(count) for name, count in self._faults().items()}
        every = self.config.run.rollouts
        if self.files is not None:
            self.files.metrics(number, metrics)
            if every and number % every == 0:
                self.files.rollouts(number, groups)
            for action in look.actions:
                self.files.action(to_dict(action))
        for action in look.actions:
            if action.kind == "stop":  # before a checkpoint of this step is made
                self.stopped = {"reason": action.reason, "gate": self._gate_settings()}
            self.watch.event(f"step {number}: gate {action.kind}: {action.reason}", "yellow")
        if metrics.get("critic/advantages/zero_frac") == 1:
            equal = "the rewards of every group are equal, so there is nothing to learn from"
            self.watch.event(f"step {number}: {equal}", "yellow")
        self.watch.step({"step": number, **metrics})

    def _faults(self) -> dict[str, int]:
        """Counts that should be 0, of the run so far."""
        left_out = len(getattr(self.rows, "problems", ()))
        return {"left_out_rows": left_out, **{name: self.counts[name] for name in FAULTS}}

    def heed(self, look: Look) -> None:
        """Stop where the gate or the loss says so."""
        for action in look.actions:
            if action.kind == "stop":
                raise GateStop(action.reason)
        if self.unjudged:
            raise Unjudged(
                f"every verdict of step {self.step - 1} failed: "
                f"{getattr(self.judge, 'last_fault', '')}"
            )
        if self.skips >= self.config.run.skips:
            raise Diverged(
                f"no finite loss and gradient at {self.skips} steps in a row: lower "
                "optimiser.rate, or look at the last rollouts"
            )

    def refuse_stopped(self) -> None:
        """A run that the gate has stopped does not go on as if nothing were."""
        if self.stopped and self.stopped["gate"] == self._gate_settings():
            raise ValueError(
                f"the gate stopped this run: {self.stopped['reason']}. To go on all the same, "
                "change the gate: gate.mode=warn, or another gate.target"
            )
        self.stopped = {}

    def _gate_settings(self) -> str:
        return self.config.gate.model_dump_json()

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "position": self.position,
            "skips": self.skips,
            "counts": dict(self.counts),
            "stopped": self.stopped,
            "gate": self.gate.state(),
            "learner": self.learner.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        _check_state(state)
        self.learner.restore(state["learner"])
        self.gate = Gate.restore(self.config.gate, state["gate"])
        self.step, self.position = state["step"], state["position"]
        self.skips, self.counts = state["skips"], Counter(state["counts"])
        self.stopped = state["stopped"]

    def save(self) -> None:
        """A checkpoint of now, unless it is there; all ranks must ask, the first one writes."""
        if self.world.only_first(self.checkpoints.latest) == self.step:
            return
        self.watch.phase("checkpoint")
        state = self.state()
        self.world.only_first(lambda: self.checkpoints.save(self.step, state, self.identity))

    def save_if_due(self) -> None:
        if self.step % self.config.run.save_every == 0:
            self.save()

    # Validation, and the end.

    def validate_if_due(self) -> None:
        """Measure accuracy every so many steps, and after the last."""
        every = self.config.validation.every
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.validate()

    def validate(self) -> None:
        if self.validation is None:
            return
        self.watch.phase("validation")
        validation, schedule = self.validation, self.gate.schedule
        found = self.world.only_first(
            lambda: validation.measure(self.engine, self.language, schedule)
        )
        if self.files is not None:
            self.files.validation(self.step, found)
        self.watch.event(f"after {self.step} steps: {told(found)}", "cyan")

    def finish(self) -> Path:
        """Write the Hugging Face folder, in the dtype of the products; by way of the host's memory.

        The learner stays as it is: who called may go on with it.
        """
        self.watch.phase("writing the model")
        dtype, named = self.learner.policy.dtype, self.learner.named_weights()
        model = self._decoder({name: weight.to("cpu", dtype) for name, weight in named.items()})
        return self.world.only_first(lambda: self._write_model(model))

    def _write_model(self, model: Decoder) -> Path:
        assert self.files is not None, "the first rank writes"
        self.files.finish()
        return save(model, self.files.folder / MODEL)


def _check_state(state: dict[str, Any]) -> None:
    """TypeError for a state of wrong types: its digest says that it is whole, not who made it."""
    counts = {
        "gate.step": state["gate"]["step"],
        "learner.taken": state["learner"]["taken"],
        **{name: state[name] for name in ("step", "position", "skips")},
        **state["counts"],
    }
    for name, count in counts.items():
        least = -1 if name == "gate.step" else 0  # the gate's last step: -1 before the first
        if type(count) is not int or not least <= count < 1 << 53:
            raise TypeError(f"{name} is no count of a run: {str(count)[:80]}")
    stopped = state["stopped"]
    if stopped and (
        stopped.keys() != {"reason", "gate"} or {*map(type, stopped.values())} != {str}
    ):
        raise TypeError(f"stopped is {stopped!r:.80}, allowed: reason and gate")
