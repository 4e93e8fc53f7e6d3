"""One part of a saved step again, from its checkpoint: the rollout alone, or the update alone.

Nothing of the run is changed. A step can be replayed where the checkpoint that was made before it
is still there (`run.keep`), and its update where its trajectories were kept (`run.rollouts`). A run
directory may be anybody's: code that its configuration names is imported only where that is asked.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparrow.dataflow.local.messages import RolloutBatch
from sparrow.dataflow.local.metrics import step_metrics
from sparrow.dataflow.local.opening import close_run, open_parts
from sparrow.dataflow.local.run import Run
from sparrow.dataflow.runs.checkpoints import Checkpoints
from sparrow.dataflow.runs.files import CHECKPOINTS
from sparrow.dataflow.runs.rollouts import (
    read_rollouts,
    rollout_steps,
    rollouts_file,
    write_rollouts,
)
from sparrow.schema.episode import Group
from sparrow.schema.loading import RESOLVED as FILE_NAME
from sparrow.schema.loading import read_resolved
from sparrow.schema.train import TrainConfig, code_settings

Part = Literal["rollout", "train"]


def replay(
    folder: Path,
    step: int | None,
    part: str,
    *,
    out: Path | None = None,
    report: Callable[[str], None] | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """The numbers of a part of a step; of a rollout also how it compares with what was kept.

    allow_code: import the code that the run's configuration names, such as its reward.
    """
    if not (folder / FILE_NAME).is_file():
        raise ValueError(
            f"{folder / FILE_NAME}: no such file; is {folder} a run directory of sparrow train?"
        )
    config = read_resolved(TrainConfig, folder)
    if not allow_code:
        refuse_code(folder / FILE_NAME, config)
    kept = rollout_steps(folder)
    steps = Checkpoints(folder / CHECKPOINTS, 1).steps()
    try:
        chosen = _chosen(steps, kept, step, part)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    run = open_parts(config, folder, report=report)
    try:
        if chosen:
            run.load_checkpoint(chosen)
        if part == "rollout":
            return _rollout(run, folder, kept, out)
        return _train(run, _groups(run, folder))
    finally:
        close_run(run)


def refuse_code(file: Path, config: TrainConfig) -> None:
    """ValueError with the settings that name code, where there are any."""
    code = code_settings(config)
    if code:
        named = ", ".join(f"{key} = {text!r}" for key, text in code.items())
        raise ValueError(
            f"{file} names code ({named}), which is imported only if you trust the run and say so: "
            "--allow-code"
        )


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
    if step is None and possible:
        return (both or possible)[-1]
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
        same = [_equal(one, two) for one, two in zip(before, trajectories, strict=False)]
        found |= {"kept": len(before), "same_tokens": sum(same)}
    return found


def _equal(one: Any, two: Any) -> bool:
    return np.array_equal(one.ids, two.ids) and np.array_equal(
        one.rollout_logprob, two.rollout_logprob
    )


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
