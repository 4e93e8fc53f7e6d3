"""Groups as they come from workers: whether they are believed, and what they say."""

from collections.abc import Callable

import numpy as np

from sparrow.dataflow.asynchronous.messages import GroupEnded
from sparrow.dataflow.asynchronous.workers import ConnectedWorker
from sparrow.schema.episode import Group, Trajectory


def find_problem(
    worker: ConnectedWorker,
    message: GroupEnded,
    row: Callable[[int], str],
    embedding: tuple[int, int] | None,
) -> str | None:
    """Why a group is not believed; None: it is.

    row: name of the row at a position. embedding: its shape, for workers of other machines.
    """
    if message.lease not in worker.unanswered:
        return f"it has no lease {message.lease}"
    group, held = message.group, worker.begun.get(message.lease)
    newest = max(int(t.weight_version.max()) for t in group.trajectories)
    if newest > worker.sent:
        return f"its tokens are of version {newest}, it was sent {worker.sent}"
    if held is not None and group.prompt_id != row(held[0].position):
        return f"it answered prompt {group.prompt_id!r:.40} under the lease of another"
    checked = () if worker.remote is None or embedding is None else group.trajectories
    fits = all(_fits(trajectory, *(embedding or (0, 0))) for trajectory in checked)
    return None if fits else "its tokens or states do not fit the model"


def _fits(trajectory: Trajectory, vocabulary: int, width: int) -> bool:
    states = trajectory.hidden is None or trajectory.hidden.shape[1] == width
    return states and int(trajectory.ids.max(initial=0)) < vocabulary


def labelled(group: Group, worker: ConnectedWorker) -> Group:
    """A group that says which worker of another machine sampled it, and in which dtype."""
    if worker.remote is None:
        return group
    own = {"worker": worker.name, "dtype": worker.dtype}
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
