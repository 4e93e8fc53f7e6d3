"""The run directory: the configuration, metrics, actions and rollouts of a training run.

    config.resolved.toml    every setting
    schedule.json           the initial schedule of a sparse rollout
    metrics.jsonl           a line a step: {"step": 12, "critic/score/mean": 0.5, ...}
    validation.jsonl        a line a validation, by the steps taken before it
    actions.jsonl           actions of the tail gate, and why
    rollouts/step_000012.jsonl
    tensorboard/
    wandb.json              the id of the run at Weights & Biases, with run.wandb
    SHA256SUMS              of the files above but rollouts, once the run has ended

Every line ends with its digest. Steps count from 0. A run resumed at step n keeps the lines of
steps before n and drops the others, so its files equal those of a run that was never interrupted.
"""

import importlib
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sparrow.files import (
    SUMS,
    FolderLock,
    add_line_digest,
    check_regular,
    explain_full_disk,
    make_folder,
    open_append,
    parse_json,
    parse_line,
    read_text,
    refuse_links,
    write_sums,
    write_whole,
)
from sparrow.schema.base import File, Record, from_dict, to_dict
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.loading import save_resolved
from sparrow.schema.run_folder import ACTIONS, METRICS, SCHEDULE, SETTINGS, VALIDATION

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

CHECKPOINTS, ROLLOUTS, TENSORBOARD = "checkpoints", "rollouts", "tensorboard"
WANDB = "wandb.json"
LEFT_OUT = "left_out.txt"  # rows of the data that cannot be used, and why
CHANGED = "changed"  # kind of an action: settings that were changed at a resume
FLUSH_SECONDS = 10  # between writes for TensorBoard
ROLLOUTS_NAME = re.compile(r"step_(\d{6,})\.jsonl")
CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")
LEFT_OUT_ROW = re.compile(r"(row \d+): ")
NO_LINES = add_line_digest('{"lines":0}') + "\n"
# Fields that rollouts of older versions lack, or no version writes, as they then are.
LATER_FIELDS = {n: f.default for n, f in Trajectory.model_fields.items() if not f.is_required()}
Kept = tuple[int, float | None, Trajectory]  # number of its group, baseline, trajectory


