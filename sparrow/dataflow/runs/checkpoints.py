"""Checkpoints that are whole or not there, and the newest of them.

    step_000010/
        state.safetensors, state.json    the state, see `states`
        meta.json                        format, step, digests of configuration and files

A checkpoint is written under a name with a dot, brought to the disk, and only then gets its name.
One that goes loses its name first. So whatever has a name is whole, however the process ended;
that its bytes are all there is checked nevertheless, for disks and copies that lose some.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from sparrow.dataflow.runs.states import FILES, State, read_state, tensor_bytes, write_state
from sparrow.files import (
    FULL,
    explained,
    file_digest,
    make_folder,
    read_document,
    sync_folder,
)
from sparrow.schema.base import File, Record, from_dict

FORMAT = 2
META = "meta.json"
NAME = re.compile(r"step_(\d{6,})")
LEFTOVER = re.compile(r"\.step_\d{6,}\.\d+\.(unfinished|removed)")


class Damaged(ValueError):
    """A checkpoint that is not what was written."""


class FileAbout(Record):
    """One of a checkpoint's files."""

    bytes: int
    sha256: str


class Meta(File):
    """What a checkpoint says of itself."""

    format: int
    step: int
    identity: str  # digest of which configuration it is of
    files: dict[str, FileAbout]


class Checkpoints:
    """The last `keep` checkpoints of a run, in a folder that one process writes.

    `report` hears of checkpoints that are passed over. `step` is the number of steps that a
    state has behind it, and with it the next one.
    """

    def __init__(
        self, folder: Path, keep: int, *, report: Callable[[str], None] = warnings.warn
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._report = report

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, in order."""
        return [step for step in self._named() if self._fault(step) is None]

    def latest(self) -> int | None:
        """The newest whole checkpoint; newer ones that are damaged are reported."""
        for step in reversed(self._named()):
            fault = self._fault(step)
            if fault is None:
                return step
            self._report(f"{fault}; it is passed over")
        return None

    def save(self, step: int, state: State, identity: str) -> Path:
        """Write a checkpoint, then remove those before the last `keep`.

        `identity` says which configuration it is of. Where step is there already, it stays: the
        state of a run is a function of the step.
        """
        newest = max(self.steps(), default=-1)
        if newest >= step:
            return self._again(step, newest, identity)
        size = tensor_bytes(state)
        make_folder(self.folder)
        self._clear_leftovers()
        unfinished = self._dotted(step, "unfinished")
        try:
            _write(unfinished, step, state, identity)
            self._name(unfinished, step)
        except OSError as error:
            raise self._no_space(error, size) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._remove_old()
        return self._place(step)

    def load(self, step: int, identity: str) -> State:
        """The state of a step, on the CPU. Raises where it is damaged, or of something else."""
        place = self._place(step)
        if not place.is_dir():
            known = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"{self.folder} has no checkpoint of step {step}; it has: {known}")
        self._refuse_other(step, identity)
        try:
            for name, about in _meta(place, step).files.items():
                if name in FILES and file_digest(place / name) != about.sha256:
                    raise ValueError(f"the bytes of {name} are not those that were written")
            return read_state(place)
        except ValueError as error:
            raise Damaged(
                f"{place} is damaged ({error}); remove it to go on from the checkpoint before it"
            ) from error

    def _named(self) -> list[int]:
        paths = self.folder.glob("step_*")
        names = (NAME.fullmatch(path.name) for path in paths if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _dotted(self, step: int, kind: str) -> Path:
        return self.folder / f".{self._place(step).name}.{os.getpid()}.{kind}"

    def _fault(self, step: int) -> str | None:
        try:
            _meta(self._place(step), step)
        except Damaged as error:
            return str(error)
        return None

    def _refuse_other(self, step: int, identity: str) -> None:
        place = self._place(step)
        if _meta(place, step).identity != _digest(identity):
            raise ValueError(
                f"{place} is of another configuration; go back to that one, give this run a "
                f"directory of its own (run.dir), or remove {self.folder} to begin anew"
            )

    def _again(self, step: int, newest: int, identity: str) -> Path:
        if newest > step:
            raise ValueError(
                f"{self.folder} has a checkpoint of step {newest}, after step {step}, which is to "
                "be saved; go on from that one, or remove it"
            )
        self._refuse_other(step, identity)
        return self._place(step)

    def _name(self, unfinished: Path, step: int) -> None:
        """Give a written checkpoint its name; a damaged one that has it goes away."""
        if self._place(step).exists():
            self._remove(step)
        os.rename(unfinished, self._place(step))
        sync_folder(self.folder)

    def _remove_old(self) -> None:
        """All but the last `keep`; damaged ones go too, a whole one being there."""
        kept = self.steps()[-self._keep :]
        for step in self._named():
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        nameless = self._dotted(step, "removed")
        os.rename(self._place(step), nameless)
        shutil.rmtree(nameless, ignore_errors=True)  # what stays is a leftover

    def _clear_leftovers(self) -> None:
        for path in self.folder.glob(".step_*"):
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _no_space(self, error: OSError, size: int) -> OSError:
        """Before the process ends: what to do, and from where it will go on."""
        if error.errno not in FULL:
            return error
        last = max(self.steps(), default=None)
        ahead = (
            "there is none before it; free space and start again"
            if last is None
            else f"the last one is step {last}; free space and start again: it goes on from there"
        )
        return explained(error, f"a checkpoint of {_readable(size)} in {self.folder}; {ahead}")


def _write(folder: Path, step: int, state: State, identity: str) -> None:
    folder.mkdir()
    write_state(folder, state)
    files = {
        name: FileAbout(bytes=(folder / name).stat().st_size, sha256=file_digest(folder / name))
        for name in FILES
    }
    Meta(format=FORMAT, step=step, identity=_digest(identity), files=files).save(folder / META)


def _meta(place: Path, step: int) -> Meta:
    """What a checkpoint says of itself, if its files are as long as it says."""
    try:
        data = read_document(place / META)
    except ValueError as error:
        raise Damaged(f"{place} is damaged ({error})") from error
    if data.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{place} has format {data['format']!r}, allowed: {FORMAT}; "
            "go on with the version of sparrow that wrote it"
        )
    try:
        meta = from_dict(Meta, data)
        sizes = {name: ((place / name).stat().st_size, meta.files[name].bytes) for name in FILES}
    except (OSError, KeyError, ValueError) as error:
        raise Damaged(f"{place} is damaged ({type(error).__name__}: {error})") from error
    if meta.step != step:
        raise Damaged(f"{place} is damaged ({META} is not that of step {step})")
    for name, (size, written) in sizes.items():
        if size != written:
            raise Damaged(f"{place} is damaged ({name} has {size} of {written} bytes)")
    return meta


def _digest(identity: str) -> str:
    return sha256(identity.encode()).hexdigest()


def _readable(size: int) -> str:
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_each:
            return f"{size / bytes_each:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
