"""Groups as they come from workers: whether they are believed, and what they say."""

from collections.abc import Callable

import numpy as np

from sparrow.dataflow.asynchronous.messages import GroupEnded
from sparrow.dataflow.asynchronous.workers import ConnectedWorker
from sparrow.models.spec import ModelSpec
from sparrow.schema.episode import Group, Trajectory


def find_problem(
    worker: ConnectedWorker,
    message: GroupEnded,
    row: Callable[[int], str],
    spec: ModelSpec | None,
) -> str | None:
    """Why a group is not believed; None: it is.

    row: name of the row at a position. spec: of the model, for workers of other machines.
    """
    if message.lease not in worker.unanswered:
        return f"it has no lease {message.lease}"
    group, held = message.group, worker.begun.get(message.lease)
    newest = max((int(t.weight_version.max(initial=-1)) for t in group.trajectories), default=-1)
    if newest > worker.sent:
        return f"its tokens are of version {newest}, it was sent {worker.sent}"
    if held is not None and group.prompt_id != row(held[0].position):
        return f"it answered prompt {group.prompt_id!r:.40} under the lease of another"
    if worker.remote is None or spec is None:
        return None
    if not all(t.loss_mask.any() and t.reward is not None for t in group.trajectories):
        return "an answer has no tokens to learn from, or no reward"
    fits = all(_fits(trajectory, spec) for trajectory in group.trajectories)
    return None if fits else "its tokens or states do not fit the model"


def _fits(trajectory: Trajectory, spec: ModelSpec) -> bool:
    states = trajectory.hidden is None or trajectory.hidden.shape[1] == spec.hidden
    short = len(trajectory.ids) <= spec.max_positions
    return states and short and int(trajectory.ids.max(initial=0)) < spec.vocabulary


def with_worker(group: Group, worker: ConnectedWorker) -> Group:
    """A group that says which worker of another machine sampled it, in which dtype, and how."""
    if worker.remote is None:
        return group
    own = {"worker": worker.name, "dtype": worker.dtype, "excluded_from_gate": worker.differs}
    return group.replace(trajectories=tuple(t.replace(**own) for t in group.trajectories))


def accuracies(group: Group) -> list[float]:
    """By accuracy, not by reward: shaping must not make a group look informative."""
    return [t.acc or 0.0 for t in group.trajectories]


def oldest_version(group: Group, default: int) -> int:
    """The version of the oldest sampled token; the default where there is none."""
    versions = np.concatenate([t.weight_version for t in group.trajectories])
    return int(min(versions[versions >= 0], default=default))


def sampled_tokens(group: Group) -> int:
    return sum(int((t.weight_version >= 0).sum()) for t in group.trajectories)
