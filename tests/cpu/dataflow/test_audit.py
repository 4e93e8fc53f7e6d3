"""`sparrow audit`: what the files prove, every kind of damage, and that nothing is written."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import async_runs, cli
from support.run_folders import training, write_lines

from sparrow.dataflow.asynchronous.audit import audit
from sparrow.dataflow.asynchronous.ledger_file import open_ledger
from sparrow.dataflow.asynchronous.prompt_ledger import PromptLedger
from sparrow.dataflow.run_files import RunFiles, read_rollouts, rollouts_file, write_rollouts
from sparrow.files import FolderLock, write_sums
from sparrow.schema.asynchronous import PROMPTS
from sparrow.schema.loading import save_resolved
from sparrow.schema.run_folder import METRICS

STEPS = async_runs.STEPS
# Leases and batches as fast as they can be written; the log starts over every few of them.
WRITER = """
import sys
from pathlib import Path
from sparrow.dataflow.asynchronous.prompt_ledger import PromptLedger
from sparrow.dataflow.run_files import LineFile
from sparrow.files import FolderLock
folder = Path(sys.argv[1])
lock, lines = FolderLock(folder), LineFile(folder / "metrics.jsonl")
ledger = PromptLedger(folder / "prompts.sqlite")
ledger._database.execute("PRAGMA wal_autocheckpoint = 20")
ledger._database.execute("PRAGMA synchronous = OFF")
step = 0
while True:
    leases = [ledger.lease("worker", step) for _ in range(6)]
    ledger.drop(leases[0], "uninformative", step)
    ledger.give_back(leases[1], "worker lost", step)
    ledger.use(step, leases[2:])
    lines.append({"step": step})
    step += 1
    print(step, flush=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs by seed; tests change copies."""
    folder = tmp_path_factory.mktemp("runs")
    return {seed: async_runs.run(folder / str(seed), seed=seed) for seed in range(3)}


@pytest.fixture
def folder(made: dict[int, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def change(folder: Path, statements: str) -> None:
    with closing(sqlite3.connect(folder / PROMPTS, isolation_level=None)) as database:
        database.executescript(statements)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# What is proven.


def test_a_run_is_proven_and_its_folder_is_as_before(made: dict[int, Path]) -> None:
    for folder in made.values():
        before = snapshot(folder)
        result = audit(folder)
        assert snapshot(folder) == before
        assert result.proven, result.problems
        assert not result.notes
        assert (result.steps, result.begun, result.compared) == (STEPS, False, STEPS)
        assert result.used == 4 * STEPS
        ended = result.used + sum(result.dropped.values())
        assert result.prompts == ended + result.open + result.waiting
        assert set(result.dropped) <= {"uninformative", "failed too often"}
        assert result.oldest in (1, 2)


def test_the_ledger_of_a_killed_process_is_read_with_its_log(tmp_path: Path) -> None:
    """The log is what a killed process leaves: opening it in place would change the file."""
    played = async_runs.Played(tmp_path / "run")
    played.step()
    log = tmp_path / "run" / f"{PROMPTS}-wal"
    left = snapshot(tmp_path / "run")
    assert log.stat().st_size > 0
    result = audit(tmp_path / "run")
    assert (result.proven, result.steps, result.used) == (True, 1, 4)
    assert snapshot(tmp_path / "run") == left
    played.close()


def test_a_batch_that_is_being_learnt_is_not_beyond(tmp_path: Path) -> None:
    folder = async_runs.run(tmp_path / "run", 3, begun=True)
    result = audit(folder)
    assert (result.proven, result.steps, result.begun) == (True, 3, True)
    write_sums(folder, [METRICS])  # the run has ended: nothing is being learnt
    assert "steps that were not taken: [3]" in audit(folder).problems[0]


def test_replayed_groups_and_rows_of_files(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "answer": str(n)} for n in range(40)]
    write_lines(tmp_path / "rows.jsonl", rows)
    data = {"task": None, "rows": str(tmp_path / "rows.jsonl"), "reward": "math"}
    folder = async_runs.run(tmp_path / "run", data=data, dispatch={"replay": 0.5})
    result = audit(folder)
    assert result.proven, result.problems
    assert result.used == 2 * STEPS
    (folder / "left_out.txt").write_text("row 3: prompt has 900 tokens, at most 500 fit\n")
    assert "rollouts of step" in audit(folder).problems[0]  # the order of the others is another
    (tmp_path / "rows.jsonl").unlink()
    result = audit(folder)
    assert result.proven
    assert "counted, not compared by name" in result.notes[0]


def test_a_ledger_that_went_back_to_the_checkpoint_before_the_other_files(folder: Path) -> None:
    async_runs.save_checkpoint(folder, 4)
    with PromptLedger(folder / PROMPTS) as ledger:
        ledger.resume(4)
    result = audit(folder)
    assert (result.proven, result.steps, result.begun) == (True, 4, False)
    assert "taken again" in result.notes[0]
    assert result.again["taken again from step 4"] > 0
    async_runs.save_checkpoint(folder, 5)  # from which it cannot have resumed
    assert "without a batch in the ledger: 4, 5" in audit(folder).problems[0]


def test_files_that_went_back_to_the_checkpoint_before_the_ledger(folder: Path) -> None:
    async_runs.save_checkpoint(folder, 3)
    with RunFiles(folder, tensorboard=False) as files:
        files.begin(async_runs.config(), 3)
        result = audit(folder)
    assert (result.proven, result.steps, result.begun, result.running) == (True, 3, False, True)
    assert "taken again" in result.notes[0]
    change(folder, "UPDATE uses SET step = 9 WHERE step = 5")
    assert "not taken: [4, 9]" in "; ".join(audit(folder).problems)  # a gap: no run that resumes


def test_metrics_that_are_gone_are_no_run_that_resumes(folder: Path) -> None:
    write_lines(folder / METRICS, [])
    assert "not taken: [1, 2, 3, 4, 5]" in audit(folder).problems[0]  # its rollouts are there


# What is found.


ONE = "(SELECT lease FROM uses WHERE step = 2 LIMIT 1)"  # lease of that batch
FOUND = {  # statements, and what is said
    "a used lease is gone": ("DELETE FROM leases WHERE lease = 3", "gap in their numbers: 4"),
    "a returned lease is gone": (
        """DELETE FROM leases
        WHERE lease = (SELECT min(lease) FROM leases WHERE end = 'returned')""",
        "attempt missing",
    ),
    "a prompt is gone": ("DELETE FROM leases WHERE position = 5", "without any lease: 1"),
    "a use is gone": (f"DELETE FROM uses WHERE lease = {ONE}", "used leases in no batch"),
    "a second first use": (
        "DROP INDEX one_first_use; INSERT INTO uses SELECT step + 1, lease, 0 FROM uses LIMIT 1",
        "used twice for the first time",
    ),
    "a second end": (
        """DROP INDEX one_end;
        INSERT INTO leases
        SELECT (SELECT max(lease) FROM leases) + 1, position, attempt + 1, worker, version,
        'dropped', 'stale', step FROM leases WHERE end = 'used' LIMIT 1""",
        "prompts that ended twice",
    ),
    "leased after its end": (
        """INSERT INTO leases (position, attempt, worker, version)
        SELECT position, attempt + 1, worker, version FROM leases WHERE end = 'used' LIMIT 1""",
        "ended and are leased",
    ),
    "a lost constraint": ("DROP INDEX one_open_lease", "lost its constraint one_open_lease"),
    "a batch of a step that was not taken": (
        f"""UPDATE uses SET step = {STEPS + 3} WHERE step = 2;
        UPDATE leases SET step = {STEPS + 3} WHERE step = 2 AND end = 'used'""",
        f"not taken: [{STEPS + 3}]",
    ),
    "a batch is missing": (
        """DELETE FROM uses WHERE step = 2;
        UPDATE leases SET end = 'returned', reason = 'lost' WHERE step = 2 AND end = 'used'""",
        "without a batch in the ledger: 2",
    ),
    "a batch of another step": (
        f"UPDATE leases SET step = 1 WHERE lease = {ONE}",
        "in a batch of another step",
    ),
    "a batch is too small": (
        f"""UPDATE leases SET end = 'dropped', reason = 'stale' WHERE lease = {ONE};
        DELETE FROM uses WHERE lease = {ONE}""",
        "do not have 4 groups: of steps 2",
    ),
    "used where it was dropped": (
        f"UPDATE leases SET end = 'dropped', reason = 'stale' WHERE lease = {ONE}",
        "did not end as used",
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_damage_to_the_ledger_is_found(what: str, folder: Path) -> None:
    statements, said = FOUND[what]
    change(folder, statements)
    assert said in "\n".join(audit(folder).problems)
    ended = cli.run("audit", folder)
    assert ended.code == 1
    assert said in ended.stdout
    assert "proven" not in ended.stdout


@given(st.integers(0, 2), st.sampled_from(["leases", "uses"]), st.integers(0, 10**6))
def test_any_row_that_is_missing_is_found(
    made: dict[int, Path], seed: int, table: str, number: int
) -> None:
    """But for a last lease that was not used: so a ledger looks before that prompt is leased."""
    folder = made[seed].parent / f"missing-{os.getpid()}"
    shutil.copytree(made[seed], folder)
    try:
        with closing(sqlite3.connect(folder / PROMPTS, isolation_level=None)) as database:
            rows = database.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall()
            (row,) = rows[number % len(rows)]
            end = database.execute("SELECT end FROM leases WHERE lease = ?", (row,)).fetchone()
            database.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
        last = table == "leases" and (row,) == rows[-1] and end != ("used",)
        assert audit(folder, rollouts=False).proven == last
    finally:
        shutil.rmtree(folder)


def test_metrics_that_do_not_match(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for line in lines:
        del line["digest"]
    write_lines(folder / METRICS, [line for line in lines if line["step"] != 3])
    assert audit(folder).problems == ("batches of steps that metrics.jsonl does not have: 3",)
    write_lines(folder / METRICS, lines[:-2])
    assert f"not taken: [{STEPS - 1}]" in audit(folder).problems[0]
    write_lines(folder / METRICS, [*lines, {"step": STEPS + 4}])
    found = "\n".join(audit(folder).problems)
    assert f"without a batch in the ledger: {STEPS + 4}" in found
    assert f"steps neither in metrics.jsonl nor in the ledger: 4 of {STEPS + 5}" in found
    write_lines(folder / METRICS, [line | {"async/staleness_max": 3.0} for line in lines])
    assert (
        "staleness above 2 in metrics.jsonl: 0, 1, 2, 3, 4 and 1 more" in audit(folder).problems[0]
    )


def test_rollouts_that_do_not_match(folder: Path) -> None:
    groups = read_rollouts(folder, 2)
    other = read_rollouts(folder, 3)

    def found() -> str:
        result = audit(folder)
        assert audit(folder, rollouts=False).proven
        return "\n".join(result.problems)

    write_rollouts(folder, 2, [*groups[:3], other[0]])
    assert f"step 2 have {other[0].prompt_id} where its batch has {groups[3].prompt_id}" in found()
    write_rollouts(folder, 2, groups[:3])
    assert "rollouts of step 2: 3 groups, its batch has 4" in found()
    future = async_runs.group(groups[0].prompt_id, (3, 2))
    write_rollouts(folder, 2, [future, *groups[1:]])
    assert "tokens in the rollouts of step 2 are -1 to" in found()
    aged = async_runs.group(read_rollouts(folder, 5)[0].prompt_id, (2, 5))
    write_rollouts(folder, 2, groups)
    write_rollouts(folder, 5, [aged, *read_rollouts(folder, 5)[1:]])
    assert "tokens in the rollouts of step 5 are 0 to 3 versions old, expected 0 to 2" in found()
    file = rollouts_file(folder, 5)
    file.write_text(file.read_text().replace('"reward":1', '"reward":2'))
    assert "step_000005.jsonl, line 1" in found()
    file.unlink()
    assert audit(folder).proven
    assert f"{STEPS - 1} of {STEPS} steps" in audit(folder).notes[0]


def test_settings_of_another_version_leave_the_ledger_alone(folder: Path) -> None:
    (folder / "config.resolved.toml").write_text("[run]\nunknown = 1\n")
    result = audit(folder)
    assert result.proven
    assert "not checked" in result.notes[0]
    assert result.compared == STEPS


# A run that goes on.


def test_a_running_run_is_read_at_one_moment(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / METRICS).touch()
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            first = int(writer.stdout.readline())
            steps = []
            for _ in range(15):
                result = audit(folder, rollouts=False)
                assert result.running
                assert result.proven, result.problems
                steps.append(result.steps)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
    assert steps[-1] > steps[0] >= first
    result = audit(folder, rollouts=False)
    assert result.proven, result.problems
    assert not result.running
    assert result.steps >= steps[-1]


def test_a_file_that_never_holds_still_is_said_to_be_in_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "sparrow.dataflow.asynchronous.ledger_file"
    monkeypatch.setattr(f"{module}._copy_once", lambda *_: False)
    monkeypatch.setattr(f"{module}.PAUSE", 0.0)
    assert "is in use and changes too fast" in cli.refused("audit", folder)


def test_a_lock_is_no_obstacle(folder: Path) -> None:
    with closing(FolderLock(folder)), PromptLedger(folder / PROMPTS):
        result = audit(folder)
    assert result.running
    assert result.proven


# Files of strangers.


def test_what_is_not_an_asynchronous_run(tmp_path: Path) -> None:
    assert "not a run directory" in cli.refused("audit", tmp_path)
    assert "not a run directory" in cli.refused("audit", tmp_path / "absent")
    assert "asynchronous runs have" in cli.refused("audit", training(tmp_path / "sync"))


def text(file: Path) -> None:
    file.write_text("no database, but long enough to be looked at " * 100)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def inner_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def pipe_for_a_log(file: Path) -> None:
    os.mkfifo(file.with_name(f"{file.name}-wal"))


def remade(statements: str) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.unlink()
        change(file.parent, statements)

    return make


def changed(statements: str) -> Callable[[Path], None]:
    return lambda file: change(file.parent, statements)


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS position"
HOSTILE: dict[str, Callable[[Path], None]] = {
    "text": text,
    "empty": empty,
    "pipe": pipe,
    "folder": inner_folder,
    "pipe for a log": pipe_for_a_log,
    "other tables": remade("CREATE TABLE leases (lease INTEGER)"),
    "no tables of ours": remade("CREATE TABLE secrets (a)"),
    "a view that never ends": remade(
        f"""CREATE TABLE uses (step, lease, replayed);
        CREATE VIEW leases AS {ENDLESS}, 1 AS lease FROM n;
        PRAGMA user_version = 1"""
    ),
    "one more view": changed(f"CREATE VIEW more AS {ENDLESS} FROM n"),
    "a trigger": changed("CREATE TRIGGER t AFTER INSERT ON uses BEGIN DELETE FROM leases; END"),
    "a virtual table": changed("CREATE VIRTUAL TABLE found USING fts5(text)"),
    "an index of the same name": changed(
        "DROP INDEX one_end; CREATE INDEX one_end ON leases (abs(position))"
    ),
    "another version": changed("PRAGMA user_version = 2"),
    "a position of another kind": changed("UPDATE leases SET position = x'00ff' WHERE lease = 1"),
    "a huge position": changed(f"UPDATE leases SET position = {2**63 - 1} WHERE lease = 1"),
    "a step of another kind": changed("UPDATE leases SET step = 'one' WHERE lease = 1"),
    "a reason that is no text": changed(
        "UPDATE leases SET reason = CAST(x'ff00fe' AS TEXT) WHERE lease = 1"
    ),
    "a constraint that does not hold": changed(
        "PRAGMA ignore_check_constraints = ON; UPDATE leases SET attempt = -1 WHERE lease = 1"
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_are_no_ledgers_are_refused(what: str, folder: Path) -> None:
    HOSTILE[what](folder / PROMPTS)
    names = sorted(path.name for path in folder.iterdir())
    said = cli.refused("audit", folder)
    assert PROMPTS in said
    assert "sparrow-ledger-" not in said  # the name of the copy
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_link_to_nothing_is_refused(folder: Path) -> None:
    link_to_itself(folder / PROMPTS)
    assert PROMPTS in cli.refused("audit", folder)


def test_reasons_of_strangers_are_shown_and_not_obeyed(folder: Path) -> None:
    hostile = "x\x1b]0;pwned\x07\x1b[2J\r\x9b31m[/b][red]" + "y" * 200
    with closing(sqlite3.connect(folder / PROMPTS, isolation_level=None)) as database:
        database.execute("UPDATE leases SET reason = ? WHERE end = 'dropped'", (hostile,))
    for words in (("audit", folder), ("audit", folder, "--json")):
        shown = cli.passed(*words).stdout
        assert "pwned" in shown
        assert not [char for char in shown if ord(char) < 32 and char != "\n"]
        assert "y" * 100 not in shown


def test_code_that_a_run_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": str(n)} for n in range(9)])
    data = {"task": None, "rows": str(tmp_path / "rows.jsonl"), "reward": "evil:score"}
    folder = async_runs.run(tmp_path / "run", 1, data=data, rollout={"episode": "evil:episode"})
    assert audit(folder).proven
    assert not (tmp_path / "marker").exists()


def test_rows_of_the_hub_are_not_downloaded(tmp_path: Path, folder: Path) -> None:
    data = {"task": None, "rows": "owner/rows:train", "reward": "math"}
    save_resolved(async_runs.config(data=data), folder)
    result = audit(folder)
    assert result.proven
    assert "owner/rows:train is not here" in result.notes[0]


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_are_a_message_or_a_problem(
    seed: int, made: dict[int, Path], tmp_path: Path
) -> None:
    """Cut short, or with other bytes: never a traceback; the rest of the run is not touched."""
    draw = random.Random(seed)
    folder = Path(shutil.copytree(made[seed % 3], tmp_path / "run"))
    file = folder / PROMPTS
    content = bytearray(file.read_bytes())
    if seed % 2:
        content = content[: draw.randrange(len(content))]
    else:
        for _ in range(draw.choice((1, 8, 64))):
            content[draw.randrange(len(content))] = draw.randrange(256)
    file.write_bytes(content)
    if seed % 5 == 0:
        file.with_name(f"{PROMPTS}-wal").write_bytes(draw.randbytes(5000))
    before = snapshot(folder)
    ended = cli.run("audit", folder, "--no-rollouts")
    assert ended.code in (0, 1, 2)
    assert ended.code != 2 or ended.stderr.count("error:") == 1
    assert snapshot(folder) == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_a_log_that_was_cut_short_loses_steps_and_says_so(share: float, tmp_path: Path) -> None:
    played = async_runs.Played(tmp_path / "run")
    for _ in range(3):
        played.step()
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    played.close()
    log = copy / f"{PROMPTS}-wal"
    log.write_bytes(log.read_bytes()[: int(share * log.stat().st_size)])
    ended = cli.run("audit", copy)
    assert ended.code == (1 if share else 2)
    assert ("without a batch" if share else "not those of a ledger") in ended.said


def test_batches_are_those_of_the_ledger(folder: Path) -> None:
    with open_ledger(folder / PROMPTS) as read:
        assert [*read.batches] == list(range(STEPS))
        for step, batch in read.batches.items():
            assert batch.fresh == read.ledger.batch(step)
            assert not batch.replayed


def test_json_has_every_number(folder: Path) -> None:
    result = json.loads(cli.passed("audit", folder, "--json").stdout)
    assert (result["steps"], result["used"], result["problems"]) == (STEPS, 4 * STEPS, [])
    shown = cli.passed("audit", folder).stdout
    assert "proven" in shown
    assert f"{STEPS} steps taken" in shown
