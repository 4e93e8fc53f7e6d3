"""The ledger of a run: how far it is, what went wrong, why it stops, and the files that say so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.messages import (
    Diverged,
    GateStop,
    Nobody,
    RolloutBatch,
    Unjudged,
    Watcher,
)
from sparrow.dataflow.local.metrics import validation_metrics
from sparrow.dataflow.run_files import RunFiles, write_rollouts
from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.gate import Look
from sparrow.schema.train import TrainConfig
from sparrow.training.learner import UpdateStats

NAMED = 5  # rows that are named one by one
FAULTS = (
    "overlong_prompts",
    "skipped_updates",
    "verifier_timeouts",
    "verifier_crashes",
    "verifier_errors",
)
Number = Annotated[int, Field(ge=0, lt=2**53)]


class Progress(Record):
    """Counts in a checkpoint: how far a run is. The last two are of its other parts."""

    step: Number  # steps that were taken
    position: Number  # of the next row
    skips: Number  # steps in a row without a finite loss
    counts: dict[str, Number]  # what went wrong so far
    stopped: dict[str, str]  # by the gate: reason and gate, its settings; otherwise empty
    gate_step: Annotated[int, Field(ge=-1, lt=2**53)]  # its last: -1 before the first
    updates: Number  # optimiser steps

    def _check(self) -> None:
        if self.stopped and self.stopped.keys() != {"reason", "gate"}:
            raise ValueError(f"stopped: got {self.stopped!r:.80}, allowed: reason and gate")


@dataclass(kw_only=True)
class Ledger:
    """Written by the run alone; a rank that is not the first has no files."""

    config: TrainConfig
    identity: str  # of the configuration: a checkpoint of another one is refused
    checkpoints: Checkpoints
    files: RunFiles | None = None
    left_out: Sequence[str] = ()  # rows of a file that cannot be used, and why
    watch: Watcher = field(default_factory=Nobody)
    step: int = 0
    position: int = 0
    skips: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, str] = field(default_factory=dict)

    # A step.

    def refuse_unjudged(self, played: RolloutBatch) -> None:
        """A step without any verdict is not taken: there is nothing to learn from."""
        total = sum(played.failed.values())
        if total and total == played.verdicts["judged"]:
            raise Unjudged(f"every verdict of step {self.step} failed: {played.fault}")

    def record(
        self,
        played: RolloutBatch,
        updates: Sequence[UpdateStats],
        look: Look,
        metrics: Mapping[str, float],
    ) -> None:
        """The step has been taken: move on, count what went wrong in it, write it down."""
        number = self.step
        self.step, self.position = number + 1, played.position
        self._count_verdicts(number, played)
        self._count_overlong(number, played.overlong)
        self._count_skips(number, updates)
        faults = {"left_out_rows": len(self.left_out)} | {n: self.counts[n] for n in FAULTS}
        values = {**metrics} | {f"faults/{name}": float(count) for name, count in faults.items()}
        if self.files is not None:
            self.files.metrics(number, values)
            if (every := self.config.run.rollouts) and number % every == 0:
                write_rollouts(self.files.folder, number, played.groups)
            for action in look.actions:
                self.files.action(to_dict(action))
        for action in look.actions:
            if action.kind == "stop":  # before a checkpoint of this step is made
                self.stopped = {"reason": action.reason, "gate": self._gate_settings()}
            self._say(number, f"gate {action.kind}: {action.reason}")
        if values.get("critic/advantages/zero_frac") == 1:
            equal = "the rewards of every group are equal, so every advantage is 0"
            unmoved = any(update.no_signal for update in updates)
            self._say(number, f"{equal}; no optimiser step" if unmoved else equal)
        self.watch.step({"step": number, **values})

    def _say(self, number: int, text: str, style: str = "yellow") -> None:
        self.watch.event(f"step {number}: {text}", style)

    def _count_verdicts(self, number: int, played: RolloutBatch) -> None:
        self.counts.update({f"verifier_{name}": n for name, n in played.verdicts.items()})
        if played.failed:
            total, judged = sum(played.failed.values()), played.verdicts["judged"]
            kinds = ", ".join(f"{count} {name}" for name, count in played.failed.items())
            told = f"{total} of {judged} verdicts failed and gave 0 ({kinds}): {played.fault}"
            self._say(number, told, "red")

    def _count_overlong(self, number: int, overlong: Sequence[str]) -> None:
        self.counts["overlong_prompts"] += len(overlong)
        if overlong:
            named = ", ".join(overlong[:NAMED]) + (" ..." if len(overlong) > NAMED else "")
            self._say(number, f"{len(overlong)} prompts are too long and were left out: {named}")

    def _count_skips(self, number: int, updates: Sequence[UpdateStats]) -> None:
        skipped = [one for one in updates if one.skipped]
        self.counts["skipped_updates"] += len(skipped)
        if not updates:
            self._say(number, "nothing to learn from, no update")
            return
        self.skips = self.skips + 1 if skipped else 0
        if skipped:
            self._say(
                number,
                f"loss {skipped[0].loss:g}, gradient {skipped[0].gradient:g}: the update was "
                f"skipped, weights are as before ({self.skips} in a row)",
                "red",
            )

    def validated(self, evaluation: Evaluation) -> None:
        """Accuracy was measured after the steps so far."""
        values = validation_metrics(evaluation)
        if self.files is not None:
            self.files.validation(self.step, values)
        told = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        self.watch.event(f"after {self.step} steps: {told}", "cyan")

    # Its end.

    def heed(self, look: Look) -> None:
        """Stop where the gate or the loss say so."""
        for action in look.actions:
            if action.kind == "stop":
                raise GateStop(action.reason)
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
        names = ("step", "position", "skips", "counts", "stopped")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of wrong types: its digest says that it is whole, not whose."""
        own = {name: state[name] for name in self.state()}
        others = {"gate_step": state["gate"]["step"], "updates": state["learner"]["taken"]}
        found = from_dict(Progress, own | others)
        self.step, self.position, self.skips = found.step, found.position, found.skips
        self.counts, self.stopped = Counter(found.counts), found.stopped
