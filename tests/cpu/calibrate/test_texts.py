"""The texts that flows are scored on: found, named, long enough, and carried to another machine."""

import hashlib
from pathlib import Path

import pytest

from sparrow.calibrate.flows import texts
from sparrow.calibrate.flows.texts import CUT, SOURCES, Text


@pytest.fixture(scope="module")
def standard() -> list[Text]:
    return texts.standard()


def test_ten_named_texts_of_mixed_kinds(standard) -> None:
    assert len(standard) == len({text.name for text in standard}) == 10
    assert {text.kind.split(":")[0] for text in standard} >= {"prose", "Python", "C", "C++", "data"}
    assert all(len(source.sha256) == 64 for source in SOURCES)
    assert all(30_000 < len(text.text) <= CUT for text in standard)


def test_they_have_as_many_tokens_as_a_score_asks_for(standard) -> None:
    folder = Path.home() / ".cache/sparrow/models/smollm2-135m"
    if not folder.is_dir():
        pytest.skip("smollm2-135m was not fetched")
    from sparrow.models import load_tokenizer

    tokenizer = load_tokenizer(folder)
    for text in standard:
        assert len(tokenizer(text.text, verbose=False)["input_ids"]) >= 8192, text.name


def test_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SOURCES[0]._replace(sha256="0" * 64)
    same = other._replace(sha256=hashlib.sha256(other.file().read_bytes()).hexdigest())
    assert "another version" in other.read().note
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


def test_a_written_folder_reads_as_the_same_texts(standard, tmp_path: Path) -> None:
    place = texts.write(tmp_path / "texts")
    found = {text.name: text for text in texts.from_folder(place)}
    assert {name: text.sha256 for name, text in found.items()} == {
        text.name: text.sha256 for text in standard
    }
    assert all(found[text.name].kind == text.kind for text in standard)


def test_a_folder_has_texts_by_their_endings(tmp_path: Path) -> None:
    for name, data in {"b.md": b"b", "a.txt": b"a\r\na", "c.py": b"c", "d.bin": b"\xff"}.items():
        (tmp_path / name).write_bytes(data)
    found = texts.from_folder(tmp_path)
    assert [(text.name, text.text) for text in found] == [("a", "a\na"), ("b", "b"), ("c", "c")]


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ValueError, match=folder.name):
            texts.from_folder(folder)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt"):
        texts.from_folder(tmp_path)
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(ValueError, match="'a'"):
        texts.from_folder(tmp_path)
