"""The configuration of a study: what arms and trainings are refused, and the shipped files."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.study import StudyConfig

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
    """Files that messages name as c.toml."""
    monkeypatch.chdir(tmp_path)


def loaded(arms: str = DENSE + TARGET, *overrides: str, head: str = "") -> StudyConfig:
    Path("c.toml").write_text(head + arms + TRAIN, encoding="utf-8")
    return load_config(StudyConfig, [Path("c.toml")], overrides)


def problem(arms: str = DENSE + TARGET, *overrides: str, head: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        loaded(arms, *overrides, head=head)
    return str(error.value)


def test_the_smallest_file_and_the_defaults() -> None:
    config = loaded()
    assert (config.name, config.dir, config.seeds, config.parallel) == ("study", None, (0, 1, 2), 1)
    assert config.rates == (1e-4, 3e-5, 1e-5)
    dense, sparse = config.arms
    assert (dense.dense, dense.role, sparse.dense, sparse.role) == (True, "baseline", False, "arm")
    assert (sparse.seeds, sparse.rate, sparse.corrections) == (None, None, None)
    outcome = config.outcome
    assert (outcome.drop, outcome.length, outcome.lag, outcome.gain) == (0.10, 0.5, 2.0, 0.15)


@pytest.mark.parametrize(
    "both",
    [
        "target = 0.8\nbudget = 64",
        'target = 0.8\nlike = "p"',
        'budget = 64\nlike = "p"',
        'target = 0.8\nbudget = 64\nlike = "p"',
    ],
)
def test_an_arm_has_one_of_target_budget_and_like(both: str) -> None:
    line = problem(DENSE + TARGET + f'[[arms]]\nname = "q"\n{both}\n')
    assert line.startswith("arms[2].name: ")
    assert "allowed: one of target, budget, like, or none" in line


@pytest.mark.parametrize(
    ("arms", "allowed"),
    [
        (TARGET, "got 0 (integer) with file c.toml, allowed: exactly one"),
        (
            DENSE + DENSE.replace("dense", "other"),
            "got 2 (integer) with file c.toml, allowed: exactly one",
        ),
        (
            DENSE + '[[arms]]\nname = "dense"\n',
            "got 'dense twice' (string) with file c.toml, allowed: one",
        ),
        (DENSE + "target = 0.8\n", "allowed: a baseline that is dense"),
        (DENSE + "budget = 64\n", "allowed: a baseline that is dense"),
        (
            DENSE + "".join(f'[[arms]]\nname = "{name}"\nrole = "flat"\n' for name in "ab"),
            "got 2 (integer) with file c.toml, allowed: one at most",
        ),
        (
            DENSE + TARGET + '[[arms]]\nname = "f"\nlike = "q"\n',
            "f.like: got 'q' (string) with file c.toml, allowed: an arm with a target: p",
        ),
        (
            DENSE + '[[arms]]\nname = "f"\nlike = "dense"\n',
            (
                "f.like: got 'dense' (string) with file c.toml, "
                "allowed: an arm with a target: there is none"
            ),
        ),
        (
            DENSE + TARGET + "seeds = [0, 7, 5]\n",
            "p.seeds: got [5, 7] (array) with file c.toml, allowed: seeds of the",
        ),
        (
            DENSE + "seeds = [0]\n" + TARGET,
            "p.seeds: got [1, 2] (array) with file c.toml, allowed: seeds of the",
        ),
    ],
)
def test_refused_arms(arms: str, allowed: str) -> None:
    assert allowed in problem(arms)


def test_the_flat_control_may_have_seeds_of_its_own() -> None:
    """It is compared with its own start, not with the baseline."""
    assert loaded(DENSE + '[[arms]]\nname = "still"\nrole = "flat"\nseeds = [9]\n')


def test_several_positive_controls_are_fine() -> None:
    arms = [f'[[arms]]\nname = "s{n}"\nrole = "collapses"\nbudget = {n}\n' for n in (48, 64)]
    assert len(loaded(DENSE + "".join(arms)).arms) == 3


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("train.rollout.attention.budget=64", "allowed: by the arms"),
        ("train.rollout.attention.schedule=s.json", "allowed: by the arms"),
        ("train.rollout.attention.dense=true", "allowed: by the arms"),
        ("train.run.dir=somewhere", "allowed: dir of the study"),
        ("train.validation.every=0", "allowed: steps between evaluations: they are the study's"),
        ("train.validation.sparse=true", "allowed: dense evaluations"),
        ("train.gate.mode=act", "allowed: warn: a gate that changes budgets changes the arms"),
        ("train.gate.mode=off", "allowed: warn, which measures p05"),
    ],
)
def test_what_the_arms_decide_is_not_the_training_s_to_say(override: str, allowed: str) -> None:
    line = problem(DENSE + TARGET, f"--{override}")
    assert line.startswith(override.split("=")[0].rpartition(".")[0])
    assert allowed in line


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-a", "a b", "a.json", "ä"])
def test_a_name_that_names_no_folder(name: str) -> None:
    assert problem(DENSE.replace('"dense"', f'"{name}"')).startswith("arms[0].name: ")


@pytest.mark.parametrize("name", ["p05-0.86", "0", "starved-64"])
def test_names_of_arms(name: str) -> None:
    assert loaded(DENSE.replace('"dense"', f'"{name}"')).arms[0].name == name


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("outcome.drop=0.0", "greater than 0"),
        ("outcome.tolerance=1.0", "less than 1"),
        ("outcome.gain=1.5", "less than or equal to 1"),
        ("probe.samples=1", "greater than or equal to 2"),
        ("parallel=0", "greater than or equal to 1"),
        ("surface.by=mean", "'p05' or 'low'"),
        ("surface.budgets=[32]", "greater than or equal to 48"),
        ("rates=[0.0]", "greater than 0"),
        ("seeds=[-1]", "greater than or equal to 0"),
        ("surfaces.bin=16", "did you mean surface?"),
    ],
)
def test_refused_values(override: str, allowed: str) -> None:
    line = problem(DENSE + TARGET, f"--{override}")
    assert line.startswith(override.split("=")[0].split(".")[0])
    assert allowed in line


@pytest.mark.parametrize(
    ("arm", "allowed"),
    [
        ("target = 1.0", "less than 1"),
        ("target = 0.0", "greater than 0"),
        ("budget = 47", "greater than or equal to 48"),
        ("rate = -0.1", "greater than or equal to 0"),
        ('role = "control"', "'baseline', 'arm', 'collapses' or 'flat'"),
    ],
)
def test_refused_values_of_an_arm(arm: str, allowed: str) -> None:
    line = problem(DENSE + f'[[arms]]\nname = "p"\n{arm}\n')
    assert line.startswith(f"arms[1].{arm.split()[0]}: ")
    assert allowed in line


def test_no_arms_and_no_seeds() -> None:
    assert "allowed: one at least, and each once" in problem("arms = []\n")
    assert "allowed: one at least, and each once" in problem(head="seeds = []\n")


@pytest.mark.parametrize(
    ("head", "allowed"),
    [
        ("seeds = [0, 0]\n", "allowed: one at least, and each once"),
        ("rates = []\n", "allowed: rates that differ, the largest first"),
        ("rates = [1e-5, 1e-4]\n", "allowed: rates that differ, the largest first"),
        ("rates = [1e-4, 1e-4]\n", "allowed: rates that differ, the largest first"),
        ("surface.first = 100000\n", "allowed: rows before those of training"),
    ],
)
def test_refused_order(head: str, allowed: str) -> None:
    assert allowed in problem(head=head)


def test_a_baseline_has_the_rate_of_the_study() -> None:
    line = problem('[[arms]]\nname = "dense"\nrole = "baseline"\nrate = 1e-3\n')
    assert "allowed: a baseline that is dense, at the rate of the study" in line
    assert problem(DENSE + "seeds = []\n").startswith("dense.seeds: got 'none'")


def test_the_study_on_small_is_that_of_the_issue() -> None:
    config = load_config(StudyConfig, [CONFIGS / "small.toml"])
    assert (config.seeds, config.rates) == ((0, 1, 2), (1e-4, 3e-5, 1e-5))
    targets = [arm.target for arm in config.arms if arm.target is not None]
    assert set(targets) >= {0.75, 0.80, 0.86, 0.92}
    like = next(arm.like for arm in config.arms if arm.like is not None)
    assert next(arm.target for arm in config.arms if arm.name == like) == 0.86
    control = next(arm for arm in config.arms if arm.role == "collapses")
    assert (control.budget, control.corrections) == (64, ())
    assert next(arm for arm in config.arms if arm.role == "flat").rate == 0.0
    (tis,) = config.train.algorithm.corrections
    assert (tis.use, tis.settings) == ("token-tis", {"cap": 2.0})
    assert (config.train.rollout.prompts, config.train.rollout.samples) == (16, 8)
    assert (config.train.run.steps, config.train.validation.rows) == (60, 256)
    assert config.train.batch.updates == 1


def test_the_study_on_tiny_is_for_a_cpu() -> None:
    config = load_config(StudyConfig, [CONFIGS / "tiny.toml"])
    assert (config.train.model.name, config.train.model.device) == ("tiny", "cpu")
    assert {arm.role for arm in config.arms} == {"baseline", "arm", "collapses", "flat"}


def test_the_files_are_all_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {"small", "tiny"}


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_loading_the_resolved_file_gives_an_equal_configuration(name: str, tmp_path: Path) -> None:
    overrides = [f"--dir={tmp_path / 'study'}", "--parallel=3"]
    config = load_config(StudyConfig, [CONFIGS / f"{name}.toml"], overrides)
    assert load_config(StudyConfig, [save_resolved(config, tmp_path)]) == config