class RunFiles:
    """The files of one run, locked against other processes.

    Open it, load a checkpoint if there is one, then `begin`.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True, wandb: str | None = None) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; choose another run.out")
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder / name for name in (CHECKPOINTS, ROLLOUTS, TENSORBOARD, "wandb"))
        self.folder = folder
        self._tensorboard, self._project = tensorboard, wandb
        self._open = ExitStack()
        self._open.callback(FolderLock(folder).close)
        self._lines: dict[str, LineFile] = {}  # empty before `begin`
        self._writer: SummaryWriter | None = None
        self._wandb: Any = None  # a run of wandb, which has no types

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        self._open.close()

    def begin(self, config: Record, next_step: int) -> list[int]:
        """Start writing at `next_step` (0: a new run); lines of that step and later are removed.

        Returns the earlier steps whose metrics are missing.
        """
        kept = {name: self._before(name, next_step) for name in (METRICS, ACTIONS)}
        kept[ACTIONS] += [
            (step, line)
            for step, line in self._before(ACTIONS, next_step + 1)
            if step == next_step and parse_line(line).get("kind") == CHANGED
        ]
        # A validation after n steps is written under n, before checkpoint n is saved.
        kept[VALIDATION] = self._before(VALIDATION, next_step + 1) if next_step else []
        (self.folder / SUMS).unlink(missing_ok=True)  # the run had ended, and continues
        save_resolved(config, self.folder)
        for name, lines in kept.items():
            write_whole(self.folder / name, (line for _, line in lines))
        self._remove_rollouts(next_step)
        for name in kept:
            self._lines[name] = self._open.enter_context(closing(LineFile(self.folder / name)))
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            place = str(self.folder / TENSORBOARD)
            self._writer = SummaryWriter(place, purge_step=next_step, flush_secs=FLUSH_SECONDS)
            self._open.callback(self._writer.close)
        if self._project is not None:
            self._wandb = open_wandb(self.folder, self._project, config)
            self._open.callback(self._wandb.finish)
        self._chart_again(next_step, kept[VALIDATION])
        return sorted(set(range(next_step)) - {step for step, _ in kept[METRICS]})

    def finish(self) -> None:
        """Mark the run as ended: list its files with their digests."""
        names = (METRICS, VALIDATION, ACTIONS, SCHEDULE, SETTINGS)
        write_sums(self.folder, [name for name in names if (self.folder / name).exists()])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step; NaN and infinities are null in the file, and not charted."""
        self._numbers(METRICS, step, values)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the results of a validation after a number of steps."""
        self._numbers(VALIDATION, step, values)

    def validated(self) -> set[int]:
        """Steps with a validation."""
        return {step for step, _ in lines_by_step(self.folder / VALIDATION)}

    def _numbers(self, name: str, step: int, values: Mapping[str, float]) -> None:
        finite = {key: float(x) for key, x in values.items() if math.isfinite(x)}
        self._lines[name].append({"step": step, **{key: finite.get(key) for key in values}})
        self._chart(step, finite)

    def _chart(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None and values:
            self._wandb.log(dict(values), step=step)

    def action(self, what: Mapping[str, Any]) -> None:
        """Add an action; it has a key "step"."""
        self._lines[ACTIONS].append(dict(what))

    def _before(self, name: str, next_step: int) -> list[tuple[int, str]]:
        lines = lines_by_step(self.folder / name)
        return [(step, line) for step, line in lines if step < next_step]

    def _chart_again(self, next_step: int, validation: Sequence[tuple[int, str]]) -> None:
        """Chart the validation at `next_step` again: TensorBoard drops all from there on."""
        for values in (parse_line(line) for step, line in validation if step == next_step):
            del values["step"]
            try:
                self._chart(next_step, {n: float(x) for n, x in values.items() if x is not None})
            except (TypeError, ValueError) as error:
                where = f"{self.folder / VALIDATION}, step {next_step}"
                raise ValueError(f"{where}: got {error}, allowed: numbers") from error

    def _remove_rollouts(self, next_step: int) -> None:
        for unfinished in (self.folder / ROLLOUTS).glob(".step_*.unfinished"):
            unfinished.unlink()
        for step in rollout_steps(self.folder):
            if step >= next_step:
                rollouts_file(self.folder, step).unlink()


class WandbRun(File):
    """wandb.json: under which id Weights & Biases knows a run."""

    id: str


def import_wandb() -> Any:
    """The package wandb, which is optional."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            "run.wandb is set, but the package wandb is not installed: pip install wandb"
        ) from error


def open_wandb(folder: Path, project: str, config: Record) -> Any:
    """A run at Weights & Biases; a resumed run continues under the id in its folder."""
    file = folder / WANDB
    if not file.exists():
        WandbRun(id=secrets.token_hex(8)).save(file)
    return import_wandb().init(
        project=project,
        id=WandbRun.load(file).id,
        resume="allow",
        name=folder.resolve().name,
        dir=str(folder),
        config=to_dict(config),
    )


