"""What was measured of every token, in one file: a run that was interrupted goes on from it.

SQLite, because a trajectory is then either there or not, whenever the process is killed. Arrays
are little-endian float32 (gaps of bounds float16, ids int32), compressed. Every row has the sha256
of its values. A file that is damaged is refused as a whole when it is opened, or when the row that
is damaged is read: nothing of it is measured again in its place.
"""

import hashlib
import json
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sparrow.schema.base import Float32Array, Int32Array, Record, from_dict

FILE = "measured.sqlite"

FORMAT = 2  # 1 had no digests
SCHEMA = {
    "about": "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "trajectories": """CREATE TABLE trajectories (
    arm TEXT NOT NULL, prompt INTEGER NOT NULL, sample INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, first INTEGER NOT NULL, ids BLOB NOT NULL,
    alpha BLOB NOT NULL, entropy BLOB NOT NULL, below BLOB NOT NULL, above BLOB NOT NULL,
    ratio BLOB, digest TEXT NOT NULL, PRIMARY KEY (arm, prompt, sample)
)""",
}
MOST_TOKENS = 1 << 24  # of a sequence
MAGIC = bytes.fromhex("d9d505f920a163d7")  # begins a journal, and ends one that names other files
AGAIN = "remove it and measure again, or give another folder"
Value = int | str | bytes | None
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
# Columns of a row after its numbers, and how their tokens are stored.
STORED = {"ids": "<i4", "alpha": "<f4", "entropy": "<f4", "below": "<f2", "above": "<f2"}
STORED |= {"ratio": "<f4"}
NUMBERS = ("prompt", "sample", "prompt_tokens", "first")


class Measured(Record):
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

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The place of each token in the response."""
        return self.lengths - self.prompt_tokens


class Trajectories:
    """The measured trajectories of a folder, of one model, one set of prompts, one setting."""

    def __init__(self, folder: str | Path, about: Mapping[str, Any]) -> None:
        """Open or begin a folder; one that holds other measurements is refused."""
        self.file = Path(folder) / FILE
        self.file.parent.mkdir(parents=True, exist_ok=True)
        wanted = {key: json.dumps(value) for key, value in about.items()}
        wanted["format"] = json.dumps(FORMAT)
        self._refuse_links()
        with self._named():
            self._db = sqlite3.connect(self.file)
            self._db.execute("PRAGMA trusted_schema = OFF")  # the file may be anybody's
            tables = self._tables()
            if tables:
                self._check(tables, wanted)
            else:
                self._create(wanted)

    def _refuse_links(self) -> None:
        """Refuse files by which SQLite would write or delete others."""
        for suffix in ("", "-journal", "-wal", "-shm"):
            file = self.file.with_name(FILE + suffix)
            if file.is_symlink() or (file.exists() and not file.is_file()):
                raise ValueError(f"{file} is a link or no regular file; remove it")
        journal = self.file.with_name(f"{FILE}-journal")
        if journal.exists():
            with journal.open("rb") as content:
                head = content.read(28)
                content.seek(-min(len(MAGIC), journal.stat().st_size), os.SEEK_END)
                if len(head) == 28 and content.read() == MAGIC:
                    raise ValueError(f"{journal} names other files, as ours do not; remove it")
            pages, _, page = struct.unpack(">III", head[16:].ljust(12, b"\0"))
            if head.startswith(MAGIC) and pages * page > self.file.stat().st_size:
                raise ValueError(f"{journal} is not the journal of {FILE}; remove both")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the database names the file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise ValueError(f"{self.file} cannot be read or written: {error}") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.file} is damaged, or no file of measurements: {error}; {AGAIN}"
            ) from error

    def _tables(self) -> dict[str, str]:
        """How the tables were made; views and triggers are among them, where somebody added any."""
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        return dict(self._db.execute(query))

    def _create(self, about: Mapping[str, str]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            for statement in SCHEMA.values():
                self._db.execute(statement)
            self._db.executemany("INSERT INTO about VALUES (?, ?)", about.items())

    def _check(self, tables: Mapping[str, str], about: Mapping[str, str]) -> None:
        """Refuse a file that is damaged, of another format, or of other measurements."""
        ((fault,), *_) = self._db.execute("PRAGMA integrity_check")
        if fault != "ok":
            raise ValueError(f"{self.file} is damaged ({' '.join(fault.split())}); {AGAIN}")
        held: dict[str, str] = {}
        if tables.get("about") == SCHEMA["about"]:
            held = dict(self._db.execute("SELECT key, value FROM about"))
            if not all(isinstance(text, str) for pair in held.items() for text in pair):
                raise ValueError(f"{self.file} is damaged (what it is about is no text); {AGAIN}")
            if held.get("format") != about["format"]:
                given = held.get("format", "1")
                raise ValueError(f"{self.file} has format {given}, allowed: {FORMAT}; {AGAIN}")
        if tables != SCHEMA:
            raise ValueError(f"{self.file} is no file of measurements; give another folder")
        self._refuse_other(held, about)

    def _refuse_other(self, held: Mapping[str, str], about: Mapping[str, str]) -> None:
        differ = [
            f"{key} is {held[key]} there and {about[key]} now"
            for key in about
            if key in held and held[key] != about[key]
        ]
        missing = sorted(held.keys() ^ about.keys())
        if differ or missing:
            told = "; ".join([*differ, *(f"{key} is known on one side only" for key in missing)])
            raise ValueError(f"{self.file} holds other measurements ({told}): give another folder")

    def put(self, arm: str, measured: Measured) -> None:
        """Keep a trajectory, on the disk before this returns; one that is there stays."""
        numbers = [getattr(measured, name) for name in NUMBERS]
        blobs = [_pack(getattr(measured, name), dtype) for name, dtype in STORED.items()]
        row = (arm, *numbers, *blobs)
        marks = ", ".join("?" * (len(row) + 1))
        with self._named(), self._db:
            query = f"INSERT OR IGNORE INTO trajectories VALUES ({marks})"
            self._db.execute(query, (*row, _digest(row)))

    def done(self, arm: str) -> set[tuple[int, int]]:
        """Prompts and samples of an arm that are there."""
        query = "SELECT prompt, sample FROM trajectories WHERE arm = ?"
        with self._named():
            return set(self._db.execute(query, (arm,)))

    def of(self, arm: str) -> Iterator[Measured]:
        """The trajectories of an arm, by prompt and sample."""
        query = "SELECT * FROM trajectories WHERE arm = ? ORDER BY prompt, sample"
        with self._named():
            for row in self._db.execute(query, (arm,)):
                yield self._measured(row)

    def _measured(self, row: Sequence[Value]) -> Measured:
        *values, digest = row
        try:
            if _digest(values) != digest:
                raise ValueError("its values do not match its digest")
            blobs = zip(STORED.items(), values[1 + len(NUMBERS) :], strict=True)
            arrays = {name: _unpack(blob, dtype) for (name, dtype), blob in blobs}
            return from_dict(Measured, dict(zip(NUMBERS, values[1:5], strict=True)) | arrays)
        except (ValueError, TypeError, zlib.error) as error:
            arm, prompt, sample = row[:3]
            raise ValueError(
                f"{self.file} is damaged (arm {arm!r}, prompt {prompt!r}, sample {sample!r}: "
                f"{error}); {AGAIN}"
            ) from error

    def close(self) -> None:
        with self._named():
            self._db.close()


def _digest(row: Sequence[Value]) -> str:
    """The sha256 of the values of a row, with their kinds and lengths."""
    digest = hashlib.sha256()
    for value in row:
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(f"{type(value).__name__} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _pack(array: npt.NDArray[Any] | None, dtype: str) -> bytes | None:
    return None if array is None else zlib.compress(array.astype(dtype).tobytes(), 1)


def _unpack(blob: Any, dtype: str) -> npt.NDArray[Any] | None:
    if blob is None:
        return None
    packed = zlib.decompressobj()
    data = packed.decompress(blob, np.dtype(dtype).itemsize * MOST_TOKENS)
    if not packed.eof:
        raise ValueError(f"it is cut off, or has more than {MOST_TOKENS} tokens")
    return np.frombuffer(data, dtype=dtype)
