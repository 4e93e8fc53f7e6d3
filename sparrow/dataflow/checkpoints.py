"""Checkpoints: written atomically, verified by digests, without pickle.

    step_000010/
        state.safetensors    every tensor, by its place in the state
        state.json           the structure around them
        meta.json            format, step, digests of configuration and files

A checkpoint is written under a temporary name with a dot, synced to the disk, and then renamed; one
that is removed is renamed first. So a checkpoint with its proper name is complete, however the
process ended; its bytes are verified nevertheless, for disks and copies that lose some.

In state.json lists, numbers, text, true, false and null are values; an object has one key, its
kind: {"tensor": name}, {"tuple": [...]} or {"dict": [[key, value], ...]}.
The safetensors file is written here, since the library's writer copies all tensors to host memory
and reports a full disk without its errno.
"""

import json
import os
import re
import shutil
import struct
import warnings
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.files import (
    FULL,
    explain_full_disk,
    file_digest,
    make_folder,
    parse_json,
    read_document,
    remove_unfinished,
    sync,
    sync_folder,
    unfinished_path,
)
from sparrow.schema.base import File, Record, from_dict
from sparrow.schema.types import Report

FORMAT = 2
META, STRUCTURE, TENSORS = "meta.json", "state.json", "state.safetensors"
FILES = (STRUCTURE, TENSORS)
NAME = re.compile(r"step_(\d{6,})")
PLAIN = (type(None), bool, int, float, str)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # bytes, of the first tensor in a file

State = dict[str, Any]
Tensors = dict[str, Tensor]


class Damaged(ValueError):
    """A checkpoint whose files are not those that were written."""


class FileAbout(Record):
    """Size and digest of a file of a checkpoint."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "FileAbout":
        return cls(bytes=file.stat().st_size, sha256=file_digest(file))


class Meta(File):
    """The content of meta.json."""

    format: int
    step: int
    identity: str  # digest of the configuration
    files: dict[str, FileAbout]


class Checkpoints:
    """The last `keep` checkpoints of a run, in a folder that one process writes.

    report: called with a message for every damaged checkpoint that is skipped. A step is the number
    of steps taken before the checkpoint.
    """

    def __init__(self, folder: Path, keep: int, *, report: Report = warnings.warn) -> None:
        self.folder = folder
        self._keep = keep
        self._report = report

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in order."""
        return [step for step in self._named() if self._fault(step) is None]

    def latest(self) -> int | None:
        """The newest complete checkpoint; newer ones that are damaged are reported."""
        for step in reversed(self._named()):
            fault = self._fault(step)
            if fault is None:
                return step
            self._report(f"{fault}; it is skipped")
        return None

    def save(self, step: int, state: State, identity: str) -> Path:
        """Write a checkpoint, then remove those before the last `keep`.

        identity: digest of the configuration. An existing checkpoint of the step is kept, as the
        state of a run is a function of the step.
        """
        newest = max(self.steps(), default=-1)
        if newest > step:
            raise ValueError(
                f"cannot save step {step}: {self.folder} has a checkpoint of step {newest}; "
                "resume from that one, or remove it"
            )
        if newest == step:
            self._refuse_other(step, identity)
            return self._place(step)
        tensors: Tensors = {}
        structure = _plain(state, "state", tensors)
        make_folder(self.folder)
        remove_unfinished(self.folder)
        unfinished = unfinished_path(self._place(step))
        try:
            _write(unfinished, structure, tensors)
            Meta(
                format=FORMAT,
                step=step,
                identity=_digest(identity),
                files={name: FileAbout.of(unfinished / name) for name in FILES},
            ).save(unfinished / META)
            if self._place(step).exists():  # damaged
                self._remove(step)
            os.rename(unfinished, self._place(step))
            sync_folder(self.folder)
        except OSError as error:
            raise self._no_space(error, sum(map(_bytes, tensors.values()))) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._remove_old()
        return self._place(step)

    def load(self, step: int, identity: str | None = None) -> State:
        """Load the state of a step onto the CPU; ValueError if it is damaged or of another run.

        identity: as in `save`; None: of any configuration.
        """
        place = self._place(step)
        if not place.is_dir():
            known = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"{self.folder} has no checkpoint of step {step}; it has: {known}")
        if identity is not None:
            self._refuse_other(step, identity)
        files = _meta(place, step).files
        try:
            for name, about in files.items():
                if name in FILES and file_digest(place / name) != about.sha256:
                    raise ValueError(f"the digest of {name} does not match")
            return read_state(place)
        except ValueError as error:
            raise Damaged(
                f"{place} is damaged ({error}); remove it to resume from the checkpoint before it"
            ) from error

    def _named(self) -> list[int]:
        paths = self.folder.glob("step_*")
        names = (NAME.fullmatch(path.name) for path in paths if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

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
                f"{place} belongs to another configuration; restore that one, give this run "
                f"another directory (run.out), or remove {self.folder} to start again"
            )

    def _remove_old(self) -> None:
        """Remove all but the last `keep`, damaged ones too."""
        kept = self.steps()[-self._keep :]
        for step in self._named():
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        nameless = unfinished_path(self.folder / f"removed_{step}")
        os.rename(self._place(step), nameless)
        shutil.rmtree(nameless, ignore_errors=True)  # leftovers go with the next one

    def _no_space(self, error: OSError, size: int) -> OSError:
        """Explain a full disk: what to do, and from where the run will resume."""
        if error.errno not in FULL:
            return error
        last = max(self.steps(), default=None)
        before = "there is no earlier one" if last is None else f"the last one is step {last}"
        what = f"a checkpoint of {size / 2**20:.1f} MiB in {self.folder}; {before}"
        return explain_full_disk(
            error, f"{what}; free space and start again: the run resumes from there"
        )


