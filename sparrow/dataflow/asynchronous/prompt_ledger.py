"""The ledger of prompts: every prompt is leased, and ends exactly once.

A prompt is a position in the order of the data; a lease is one attempt to answer it. A lease ends
as `used` (its group was in the batch of a step), `dropped` (with a reason), or `returned`: the
prompt is dispatched again. Only the first two end a prompt, and the file's own constraints refuse a
second end or a second open lease. One SQLite file, one writer; what a call returns is on disk.

Groups that no step has used yet are not in the file: after a crash their prompts are dispatched
again, and so are those of steps behind the checkpoint from which a run resumes.
"""

import heapq
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

End = Literal["used", "dropped", "returned"]

_TABLES = """
CREATE TABLE leases (
    lease INTEGER PRIMARY KEY,
    position INTEGER NOT NULL CHECK (position >= 0),
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    worker TEXT NOT NULL,
    version INTEGER NOT NULL,
    end TEXT CHECK (end IN ('used', 'dropped', 'returned')),
    reason TEXT,
    step INTEGER,
    CHECK ((end IS NULL) = (step IS NULL) AND (end IS NULL) = (reason IS NULL))
);
CREATE INDEX leases_of_a_prompt ON leases (position);
CREATE UNIQUE INDEX one_open_lease ON leases (position) WHERE end IS NULL;
CREATE UNIQUE INDEX one_end ON leases (position) WHERE end IN ('used', 'dropped');
CREATE TABLE uses (
    step INTEGER NOT NULL,
    lease INTEGER NOT NULL REFERENCES leases (lease),
    replayed INTEGER NOT NULL CHECK (replayed IN (0, 1)),
    PRIMARY KEY (step, lease)
);
CREATE UNIQUE INDEX one_first_use ON uses (lease) WHERE NOT replayed;
"""
_VERSION = 1  # of the tables: PRAGMA user_version
# Why leases are returned: in a run, and when one is resumed.
FAILED, LATE, LOST = "episode failed", "deadline", "worker lost"
ENDED, TAKEN_AGAIN = "the process ended", "taken again from step {}"


class Lease(NamedTuple):
    """An attempt to answer a prompt, begun under a version of the weights.

    failures: attempts that failed for their own sake since the run began or was last resumed. A
    lost worker, which may have had many prompts, counts a third.
    """

    number: int
    position: int
    attempt: int
    version: int
    failures: int = 0


class LeaseCount(NamedTuple):
    """How many leases ended in one way for one reason."""

    end: str
    reason: str
    leases: int


class LedgerAudit(NamedTuple):
    """What the file proves. problems: empty if every prompt ended at most once and none is lost."""

    prompts: int
    used: int
    dropped: int
    open: int  # leased now
    waiting: int  # to be dispatched again
    counts: tuple[LeaseCount, ...]
    problems: tuple[str, ...]


