"""The configuration of a study: which arms and trainings are refused, and the shipped files."""

from pathlib import Path

import pytest

from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config, save_resolved
from sparrow_recipes.study.config import StudyConfig

CONFIGS = Path(__file__).parents[3] / "recipes/sparrow_recipes/configs/study"
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
    Path("c.toml").write_text(head + arms + TRAIN)
    return load_config(StudyConfig, [Path("c.toml")], overrides)


def refused(key: str, arms: str = DENSE + TARGET, *overrides: str, head: str = "") -> None:
    """The first problem names this key."""
    with pytest.raises(ConfigError) as error:
        loaded(arms, *overrides, head=head)
    assert key in error.value.args[0].partition(": got")[0], error.value


def arm(name: str, *lines: str) -> str:
    return "\n".join(["[[arms]]", f'name = "{name}"', *lines, ""])


def test_the_smallest_file_and_the_defaults() -> None:
    config = loaded()
    assert (config.name, config.dir, config.seeds, config.parallel) == ("study", None, (0, 1, 2), 1)
    assert config.rates == (1e-4, 3e-5, 1e-5)
    dense, sparse = config.arms
    assert (dense.dense, dense.role, sparse.dense, sparse.role) == (True, "baseline", False, "arm")
    outcome = config.outcome
    assert (outcome.drop, outcome.length, outcome.lag, outcome.gain) == (0.10, 0.5, 2.0, 0.15)


def test_an_arm_has_one_of_target_budget_and_like() -> None:
    for both in (
        ("target = 0.8", "budget = 64"),
        ("target = 0.8", 'like = "p"'),
        ("budget = 64", 'like = "p"'),
    ):
        refused("arms[2].name", DENSE + TARGET + arm("q", *both))


def test_refused_arms() -> None:
    for key, arms in (
        ("arms", TARGET),
        ("arms", DENSE + DENSE.replace("dense", "other")),
        ("arms", DENSE + arm("dense")),
        ("dense", DENSE + "target = 0.8\n"),
        ("dense", DENSE + "budget = 64\n"),
        ("dense", DENSE + "rate = 1e-3\n"),
        ("dense.seeds", DENSE + "seeds = []\n"),
        ("arms", DENSE + arm("a", 'role = "flat"') + arm("b", 'role = "flat"')),
        ("f.like", DENSE + TARGET + arm("f", 'like = "q"')),
        ("f.like", DENSE + arm("f", 'like = "dense"')),
        ("p.seeds", DENSE + TARGET + "seeds = [0, 7, 5]\n"),
        ("p.seeds", DENSE + "seeds = [0]\n" + TARGET),
        ("arms", "arms = []\n"),
        ("arms[1].target", DENSE + arm("p", "target = 1.0")),
        ("arms[1].budget", DENSE + arm("p", "budget = 47")),
        ("arms[1].rate", DENSE + arm("p", "rate = -0.1")),
        ("arms[1].role", DENSE + arm("p", 'role = "control"')),
        *(("arms[0].name", DENSE.replace("dense", name)) for name in ("", "a/b", "..", "a.json")),
    ):
        refused(key, arms)


def test_arms_that_are_fine() -> None:
    assert loaded(DENSE + arm("still", 'role = "flat"', "seeds = [9]"))  # compared with itself
    controls = [arm(f"s{n}", 'role = "collapses"', f"budget = {n}") for n in (48, 64)]
    assert len(loaded(DENSE + "".join(controls)).arms) == 3
    for name in ("p05-0.86", "0", "starved-64"):
        assert loaded(DENSE.replace('"dense"', f'"{name}"')).arms[0].name == name


def test_what_the_arms_decide_is_not_the_training_s_to_say() -> None:
    for setting in (
        "train.rollout.attention.budget=64",
        "train.rollout.attention.schedule=s.json",
        "train.rollout.attention.dense=true",
        "train.run.dir=somewhere",
        "train.validation.every=0",
        "train.validation.sparse=true",
        "train.gate.mode=act",
        "train.gate.mode=off",
    ):
        section = setting.partition("=")[0].rpartition(".")[0]
        refused(section, DENSE + TARGET, f"--{setting}")


def test_refused_values() -> None:
    for setting in (
        "outcome.drop=0.0",
        "outcome.tolerance=1.0",
        "outcome.gain=1.5",
        "probe.samples=1",
        "parallel=0",
        "surface.by=mean",
        "surface.budgets=[32]",
        "surface.first=100000",
        "rates=[0.0]",
        "rates=[]",
        "rates=[1e-5, 1e-4]",
        "rates=[1e-4, 1e-4]",
        "seeds=[-1]",
        "seeds=[]",
        "seeds=[0, 0]",
        "surfaces.bin=16",
    ):
        refused(setting.partition("=")[0].partition(".")[0], DENSE + TARGET, f"--{setting}")


def test_the_shipped_files(tmp_path: Path) -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {"small", "tiny"}
    for name in ("small", "tiny"):
        overrides = [f"--dir={tmp_path / 'study'}", "--parallel=3"]
        config = load_config(StudyConfig, [CONFIGS / f"{name}.toml"], overrides)
        assert load_config(StudyConfig, [save_resolved(config, tmp_path)]) == config
        assert {each.role for each in config.arms} == {"baseline", "arm", "collapses", "flat"}
