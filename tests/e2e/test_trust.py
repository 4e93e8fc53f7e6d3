"""Files that people share run nothing, in any verb that reads them."""

import json
import sys
from pathlib import Path

import pytest
from support import cli
from support.surfaces import surface

from sparrow.files import write_document
from sparrow.models.sources import SHIPPED
from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule

ROOT = Path(__file__).parents[2]
DRY_RUN = ("train", "tiny", "--dry-run")
TASK = ("-t", "assignments", "-l", "100", "-n", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a module that would leave a mark, and is where the verbs are called."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hostile(folder: Path, source: str) -> Path:
    """A schedule whose provenance names code, with a digest that is right."""
    plain = to_dict(Schedule.fixed(64, flow="block-mean", dense_layers=()))
    write_document(
        folder / "schedule.json", plain | {"provenance": [{"key": "flow", "text": source}]}
    )
    return folder / "schedule.json"


def test_verbs_that_take_a_schedule(folder: Path) -> None:
    for source in (f"os:system('touch {folder / 'marker'}')", "evil.py:flow", "evil:flow"):
        file = hostile(folder, source)
        for words in (
            (*DRY_RUN, f"--rollout.attention.schedule={file}"),
            ("eval", "tiny", *TASK, "--schedule", str(file)),
            ("calibrate", "tiny", "--task", "assignments", "-n", "1", "--schedule", str(file)),
            ("generate", "--model.name=tiny", f"--attention.schedule={file}", "x"),
        ):
            assert "schedule" in cli.refused(*words), words
            assert not (folder / "marker").exists(), (source, words)
    assert "evil" not in sys.modules


def test_a_surface_that_names_code_is_planned_as_data(folder: Path) -> None:
    source = f"os:system('touch {folder / 'marker'}')"
    made = surface(shape=(SHIPPED / "tiny" / "config.json").read_text())
    made["variants"] = [one | {"source": source} for one in made["variants"]]
    (folder / "surface.json").write_text(json.dumps(made))
    result = cli.run("plan", "surface.json", "-t", "0.7", "--allow-dense", "--no-plots")
    assert result.code == 0, result.said
    planned = Schedule.load(folder / "schedule.json")
    assert source in [note.text for note in planned.provenance]
    assert not (folder / "marker").exists()
    cli.refused("eval", "tiny", *TASK, "--schedule", "schedule.json")
    assert not (folder / "marker").exists()