class PromptLedger:
    """Leases of prompts, in a file or in memory; a file is for one process at a time."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._database = sqlite3.connect(
            file or ":memory:", isolation_level=None, check_same_thread=False
        )  # calls of several threads must not overlap
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise ValueError(f"{file}: cannot be used as a ledger of prompts: {error}") from error

    def _open(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA trusted_schema = OFF")
        if self.file is not None:
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        (version,) = run("PRAGMA user_version").fetchone()
        if version == 0 and not run("SELECT 1 FROM sqlite_master").fetchone():
            made = f"{_TABLES} PRAGMA user_version = {_VERSION};"
            self._database.executescript(f"BEGIN; {made} COMMIT;")  # whole, or not at all
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"version {version}, expected {_VERSION}")
        (largest,) = run("SELECT coalesce(max(position), -1) FROM leases").fetchone()
        self._next = largest + 1
        self._waiting = [position for (position,) in run(_WAITING)]
        heapq.heapify(self._waiting)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> "PromptLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._database.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")

    # Leases.

    def lease(self, worker: str, version: int) -> Lease:
        """Lease the lowest prompt that is to be dispatched again, otherwise the next one."""
        again = bool(self._waiting)
        position = self._waiting[0] if again else self._next
        with self._transaction() as cursor:
            query = "SELECT count(*) FROM leases WHERE position = ?"
            attempt = cursor.execute(query, (position,)).fetchone()[0] + 1
            failed = 0
            if again:
                failed = cursor.execute(_FAILURES, {"position": position}).fetchone()[0]
            cursor.execute(
                "INSERT INTO leases (position, attempt, worker, version) VALUES (?, ?, ?, ?)",
                (position, attempt, worker, version),
            )
            number = cursor.lastrowid
        assert number is not None
        if again:
            heapq.heappop(self._waiting)
        else:
            self._next += 1
        return Lease(number, position, attempt, version, failed)

    def drop(self, lease: Lease, reason: str, step: int) -> None:
        """End a prompt without a use; step: the next to be taken."""
        with self._transaction() as cursor:
            _end(cursor, lease, "dropped", reason, step)

    def give_back(self, lease: Lease, reason: str, step: int) -> None:
        """End a lease; its prompt is dispatched again."""
        with self._transaction() as cursor:
            _end(cursor, lease, "returned", reason, step)
        heapq.heappush(self._waiting, lease.position)

    def use(self, step: int, fresh: Iterable[Lease], replayed: Iterable[Lease] = ()) -> None:
        """End prompts as the batch of a step, all or none of them; record what it replays."""
        with self._transaction() as cursor:
            for lease in fresh:
                _end(cursor, lease, "used", "used", step)
                cursor.execute("INSERT INTO uses VALUES (?, ?, 0)", (step, lease.number))
            for lease in replayed:
                cursor.execute("INSERT INTO uses VALUES (?, ?, 1)", (step, lease.number))

    def resume(self, step: int) -> tuple[LeaseCount, ...]:
        """Go back to the checkpoint before a step; what is done again, by how it had ended.

        Prompts that were open, and those that ended in this step or later, are dispatched again.
        """
        with self._transaction() as cursor:
            query = "SELECT end, reason, count(*) FROM leases WHERE step >= ? AND end != 'returned'"
            ended = cursor.execute(f"{query} GROUP BY end, reason", (step,)).fetchall()
            (opened,) = cursor.execute("SELECT count(*) FROM leases WHERE end IS NULL").fetchone()
            cursor.execute("DELETE FROM uses WHERE step >= ?", (step,))
            again = TAKEN_AGAIN.format(step)
            cursor.execute(
                "UPDATE leases SET end = 'returned', reason = ?, step = ? "
                "WHERE step >= ? AND end != 'returned'",
                (again, step, step),
            )
            cursor.execute(
                "UPDATE leases SET end = 'returned', reason = ?, step = ? WHERE end IS NULL",
                (ENDED, step),
            )
        self._waiting = [position for (position,) in self._database.execute(_WAITING)]
        heapq.heapify(self._waiting)
        counts = [LeaseCount(*row) for row in ended]
        return (*counts, *([LeaseCount("open", ENDED, opened)] if opened else []))

    # What is there.

    @property
    def next_position(self) -> int:
        """Of the first prompt that was never leased."""
        return self._next

    def counts(self) -> tuple[LeaseCount, ...]:
        """Leases by how and why they ended; open ones as such."""
        query = "SELECT coalesce(end, 'open'), coalesce(reason, ''), count(*) FROM leases"
        rows = self._database.execute(f"{query} GROUP BY 1, 2 ORDER BY 1, 2")
        return tuple(LeaseCount(*row) for row in rows)

    def batch(self, step: int) -> tuple[int, ...]:
        """Positions that a step used for the first time, ascending."""
        query = "SELECT position FROM uses JOIN leases USING (lease) WHERE uses.step = ?"
        rows = self._database.execute(f"{query} AND NOT replayed ORDER BY position", (step,))
        return tuple(position for (position,) in rows)

    def audit(self, steps: int | None = None) -> LedgerAudit:
        """Prove from the file alone that prompts end once; steps: how many the run has taken."""
        run = self._database.execute
        (prompts,) = run("SELECT coalesce(max(position), -1) + 1 FROM leases").fetchone()
        numbers = {
            name: run(f"SELECT count(*) FROM ({query})").fetchone()[0]
            for name, query in {
                "used": "SELECT 1 FROM leases WHERE end = 'used'",
                "dropped": "SELECT 1 FROM leases WHERE end = 'dropped'",
                "open": "SELECT 1 FROM leases WHERE end IS NULL",
                "waiting": _WAITING,
            }.items()
        }
        problems = [
            f"{name}: {', '.join(map(str, found[:5]))}{' ...' if len(found) > 5 else ''}"
            for name, query in _PROBLEMS.items()
            if (found := [row[0] for row in run(query)])
        ]
        (known,) = run("SELECT count(DISTINCT position) FROM leases").fetchone()
        if known != prompts:
            problems.append(f"prompts without any lease: {prompts - known}")
        if sum(numbers.values()) != prompts:
            problems.append(f"{prompts} prompts, but {numbers} of them")
        if steps is not None:
            taken = {step for (step,) in run("SELECT DISTINCT step FROM uses")}
            if beyond := sorted(step for step in taken if step >= steps):
                problems.append(f"batches of steps that were not taken: {beyond[:5]}")
        return LedgerAudit(prompts, **numbers, counts=self.counts(), problems=tuple(problems))


def ledger_schema() -> tuple[int, dict[str, str | None]]:
    """The version of a ledger's tables; tables and indexes by name, as the text that made them."""
    with PromptLedger() as ledger:
        return _VERSION, dict(ledger._database.execute("SELECT name, sql FROM sqlite_master"))


