"""Sparrow from Python: what the functions do, and their defaults against those of the verbs."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("typer")

from sparrow.cli.flow import layers_of
from support.training import config, model_folder
from typer.main import get_command

from sparrow import api, models
from sparrow.calibrate.planning.plan import Unreachable
from sparrow.cli import app
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface

FEW = {"max_tokens": 96, "bin": 64, "prompts": 8, "first_round": 8, "layer_groups": 0}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Surface]:
    folder = tmp_path_factory.mktemp("api")
    arguments: dict[str, Any] = {**FEW, "task": "assignments", "length": 100, "device": "cpu"}
    return folder, api.calibrate("tiny", folder, budgets=[96, 64], **arguments)


def test_calibrate_measures_and_writes(calibrated: tuple[Path, Surface]) -> None:
    folder, surface = calibrated
    assert surface.budgets == (64, 96)
    assert surface.targets == (0.86,)
    assert surface.model == "tiny"
    assert surface.device.startswith("cpu")
    assert all(cell.prompts <= 8 for cell in surface.cells)
    assert Surface.load(folder / "surface.json") == surface


def test_plan_writes_only_into_a_folder(calibrated: tuple[Path, Surface], tmp_path: Path) -> None:
    folder, surface = calibrated
    planned = api.plan(surface, 0.5, allow_dense=True)
    assert not (folder / "schedule.json").exists()
    again = api.plan(folder / "surface.json", 0.5, allow_dense=True, folder=tmp_path)
    assert again == planned
    assert Schedule.load(tmp_path / "schedule.json") == planned.schedule
    assert (tmp_path / "plan.json").exists()


def test_a_target_out_of_reach(calibrated: tuple[Path, Surface]) -> None:
    with pytest.raises(Unreachable, match="no measured budget"):
        api.plan(calibrated[1], 0.9999)


def test_train_and_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = config(model_folder(tmp_path / "model"), run, run={"steps": 1})
    said: list[str] = []
    trained = api.train(made, report=said.append)
    assert trained == run / "model"
    assert models.load(trained, device="cpu").spec.layers == 3
    with pytest.raises(ValueError, match="this run has ended"):
        api.train(made)
    page = api.report(run, title="Mine")
    assert page.startswith("<!doctype html>")
    assert "<title>Mine" in page
    assert api.report(str(run), format="md", title="Mine").startswith("# Mine")


def test_train_takes_a_file_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nname = "tiny"\n[data]\ntask = "assignments"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.stesp"):
        api.train(file, "--run.stesp=1")


def test_settings_do_not_go_with_a_made_configuration(tmp_path: Path) -> None:
    made = config(tmp_path / "model", tmp_path / "run")
    with pytest.raises(ValueError, match=r"got settings .*--run\.steps=3.* allowed: none"):
        api.train(made, "--run.steps=3")


@pytest.mark.parametrize("given", [{}, {"task": "assignments", "rows": "prompts.jsonl"}])
def test_prompts_come_from_one_place(given: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed: one of them"):
        api.calibrate("tiny", tmp_path, **given)


def test_device_and_dtype_of_a_loaded_model_stay(tmp_path: Path) -> None:
    loaded = models.load("tiny", device="cpu")
    with pytest.raises(ValueError, match="dtype 'bfloat16' for a loaded model"):
        api.calibrate(loaded, tmp_path, task="assignments", dtype="bfloat16")


def test_an_unknown_format(calibrated: tuple[Path, Surface]) -> None:
    with pytest.raises(ValueError, match="got format 'pdf', allowed: html or md"):
        api.report(calibrated[0], format="pdf")  # type: ignore[arg-type]


# The functions promise the defaults of the verbs.

GIVEN = {"model", "folder", "surface", "progress", "report"}  # not options of the verbs
OTHER_NAMES = {"budgets": "budget", "flows": "flow", "bin": "bins"}
NOT_SAID = {  # what a verb takes where an option is not given; it says so in its help
    "flows": ("block_mean",),
    "budgets": (),
    "dense_layers": (layers_of("none"),),
    "target": 0.86,
}


def defaults(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.name not in GIVEN}


@pytest.mark.parametrize("verb", ["calibrate", "plan"])
def test_defaults_are_those_of_the_verb(verb: str) -> None:
    command: Any = get_command(app)
    options = {each.name: each for each in command.commands[verb].params}
    for name, default in defaults(getattr(api, verb)).items():
        option = options[OTHER_NAMES.get(name, name)]
        said = NOT_SAID.get(name) if option.default is None else option.default
        assert default == said, name


def test_what_a_verb_says_of_options_that_are_not_given() -> None:
    command: Any = get_command(app)
    texts = {each.name: each.help for each in command.commands["calibrate"].params}
    assert "Default: block_mean." in texts["flow"]
    assert "Default: 0.86." in texts["target"]
    assert "none (the default)" in texts["dense_layers"]
    assert f"Default: {api.ROOM} x length for a task, else 1024." in texts["max_tokens"]
