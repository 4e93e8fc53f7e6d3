"""The configuration of a study: which arms and trainings are refused."""

from pathlib import Path

import pytest

from sparrow.schema.loading import ConfigError, load_config
from sparrow_recipes.study.config import StudyConfig

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


def loaded(arms: str, *overrides: str) -> StudyConfig:
    Path("c.toml").write_text(arms + TRAIN)
    return load_config(StudyConfig, [Path("c.toml")], overrides)


def refused(key: str, arms: str, *overrides: str) -> None:
    """The first problem names this key."""
    with pytest.raises(ConfigError) as error:
        loaded(arms, *overrides)
    assert key in error.value.args[0].partition(": got")[0], error.value


def arm(name: str, *lines: str) -> str:
    return "\n".join(["[[arms]]", f'name = "{name}"', *lines, ""])


def test_refused_arms() -> None:
    for key, arms in (
        ("arms[2].name", DENSE + TARGET + arm("q", "target = 0.8", "budget = 64")),
        ("arms[2].name", DENSE + TARGET + arm("q", "budget = 64", 'like = "p"')),
        ("arms", TARGET),
        ("arms", "arms = []\n"),
        ("arms", DENSE + DENSE.replace("dense", "other")),
        ("arms", DENSE + arm("dense")),
        ("dense", DENSE + "target = 0.8\n"),
        ("dense", DENSE + "rate = 1e-3\n"),
        ("dense.seeds", DENSE + "seeds = []\n"),
        ("arms", DENSE + arm("a", 'role = "flat"') + arm("b", 'role = "flat"')),
        ("f.like", DENSE + TARGET + arm("f", 'like = "q"')),
        ("f.like", DENSE + arm("f", 'like = "dense"')),
        ("p.seeds", DENSE + TARGET + "seeds = [0, 7, 5]\n"),
        ("p.seeds", DENSE + "seeds = [0]\n" + TARGET),
        ("arms[1].budget", DENSE + arm("p", "budget = 47")),
        ("arms[1].role", DENSE + arm("p", 'role = "control"')),
        ("arms[1].name", DENSE + arm("p", "budget = 64", 'schedule = "s"')),
        ("arms[1].train", DENSE + arm("p", "train.run.steps = 3")),
        ("arms[1].train", DENSE + arm("p", "train.rollout.attention.budget = 64")),
        ("arms", DENSE + arm("p", "train.algorithm.cap = 3")),
        ("arms", DENSE + arm("p", 'train.rollout.attention.flow = "quest"')),
        *(("arms[0].name", DENSE.replace("dense", name)) for name in ("", "a/b", "..", "a.json")),
    ):
        refused(key, arms)
    assert loaded(DENSE + arm("still", 'role = "flat"', "seeds = [9]"))  # compared with itself
    controls = [arm(f"s{n}", 'role = "collapses"', f"budget = {n}") for n in (48, 64)]
    assert len(loaded(DENSE + "".join(controls)).arms) == 3
    for name in ("p05-0.86", "0", "starved-64"):
        assert loaded(DENSE.replace('"dense"', f'"{name}"')).arms[0].name == name


def test_refused_settings() -> None:
    """What the arms decide is not the training's to say."""
    for setting in (
        "train.rollout.attention.budget=64",
        "train.rollout.attention.schedule=s.json",
        "train.rollout.decoding=dense",
        "train.run.out=somewhere",
        "train.validation.every=0",
        "train.validation.sparse=true",
        "train.gate.mode=act",
        "train.gate.mode=off",
        "surface.first=100000",
        "rates=[]",
        "rates=[1e-5, 1e-4]",
        "rates=[1e-4, 1e-4]",
        "seeds=[]",
        "seeds=[0, 0]",
        "surfaces.bin=16",
    ):
        key = setting.partition("=")[0]
        refused(key.rpartition(".")[0] or key, DENSE + TARGET, f"--{setting}")


def test_older_files_have_rate_and_corrections_beside_train() -> None:
    older = loaded(DENSE + arm("p", "rate = 0.0", "corrections = []"))
    now = loaded(DENSE + arm("p", "train.optimiser.rate = 0.0", "train.algorithm.corrections = []"))
    assert older == now
    assert older.arms[1].setting("optimiser.rate") == 0.0


def test_an_analysis_names_arms_and_needs_no_dense_baseline() -> None:
    base = DENSE + "budget = 64\n" + TARGET
    refused("dense", base)
    analysis = '[analysis]\nsd = [0.1]\ncompare = [["p", "dense"]]\n'
    assert loaded(base + analysis).analysis.pairs == (("p", "dense"),)
    refused("analysis", base + analysis.replace('"p"', '"q"'))
    refused("analysis.sd", base + analysis.replace("[0.1]", "[]"))
    predicted = '[[analysis.predictions]]\nhypothesis = "h"\n'
    both = 'compare = ["dense", "p"]\nright = "open"\n'
    assert loaded(base + analysis + predicted + both).analysis.pairs[1] == ("dense", "p")
    for wrong in ("", 'right = "open"\n', 'compare = ["dense", "p"]\n'):
        refused("analysis.predictions[0]", base + analysis + predicted + wrong)
    refused("analysis", base + analysis + predicted + "fell = { q = [0.0, 1.0] }\n")
