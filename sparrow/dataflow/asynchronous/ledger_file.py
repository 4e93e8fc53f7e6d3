"""Read the ledger of a run from its file, which nobody may change: not even a reader.

A database in WAL mode is changed by whoever opens it, and a running process locks it. So the file
is copied with its write-ahead log, and the copy is opened. It may come from a stranger: the copy is
read only if its tables are those of a ledger, letter by letter, so nothing in it is ever executed.
"""

import shutil
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from sparrow.dataflow.asynchronous.prompt_ledger import PromptLedger, ledger_schema
from sparrow.files import check_regular

MOST_BYTES = 2**33  # of a file
TRIES, PAUSE = 50, 0.1  # to copy a file that changes, seconds between them
HEADER = 32  # bytes of a write-ahead log: with salts that change when it starts over
LARGEST = 2**53  # number in a ledger
_TABLES = ("leases", "uses")
_ODD = {
    "leases": f"""
        typeof(position) != 'integer' OR position > {LARGEST} OR typeof(attempt) != 'integer'
        OR typeof(version) != 'integer' OR typeof(worker) != 'text'
        OR end IS NOT NULL AND (typeof(step) != 'integer' OR abs(step) > {LARGEST}
        OR typeof(reason) != 'text')""",
    "uses": f"typeof(step) != 'integer' OR abs(step) > {LARGEST} OR typeof(lease) != 'integer'",
}


class UsedPrompts(NamedTuple):
    """Positions of the prompts in the batch of a step, ascending."""

    fresh: tuple[int, ...]
    replayed: tuple[int, ...]


class LedgerFile(NamedTuple):
    """A ledger that was read from a file."""

    ledger: PromptLedger  # a copy
    batches: dict[int, UsedPrompts]  # by step
    missing: tuple[str, ...]  # indexes that would refuse a second end or a second lease


@contextmanager
def open_ledger(file: Path) -> Iterator[LedgerFile]:
    """Open a copy of the ledger in a file; ValueError if it is none, or damaged."""
    try:
        with _copy(file) as copy:
            with closing(sqlite3.connect(copy, isolation_level=None)) as database:
                missing = _check(database)
                batches = _batches(database)
            with PromptLedger(copy) as ledger:
                yield LedgerFile(ledger, batches, missing)
    except sqlite3.Error as error:
        raise ValueError(f"{file}: damaged, or not a ledger of prompts: {error}") from error


# The copy.


@contextmanager
def _copy(file: Path) -> Iterator[Path]:
    """Copy a ledger with its write-ahead log, as it was at one moment."""
    with tempfile.TemporaryDirectory(prefix="sparrow-ledger-") as folder:
        copy = Path(folder) / file.name
        for _ in range(TRIES):
            if _copy_once(file, copy):
                break
            time.sleep(PAUSE)
        else:
            raise ValueError(f"{file} is in use and changes too fast to be read; try again")
        yield copy


def _copy_once(file: Path, copy: Path) -> bool:
    """Copy both files; False if they do not belong together.

    The database first: what a checkpoint writes into it meanwhile is in the log as well, for as
    long as the log has the same header. A frame that is being appended to the log has no valid
    checksum yet, and is ignored.
    """
    before = _generation(file)
    for source, target in ((file, copy), (_log(file), _log(copy))):
        target.unlink(missing_ok=True)
        if source == file or source.exists():
            check_regular(source, "ledger", MOST_BYTES)
            shutil.copyfile(source, target)
    return before == _generation(file) and before[0] == _header(copy)


def _generation(file: Path) -> tuple[bytes, tuple[int, int]]:
    """What changes when the log starts over; without a log, when the database changes."""
    header, status = _header(file), file.stat()
    return header, (0, 0) if header else (status.st_mtime_ns, status.st_size)


def _header(file: Path) -> bytes:
    try:
        check_regular(_log(file), "ledger", MOST_BYTES)
        with _log(file).open("rb") as log:
            header = log.read(HEADER)
    except FileNotFoundError:
        return b""
    return header if len(header) == HEADER else b""


def _log(file: Path) -> Path:
    return file.with_name(f"{file.name}-wal")


# What is in it.


def _check(database: sqlite3.Connection) -> tuple[str, ...]:
    """Refuse what is not a ledger, or damaged; return the names of missing indexes."""
    run = database.execute
    run("PRAGMA trusted_schema = OFF")
    run("PRAGMA cell_size_check = ON")
    version, expected = ledger_schema()
    made = run("SELECT name, sql FROM sqlite_master").fetchall()
    found = dict(made)
    known = len(found) == len(made) and found.items() <= expected.items()
    if not known or not found.keys() >= {*_TABLES}:
        raise sqlite3.DatabaseError("its tables are not those of a ledger")
    if run("PRAGMA user_version").fetchone() != (version,):
        raise sqlite3.DatabaseError(f"its tables are not of version {version}")
    (state,) = run("PRAGMA integrity_check(1)").fetchone()
    if state != "ok":
        raise sqlite3.DatabaseError(state)
    for table, odd in _ODD.items():
        if run(f"SELECT 1 FROM {table} WHERE {odd} LIMIT 1").fetchone():
            raise sqlite3.DatabaseError(f"{table} has values of another kind")
    return tuple(sorted(expected.keys() - found.keys()))


def _batches(database: sqlite3.Connection) -> dict[int, UsedPrompts]:
    query = "SELECT uses.step, replayed, position FROM uses JOIN leases USING (lease)"
    parts: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for step, replayed, position in database.execute(f"{query} ORDER BY position"):
        parts[step][replayed].append(position)
    return {step: UsedPrompts(*map(tuple, parts[step])) for step in sorted(parts)}
