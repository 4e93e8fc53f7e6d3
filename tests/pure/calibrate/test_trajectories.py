"""The file of measurements: nothing lost, nothing mixed."""

import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sparrow.calibrate.trajectories import FILE, Measured, Trajectories, _digest

ABOUT = {"model": "ab", "temperature": 1.0}


def measured(prompt: int = 0, sample: int = 0, tokens: int = 5, drawn: bool = True) -> Measured:
    rng = np.random.default_rng(prompt)
    alpha = rng.random(tokens, np.float32)
    return Measured(
        prompt=prompt,
        sample=sample,
        prompt_tokens=7,
        first=8,
        ids=np.arange(8 + tokens, dtype=np.int32),
        alpha=alpha,
        entropy=rng.random(tokens, np.float32),
        below=np.zeros(tokens, np.float32),
        above=np.full(tokens, 0.25, np.float32),
        ratio=alpha if drawn else None,
    )


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, ABOUT)
    for prompt in (3, 1):
        store.put("arm", measured(prompt))
    store.put("other", measured(tokens=0, drawn=False))
    store.close()

    again = Trajectories(tmp_path, ABOUT)
    assert again.done("arm") == {(1, 0), (3, 0)}
    first, second = again.of("arm")
    assert (first.prompt, second.prompt) == (1, 3)
    for name in ("ids", "alpha", "entropy", "below", "above", "ratio"):
        np.testing.assert_array_equal(getattr(first, name), getattr(measured(1), name))
    assert first.lengths.tolist() == [8, 9, 10, 11, 12]
    assert first.positions.tolist() == [1, 2, 3, 4, 5]
    (empty,) = again.of("other")
    assert len(empty.alpha) == 0
    assert empty.ratio is None


def test_what_is_there_stays(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, ABOUT)
    store.put("arm", measured(1, tokens=5))
    store.put("arm", measured(1, tokens=9))
    assert [len(one.alpha) for one in store.of("arm")] == [5]


def test_other_measurements_are_refused(tmp_path: Path) -> None:
    Trajectories(tmp_path, ABOUT).close()
    for about, told in (({"model": "cd", "temperature": 1.0}, "model"), ({"model": "ab"}, "temp")):
        with pytest.raises(ValueError, match=told):
            Trajectories(tmp_path, about)


def values_of(store: Trajectories) -> list[list[object]]:
    return [
        [x.tobytes() if isinstance(x, np.ndarray) else x for _, x in one]
        for arm in ("dense", "sparse")
        for one in store.of(arm)
    ]


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """Flipped bits and lost ends: the file is named, or every row is what it was."""
    with closing(Trajectories(tmp_path, ABOUT)) as store:
        for prompt in range(4):
            store.put("dense", measured(prompt, tokens=300))
            store.put("sparse", measured(prompt, tokens=200, drawn=False))
        written, done = values_of(store), store.done("sparse")
    whole, chance = store.file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        page = chance.randrange(len(content) // 4096) * 4096
        place = page + chance.randrange(chance.choice([120, 4096]))  # the head of a page, or any
        content[place] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del content[max(1, place) :]
        store.file.write_bytes(content)
        found = _values_or_fault(tmp_path)
        refused += isinstance(found, str)
        assert found == (written, done) or str(store.file) in str(found)
    assert refused > 50


def _values_or_fault(folder: Path) -> tuple[list[list[object]], set[tuple[int, int]]] | str:
    try:
        with closing(Trajectories(folder, ABOUT)) as store:
            store.put("new", measured(9))
            return values_of(store), store.done("sparse")
    except ValueError as error:
        return str(error)


def test_a_changed_row_is_named(tmp_path: Path) -> None:
    """By prompt and sample; also where the value is as valid as the one before."""
    with closing(Trajectories(tmp_path, ABOUT)) as store:
        store.put("arm", measured(3))
        store.put("arm", measured(4, sample=2))
    for change in ("first = 9", "alpha = ids", "alpha = x'00'", "ratio = 'x'", "digest = ''"):
        with closing(sqlite3.connect(store.file)) as db, db:
            (before,) = db.execute("SELECT * FROM trajectories WHERE prompt = 4")
            db.execute(f"UPDATE trajectories SET {change} WHERE prompt = 4")
        with (
            closing(Trajectories(tmp_path, ABOUT)) as again,
            pytest.raises(ValueError, match=rf"{FILE} is damaged .*prompt 4, sample 2"),
        ):
            list(again.of("arm"))
        with closing(sqlite3.connect(store.file)) as db, db:
            db.execute("DELETE FROM trajectories WHERE prompt = 4")
            db.execute(f"INSERT INTO trajectories VALUES ({', '.join('?' * len(before))})", before)
    with closing(Trajectories(tmp_path, ABOUT)) as again:
        assert len(list(again.of("arm"))) == 2


TRIGGER = "CREATE TRIGGER t AFTER INSERT ON trajectories BEGIN DELETE FROM about; END"


STRANGE = (
    "DELETE FROM about WHERE key = 'format'",
    "UPDATE about SET value = 3 WHERE key = 'format'",
    "ALTER TABLE trajectories RENAME COLUMN alpha TO beta",
    "INSERT INTO about VALUES (x'6b6579', 'value')",
    TRIGGER,
)


def test_files_of_another_make_are_refused(tmp_path: Path) -> None:
    for number, statement in enumerate(STRANGE):
        with closing(Trajectories(tmp_path / str(number), ABOUT)) as store:
            store.put("arm", measured())
        with closing(sqlite3.connect(store.file)) as db, db:
            db.execute(statement)
        with pytest.raises(ValueError, match=FILE):
            Trajectories(tmp_path / str(number), ABOUT)
    (tmp_path / FILE).write_text("this is no database, but long enough to be one" * 50)
    with pytest.raises(ValueError, match=FILE):
        Trajectories(tmp_path, ABOUT)


def test_an_error_while_writing_names_the_file(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, ABOUT)
    store._db.execute("PRAGMA max_page_count = 1")  # as a full disk
    with pytest.raises(ValueError, match=rf"{FILE} cannot be read or written: .*full"):
        store.put("arm", measured(tokens=10_000))


def test_a_killed_writer_leaves_whole_trajectories(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from calibrate_writer import measured\n"
        "from sparrow.calibrate.trajectories import Trajectories\n"
        f"store = Trajectories(sys.argv[1], {ABOUT!r})\n"
        "for number in range(10**6): store.put('arm', measured(number, tokens=2000))\n"
    )
    here = tmp_path / "calibrate_writer.py"
    here.write_text(Path(__file__).read_text())
    root = str(Path(__file__).parents[3])
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(tmp_path), root])
    while not (tmp_path / FILE).exists() or (tmp_path / FILE).stat().st_size < 200_000:
        time.sleep(0.01)
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = list(Trajectories(tmp_path, ABOUT).of("arm"))
    assert [one.prompt for one in found] == list(range(len(found)))
    assert all(len(one.alpha) == 2000 for one in found)
    assert len(found) > 1


