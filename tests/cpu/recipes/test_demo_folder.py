"""The demo's folder: whose it is, and what beginning anew deletes."""

from pathlib import Path

import pytest

from sparrow.files import add_line_digest, read_document
from sparrow_recipes import demo
from sparrow_recipes.demo import Place


def opened(folder: Path, *, fresh: bool = False) -> None:
    demo.open_folder(Place(folder=folder), fresh=fresh).close()


def begun(folder: Path) -> Place:
    """A folder in which every stage has left something, and its owner too."""
    opened(folder)
    place = Place(folder=folder)
    for file in (place.surface, place.train / "metrics.jsonl", place.speed, place.page):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}", encoding="utf-8")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "train-of-mine").mkdir()
    return place


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if not each.name.startswith(".")}


MINE = {"notes.txt", "train-of-mine"}
ITS = {"demo.json", "calibration", "train", "speed.json", "report.html"}


def test_a_folder_is_gone_on_with_and_fresh_deletes_what_the_demo_made(tmp_path: Path) -> None:
    place = begun(tmp_path / "demo")
    left = place.folder / ".speed.json.4194305.unfinished"  # of no process that can run
    left.touch()
    lock = demo.open_folder(place)
    assert not left.exists()
    with pytest.raises(ValueError, match="demo"):  # two in one folder
        opened(place.folder, fresh=True)
    assert names(place.folder) == MINE | ITS
    lock.close()
    opened(place.folder, fresh=True)
    assert names(place.folder) == MINE | {"demo.json"}
    assert read_document(place.about) == demo.describe()


def test_a_folder_of_other_runs_is_refused(tmp_path: Path) -> None:
    for name in ITS - {"demo.json"}:
        (tmp_path / name / name).mkdir(parents=True)
        for fresh in (False, True):
            with pytest.raises(ValueError, match="--out"):
                opened(tmp_path / name, fresh=fresh)
        assert names(tmp_path / name) == {name}


def test_a_folder_that_cannot_be_gone_on_with_begins_anew_when_asked(tmp_path: Path) -> None:
    """Of another version, or damaged."""
    for number, text in enumerate(("{}", "{", "7", '{"digest": "sha256:0"}')):
        place = begun(tmp_path / str(number))
        place.about.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="--fresh"):
            opened(place.folder)
        assert names(place.folder) == MINE | ITS
        opened(place.folder, fresh=True)
        assert names(place.folder) == MINE | {"demo.json"}


def test_actions_of_the_gate_that_were_changed_are_named(tmp_path: Path) -> None:
    place = begun(tmp_path / "demo")
    actions = place.train / "actions.jsonl"
    assert not demo.gate_stopped(place)
    line = add_line_digest('{"step": 3, "kind": "stop"}')
    actions.write_text(f"{line}\n{line[:10]}", encoding="utf-8")  # another is being written
    assert demo.gate_stopped(place)
    actions.write_text(line.replace("stop", "warn") + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"actions\.jsonl, line 1"):
        demo.gate_stopped(place)
