"""The ledger of a run: progress, fault counts, reasons to stop, and the files that record them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.messages import (
    FAILED,
    Callbacks,
    Diverged,
    GateStop,
    NoCallbacks,
    RolloutBatch,
    Unjudged,
)
from sparrow.dataflow.local.metrics import validation_metrics
from sparrow.dataflow.run_files import RunFiles, write_rollouts
from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.evaluation import Evaluation, describe_problems
from sparrow.schema.gate import GateCheck
from sparrow.schema.train import GateConfig, TrainConfig
from sparrow.training.update import UpdateStats

NAMED = 5  # rows listed by name in a message
FAULTS = (
    "overlong_prompts",
    "skipped_updates",
    "verifier_timeouts",
    "verifier_crashes",
    "verifier_errors",
)
Number = Annotated[int, Field(ge=0, lt=2**53)]


class Progress(Record):
    """The counters in a checkpoint. The last two belong to the gate and the learner."""

    step: Number  # steps taken
    position: Number  # of the next row
    skips: Number  # steps in a row without a finite loss
    counts: dict[str, Number]  # of faults
    stopped: dict[str, str]  # by the gate: its reason and settings; otherwise empty
    gate_step: Annotated[int, Field(ge=-1, lt=2**53)]  # the last; -1 before the first
    updates: Number  # optimiser steps

    def _check(self) -> None:
        if self.stopped and self.stopped.keys() != {"reason", "gate"}:
            raise ValueError(f"stopped: expected reason and gate, got {self.stopped!r:.80}")


@dataclass(kw_only=True)
class Ledger:
    """Progress and records of a run; only the first rank has files."""

    config: TrainConfig
    identity: str  # digest of the configuration: checkpoints of another one are refused
    checkpoints: Checkpoints
    files: RunFiles | None = None
    left_out: Sequence[str] = ()  # rows that cannot be used, and why
    callbacks: Callbacks = field(default_factory=NoCallbacks)
    step: int = 0
    position: int = 0
    skips: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, str] = field(default_factory=dict)
    fault: str = ""  # why the first verdict failed, of those that this process has seen

    @property
    def problems(self) -> list[str]:
        """Rows that were left out and verdicts that failed, a line for each kind."""
        failed = sum(self.counts[f"verifier_{kind}"] for kind in FAILED)
        judged = self.counts["verifier_judged"]
        return describe_problems(self.left_out, failed, judged, self.fault)

    # A step.

    def refuse_unjudged(self, rollouts: RolloutBatch) -> None:
        """Raise if every verdict of a step failed: there is nothing to learn from."""
        total = sum(rollouts.failed.values())
        if total and total == rollouts.verdicts["judged"]:
            raise Unjudged(f"every verdict of step {self.step} failed: {rollouts.fault}")

    def record(
        self,
        rollouts: RolloutBatch,
        updates: Sequence[UpdateStats],
        look: GateCheck,
        metrics: Mapping[str, float],
    ) -> None:
        """Record a step that was taken: progress, faults, metrics, rollouts and gate actions."""
        number = self.step
        self.step, self.position = number + 1, rollouts.position
        self._count_verdicts(number, rollouts)
        self._count_overlong(number, rollouts.overlong)
        self._count_skips(number, updates)
        faults = {"left_out_rows": len(self.left_out)} | {n: self.counts[n] for n in FAULTS}
        values = {**metrics} | {f"faults/{name}": float(count) for name, count in faults.items()}
        if self.files is not None:
            self.files.metrics(number, values)
            if (every := self.config.run.rollouts) and number % every == 0:
                write_rollouts(self.files.folder, number, rollouts.groups)
            for action in look.actions:
                self.files.action(to_dict(action))
        for action in look.actions:
            if action.kind == "stop":  # before the checkpoint of this step
                settings = self.config.gate.model_dump_json()
                self.stopped = {"reason": action.reason, "gate": settings}
            self._notify(number, f"gate {action.kind}: {action.reason}")
        if values.get("critic/advantages/zero_frac") == 1:
            equal = "the rewards of every group are equal, so every advantage is 0"
            unmoved = any(update.no_signal for update in updates)
            self._notify(number, f"{equal}; no optimiser step" if unmoved else equal)
        self.callbacks.step({"step": number, **values})

    def _notify(self, number: int, text: str, style: str = "yellow") -> None:
        self.callbacks.event(f"step {number}: {text}", style)

    def _count_verdicts(self, number: int, rollouts: RolloutBatch) -> None:
        self.counts.update({f"verifier_{name}": n for name, n in rollouts.verdicts.items()})
        if rollouts.failed:
            total, judged = sum(rollouts.failed.values()), rollouts.verdicts["judged"]
            kinds = ", ".join(f"{count} {name}" for name, count in rollouts.failed.items())
            failed = f"{total} of {judged} verdicts failed and gave 0 ({kinds})"
            self._notify(number, f"{failed}: {rollouts.fault}", "red")
            self.fault = self.fault or rollouts.fault

    def _count_overlong(self, number: int, overlong: Sequence[str]) -> None:
        self.counts["overlong_prompts"] += len(overlong)
        if overlong:
            named = ", ".join(overlong[:NAMED]) + (" ..." if len(overlong) > NAMED else "")
            self._notify(number, f"{len(overlong)} prompts are too long and were skipped: {named}")

    def _count_skips(self, number: int, updates: Sequence[UpdateStats]) -> None:
        skipped = [update for update in updates if update.skipped]
        self.counts["skipped_updates"] += len(skipped)
        if not updates:
            self._notify(number, "no samples to learn from, no update")
            return
        self.skips = self.skips + 1 if skipped else 0
        if skipped:
            self._notify(
                number,
                f"loss {skipped[0].loss:g}, gradient {skipped[0].gradient:g}: update skipped, "
                f"weights unchanged ({self.skips} in a row)",
                "red",
            )

    def record_validation(self, step: int, evaluation: Evaluation) -> None:
        """Record the held-out accuracy after a number of steps."""
        values = validation_metrics(evaluation)
        if self.files is not None:
            self.files.validation(step, values)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        self.callbacks.event(f"after {step} steps: {shown}", "cyan")
        for problem in evaluation.problems:
            self.callbacks.event(f"after {step} steps: {problem}", "red")

    # Stopping.

    def raise_if_stopped(self, look: GateCheck) -> None:
        """Raise if the gate stopped the run, or too many steps had no finite loss."""
        for action in look.actions:
            if action.kind == "stop":
                raise GateStop(action.reason)
        if self.skips >= self.config.run.skips:
            raise Diverged(
                f"no finite loss and gradient for {self.skips} steps in a row: lower "
                "optimiser.rate, or check the last rollouts"
            )

    def refuse_stopped(self) -> None:
        """Raise if the gate stopped this run and its settings have not changed since."""
        if (
            self.stopped
            and GateConfig.model_validate_json(self.stopped["gate"]) == self.config.gate
        ):
            raise ValueError(
                f"the gate stopped this run: {self.stopped['reason']}. To continue anyway, change "
                "the gate: gate.mode=warn, or another bound (gate.target)"
            )
        self.stopped = {}

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        names = ("step", "position", "skips", "counts", "stopped")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counters; ValueError if they have wrong types (a digest proves no origin)."""
        counters = {name: state[name] for name in self.state()}
        others = {"gate_step": state["gate"]["step"], "updates": state["learner"]["taken"]}
        progress = from_dict(Progress, counters | others)
        self.step, self.position, self.skips = progress.step, progress.position, progress.skips
        self.counts, self.stopped = Counter(progress.counts), progress.stopped
