"""Python arguments become a configuration: positions, short names, sections, objects."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.arguments import configured
from sparrow.functions import resolve
from sparrow.schema.calibrate import CalibrateConfig
from sparrow.schema.common import GenerateConfig, ReportConfig
from sparrow.schema.evaluation import EvalConfig
from sparrow.schema.loading import load_config
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RateConfig, TrainConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "cache"))


def make_config(cls: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    return configured(cls)(lambda config: config)(*arguments, **settings)


def train(*arguments: Any, **settings: Any) -> TrainConfig:
    return make_config(TrainConfig, arguments, settings)


def test_tables_change_what_they_name() -> None:
    again = train(train("tiny", run={"steps": 3}), run={"seed": 7})
    assert (again.run.name, again.run.steps, again.run.seed) == ("tiny", 3, 7)


def test_model_first_then_rows_and_settings_by_short_name_or_section() -> None:
    config = train("tiny", "rows.jsonl", steps=12, optimiser={"rate": 1e-4}, run={"seed": 3})
    assert (config.model.name, config.data.rows) == ("tiny", "rows.jsonl")
    assert (config.run.steps, config.run.seed, config.optimiser.rate) == (12, 3, 1e-4)
    assert train("tiny", task="graph", optimiser=RateConfig(rate=1e-4)).optimiser.rate == 1e-4
    assert train(model=Path("folder"), task="graph").model.name == "folder"


def test_a_recipe_by_its_name_whatever_else_is_given() -> None:
    shipped = load_config(TrainConfig, ["tiny"])
    assert train("tiny", steps=3) == shipped.replace(run=shipped.run.replace(steps=3))
    assert train("tiny", task="graph").validation == shipped.validation
    assert train("tiny", [{"prompt": "a", "answer": "b"}]).optimiser == shipped.optimiser
    assert train(model="tiny", task="graph").validation.every == 0
    assert train("qwen3-1.7b-math", rows="mine.parquet").data.reward == "math"


def from_words(*words: str) -> TrainConfig:
    return load_config(TrainConfig, [], words)


@pytest.mark.parametrize("make", [train, lambda name, **s: from_words(name, *as_words(s))])
def test_a_setting_replaces_its_alternative_of_a_recipe(make: Any) -> None:
    rows = make("tiny", rows="mine.jsonl")
    assert (rows.data.task, rows.data.rows) == (None, "mine.jsonl")
    assert (rows.validation.every, rows.rollout.max_prompt) == (0, None)  # of the recipe's rows
    assert rows.rollout.attention.schedule == "tiny-0.86"
    fixed = make("tiny", budget=96).rollout.attention
    assert (fixed.budget, fixed.schedule) == (96, None)
    task = make("qwen3-1.7b-math", task="graph")
    assert (task.data.rows, task.data.reward, task.data.task) == (None, None, "graph")
    for clash in ({"budget": 96, "schedule": "tiny-0.86"}, {"rows": "a.jsonl", "task": "graph"}):
        with pytest.raises(ValueError, match="one of"):
            make("tiny", **clash)


def as_words(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def test_alternatives_of_every_verb() -> None:
    attention = make_config(GenerateConfig, ("tiny", "a"), {"budget": 64})
    again = make_config(GenerateConfig, (attention,), {"schedule": "tiny-0.86"})
    assert (again.attention.budget, again.prompts) == (None, ("a",))
    chosen = make_config(EvalConfig, ("tiny",), {"task": "graph", "length": 100, "window": 64})
    again = make_config(EvalConfig, (chosen,), {"rows": "a.csv", "budget": 96})
    assert (again.task, again.length, again.window, again.budget) == ((), (), None, 96)
    calibrated = make_config(CalibrateConfig, ("tiny", "a.csv"), {})
    again = make_config(CalibrateConfig, (calibrated,), {"task": "graph"})
    assert (again.rows, again.task) == (None, "graph")


def test_what_help_and_completion_show() -> None:
    shown = inspect.signature(sparrow.train)
    assert [*shown.parameters][:2] == ["model", "rows"]
    assert {"task", "budget", "steps", "callbacks", "settings"} <= {*shown.parameters}
    assert not {"config", "loaded"} & {*shown.parameters}
    assert "budget:" in sparrow.train.__doc__
    assert "optimiser" in sparrow.train.__doc__
    for name in ("generate", "plan", "report", "presets", "doctor"):
        assert "config" not in inspect.signature(getattr(sparrow, name)).parameters


def test_rows_in_memory() -> None:
    frame = pytest.importorskip("pandas").DataFrame([{"prompt": "a", "answer": 1}])
    rows = [{"prompt": "a", "answer": 1}]
    assert train("tiny", frame).data == train("tiny", rows).data
    with pytest.raises(ValueError, match="DataFrame"):
        train("tiny", {"prompt": ["a"], "answer": [1]})


def test_messages_name_the_setting_without_control_characters() -> None:
    with pytest.raises(ValueError, match=r"data\.task") as error:
        train("runs/x")
    assert "RowsConfig" not in str(error.value)
    with pytest.raises(ValueError, match=r"\\x1b") as error:
        train("tiny", validation={"sets": {"\x1b[31m": "graph"}})
    assert "\x1b" not in str(error.value)


def test_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\nname = "tiny"\n[data]\ntask = "graph"\n')
    config = train(tmp_path / "mine.toml", steps=3, length=100)
    assert (config.data.task, config.data.length, config.run.steps) == ("graph", 100, 3)


def test_prompts_follow_the_model() -> None:
    for arguments in (("tiny", "a"), ("tiny", ["a"])):
        config = make_config(GenerateConfig, arguments, {"budget": 64, "device": "cpu"})
        assert (config.model.name, config.prompts) == ("tiny", ("a",)), arguments
    config = make_config(GenerateConfig, ("a",), {"model": {"name": "tiny"}})
    assert (config.model.name, config.prompts) == ("tiny", ("a",))
    assert make_config(GenerateConfig, ("tiny", "a", "b"), {}).prompts == ("a", "b")
    assert make_config(ReportConfig, ("a", Path("b")), {}).runs == (Path("a"), Path("b"))


def test_a_wrong_keyword_names_near_ones() -> None:
    for settings, near in (({"stpes": 3}, "steps"), ({"optimizer": {}}, "optimiser")):
        with pytest.raises(TypeError, match=near):
            train("tiny", **settings)
    with pytest.raises(TypeError, match="positional"):
        make_config(CalibrateConfig, ("tiny", "rows.jsonl", "more"), {"prompts": 3})
    with pytest.raises(TypeError, match="--run"):
        train("tiny", "--run.steps=3")


def test_functions_are_registered() -> None:
    def reward(text: str, answer: str) -> float:
        return float(text == answer)

    config = train("tiny", "rows.jsonl", reward=reward)
    assert config.data.reward is not None
    assert resolve(config.data.reward, "data.reward") is reward
    same = train("tiny", data={"rows": "rows.jsonl", "reward": reward})
    assert same == config


def test_schedules_are_written_once() -> None:
    config = train("tiny", task="graph", schedule=Schedule.fixed(96))
    file = config.rollout.attention.schedule
    assert file is not None
    assert Schedule.load(file) == Schedule.fixed(96)
    section = {"attention": {"schedule": Schedule.fixed(96)}}
    assert train("tiny", task="graph", rollout=section) == config


def test_every_verb_is_listed_and_found() -> None:
    for name in sparrow.__all__:
        assert getattr(sparrow, name) is not None
        assert name in dir(sparrow)
    with pytest.raises(AttributeError):
        sparrow.nothing  # noqa: B018
