"""Measurements on disk: JSON lines with digests, by key; existing ones are kept.

Every line is on the disk before anything else is measured, so a run that was interrupted goes on. A
last line without its end is of a run that was killed while it wrote, and goes. Any other damage is
refused with the file and the line: nothing of it is measured again in its place. Several processes
may use a file at once: whoever reads or writes it holds its lock.
"""

import base64
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sparrow import files
from sparrow.schema.base import Float32Array, Int32Array, R, Record, from_dict

FILE = "measured.jsonl"
EARLIER = "measured.sqlite"  # of earlier versions
ABOUT = {"format": 3}  # the key of what all measurements of a folder share
MOST_TOKENS = 1 << 24  # of a sequence
MOST_LINE = 1 << 30  # bytes
# How values of tokens are stored: least byte first, whatever the machine.
STORED = {"ids": "<i4", "alpha": "<f4", "entropy": "<f4", "below": "<f2", "above": "<f2"}
STORED |= {"ratio": "<f4"}

Key = Mapping[str, Any]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]


class Store:
    """A file of figures by key."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._places: dict[str, int] = {}  # where the line of a key begins
        self._end = 0  # of what was read
        file.parent.mkdir(parents=True, exist_ok=True)
        files.refuse_links([file])
        if file.exists():
            files.check_regular(file, most=None)
        self._read()

    def _read(self) -> None:
        """Read what was written since, by this process or others."""
        if not self.file.exists():
            return
        with self.file.open("rb") as lines:
            fcntl.flock(lines, fcntl.LOCK_SH)  # nobody writes meanwhile
            self._read_on(lines)

    def _read_on(self, lines: BinaryIO) -> None:
        size = os.fstat(lines.fileno()).st_size
        lines.seek(self._end)
        while line := lines.readline(MOST_LINE):
            if not line.endswith(b"\n") and lines.tell() == size:
                os.truncate(self.file, self._end)
                break
            key = self._parsed(line, f"line {len(self._places) + 1}")["key"]
            self._places.setdefault(_text(key), self._end)
            self._end = lines.tell()

    def _parsed(self, line: bytes, which: str) -> files.Json:
        try:
            parsed = files.parse_line(line.decode())
            if parsed.keys() != {"key", "figures"} or not isinstance(parsed["figures"], dict):
                raise ValueError("not a measurement")
        except ValueError as error:
            raise ValueError(f"{self.file}, {which}: {error}") from error
        return parsed

    def __iter__(self) -> Iterator[Any]:
        """The keys, in the order of their lines."""
        return map(json.loads, [*self._places])

    def get(self, key: Key) -> files.Json | None:
        if _text(key) not in self._places:
            self._read()
        place = self._places.get(_text(key))
        if place is None:
            return None
        with self.file.open("rb") as lines:
            lines.seek(place)
            figures: files.Json = self._parsed(lines.readline(MOST_LINE), _text(key))["figures"]
            return figures

    def put(self, key: Key, figures: files.Json) -> files.Json:
        """Store figures; existing ones are kept."""
        line = files.add_line_digest(json.dumps({"key": dict(key), "figures": figures}))
        try:
            with files.open_append(self.file) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                with self.file.open("rb") as lines:
                    self._read_on(lines)
                if _text(key) not in self._places:
                    file.write(f"{line}\n".encode())
                    files.sync(file)
                    self._places[_text(key)] = self._end
                    self._end += len(line.encode()) + 1
        except OSError as error:
            raise files.explain_full_disk(
                error, f"{self.file.name} in {self.file.parent}"
            ) from error
        return figures


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


class MeasuredSequence(Record):
    """Acceptance along one sequence, at every token that sparse decoding could have changed.

    The first of them was drawn at a total length of `first`; an answer's very first token comes
    from the dense prompt and is not among them.
    """

    prompt: Number  # its number
    sample: Number
    prompt_tokens: Number
    first: Number
    ids: Int32Array  # the whole sequence
    alpha: Float32Array  # exact
    entropy: Float32Array  # of the dense policy
    below: Float32Array  # alpha less its top-K lower bound
    above: Float32Array  # the upper bound less alpha
    ratio: Float32Array | None  # min(1, p/q) of the token; None where it was not sampled from q

    def _check(self) -> None:
        self._require_aligned("alpha", "entropy", "below", "above", "ratio")

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The total length at which each token was drawn: what a schedule looks up."""
        return self.first + np.arange(len(self.alpha))


class TrajectoryKey(Record):
    """The key of a trajectory: arm, prompt and sample."""

    arm: str
    prompt: Number
    sample: Number


class Trajectories:
    """The measured trajectories in a folder, of one model, set of prompts and configuration."""

    def __init__(self, folder: str | Path, about: files.Json) -> None:
        """Open or create a folder; one with other measurements is refused."""
        if (earlier := Path(folder) / EARLIER).exists():
            raise ValueError(f"{earlier} is of an earlier version: give another folder")
        self._store = Store(Path(folder) / FILE)
        self.file = self._store.file
        keys, about = [*self._store], json.loads(json.dumps(about))
        held = (self._store.get(ABOUT) or {}) if keys else self._store.put(ABOUT, about)
        changes = "; ".join(
            f"{name}: {held.get(name)}, now {about.get(name)}"
            for name in held | about
            if held.get(name) != about.get(name)
        )
        if changes:
            raise ValueError(
                f"{self.file} holds other measurements ({changes}): give another folder"
            )
        for key in keys:
            if key != ABOUT:
                self._read(TrajectoryKey, key)

    def put(self, arm: str, measured: MeasuredSequence) -> None:
        """Store a trajectory, on disk before this returns; an existing one is kept."""
        key = {"arm": arm, "prompt": measured.prompt, "sample": measured.sample}
        arrays = {name: _pack(getattr(measured, name), kind) for name, kind in STORED.items()}
        self._store.put(key, measured.model_dump(exclude={*STORED}) | arrays)

    def done(self, arm: str) -> set[tuple[int, int]]:
        """Return the stored prompts and samples of an arm."""
        keys = [key for key in self._store if key.get("arm") == arm]
        return {(key["prompt"], key["sample"]) for key in keys}

    def of(self, arm: str) -> Iterator[MeasuredSequence]:
        """Read the trajectories of an arm, by prompt and sample."""
        for prompt, sample in sorted(self.done(arm)):
            figures = self._store.get({"arm": arm, "prompt": prompt, "sample": sample})
            yield self._read(MeasuredSequence, figures)

    def _read(self, kind: type[R], figures: Any) -> R:
        try:
            stored = {name: dtype for name, dtype in STORED.items() if name in figures}
            arrays = {name: _unpack(figures[name], dtype) for name, dtype in stored.items()}
            return from_dict(kind, {**figures, **arrays})
        except (ValueError, TypeError, zlib.error) as error:
            raise ValueError(
                f"{self.file} is damaged ({error}); remove it and measure again, or give another "
                "folder"
            ) from error


def _pack(array: npt.NDArray[Any] | None, kind: str) -> str | None:
    if array is None:
        return None
    return base64.b64encode(zlib.compress(array.astype(kind).tobytes(), 1)).decode()


def _unpack(text: str | None, kind: str) -> npt.NDArray[Any] | None:
    if text is None:
        return None
    packed = zlib.decompressobj()
    data = packed.decompress(base64.b64decode(text), np.dtype(kind).itemsize * MOST_TOKENS)
    if not packed.eof:
        raise ValueError(f"it is cut off, or has more than {MOST_TOKENS} tokens")
    return np.frombuffer(data, dtype=kind)
