"""One part of a saved step again, from its checkpoint: the rollout alone, or the update alone.

Nothing of the run is changed. A step can be replayed where the checkpoint that was made before it
is still there (`run.keep`), and its update where its trajectories were kept (`run.rollouts`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparrow.config import TrainConfig, load_config
from sparrow.config.resolved import FILE_NAME
from sparrow.dataflow.local import learning, playing
from sparrow.dataflow.local.metrics import step_metrics
from sparrow.dataflow.local.opening import CHECKPOINTS, close_run, open_parts, take_up
from sparrow.dataflow.local.playing import Played
from sparrow.dataflow.local.run import Run
from sparrow.dataflow.runs.checkpoints import Checkpoints
from sparrow.dataflow.runs.rollouts import read_rollouts, rollout_steps, write_rollouts
from sparrow.records import Group

Part = Literal["rollout", "train"]


def replay(
    folder: Path,
    step: int | None,
    part: str,
    *,
    out: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The numbers of a part of a step; of a rollout also how it compares with what was kept."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise ValueError(f"{file}: no such file; is {folder} a run directory of sparrow train?")
    config = load_config(TrainConfig, [file])
    kept = rollout_steps(folder)
    chosen = _chosen(Checkpoints(folder / CHECKPOINTS, 1).steps(), kept, step, part)
    run = open_parts(config, folder, report=report)
    try:
        if chosen:
            take_up(run, chosen)
        if part == "rollout":
            return _rollout(run, folder, kept, out)
        return _train(run, read_rollouts(folder, chosen))
    finally:
        close_run(run)


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
    played = playing.play(run)
    trajectories = [one for group in played.groups for one in group.trajectories]
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
    clock = run.clock()
    run.engine_out()
    batch = learning.read(run, groups)
    look = run.gate.observe(run.step, batch.readings, batch.estimates)
    with clock("update_actor"):
        updates = learning.update(run, batch)
    played = Played(groups=tuple(groups), position=run.position, overlong=())
    metrics = step_metrics(played, batch, updates, look, clock.seconds())
    return {"step": run.step, **metrics}