def _meta(place: Path, step: int) -> Meta:
    """Read meta.json and check the sizes of the files."""
    try:
        data = read_document(place / META)
    except ValueError as error:
        raise Damaged(f"{place} is damaged ({error})") from error
    if data.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{place} has format {data['format']!r}, expected {FORMAT}; resume with the version of "
            "sparrow that wrote it"
        )
    try:
        meta = from_dict(Meta, data)
        if meta.step != step:
            raise ValueError(f"{META} belongs to step {meta.step}, not {step}")
        for name in FILES:
            size, written = (place / name).stat().st_size, meta.files[name].bytes
            if size != written:
                raise ValueError(f"{name} has {size} of {written} bytes")
    except (OSError, KeyError, ValueError) as error:
        raise Damaged(f"{place} is damaged ({type(error).__name__}: {error})") from error
    return meta


def _digest(identity: str) -> str:
    return sha256(identity.encode()).hexdigest()


# The state.


def _write(folder: Path, structure: Any, tensors: Tensors) -> None:
    """Write both files into a folder, one tensor at a time through host memory."""
    folder.mkdir()
    with (folder / TENSORS).open("wb") as file:
        _write_tensors(file, tensors)
        sync(file)
    with (folder / STRUCTURE).open("wb") as file:
        file.write(json.dumps(structure).encode())
        sync(file)


def read_state(folder: Path) -> State:
    """Read the state in a folder onto the CPU; ValueError names a damaged file."""
    tensors = _read_tensors(folder / TENSORS)
    try:
        state = _value(parse_json((folder / STRUCTURE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder / STRUCTURE}: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{folder / STRUCTURE}: expected a dict, got {type(state).__name__}")
    return state


def _plain(value: Any, where: str, tensors: Tensors) -> Any:
    """A value for JSON, its tensors collected by place; ValueError if it could not be read back."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_writable(value):
        assert where not in tensors, f"duplicate {where}"
        tensors[where] = value.detach()
        return {"tensor": where}
    if kind in (dict, OrderedDict):
        keys = [_plain(key, f"the keys of {where}", tensors) for key in value]
        values = [_plain(item, f"{where}[{key!r}]", tensors) for key, item in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    if kind in (list, tuple):
        items = [_plain(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind not in PLAIN:
        expected = "dense tensors, numbers, text, None, and dicts, lists and tuples of them"
        got = f"a {kind.__module__}.{kind.__name__}"
        if isinstance(value, Tensor):
            got += f" of {value.dtype}, {value.layout}"
        raise ValueError(f"{where}: expected {expected}, got {got}")
    return value


def _is_writable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in DTYPES and not tensor.is_meta


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _value(plain: Any, tensors: Tensors) -> Any:
    """Inverse of `_plain`."""
    if isinstance(plain, list):
        return [_value(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(_value(inner, tensors))
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in inner}
    raise ValueError(f"expected an object of kind tensor, tuple or dict, got {kind!r}")


def _write_tensors(file: IO[bytes], tensors: Tensors) -> None:
    """Write the safetensors format: the header's length, the header, bytes; wide elements first."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + _bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_tensors(path: Path) -> Tensors:
    """Read copies: safetensors returns views of the file, which may change or be removed."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error
