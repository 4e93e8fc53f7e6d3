"""`sparrow train`: the loop, readable on one screen.

    rows -> episodes -> rewards -> dense log-probs -> advantages -> update -> the engine's weights

The actor that samples is sparse, the policy that learns is dense; the gate watches how far apart
the two are, token by token, in the lower tail of acceptance.

`replay` repeats one part of a saved step from its checkpoint: the rollout or the update alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.messages import (
    Clock,
    Diverged,
    EpisodeFailed,
    GateStop,
    LearnerBatch,
    RolloutBatch,
    Unjudged,
)
from sparrow.dataflow.local.metrics import step_metrics
from sparrow.dataflow.local.run import Run, open_parts, open_run
from sparrow.dataflow.run_files import (
    CHECKPOINTS,
    read_rollouts,
    rollout_steps,
    rollouts_file,
    write_rollouts,
)
from sparrow.dataflow.stopping import Stopped
from sparrow.dataflow.team.asynchronous import take_steps
from sparrow.dataflow.team.opening import open_team, open_team_parts
from sparrow.dataflow.team.run import TeamRun
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models.weights import EMBEDDING
from sparrow.schema.episode import Group
from sparrow.schema.loading import RESOLVED, read_resolved
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.schema.types import Report
from sparrow.training.update import UpdateStats


def open_training(config: TrainConfig, **parts: Any) -> Run:
    """Open a run of one policy or of several; `parts` are those of `open_run`."""
    return (open_team if config.policies else open_run)(config, **parts)


def train(run: Run) -> Path:
    """Run the remaining steps and return the folder of the trained model.

    A graceful shutdown, a stop by the gate, a loss that is not finite, and failing verifiers or
    episodes save a checkpoint first; anything else (a full disk, a kill) leaves the last one.
    """
    try:
        if run.step == 0 or run.lacks_validation():
            run.validate()
        while run.step < run.config.run.steps:
            _take(run)
        run.finish_validations()
    except (Stopped, GateStop, Diverged, Unjudged, EpisodeFailed):
        run.save()
        raise
    run.save()
    return run.finish()


def _take(run: Run) -> None:
    """Take a step; of several policies that run asynchronously, some."""
    if not isinstance(run, TeamRun):
        step(run)
    elif run.config.run.loop == "async":
        take_steps(run)
    else:
        run.take_step()


def step(run: Run) -> None:
    """Run one step: rollout, dense log-probs, update, weight sync, records."""
    clock = run.start_step()
    request = run.request()
    with clock("gen"):
        rollouts = run.rollout.generate(request)
        run.ledger.refuse_unjudged(rollouts)
    decoding = run.rollout.decoding(request.schedule)
    with clock("old_log_prob"):
        run.rollout.sleep()
        batch = run.learner.score(rollouts, decoding)
        look = run.gate.observe(run.step, batch.readings, batch.estimates)
    updates, kl = _update(run, batch, decoding, clock)
    look = run.gate.judge_policy(look, entropy=batch.entropy, kl=kl)
    distilled = None
    if run.config.rollout.distill.on:
        with clock("distill"):
            distilled = run.learner.distill(batch, decoding, run.step)
    with clock("weights"):
        run.sync_weights()
    metrics = step_metrics(rollouts, batch, updates, look, clock.seconds(), distilled, kl=kl)
    run.ledger.record(rollouts, updates, look.actions, metrics)
    run.validate_if_due()
    run.save_if_due()
    run.ledger.raise_if_stopped(look.actions)


def _update(
    run: Run, batch: LearnerBatch, decoding: ResolvedDecoding, clock: Clock
) -> tuple[list[UpdateStats], float | None]:
    """Take the optimiser steps, and measure how far they moved the policy: KL(new || old)."""
    with clock("kl"):
        old = run.learner.snapshot(batch, run.step)
    with clock("update_actor"):
        updates = run.learner.update(batch, decoding)
    with clock("kl"):
        return updates, run.learner.kl(old)


# Replay. Nothing of the run is changed. A step can be replayed while the checkpoint before it
# exists (`run.keep`), and its update if its trajectories were kept (`run.rollouts`). A run may come
# from a stranger: code that its configuration names is imported only on request.


def replay(
    folder: Path,
    step: int | None,
    part: str,
    *,
    out: Path | None = None,
    report: Report | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Repeat a part of a step and return its metrics; a rollout is compared with the saved one.

    allow_code: import the code that the run's configuration names, such as its reward.
    """
    if not (folder / RESOLVED).is_file():
        raise ValueError(
            f"{folder / RESOLVED}: no such file; is {folder} a run directory of sparrow train?"
        )
    config = read_resolved(TrainConfig, folder)
    if part == "rollout" and config.run.loop == "async":
        raise ValueError(
            f"{folder}: rollouts of an asynchronous run depend on time and cannot be repeated; "
            "--part train repeats an update"
        )
    if (code := code_settings(config)) and not allow_code:
        named = ", ".join(f"{key} = {text!r}" for key, text in code.items())
        raise ValueError(
            f"{folder / RESOLVED} names code ({named}), which is not imported without "
            "--allow-code: use it only for runs that you trust"
        )
    kept = rollout_steps(folder)
    steps = Checkpoints(folder / CHECKPOINTS, 1).steps()
    try:
        chosen = _chosen(steps, kept, step, part)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    local = config.rollout.replace(url=(), fixed_weights=False)  # servers may be at work
    make = open_team_parts if config.policies else open_parts
    with make(config.replace(rollout=local), folder, report=report) as run:
        if chosen:
            run.load_checkpoint(chosen)
        if part == "rollout":
            return _rollout(run, folder, kept, out)
        groups = _groups(run, folder)
        return _train_team(run, groups) if isinstance(run, TeamRun) else _train(run, groups)


