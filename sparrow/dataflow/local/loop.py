"""`sparrow train`: the loop, readable on one screen.

    rows -> episodes -> rewards -> dense log-probs -> advantages -> update -> the engine's weights

The actor that plays is sparse, the policy that learns is dense; the gate watches how far the two
are apart, token by token, in its lower tail.

`replay` does one part of a saved step again, from its checkpoint: the rollout or the update alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.messages import (
    Diverged,
    EpisodeFailed,
    GateStop,
    RolloutBatch,
    Unjudged,
)
from sparrow.dataflow.local.metrics import step_metrics
from sparrow.dataflow.local.run import Run, open_parts
from sparrow.dataflow.run_files import (
    CHECKPOINTS,
    read_rollouts,
    rollout_steps,
    rollouts_file,
    write_rollouts,
)
from sparrow.dataflow.stopping import Stopped
from sparrow.schema.episode import Group
from sparrow.schema.loading import RESOLVED, read_resolved
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.schema.types import Report


def train(run: Run) -> Path:
    """Run the steps that are left; the model's folder.

    A wish to stop, the gate, a loss that is no number, verifiers and episodes that fail save what
    there is; what else may come (a full disk, a kill) leaves the last checkpoint.
    """
    try:
        if run.step == 0:
            run.validate()
        while run.step < run.config.run.steps:
            step(run)
    except (Stopped, GateStop, Diverged, Unjudged, EpisodeFailed):
        run.save()
        raise
    run.save()
    return run.finish()


def step(run: Run) -> None:
    """One step."""
    clock = run.begin()
    with clock("gen"):
        played = run.rollout.play(run.request())
        run.ledger.refuse_unjudged(played)
    with clock("old_log_prob"):
        run.rollout.sleep()
        batch = run.learner.read(played)
        look = run.gate.observe(run.step, batch.readings, batch.estimates)
    with clock("update_actor"):
        updates = run.learner.update(batch)
    with clock("weights"):
        run.sync_weights()
    metrics = step_metrics(played, batch, updates, look, clock.seconds())
    run.ledger.record(played, updates, look, metrics)
    run.validate_if_due()
    run.save_if_due()
    run.ledger.heed(look)


# A part of a saved step again. Nothing of the run is changed. A step can be replayed where the
# checkpoint that was made before it is still there (`run.keep`), and its update where its
# trajectories were kept (`run.rollouts`). A run directory may be anybody's: code that its
# configuration names is imported only where that is asked.


def replay(
    folder: Path,
    step: int | None,
    part: str,
    *,
    out: Path | None = None,
    report: Report | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """The numbers of a part of a step; of a rollout also how it compares with what was kept.

    allow_code: import the code that the run's configuration names, such as its reward.
    """
    if not (folder / RESOLVED).is_file():
        raise ValueError(
            f"{folder / RESOLVED}: no such file; is {folder} a run directory of sparrow train?"
        )
    config = read_resolved(TrainConfig, folder)
    if (code := code_settings(config)) and not allow_code:
        named = ", ".join(f"{key} = {text!r}" for key, text in code.items())
        raise ValueError(
            f"{folder / RESOLVED} names code ({named}), which is imported only if you trust the "
            "run and say so: --allow-code"
        )
    kept = rollout_steps(folder)
    steps = Checkpoints(folder / CHECKPOINTS, 1).steps()
    try:
        chosen = _chosen(steps, kept, step, part)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    with open_parts(config, folder, report=report) as run:
        if chosen:
            run.load_checkpoint(chosen)
        if part == "rollout":
            return _rollout(run, folder, kept, out)
        return _train(run, _groups(run, folder))


def _groups(run: Run, folder: Path) -> list[Group]:
    """The trajectories that were kept of the run's step, if the model can read them."""
    groups = read_rollouts(folder, run.step)
    ids = [trajectory.ids for group in groups for trajectory in group.trajectories]
    vocabulary = run.learner.learner.policy.model.spec.vocabulary
    if not ids or any(row.max() >= vocabulary for row in ids):
        raise ValueError(
            f"{rollouts_file(folder, run.step)}: got {len(ids)} trajectories, allowed: one at "
            f"least, of token ids below {vocabulary}, which the model has"
        )
    return groups


def _chosen(checkpoints: Sequence[int], kept: Sequence[int], step: int | None, part: str) -> int:
    """The step that is asked for, or the latest; one that was taken, as it can be compared."""
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
    played = run.rollout.play(run.request())
    trajectories = played.trajectories
    found: dict[str, Any] = {
        "step": run.step,
        "trajectories": len(trajectories),
        "score": float(np.mean([one.reward for one in trajectories])) if trajectories else None,
    }
    if out is not None:
        found["written"] = str(write_rollouts(out, run.step, played.groups))
    if run.step in kept:
        before = [t for g in read_rollouts(folder, run.step) for t in g.trajectories]
        same = [
            all(
                np.array_equal(getattr(one, n), getattr(two, n)) for n in ("ids", "rollout_logprob")
            )
            for one, two in zip(before, trajectories, strict=False)
        ]
        found |= {"kept": len(before), "same_tokens": sum(same)}
    return found


def _train(run: Run, groups: Sequence[Group]) -> dict[str, Any]:
    clock = run.begin()
    run.rollout.sleep()
    played = RolloutBatch(groups=tuple(groups), position=run.ledger.position)
    batch = run.learner.read(played)
    look = run.gate.observe(run.step, batch.readings, batch.estimates)
    with clock("update_actor"):
        updates = run.learner.update(batch)
    metrics = step_metrics(played, batch, updates, look, clock.seconds())
    return {"step": run.step, **metrics}
