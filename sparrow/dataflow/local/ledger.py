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
from sparrow.schema.gate import GateAction
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
        actions: Sequence[GateAction],
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
            for action in actions:
                self.files.action(to_dict(action))
        for action in actions:
            if action.kind == "stop":  # before the checkpoint of this step
                self.stopped = {"reason": action.reason, "gate": self._gates()}
            self._notify(number, f"gate {action.kind}: {action.reason}")
        for name in [*self.config.policies] or [""]:
            self._say_if_equal(number, name, values)
        self.callbacks.step({"step": number, **values})

    def _say_if_equal(self, number: int, policy: str, values: Mapping[str, float]) -> None:
        """Say that there is nothing to tell answers apart by; policy: of several, its name."""
        place, whose = (f"policy/{policy}/", f"policy {policy}: ") if policy else ("", "")
        if values.get(f"{place}critic/advantages/zero_frac") == 1:
            equal = f"{whose}the rewards of every group are equal, so every advantage is 0"
            unmoved = values.get(f"{place}actor/no_signal_updates")
            self._notify(number, f"{equal}; no optimiser step" if unmoved else equal)

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
            if not self.config.policies:  # of several, a round says it of each
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

    def record_validation(
        self,
        step: int,
        evaluations: Mapping[str, Evaluation],
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Record the held-out accuracy after a number of steps, by prefix of the metrics."""
        found = {prefix: validation_metrics(each) for prefix, each in evaluations.items()}
        if more:
            found[""] = found.get("", {}) | dict(more)
        if self.files is not None:
            values = {f"{p}{name}": x for p, own in found.items() for name, x in own.items()}
            self.files.validation(step, values)
        for prefix, own in found.items():
            shown = ", ".join(f"{name} {value:.3g}" for name, value in own.items())
            whose = f", {prefix.rstrip('/').replace('/', ' ')}" if prefix else ""
            self.callbacks.event(f"after {step} steps{whose}: {shown}", "cyan")
        for problem in (text for each in evaluations.values() for text in each.problems):
            self.callbacks.event(f"after {step} steps: {problem}", "red")

    # Stopping.

    def raise_if_stopped(self, actions: Sequence[GateAction]) -> None:
        """Raise if the gate stopped the run, or too many steps had no finite loss."""
        for action in actions:
            if action.kind == "stop":
                raise GateStop(action.reason)
        if self.skips >= self.config.run.skips:
            raise Diverged(
                f"no finite loss and gradient for {self.skips} steps in a row: lower "
                "optimiser.rate, or check the last rollouts"
            )

    def refuse_stopped(self) -> None:
        """Raise if the gate stopped this run and its settings have not changed since."""
        if self.stopped and self._has_gates(self.stopped["gate"]):
            raise ValueError(
                f"the gate stopped this run: {self.stopped['reason']}. To continue anyway, change "
                "the gate: gate.mode=warn, or another bound (gate.target)"
            )
        self.stopped = {}

    def _gates(self) -> str:
        """The settings of the gate, or of those of several policies."""
        views = [self.config.policy(name) for name in self.config.policies] or [self.config]
        return "\n".join(view.gate.model_dump_json() for view in views)

    def _has_gates(self, settings: str) -> bool:
        """Whether the gates still have these settings; those of an older version may be fewer."""
        found = [GateConfig.model_validate_json(line) for line in settings.splitlines()]
        return found == [GateConfig.model_validate_json(g) for g in self._gates().splitlines()]

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        names = ("step", "position", "skips", "counts", "stopped")
        return {name: getattr(self, name) for name in names} | {"counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counters; ValueError if they have wrong types (a digest proves no origin)."""
        counters = {name: state[name] for name in self.state()}
        parts = [state] if "learner" in state else list(state["policies"].values())  # of several
        steps, taken = zip(
            *((p["gate"]["step"], p["learner"]["taken"]) for p in parts), strict=True
        )
        others = {"gate_step": max(steps), "updates": sum(taken)}
        progress = from_dict(Progress, counters | others)
        self.step, self.position, self.skips = progress.step, progress.position, progress.skips
        self.counts, self.stopped = Counter(progress.counts), progress.stopped