def test_a_journal_deletes_no_other_file(tmp_path: Path) -> None:
    Trajectories(tmp_path, ABOUT).close()
    victim, magic = tmp_path / "victim", bytes.fromhex("d9d505f920a163d7")
    victim.write_text("dear")
    (page,) = struct.unpack(">H", (tmp_path / FILE).read_bytes()[16:18])
    name = str(victim).encode()
    header = magic + struct.pack(">IIIII", 0, 0, 1, 512, page)
    tail = name + struct.pack(">II", len(name), sum(name)) + magic
    journal = header.ljust(512, b"\0") + struct.pack(">I", 2**30 // page + 1) + tail
    (tmp_path / f"{FILE}-journal").write_bytes(journal)
    with pytest.raises(ValueError, match="-journal names other files"):
        Trajectories(tmp_path, ABOUT)
    assert victim.exists()


def test_a_journal_does_not_make_the_file_larger(tmp_path: Path) -> None:
    Trajectories(tmp_path, ABOUT).close()
    before = (tmp_path / FILE).stat().st_size
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 0, 0, 2**30, 512, 1024)
    (tmp_path / f"{FILE}-journal").write_bytes(head.ljust(4096, b"\0"))
    with pytest.raises(ValueError, match="is not the journal of"):
        Trajectories(tmp_path, ABOUT)
    assert (tmp_path / FILE).stat().st_size == before


def test_links_are_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    for suffix in ("", "-journal", "-wal"):
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir()
        (folder / f"{FILE}{suffix}").symlink_to(other)
        with pytest.raises(ValueError, match="link"):
            Trajectories(folder, ABOUT)
    assert other.read_bytes() == b""


def test_rows_of_strangers_with_their_digests(tmp_path: Path) -> None:
    zeros = zlib.compress(b"\0" * 400)
    wrong: list[tuple[str, object]] = [("first", value) for value in ("abc", 1.5, 2**31)]
    wrong += [("prompt_tokens", -1), ("ids", "text"), ("alpha", zeros), ("alpha", zeros[:-3])]
    wrong += [("alpha", zlib.compress(b"\0" * (1 << 27)))]
    for number, (column, value) in enumerate(wrong):
        folder = tmp_path / str(number)
        with closing(Trajectories(folder, ABOUT)) as store:
            store.put("arm", measured(1))
        with closing(sqlite3.connect(store.file)) as db, db:
            db.execute(f"UPDATE trajectories SET {column} = ?", (value,))
            ((*values, _),) = db.execute("SELECT * FROM trajectories")
            db.execute("UPDATE trajectories SET digest = ?", (_digest(values),))
        with closing(Trajectories(folder, ABOUT)) as again, pytest.raises(ValueError, match=FILE):
            list(again.of("arm"))
