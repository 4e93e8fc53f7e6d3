"""The demo's folder: whose it is, and what beginning anew deletes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from sparrow.demo import recipe, stages
from sparrow.demo.recipe import Place


def opened(folder: Path, *, fresh: bool = False) -> None:
    stages.open_folder(Place(folder=folder), fresh=fresh).close()


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


def test_a_folder_that_is_gone_on_with_keeps_everything(tmp_path: Path) -> None:
    begun(tmp_path / "demo")
    opened(tmp_path / "demo")
    assert names(tmp_path / "demo") == MINE | ITS


def test_fresh_deletes_what_the_demo_made_and_nothing_else(tmp_path: Path) -> None:
    place = begun(tmp_path / "demo")
    opened(place.folder, fresh=True)
    assert names(place.folder) == MINE | {"demo.json"}
    assert json.loads(place.about.read_text(encoding="utf-8")) == recipe.describe()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", sorted(ITS - {"demo.json"}))
def test_a_folder_of_other_runs_is_refused(name: str, fresh: bool, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="holds other runs; name another folder with --out"):
        opened(tmp_path, fresh=fresh)
    assert names(tmp_path) == {name}


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "is of another version of the demo"), ("{", "is broken"), ("7", "is broken")],
)
def test_a_folder_that_cannot_be_gone_on_with_begins_anew_when_asked(
    text: str, said: str, tmp_path: Path
) -> None:
    place = begun(tmp_path / "demo")
    place.about.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{said}.*; --fresh begins anew"):
        opened(place.folder)
    assert names(place.folder) == MINE | ITS
    opened(place.folder, fresh=True)
    assert names(place.folder) == MINE | {"demo.json"}


def test_two_demos_in_one_folder(tmp_path: Path) -> None:
    place = begun(tmp_path / "demo")
    lock = stages.open_folder(place)
    with pytest.raises(ValueError, match="is in use by another process"):
        opened(place.folder, fresh=True)
    assert names(place.folder) == MINE | ITS
    lock.close()
