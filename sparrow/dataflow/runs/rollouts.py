"""The trajectories of a step as a file: to read, and to train on again.

One JSON line a trajectory, all of it but the actor's hidden states; log-probs come back bit for
bit. What a person looks for comes first in a line, the arrays last. Each line says which one it is
and how many there are, so that a file that lost some, or has them in another order, is refused. A
step without trajectories has one line that says so.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparrow.files import check_regular, make_folder, parse_line, sealed, write_whole
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.episode import Group, Trajectory

ROLLOUTS = "rollouts"
NAME = re.compile(r"step_(\d{6,})\.jsonl")
NO_LINES = sealed('{"lines":0}') + "\n"
Kept = tuple[int, float | None, Trajectory]  # the number of its group, its baseline, and itself


def rollouts_file(folder: Path, step: int) -> Path:
    """Where a run directory has the trajectories of a step."""
    return folder / ROLLOUTS / f"step_{step:06d}.jsonl"


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose trajectories a run directory has."""
    names = (NAME.fullmatch(path.name) for path in (folder / ROLLOUTS).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def write_rollouts(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """The file appears whole or not at all."""
    path = rollouts_file(folder, step)
    make_folder(path.parent)
    write_whole(path, _lines(groups))
    return path


def read_rollouts(folder: Path, step: int) -> list[Group]:
    """The groups of a step, equal to those that were written, without hidden states.

    Needs no lock: another run may train on what this one sampled.
    """
    path = rollouts_file(folder, step)
    if not path.exists():
        known = ", ".join(map(str, rollout_steps(folder))) or "none"
        raise ValueError(f"{folder} has no rollouts of step {step}; it has those of: {known}")
    by_group = itertools.groupby(_trajectories(path), key=lambda kept: kept[:2])
    return [
        _group(path, baseline, [trajectory for *_, trajectory in members])
        for (_, baseline), members in by_group
    ]


def _lines(groups: Sequence[Group]) -> Iterator[str]:
    count, number = sum(len(group.trajectories) for group in groups), itertools.count(1)
    if not count:
        yield NO_LINES
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            line = to_dict(trajectory.replace(hidden=None))
            del line["hidden"]
            ordered = sorted(line.items(), key=lambda item: isinstance(item[1], list))
            place = {"group_index": index, "baseline": group.baseline, "line": next(number)}
            line = {**place, "lines": count, **dict(ordered)}
            yield sealed(json.dumps(line, allow_nan=False, separators=(",", ":"))) + "\n"


def _trajectories(path: Path) -> list[Kept]:
    """Those of a file, which has as many lines as each of them says."""
    trajectories: list[Kept] = []
    counts: set[int | None] = set()
    check_regular(path, most=None)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line == NO_LINES.encode():
                counts.add(0)
                continue
            kept, count = _read(path, number, line)
            trajectories.append(kept)
            counts.add(count)
    if not counts:
        raise ValueError(f"{path} is empty: it is damaged, or of a version that left it so")
    if not counts <= {len(trajectories), None}:  # None: of a version that did not say
        raise ValueError(f"{path} is damaged: got {len(trajectories)} lines, allowed: {counts}")
    return trajectories


def _read(path: Path, number: int, line: bytes) -> tuple[Kept, int | None]:
    try:
        data = parse_line(line.decode())
        index, baseline = data.pop("group_index"), data.pop("baseline")
        count = data.pop("lines", None)
        if data.pop("line", number) != number:
            raise ValueError("it is another line of the file")
        return (index, baseline, from_dict(Trajectory, {**data, "hidden": None})), count
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no trajectory: {error}") from error


def _group(path: Path, baseline: float | None, trajectories: list[Trajectory]) -> Group:
    members = {"prompt_id": trajectories[0].prompt_id, "trajectories": tuple(trajectories)}
    try:
        return from_dict(Group, {**members, "baseline": baseline})
    except ValueError as error:
        raise ValueError(f"{path} has a group that is none: {error}") from error
