"""Verbs as Python functions: from a configuration, from fields, from words."""

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.training import config, model_folder

from sparrow import api, models
from sparrow.calibration.planning.plan import Unreachable
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.local.messages import NoCallbacks
from sparrow.dataflow.stopping import Stopped
from sparrow.engine import Engine
from sparrow.schema.calibrate import CalibrateConfig, PlanConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule
from sparrow.tasks.base import decode

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
    assert models.load(run, device="cpu").source == trained.model
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


def test_a_surface_is_a_file_a_folder_or_an_object() -> None:
    for wrong in (5, None, {}):
        with pytest.raises(ValueError, match="surface"):
            api.plan(wrong)


def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook."""
    run = config(model_folder(tmp_path / "model"), tmp_path / "run", run={"steps": 1})
    few: dict[str, Any] = {"task": "graph", "length": 100, "prompts": 2, "max_tokens": 4}

    async def cell() -> tuple[Any, Any]:
        return api.train(run), api.evaluate("tiny", device="cpu", **few)

    trained, evaluation = asyncio.run(cell())
    assert trained.model.is_dir()
    assert evaluation.cells == api.evaluate("tiny", device="cpu", **few).cells


def test_a_keyboard_interrupt_cancels_a_coroutine_in_another_thread() -> None:
    cancelled: list[bool] = []

    async def endless() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(endless())

    loop = asyncio.new_event_loop()  # as in a notebook: asyncio.run takes the signal itself
    loop.run_until_complete(cell())
    loop.close()
    assert cancelled == [True]


def test_an_interrupted_run_is_saved_and_resumed(tmp_path: Path) -> None:
    class Interrupt(NoCallbacks):
        def step(self, metrics: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    settings: dict[str, Any] = {"steps": 2, "save_every": 100}
    made = config(model_folder(tmp_path / "model"), tmp_path / "run", run=settings)

    async def cell() -> None:
        api.train(made, callbacks=Interrupt())

    with pytest.raises(Stopped, match="resumes"):
        asyncio.run(cell())
    assert not (tmp_path / "run" / "model").exists()
    assert [line.step for line in api.train(made).metrics] == [0, 1]


def test_a_flow_object(tmp_path: Path) -> None:
    def score(query: Any, fields: Any, position: Any) -> Any:
        return -position.page

    first_pages = Flow(name="first-pages", score=score)
    checked = api.flow_check(first_pages, head_size=16)
    assert (checked.flow, checked.passed) == ("first-pages", True)
    assert load_flow("here:first-pages") is first_pages
    with pytest.raises(ValueError, match="here:another"):
        load_flow("here:another")
    prompt = api.puzzle("countdown", length=100).prompt
    schedule = Schedule.fixed(64, flow="first-pages", flow_digest=first_pages.digest)
    arguments: dict[str, Any] = {"schedule": schedule, "flow": first_pages, "max_tokens": 4}
    (completion,) = api.generate("tiny", prompt, device="cpu", **arguments)
    assert "first-pages" in completion.attention
    arguments["schedule"] = Schedule.fixed(64, flow="first-pages")  # by hand: taken by its name
    (completion,) = api.generate("tiny", prompt, device="cpu", **arguments)
    assert "first-pages" in completion.attention


def test_a_flow_with_a_budget_in_every_verb() -> None:
    fixed: dict[str, Any] = {"flow": "quest", "budget": 64, "device": "cpu"}
    prompt = api.puzzle("countdown", length=100).prompt
    (completion,) = api.generate("tiny", prompt, max_tokens=2, **fixed)
    few: dict[str, Any] = {"task": "countdown", "length": 100, "prompts": 1, "max_tokens": 2}
    evaluation = api.evaluate("tiny", **few, **fixed)
    preview = api.preview("tiny", **fixed)
    for attention in (completion.attention, evaluation.attention, preview.words["rollout"]):
        assert "quest" in attention
        assert "64" in attention
    for verb, settings in ((api.generate, {}), (api.evaluate, {}), (api.preview, few)):
        with pytest.raises(ValueError, match="flow"):
            verb(model="tiny", flow="quest", **settings)


def test_a_schedule_of_layers_that_a_model_does_not_have() -> None:
    schedule = Schedule.fixed(96, dense_layers=(99,))
    with pytest.raises(ValueError, match="99"):
        api.preview("tiny", schedule=schedule)
    with pytest.raises(ValueError, match="99"):
        Engine(models.load("tiny", device="cpu"), rule=Rule.of(schedule))


def test_a_model_has_a_short_repr() -> None:
    assert repr(models.load("tiny", device="cpu")).count("\n") == 0


def test_a_model_that_is_in_no_folder_is_not_trained() -> None:
    model = models.random(models.load("tiny", device="cpu").spec)
    with pytest.raises(ValueError, match="save"):
        api.train(model, task="assignments")


def test_chat(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
        "{% if thinking is defined and not thinking %}</think>{% endif %}"
    )
    model = models.load(model_folder(tmp_path / "model", chat=template), device="cpu")
    completion = api.chat(model, "x1", system="yes", template={"thinking": False}, max_tokens=4)
    assert decode(completion.prompt_ids.tolist()) == "yes x1 </think>"
    assert len(completion.token_ids) <= 4
    assert completion.text is not None
    chat = {"system": "no", "template": {"thinking": False}}
    completion = api.chat(model, "x1", system="yes", chat=chat, max_tokens=4)
    assert decode(completion.prompt_ids.tolist()) == "yes x1 </think>"
    messages = [{"role": "user", "content": "x1"}, {"role": "assistant", "content": "x2"}]
    completion = api.chat(model, [*messages, {"role": "user", "content": "x3"}], max_tokens=4)
    assert decode(completion.prompt_ids.tolist()) == "x1 x2 x3"
    with pytest.raises(ValueError, match="raw"):
        api.chat(model, messages, raw=True)


def test_rows_and_a_reward_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "cache"))

    def short(text: str, answer: str) -> float:
        return 1.0 if len(text.split()) <= int(answer) else 0.0

    rows = [{"question": f"x{number}", "answer": "20"} for number in range(4)]
    model = models.load(model_folder(tmp_path / "model"), device="cpu")
    settings: dict[str, Any] = {"prompts": 2, "samples": 2, "max_tokens": 24, "device": "cpu"}
    run = api.train(model, rows, reward=short, steps=1, out=tmp_path / "run", **settings)
    score = run.metrics[0].values["critic/score/mean"]
    assert score is not None
    assert 0 <= score <= 1
    evaluation = api.evaluate(run, rows, reward=short, max_tokens=24, device="cpu")
    assert evaluation.cells[0].rows == 4
    assert run.model.name in evaluation.model

    def other(text: str, answer: str) -> float:
        return 1.0

    other.__name__ = "short"
    more: Any = {"steps": 2, "out": tmp_path / "run", **settings}
    with pytest.raises(ValueError, match=r"Changed:.* data\.reward here:short"):
        api.train(model, rows, reward=other, **more)


def test_failed_verdicts_and_unusable_rows_are_told_by_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a script too, which has no progress bar; where all fail it is an error."""
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "cache"))

    def reward(text: str, answer: str) -> float:
        return 1.0 / float(answer)

    rows = [{"question": f"x{number}", "answer": str(number)} for number in range(3)]
    rows.append({"question": "x3", "answer": ""})
    model = model_folder(tmp_path / "model")
    settings: dict[str, Any] = {"max_tokens": 4, "device": "cpu", "reward": reward}
    run: dict[str, Any] = {"prompts": 3, "samples": 2, "steps": 1, "out": tmp_path / "run"}
    for verb, more in ((api.evaluate, {}), (api.train, run)):
        with pytest.warns(UserWarning, match="1 rows.*of.*ZeroDivisionError") as caught:
            verb(model, rows, **settings, **more)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        api.evaluate(model, rows[:1], **settings)