class LineFile:
    """Appends lines, each synced to the disk when `append` returns, or not in the file at all.

    So the file has every step of a checkpoint that is written afterwards.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_append(path, buffering=0)

    def append(self, line: dict[str, Any]) -> None:
        rest = memoryview(f"{add_line_digest(json.dumps(line, allow_nan=False))}\n".encode())
        before = self._file.tell()
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            raise explain_full_disk(error, f"another line of {self._path}") from error

    def close(self) -> None:
        self._file.close()


def lines_by_step(path: Path) -> list[tuple[int, str]]:
    """The lines with their steps; a torn last line, of a killed process, is left out."""
    text = ""
    if path.exists():
        check_regular(path)
        text = path.read_bytes().decode(errors="replace")
    *lines, unfinished = text.split("\n")
    if lines and not unfinished and _is_torn(lines[-1]):
        lines.pop()
    numbered: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            numbered.append((_step(line), f"{line}\n"))
        except ValueError as error:
            where = f"{path}, line {number}"
            raise ValueError(f"{where}: got {line[:80]!r}: {error}") from error
    return numbered


def _step(line: str) -> int:
    step = parse_line(line).get("step")
    if type(step) is not int:
        raise ValueError('expected a JSON object with an integer "step"')
    return step


def _is_torn(line: str) -> bool:
    """Whether a loss of power can have left it: not if only its digest differs."""
    try:
        parse_json(line)
    except ValueError:
        return True
    return False


# The trajectories of a step, to inspect and to replay: one JSON line each, without the actor's
# hidden states; log-probs are restored bit for bit. Text and numbers come first in a line, arrays
# last. Each line has its number and their count, so that a file with missing or reordered lines is
# refused. A step without trajectories has one line that says so.


def rollouts_file(folder: Path, step: int) -> Path:
    """The file with the trajectories of a step."""
    return folder / ROLLOUTS / f"step_{step:06d}.jsonl"


def rollout_steps(folder: Path) -> list[int]:
    """The steps with saved trajectories."""
    names = (ROLLOUTS_NAME.fullmatch(path.name) for path in (folder / ROLLOUTS).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def saved_step(folder: Path) -> int | None:
    """The steps taken before the last checkpoint, by the names of the folders alone."""
    paths = (path for path in (folder / CHECKPOINTS).glob("step_*") if path.is_dir())
    names = (CHECKPOINT_NAME.fullmatch(path.name) for path in paths)
    return max((int(name[1]) for name in names if name), default=None)


def left_out_rows(folder: Path) -> set[str]:
    """The names of the rows that a run left out."""
    file = folder / LEFT_OUT
    lines = read_text(file).splitlines() if file.exists() else []
    return {match[1] for line in lines if (match := LEFT_OUT_ROW.match(line))}


def write_rollouts(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write the trajectories of a step, atomically."""
    path = rollouts_file(folder, step)
    make_folder(path.parent)
    write_whole(path, _lines(groups))
    return path


def read_rollouts(folder: str | Path, step: int) -> list[Group]:
    """Read the groups of a step, without hidden states. Needs no lock."""
    folder = Path(folder)
    path = rollouts_file(folder, step)
    if not path.exists():
        known = ", ".join(map(str, rollout_steps(folder))) or "none"
        raise ValueError(f"{folder} has no rollouts of step {step}; it has those of: {known}")
    groups = list[Group]()
    for (_, baseline), kept in itertools.groupby(_trajectories(path), key=lambda kept: kept[:2]):
        members = tuple(trajectory for *_, trajectory in kept)
        group = {"prompt_id": members[0].prompt_id, "trajectories": members, "baseline": baseline}
        try:
            groups.append(from_dict(Group, group))
        except ValueError as error:
            raise ValueError(f"{path} has an invalid group: {error}") from error
    return groups


def _lines(groups: Sequence[Group]) -> Iterator[str]:
    count, number = sum(len(group.trajectories) for group in groups), itertools.count(1)
    if not count:
        yield NO_LINES
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            line = to_dict(trajectory.replace(hidden=None, hidden_of={}))
            del line["hidden"], line["hidden_of"]
            ordered = sorted(line.items(), key=lambda item: isinstance(item[1], list))
            place = {"group_index": index, "baseline": group.baseline, "line": next(number)}
            line = {**place, "lines": count, **dict(ordered)}
            yield add_line_digest(json.dumps(line, allow_nan=False, separators=(",", ":"))) + "\n"


def _trajectories(path: Path) -> list[Kept]:
    """Read the trajectories of a file, and check the number of its lines."""
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
        raise ValueError(f"{path} is empty: damaged, or of a version that left it so")
    if not counts <= {len(trajectories), None}:  # None: of an older version
        raise ValueError(f"{path} is damaged: expected {counts} lines, got {len(trajectories)}")
    return trajectories


def _read(path: Path, number: int, line: bytes) -> tuple[Kept, int | None]:
    try:
        data = parse_line(line.decode())
        data.pop("group", None)  # of older versions, always null
        index, baseline = data.pop("group_index"), data.pop("baseline")
        count = data.pop("lines", None)
        if data.pop("line", number) != number:
            raise ValueError("it belongs at another line of the file")
        data = {**LATER_FIELDS, **data}
        return (index, baseline, from_dict(Trajectory, data)), count
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is not a trajectory: {error}") from error