def _end(cursor: sqlite3.Cursor, lease: Lease, end: End, reason: str, step: int) -> None:
    query = "UPDATE leases SET end = ?, reason = ?, step = ? WHERE lease = ? AND end IS NULL"
    cursor.execute(query, (end, reason, step, lease.number))
    if cursor.rowcount != 1:
        raise ValueError(f"lease {lease.number} of prompt {lease.position} is not open")


_RESUMED = f"(reason = '{ENDED}' OR reason LIKE '{TAKEN_AGAIN[:-3]}%')"
_FAILURES = f"""
SELECT coalesce(sum(reason != '{LOST}'), 0) + coalesce(sum(reason = '{LOST}'), 0) / 3
FROM leases WHERE position = :position AND end = 'returned' AND lease >
    (SELECT coalesce(max(lease), 0) FROM leases WHERE position = :position AND {_RESUMED})
"""
# Prompts of which every lease was returned.
_WAITING = """
SELECT position FROM leases GROUP BY position HAVING min(coalesce(end, '') = 'returned') = 1
"""
_PROBLEMS = {
    "prompts that ended twice": "SELECT position FROM leases WHERE end IN ('used', 'dropped') "
    "GROUP BY position HAVING count(*) > 1",
    "prompts that ended and are leased": "SELECT position FROM leases GROUP BY position HAVING "
    "sum(end IS NULL) > 0 AND sum(coalesce(end IN ('used', 'dropped'), 0)) > 0",
    "leases in a batch that did not end as used": "SELECT uses.lease FROM uses LEFT JOIN leases "
    "USING (lease) WHERE coalesce(end, '') != 'used'",
    "used leases in no batch": "SELECT lease FROM leases WHERE end = 'used' AND lease NOT IN "
    "(SELECT lease FROM uses WHERE NOT replayed)",
    "leases used twice for the first time": "SELECT lease FROM uses WHERE NOT replayed "
    "GROUP BY lease HAVING count(*) > 1",
    "leases in a batch of another step than the one that ended them": "SELECT uses.lease FROM uses "
    "JOIN leases USING (lease) WHERE NOT replayed AND uses.step != leases.step",
    "prompts with an attempt missing or repeated": "SELECT position FROM leases GROUP BY position "
    "HAVING min(attempt) != 1 OR max(attempt) != count(*) OR count(DISTINCT attempt) != count(*)",
    "leases behind a gap in their numbers": "SELECT lease FROM (SELECT lease, lag(lease, 1, 0) "
    "OVER (ORDER BY lease) AS before FROM leases) WHERE lease != before + 1",
    "replays before the first use": "SELECT later.lease FROM uses AS later JOIN uses AS first "
    "USING (lease) WHERE later.replayed AND NOT first.replayed AND later.step <= first.step",
}
