"""What was measured of every token, in one file: a run that was interrupted goes on from it.

SQLite, because a trajectory is then either there or not, whenever the process is killed. Arrays
are little-endian float32 (gaps of bounds float16, ids int32), compressed.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FILE = "measured.sqlite"
FloatArray = npt.NDArray[np.float32]

SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (
    arm TEXT NOT NULL, prompt INTEGER NOT NULL, sample INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, first INTEGER NOT NULL, ids BLOB NOT NULL,
    alpha BLOB NOT NULL, entropy BLOB NOT NULL, below BLOB NOT NULL, above BLOB NOT NULL,
    ratio BLOB, PRIMARY KEY (arm, prompt, sample)
);
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Acceptance along one sequence, at every token that sparse decoding could have changed.

    The first of them was drawn at a total length of `first`; an answer's very first token comes
    from the dense prompt and is not among them.
    """

    prompt: int  # its number
    sample: int
    prompt_tokens: int
    first: int
    ids: npt.NDArray[np.int32]  # the whole sequence
    alpha: FloatArray  # exact
    entropy: FloatArray  # of the dense policy
    below: FloatArray  # alpha less its top-K lower bound
    above: FloatArray  # the upper bound less alpha
    ratio: FloatArray | None  # min(1, p/q) of the token; None where it was not sampled from q

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
        try:
            self._db = sqlite3.connect(self.file)
            self._db.executescript(SCHEMA)
            self._check({key: json.dumps(value) for key, value in about.items()})
        except sqlite3.OperationalError as error:
            raise ValueError(f"{self.file} cannot be written: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.file} is no file of measurements: {error}") from error

    def _check(self, about: Mapping[str, str]) -> None:
        held = dict(self._db.execute("SELECT key, value FROM about"))
        differ = [
            f"{key} is {held[key]} there and {about[key]} now"
            for key in about
            if held and held.get(key) != about[key] and key in held
        ]
        missing = sorted(held.keys() ^ about.keys()) if held else []
        if differ or missing:
            told = "; ".join([*differ, *(f"{key} is known on one side only" for key in missing)])
            raise ValueError(f"{self.file} holds other measurements ({told}): give another folder")
        with self._db:
            self._db.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", about.items())

    def put(self, arm: str, measured: Measured) -> None:
        """Keep a trajectory, on the disk before this returns; one that is there stays."""
        m = measured
        arrays = (m.ids.astype("<i4"), *(a.astype("<f4") for a in (m.alpha, m.entropy)))
        gaps = (gap.astype("<f2") for gap in (m.below, m.above))
        blobs = [_pack(array) for array in (*arrays, *gaps)]
        ratio = None if m.ratio is None else _pack(m.ratio.astype("<f4"))
        row = (arm, m.prompt, m.sample, m.prompt_tokens, m.first, *blobs, ratio)
        marks = ", ".join("?" * len(row))
        with self._db:
            self._db.execute(f"INSERT OR IGNORE INTO trajectories VALUES ({marks})", row)

    def done(self, arm: str) -> set[tuple[int, int]]:
        """Prompts and samples of an arm that are there."""
        query = "SELECT prompt, sample FROM trajectories WHERE arm = ?"
        return set(self._db.execute(query, (arm,)))

    def of(self, arm: str) -> Iterator[Measured]:
        """The trajectories of an arm, by prompt and sample."""
        query = (
            "SELECT prompt, sample, prompt_tokens, first, ids, alpha, entropy, below, above, ratio "
            "FROM trajectories WHERE arm = ? ORDER BY prompt, sample"
        )
        for row in self._db.execute(query, (arm,)):
            numbers, (ids, alpha, entropy, below, above, ratio) = row[:4], row[4:]
            yield Measured(
                **dict(zip(("prompt", "sample", "prompt_tokens", "first"), numbers, strict=True)),
                ids=_unpack(ids, "<i4"),
                alpha=_unpack(alpha, "<f4"),
                entropy=_unpack(entropy, "<f4"),
                below=_unpack(below, "<f2").astype(np.float32),
                above=_unpack(above, "<f2").astype(np.float32),
                ratio=None if ratio is None else _unpack(ratio, "<f4"),
            )

    def close(self) -> None:
        self._db.close()


def _pack(array: npt.NDArray[Any]) -> bytes:
    return zlib.compress(array.tobytes(), 1)


def _unpack(blob: bytes, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(zlib.decompress(blob), dtype=dtype)
