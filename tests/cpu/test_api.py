"""Verbs as Python functions: from a configuration, from fields, from words."""

from pathlib import Path
from typing import Any

import pytest
from support.training import config, model_folder

from sparrow import api, models
from sparrow.arguments import make_config
from sparrow.calibration.planning.plan import Unreachable
from sparrow.schema.calibrate import CalibrateConfig, PlanConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig

FEW: dict[str, Any] = {"max_tokens": 96, "bin": 64, "prompts": 8, "first_round": 8}
FEW |= {"layer_groups": 0, "task": "assignments", "length": 100}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Surface]:
    folder = tmp_path_factory.mktemp("api")
    return folder, api.calibrate("tiny", out=str(folder), budget=[96, 64], device="cpu", **FEW)


def test_calibrate_measures_and_writes(calibrated: tuple[Path, Surface]) -> None:
    folder, surface = calibrated
    assert (surface.budgets, surface.targets, surface.model) == ((64, 96), (0.86,), "tiny")
    assert surface.device.startswith("cpu")
    assert all(cell.prompts <= 8 for cell in surface.cells)
    assert Surface.load(folder / "surface.json") == surface


def test_a_made_configuration_and_a_loaded_model(calibrated: tuple[Path, Surface]) -> None:
    folder, surface = calibrated
    made = CalibrateConfig(model="tiny", out=folder, budget=(64, 96), **FEW)
    assert api.calibrate(made, device="cpu").cells == surface.cells
    loaded = models.load("tiny", device="cpu")
    assert api.calibrate(loaded, out=folder, budget=(64, 96), **FEW).cells == surface.cells
    with pytest.raises(ValueError, match="device"):
        api.calibrate(loaded, out=folder, dtype="bfloat16", **FEW)


def test_plan_writes_beside_a_file(calibrated: tuple[Path, Surface], tmp_path: Path) -> None:
    folder, surface = calibrated
    planned = api.plan(surface, target=0.5, allow_dense=True)
    assert "<title>" in api.report(surface, planned)
    assert not (folder / "schedule.json").exists()
    surface.save(tmp_path / "surface.json")
    made = PlanConfig(surface=tmp_path / "surface.json", target=0.5, allow_dense=True)
    assert api.plan(made) == planned
    assert Schedule.load(tmp_path / "schedule.json") == planned.schedule
    assert (tmp_path / "plan.json").exists()
    (tmp_path / "plan.json").unlink()
    assert api.plan(tmp_path, target=0.5, allow_dense=True) == planned  # the folder
    assert (tmp_path / "plan.json").exists()
    with pytest.raises(Unreachable):
        api.plan(surface, target=0.9999)


def test_train_and_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = config(model_folder(tmp_path / "model"), run, run={"steps": 1})
    said: list[str] = []
    trained = api.train(made, report=said.append)
    assert (trained.folder, trained.model) == (run, run / "model")
    assert models.load(trained.model, device="cpu").spec.layers == 3
    assert [line.step for line in trained.metrics] == [0]
    assert "critic/score/mean" in trained.to_pandas().columns
    with pytest.raises(ValueError, match="ended"):
        api.train(made)
    page = api.report(run, title="Mine")
    assert page.startswith("<!doctype html>")
    assert "<title>Mine" in page
    assert not (run / "report.html").exists()
    assert api.report(str(run), format="md", title="Mine").startswith("# Mine")
    assert api.report(runs=run, out=tmp_path / "a.html") == (tmp_path / "a.html").read_text()
    assert api.report(trained, title="Mine") == page


def test_generate_and_evaluate() -> None:
    puzzle = api.puzzle("countdown", length=100)
    model = {"name": "tiny", "device": "cpu"}
    (completion,) = api.generate(puzzle.prompt, model=model, sampling={"max_tokens": 4})
    assert len(completion.token_ids) == 4
    loaded = models.load("tiny", device="cpu")
    both = api.generate(loaded, [puzzle.prompt, puzzle.prompt], max_tokens=4)
    assert both[0].text == completion.text
    assert both.to_pandas().tokens.tolist() == [4, 4]
    assert api.generate("tiny", puzzle.prompt, max_tokens=4, device="cpu")[0].text == both[0].text
    with pytest.raises(ValueError, match="device"):
        api.generate(loaded, puzzle.prompt, device="cpu")
    few: dict[str, Any] = {"task": "graph", "length": 100, "prompts": 2, "max_tokens": 4}
    counted: list[int] = []
    evaluation = api.evaluate(
        "tiny", device="cpu", **few, progress=lambda done, total, what: counted.append(done)
    )
    assert [cell.rows for cell in evaluation.cells] == [2]
    assert counted == [1, 2]
    assert api.evaluate(loaded, **few).cells == evaluation.cells


def test_what_cannot_be_is_a_value_error_that_names_the_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nname = "tiny"\n[data]\ntask = "assignments"\n', encoding="utf-8")
    for call, name in (
        (lambda: api.calibrate("tiny"), "task"),
        (lambda: api.calibrate("tiny", task="graph", rows="x.jsonl"), "rows"),
        (lambda: api.calibrate("tiny", task="graph", length="long"), "length"),
        (lambda: api.calibrate(task="graph"), "model"),
        (lambda: api.report(tmp_path, format="pdf"), "format"),
        (lambda: api.train(file, run={"stesp": 1}), "stesp"),
        (lambda: api.puzzle("sudoku"), "task"),
        (lambda: api.bench("sudoku"), "decode"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_tables_change_what_they_name() -> None:
    config = make_config(TrainConfig, ("tiny",), {"run": {"steps": 3}})
    again = make_config(TrainConfig, (config,), {"run": {"seed": 7}})
    assert (again.run.name, again.run.steps, again.run.seed) == ("tiny", 3, 7)
    for wrong in (5, None, {}):
        with pytest.raises(ValueError, match="surface"):
            api.plan(wrong)