def _groups(run: Run, folder: Path) -> list[Group]:
    """Read the saved trajectories of the run's step; ValueError if the model has no such tokens."""
    groups = read_rollouts(folder, run.step)
    ids = [trajectory.ids for group in groups for trajectory in group.trajectories]
    learner = run.learning[0].learner if isinstance(run, TeamRun) else run.learner
    assert learner is not None
    vocabulary = len(learner.weights()[EMBEDDING])
    if not ids or any(row.max() >= vocabulary for row in ids):
        raise ValueError(
            f"{rollouts_file(folder, run.step)}: expected trajectories with token ids "
            f"below {vocabulary}, the size of the vocabulary; got {len(ids)} trajectories"
        )
    return groups


def _chosen(checkpoints: Sequence[int], kept: Sequence[int], step: int | None, part: str) -> int:
    """Choose the requested step, or the latest one that has saved trajectories to compare with."""
    before = sorted({0, *checkpoints})  # a run's start needs no checkpoint
    both = [n for n in before if n in kept]
    possible = before if part == "rollout" else both
    if step is None:
        step = max(both or possible, default=None)
    if step not in possible:
        asked = "no step" if step is None else f"step {step}"
        raise ValueError(
            f"{asked}: cannot be replayed. There are checkpoints before steps {before}, and "
            f"trajectories of {len(kept)} steps up to {max(kept, default=None)}"
        )
    return step


def _rollout(run: Run, folder: Path, kept: Sequence[int], out: Path | None) -> dict[str, Any]:
    rollouts = run.rollout.generate(run.request())
    trajectories = rollouts.trajectories
    result: dict[str, Any] = {
        "step": run.step,
        "trajectories": len(trajectories),
        "score": float(np.mean([t.reward for t in trajectories])) if trajectories else None,
    }
    if out is not None:
        result["written"] = str(write_rollouts(out, run.step, rollouts.groups))
    if run.step in kept:
        before = [t for g in read_rollouts(folder, run.step) for t in g.trajectories]
        same = [
            np.array_equal(saved.ids, again.ids)
            and np.array_equal(saved.rollout_logprob, again.rollout_logprob)
            and np.array_equal(saved.policy_id, again.policy_id)
            for saved, again in zip(before, trajectories, strict=False)
        ]
        result |= {"kept": len(before), "same_tokens": sum(same)}
    return result


def _train(run: Run, groups: Sequence[Group]) -> dict[str, Any]:
    clock = run.start_step()
    run.rollout.sleep()
    rollouts = RolloutBatch(groups=tuple(groups), position=run.ledger.position)
    decoding = run.rollout.decoding(run.gate.schedule)  # before the gate changes it
    batch = run.learner.score(rollouts, decoding)
    look = run.gate.observe(run.step, batch.readings, batch.estimates)
    updates, kl = _update(run, batch, decoding, clock)
    distilled = run.learner.distill(batch, decoding, run.step)
    metrics = step_metrics(rollouts, batch, updates, look, clock.seconds(), distilled, kl=kl)
    return {"step": run.step, **metrics}


def _train_team(run: TeamRun, groups: Sequence[Group]) -> dict[str, Any]:
    """What the policies learn from a round and from what they had not learnt before it."""
    metrics, _, _ = run.learn(RolloutBatch(groups=tuple(groups), position=run.ledger.position))
    return {"step": run.step, **metrics}
