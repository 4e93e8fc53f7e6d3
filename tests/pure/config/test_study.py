"""The configuration of a study: what arms and trainings are refused, and the shipped files."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.errors import ConfigError
from sparrow.schema.layers import shipped_configs
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.study import StudyConfig

DENSE = '[[arms]]\nname = "dense"\nrole = "baseline"\n'
TARGET = '[[arms]]\nname = "p"\ntarget = 0.86\n'
TRAIN = """
[train.model]
name = "tiny"

[train.data]
task = "assignments"

[train.gate]
mode = "warn"

[train.validation]
every = 4
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(arms: str = DENSE + TARGET, *overrides: str, head: str = "") -> StudyConfig:
    Path("c.toml").write_text(head + arms + TRAIN, encoding="utf-8")
    return load_config(StudyConfig, ["c.toml"], overrides)


def refused(arms: str = DENSE + TARGET, *overrides: str, head: str = "") -> str:
    """The message, which begins with the field that is refused."""
    with pytest.raises(ConfigError) as error:
        loaded(arms, *overrides, head=head)
    return str(error.value)


def arm(name: str, *settings: str) -> str:
    return "\n".join(["[[arms]]", f'name = "{name}"', *settings, ""])


def test_the_smallest_file_and_the_defaults() -> None:
    config = loaded()
    assert (config.name, config.dir, config.seeds, config.parallel) == ("study", None, (0, 1, 2), 1)
    assert config.rates == (1e-4, 3e-5, 1e-5)
    dense, sparse = config.arms
    assert (dense.dense, dense.role, sparse.dense, sparse.role) == (True, "baseline", False, "arm")
    assert (sparse.seeds, sparse.rate, sparse.corrections) == (None, None, None)
    outcome = config.outcome
    assert (outcome.drop, outcome.length, outcome.lag, outcome.gain) == (0.10, 0.5, 2.0, 0.15)


def test_an_arm_has_one_of_target_budget_and_like() -> None:
    choices = ("target = 0.8", "budget = 64", 'like = "p"')
    for both in (choices[:2], choices[1:], choices[::2], choices):
        assert refused(DENSE + TARGET + arm("q", *both)).startswith("arms[2].name: ")


def test_refused_arms() -> None:
    flat = 'role = "flat"'
    for arms, field in (
        (TARGET, "arms of role baseline"),
        (DENSE + DENSE.replace("dense", "other"), "arms of role baseline"),
        (DENSE + arm("a", flat) + arm("b", flat), "arms of role flat"),
        (DENSE + arm("dense"), "arms: names"),
        ("arms = []\n", "arms: names"),
        (DENSE + "target = 0.8\n", "arms: dense"),
        (DENSE + "budget = 64\n", "arms: dense"),
        (DENSE + "rate = 1e-3\n", "arms: dense"),
        (DENSE + "seeds = []\n", "dense.seeds"),
        (DENSE + TARGET + arm("f", 'like = "q"'), "f.like"),
        (DENSE + arm("f", 'like = "dense"'), "f.like"),
        (DENSE + TARGET + "seeds = [0, 7, 5]\n", "p.seeds"),
        (DENSE + "seeds = [0]\n" + TARGET, "p.seeds"),
        (DENSE + arm("p", "target = 1.0"), "arms[1].target"),
        (DENSE + arm("p", "target = 0.0"), "arms[1].target"),
        (DENSE + arm("p", "budget = 47"), "arms[1].budget"),
        (DENSE + arm("p", "rate = -0.1"), "arms[1].rate"),
        (DENSE + arm("p", 'role = "control"'), "arms[1].role"),
    ):
        assert refused(arms).split(": got")[0].strip('"') == field, arms


def test_arms_that_are_fine() -> None:
    """The flat control is compared with its own start; positive controls may be several."""
    assert loaded(DENSE + arm("still", 'role = "flat"', "seeds = [9]"))
    controls = [arm(f"s{n}", 'role = "collapses"', f"budget = {n}") for n in (48, 64)]
    assert len(loaded(DENSE + "".join(controls)).arms) == 3


def test_names_of_arms_name_folders() -> None:
    for name in ("", "a/b", "..", ".hidden", "-a", "a b", "a.json", "ä"):
        assert refused(DENSE.replace('"dense"', f'"{name}"')).startswith("arms[0].name: ")
    for name in ("p05-0.86", "0", "starved-64"):
        assert loaded(DENSE.replace('"dense"', f'"{name}"')).arms[0].name == name


def test_refused_settings() -> None:
    """The last eight are the arms' to say, or what a study is about."""
    for key, value in (
        ("outcome.drop", "0.0"),
        ("outcome.tolerance", "1.0"),
        ("outcome.gain", "1.5"),
        ("probe.samples", "1"),
        ("parallel", "0"),
        ("surface.by", "mean"),
        ("surface.budgets", "[32]"),
        ("surface.first", "100000"),
        ("surfaces", "16"),
        ("rates", "[0.0]"),
        ("rates", "[]"),
        ("rates", "[1e-5, 1e-4]"),
        ("rates", "[1e-4, 1e-4]"),
        ("seeds", "[-1]"),
        ("seeds", "[]"),
        ("seeds", "[0, 0]"),
        ("train.rollout.attention", "{budget = 64}"),
        ("train.rollout.attention", '{schedule = "s.json"}'),
        ("train.rollout.attention", "{dense = true}"),
        ("train.run.dir", "somewhere"),
        ("train.validation.every", "0"),
        ("train.validation.sparse", "true"),
        ("train.gate.mode", "act"),
        ("train.gate.mode", "off"),
    ):
        assert refused(DENSE + TARGET, f"--{key}={value}").startswith(key), (key, value)


def test_the_study_on_small_is_that_of_the_issue() -> None:
    config = load_config(StudyConfig, ["small"])
    assert (config.seeds, config.rates) == ((0, 1, 2), (1e-4, 3e-5, 1e-5))
    assert {one.target for one in config.arms} >= {0.75, 0.80, 0.86, 0.92}
    like = next(one.like for one in config.arms if one.like is not None)
    assert next(one.target for one in config.arms if one.name == like) == 0.86
    control = next(one for one in config.arms if one.role == "collapses")
    assert (control.budget, control.corrections) == (64, ())
    assert next(one for one in config.arms if one.role == "flat").rate == 0.0
    train = config.train
    (tis,) = train.algorithm.corrections
    assert (tis.use, tis.settings) == ("token-tis", {"cap": 2.0})
    assert (train.rollout.prompts, train.rollout.samples, train.batch.updates) == (16, 8, 1)
    assert (train.run.steps, train.validation.rows) == (60, 256)


def test_the_study_on_tiny_is_for_a_cpu() -> None:
    config = load_config(StudyConfig, ["tiny"])
    assert (config.train.model.name, config.train.model.device) == ("tiny", "cpu")
    assert {one.role for one in config.arms} == {"baseline", "arm", "collapses", "flat"}


def test_loading_the_resolved_file_gives_an_equal_configuration(tmp_path: Path) -> None:
    for name in shipped_configs("study"):
        config = load_config(StudyConfig, [name], [f"--dir={tmp_path / 'study'}", "--parallel=3"])
        assert load_config(StudyConfig, [save_resolved(config, tmp_path)]) == config
