"""The ledger of prompts: every prompt ends once, whatever happens, and the file proves it."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.dataflow.asynchronous.prompt_ledger import (
    FAILED,
    LOST,
    Lease,
    LeaseCount,
    PromptLedger,
)

WRITER = """
import sys
from pathlib import Path
from sparrow.dataflow.asynchronous.prompt_ledger import FAILED, LOST, PromptLedger
ledger = PromptLedger(Path(sys.argv[1]))
step = 0
while True:
    leases = [ledger.lease("worker", step) for _ in range(4)]
    ledger.drop(leases[0], "uninformative", step)
    ledger.use(step, leases[1:3])
    step += 1
    print(step, flush=True)
"""


def leases(ledger: PromptLedger, count: int, version: int = 0) -> list[Lease]:
    return [ledger.lease("w", version) for _ in range(count)]


def test_prompts_end_as_used_dropped_or_are_dispatched_again(tmp_path: Path) -> None:
    with PromptLedger(tmp_path / "prompts.sqlite") as ledger:
        first, second, third, fourth = leases(ledger, 4)
        assert [lease.position for lease in (first, second, third, fourth)] == [0, 1, 2, 3]
        ledger.use(0, [first, second])
        ledger.drop(third, "uninformative", 0)
        ledger.give_back(fourth, "worker lost", 0)
        again, later = leases(ledger, 2, version=1)
        assert (again.position, again.attempt) == (3, 2)
        assert (later.position, later.attempt) == (4, 1)
        ledger.use(1, [again], replayed=[first])
        assert (ledger.batch(0), ledger.batch(1)) == ((0, 1), (3,))
    with PromptLedger(tmp_path / "prompts.sqlite") as ledger:
        audit = ledger.audit(steps=2)
        assert (audit.prompts, audit.used, audit.dropped) == (5, 3, 1)
        assert (audit.open, audit.waiting) == (1, 0)
        assert not audit.problems
        assert LeaseCount("returned", "worker lost", 1) in audit.counts


def test_a_lease_ends_once_and_a_batch_is_recorded_whole_or_not_at_all() -> None:
    ledger = PromptLedger()
    first, second = leases(ledger, 2)
    ledger.drop(first, "stale", 0)
    for end in (
        lambda: ledger.drop(first, "stale", 0),
        lambda: ledger.give_back(first, "lost", 0),
        lambda: ledger.use(0, [second, first]),
    ):
        with pytest.raises(ValueError, match="is not open"):
            end()
    assert ledger.batch(0) == ()
    assert ledger.audit().open == 1
    ledger.use(0, [second])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.use(0, [], replayed=[second])  # a batch has a group once
    assert not ledger.audit(steps=1).problems


def test_a_resumed_run_takes_again_what_its_checkpoint_has_not_seen(tmp_path: Path) -> None:
    file = tmp_path / "prompts.sqlite"
    with PromptLedger(file) as ledger:
        group = leases(ledger, 6)
        ledger.use(0, group[:2])
        ledger.use(1, group[2:3])
        ledger.drop(group[3], "uninformative", 1)
    with PromptLedger(file) as ledger:
        again = ledger.resume(1)
        ends = {count.end: count.leases for count in again}
        assert ends == {"used": 1, "dropped": 1, "open": 2}
        assert [lease.position for lease in leases(ledger, 5, 1)] == [2, 3, 4, 5, 6]
        audit = ledger.audit(steps=1)
        assert (audit.used, audit.open, audit.problems) == (2, 5, ())


def test_failures_are_counted_since_the_last_resume() -> None:
    """Or a run that is resumed often would drop the same prompts at every start."""
    ledger = PromptLedger()
    for failures in range(3):
        lease = ledger.lease("w", 0)
        assert (lease.position, lease.failures) == (0, failures)
        ledger.give_back(lease, FAILED, 0)
    lease = ledger.lease("w", 0)
    ledger.drop(lease, "failed too often", 0)
    ledger.resume(0)
    assert ledger.lease("w", 0).failures == 0
    ledger.resume(0)
    for lost in range(4):
        lease = ledger.lease("w", 0)
        assert lease.failures == lost // 3
        ledger.give_back(lease, LOST, 0)


def test_kill_nine_loses_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.sqlite"
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            taken = [int(writer.stdout.readline()) for _ in range(5)][-1]
            os.kill(writer.pid, signal.SIGKILL)
        with PromptLedger(file) as ledger:
            assert not ledger.audit().problems
            assert ledger.batch(taken - 1)  # what was printed is on disk
            ledger.resume(0)
            audit = ledger.audit(steps=0)
            assert (audit.used, audit.dropped, audit.open) == (0, 0, 0)
            assert (audit.waiting, audit.problems) == (audit.prompts, ())


def test_files_that_are_no_ledgers_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at " * 100)
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE leases (lease INTEGER)")
    for file in (text, other):
        with pytest.raises(ValueError, match="ledger of prompts"):
            PromptLedger(file)


def test_an_audit_sees_what_the_constraints_would_have_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.sqlite"
    with PromptLedger(file) as ledger:
        ledger.use(0, leases(ledger, 2))
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("DROP INDEX one_end")
        database.execute(
            "INSERT INTO leases SELECT 9, position, 2, worker, version, end, reason, step FROM "
            "leases WHERE lease = 1"
        )
        database.execute("UPDATE leases SET position = 7 WHERE lease = 2")
    with PromptLedger(file) as ledger:
        problems = "; ".join(ledger.audit(steps=0).problems)
    for part in ("ended twice", "in no batch", "without any lease", "not taken"):
        assert part in problems


@given(
    st.lists(
        st.tuples(st.sampled_from(["lease", "use", "drop", "give", "resume"]), st.integers(0, 9))
    )
)
def test_any_history_keeps_every_prompt_once(history: list[tuple[str, int]]) -> None:
    ledger, opened, step = PromptLedger(), list[Lease](), 0
    for action, number in history:
        if action == "resume":
            step = min(step, number)
            ledger.resume(step)
            opened = []
        elif action == "lease" or not opened:
            opened.append(ledger.lease("w", step))
        elif action == "use":
            ledger.use(step, opened[: number + 1])
            opened, step = opened[number + 1 :], step + 1
        else:
            lease = opened.pop(number % len(opened))
            (ledger.drop if action == "drop" else ledger.give_back)(lease, "because", step)
    audit = ledger.audit(steps=step)
    assert not audit.problems
    assert audit.open == len(opened)
    assert audit.prompts == audit.used + audit.dropped + audit.open + audit.waiting
