"""The texts that flows are scored on: found, named, long enough, and carried to another machine."""

import hashlib
from pathlib import Path

import pytest

from sparrow.calibration.flows import texts
from sparrow.calibration.flows.texts import CUT, SOURCES, Text


@pytest.fixture(scope="module")
def standard() -> list[Text]:
    return texts.standard()


def test_ten_named_texts_of_mixed_kinds(standard) -> None:
    assert len(standard) == len({text.name for text in standard}) == 10
    assert {text.kind.split(":")[0] for text in standard} >= {"prose", "Python", "C", "C++", "data"}
    assert all(len(source.sha256) == 64 for source in SOURCES)
    assert all(30_000 < len(text.text) <= CUT for text in standard)


def test_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SOURCES[0]._replace(sha256="0" * 64)
    same = other._replace(sha256=hashlib.sha256(other.file().read_bytes()).hexdigest())
    assert "not comparable" in other.read().note
    assert same.read().note == ""
    monkeypatch.setattr(texts, "SOURCES", (other, same))
    notes: list[str] = []
    texts.standard(notes.append)
    assert notes == [other.read().note]
    for gone in ({"package": "no_such_package"}, {"path": "nothing.py"}):
        with pytest.raises(ValueError, match=other.name):
            other._replace(**gone).read()
    with pytest.raises(ValueError, match=SOURCES[1].name):
        SOURCES[1]._replace(package="no-such-distribution").read()


def test_folders(standard, tmp_path: Path) -> None:
    found = texts.from_folder(texts.write(tmp_path / "texts"))
    assert sorted(found) == sorted(text._replace(note="") for text in standard)
    own = tmp_path / "own"
    own.mkdir()
    for folder in (tmp_path / "nothing", own):
        with pytest.raises(ValueError, match=folder.name):
            texts.from_folder(folder)
    for name, data in {"b.md": b"b", "a.txt": b"a\r\na", "c.py": b"c", "d.bin": b"\xff"}.items():
        (own / name).write_bytes(data)
    found = texts.from_folder(own)
    assert [(text.name, text.text) for text in found] == [("a", "a\na"), ("b", "b"), ("c", "c")]
    (own / "a.md").write_text("x")
    with pytest.raises(ValueError, match="'a'"):
        texts.from_folder(own)
    (own / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt"):
        texts.from_folder(own)
