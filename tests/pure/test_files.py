"""Files that people share: what was changed since they were written is an error, not a value."""

import fcntl
import json
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparrow import files

CONTENT = {
    "format": 2,
    "name": "tiny-0.86 ✓",
    "budgets": [48, 96, 2**31 - 1],
    "cells": [{"p05": 0.8600000000000001, "low": None}, {"p05": 1e-9, "low": -0.0}],
    "nested": {"b": [1.5, True], "a": "text"},
}


def test_a_document_comes_back_without_its_digest(tmp_path: Path) -> None:
    """Layout and order do not matter; one without a digest is read as it is."""
    files.write_document(tmp_path / "a.json", CONTENT)
    assert files.read_document(tmp_path / "a.json") == CONTENT
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["digest"] == files.content_digest(CONTENT)
    again = json.dumps(dict(sorted(data.items(), reverse=True)), indent=7)
    assert files.parse_document(again) == files.parse_document(json.dumps(CONTENT)) == CONTENT


def refused_of_damaged(whole: bytes, parse: Callable[[bytes], Any], content: dict[str, Any]) -> int:
    """How many of 1000 texts with one changed bit are refused; the others have the same content."""
    rng, refused = random.Random(0), 0
    for _ in range(1000):
        place = rng.randrange(len(whole))
        damaged = whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        try:
            parsed = parse(damaged)
        except ValueError:
            refused += 1
            continue
        assert {key: parsed.get(key) for key in content} == content
    return refused


def test_no_damage_passes_silently() -> None:
    """One changed byte: an error, or the same content (a space, or the digest itself lost)."""
    text = files.document_text(CONTENT).encode()
    assert refused_of_damaged(text, lambda data: files.parse_document(data.decode()), CONTENT) > 750
    for stop in range(len(text) - 2):
        with pytest.raises(ValueError, match=r"JSON|utf-8"):
            files.parse_document(text[:stop].decode())


def test_what_is_wrong_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    for text, what in (
        ("[1]", "list"),
        ("{", "JSON"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"x": ["fine", {"y": "\\u001b[2J"}]}', r"x\[1\]\.y"),
        ('{"\\u0007": 1}', "a key"),
        ('{"x": "a\\u202eb"}', "x"),  # turns the direction of what follows
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "deep"),
        ('{"x": ' + "9" * 5000 + "}", "digits"),
        ('{"a": 1, "digest": "sha256:00"}', "digest"),
        (b"\xff\xfe", "UTF-8"),
        (None, "read"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ValueError, match=what) as error:
            files.read_document(file, "surface")
        assert str(error.value).startswith(f"surface {file}")


def test_lines_come_back_without_their_digest_and_changed_ones_do_not() -> None:
    """Where the digest itself is what was damaged, the values are those that were written."""
    data = {"step": 12, "reward": 0.5, "text": 'a "quoted" line'}
    line = files.add_line_digest(json.dumps(data))
    assert json.loads(line)["step"] == 12
    assert files.parse_line(f"{line}\n") == data
    assert files.parse_line(json.dumps(data)) == data  # older lines have none
    for text in ("[1]", "1", "{", "", line + line, line.replace('"digest": "', '"digest": "x')):
        with pytest.raises(ValueError, match=r"."):
            files.parse_line(text)
    assert (
        refused_of_damaged(line.encode(), lambda text: files.parse_line(text.decode()), data) > 700
    )


def test_two_threads_write_one_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: files.write_whole(tmp_path / "status", [str(n)] * 9), range(200)))
    text = (tmp_path / "status").read_text()
    assert text == text[: len(text) // 9] * 9  # of one writer
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


def test_what_a_killed_process_was_writing_is_found(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        files.unfinished_path(tmp_path / "model").mkdir()
        files.unfinished_path(tmp_path / "metrics.jsonl").touch()
        os._exit(0)
    os.waitpid(child, 0)
    files.write_whole(tmp_path / "kept.txt", ["kept"])
    (tmp_path / f".other.{os.getppid()}.unfinished").touch()  # of a process that runs
    assert sorted(path.name for path in files.unfinished_paths(tmp_path)) == [
        f".metrics.jsonl.{child}-{child}.unfinished",
        f".model.{child}-{child}.unfinished",
    ]
    assert files.unfinished_paths(tmp_path / "nowhere") == []
    files.remove_unfinished(tmp_path, "metrics.jsonl")
    assert [path.name for path in files.unfinished_paths(tmp_path)] == [
        f".model.{child}-{child}.unfinished"
    ]
    (tmp_path / f".link.{child}.unfinished").symlink_to(tmp_path / "kept.txt")
    files.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "kept.txt",
        f".other.{os.getppid()}.unfinished",
    }


# Locks.


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    lock = files.FolderLock(tmp_path)
    with pytest.raises(ValueError, match=str(os.getpid())):
        files.FolderLock(tmp_path)
    lock.close()
    files.FolderLock(tmp_path).close()


def test_who_holds_a_lock_is_seen_without_a_trace(tmp_path: Path) -> None:
    assert files.lock_holder(tmp_path) is None
    assert not any(tmp_path.iterdir())
    lock = files.FolderLock(tmp_path)
    assert files.lock_holder(tmp_path) == os.getpid()
    (tmp_path / files.LOCK).write_text("not a number")
    assert files.lock_holder(tmp_path) == 0
    lock.close()
    assert files.lock_holder(tmp_path) is None
    makes = (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"))
    for number, make in enumerate(makes):
        (tmp_path / str(number)).mkdir()
        make(tmp_path / str(number) / files.LOCK)
        assert files.lock_holder(tmp_path / str(number)) is None


def test_a_look_at_a_lock_does_not_refuse_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who looks holds it for an instant."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.5)
    with (tmp_path / files.LOCK).open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        timer = threading.Timer(0.01, looked_at.close)
        timer.start()
        files.FolderLock(tmp_path).close()
        timer.join()


def test_a_lock_that_is_a_link_changes_and_makes_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for link in (os.symlink, os.link, lambda _, at: os.mkfifo(at)):
        link(tmp_path / "precious", tmp_path / files.LOCK)
        with pytest.raises(ValueError, match=files.LOCK):
            files.FolderLock(tmp_path)
        assert (tmp_path / "precious").read_text() == "precious"
        (tmp_path / files.LOCK).unlink()
    (tmp_path / files.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=files.LOCK):
        files.open_lock(tmp_path / files.LOCK)
    assert not (tmp_path / "elsewhere").exists()


def test_no_link_is_followed_where_files_are_written(tmp_path: Path) -> None:
    """Neither one that has the file's name, nor one where it is written before."""
    kept, path = tmp_path / "kept.txt", tmp_path / "new.txt"
    kept.write_text("dear")
    for link in (path, files.unfinished_path(path)):
        link.symlink_to(kept)
        files.write_whole(path, ["new"])
        assert (kept.read_text(), path.read_text(), path.is_symlink()) == ("dear", "new", False)
    path.unlink()
    for make in (path.symlink_to, lambda _: os.mkfifo(path)):
        make(kept)
        with pytest.raises(ValueError, match=r"new\.txt"):
            files.open_append(path)
        path.unlink()
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="symbolic link"):
        files.make_folder(tmp_path / "folder")
    with files.open_append(path) as file:
        file.write(b"a")
    assert path.read_bytes() == b"a"


def test_digests_of_files_and_not_of_pipes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert files.file_digest(tmp_path / "a").startswith("ba7816bf")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="regular file"):
        files.file_digest(tmp_path / "pipe")
