"""The configuration of the warm-up: refusals with their messages, the shipped files, round trip."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.warmup import (
    DataConfig,
    OptimiserConfig,
    StageConfig,
    WarmupConfig,
    WarmupRunConfig,
)

OPTIMISER_KEYS = "rate, warm_up, decay, final, beta1, beta2, weight_decay, clip"
RATE = "; did you mean rate?"
CONFIGS = Path(__file__).parents[3] / "recipes/sparrow_recipes/configs/warmup"
SMALLEST = """
[model]
name = "m"
layers = 1
hidden = 32
intermediate = 64
heads = 2
kv_heads = 1
max_positions = 1024

[[stages]]
steps = 3
tokens = 1024
longest = 200
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that messages name as c.toml."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(SMALLEST, encoding="utf-8")
    return Path("c.toml")


def problems(toml: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(WarmupConfig, [toml], overrides)
    return str(error.value).splitlines()


def in_file(toml: Path, old: str, new: str) -> list[str]:
    """Problems of the file with a line changed."""
    assert old in SMALLEST
    toml.write_text(SMALLEST.replace(old, new), encoding="utf-8")
    return problems(toml)


def test_the_smallest_file_and_the_defaults(toml: Path) -> None:
    config = load_config(WarmupConfig, [toml])
    assert config.steps == 3
    assert config.stages == (StageConfig(steps=3, tokens=1024, shortest=100, longest=200),)
    assert config.data == DataConfig(seed=0, assignments=1, countdown=1, graph=1, revisit=True)
    assert config.optimiser == OptimiserConfig()
    assert config.run == WarmupRunConfig(device="auto", dtype="auto", workers=0, save_every=500)
    assert (config.model.head_size, config.model.start, config.run.dir) == (64, None, None)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "model.layers=0",
            "got 0 (integer) from override '{}', allowed: greater than or equal to 1",
        ),
        ("model.layers=1.0", "got 1.0 (float) from override '{}', allowed: a valid integer"),
        ("model.head_size=63", "got 63 (integer) from override '{}', allowed: a multiple of 2"),
        (
            "model.head_size=0",
            "got 0 (integer) from override '{}', allowed: greater than or equal to 2",
        ),
        ("model.rope_theta=1.0", "got 1.0 (float) from override '{}', allowed: greater than 1"),
        (
            "model.name=",
            (
                "got '' (string) from override '{}', "
                "allowed: letters, digits, '.', '_' and '-', as it names a folder"
            ),
        ),
        ("model.start=", "got '' (string) from override '{}', allowed: a text that is not empty"),
        (
            "data.seed=-1",
            "got -1 (integer) from override '{}', allowed: greater than or equal to 0",
        ),
        ("data.graph=1.5", "got 1.5 (float) from override '{}', allowed: less than or equal to 1"),
        (
            "data.graph=-0.5",
            "got -0.5 (float) from override '{}', allowed: greater than or equal to 0",
        ),
        ("data.revisit=1", "got 1 (integer) from override '{}', allowed: a valid boolean"),
        ("optimiser.rate=0.0", "got 0.0 (float) from override '{}', allowed: greater than 0"),
        ("optimiser.rate=1.0", "got 1.0 (float) from override '{}', allowed: less than 1"),
        ("optimiser.rate=nan", "got nan (float) from override '{}', allowed: a finite number"),
        (
            "optimiser.warm_up=-1",
            "got -1 (integer) from override '{}', allowed: greater than or equal to 0",
        ),
        (
            "optimiser.decay=-1",
            "got -1 (integer) from override '{}', allowed: greater than or equal to 0",
        ),
        ("optimiser.clip=0.0", "got 0.0 (float) from override '{}', allowed: greater than 0"),
        (
            "run.workers=257",
            "got 257 (integer) from override '{}', allowed: less than or equal to 256",
        ),
        (
            "run.save_every=0",
            "got 0 (integer) from override '{}', allowed: greater than or equal to 1",
        ),
        ("run.dir=", "got '' (string) from override '{}', allowed: a text that is not empty"),
        (
            "run.device=gpu",
            "got 'gpu' (string) from override '{}', allowed: 'auto', 'cpu', 'cuda' or 'cuda:N'",
        ),
        (
            "run.dtype=float16",
            "got 'float16' (string) from override '{}', allowed: 'auto', 'float32' or 'bfloat16'",
        ),
        (
            "optimiser.rte=0.1",
            f"unknown key, got 0.1 (float) from override '{{}}', allowed: {OPTIMISER_KEYS}{RATE}",
        ),
    ],
)
def test_refused_values(toml: Path, override: str, problem: str) -> None:
    key = override.split("=")[0]
    assert problems(toml, f"--{override}") == [f"{key}: {problem.format(f'--{override}')}"]


def test_an_unknown_key_of_the_model(toml: Path) -> None:
    (line,) = in_file(toml, "layers = 1", "layers = 1\nlayer = 2")
    assert line.startswith(
        "model.layer: unknown key, got 2 (integer) from file c.toml, allowed: name, "
    )
    assert line.endswith("; did you mean layers?")


def test_an_unknown_table(toml: Path) -> None:
    (line,) = in_file(toml, "[[stages]]", "[optimizer]\nrate = 1e-3\n[[stages]]")
    assert line.startswith("optimizer: unknown key, got the table {'rate': 0.001} from file c.toml")
    assert line.endswith("; did you mean optimiser?")


def test_what_has_no_default(toml: Path) -> None:
    assert in_file(toml, "hidden = 32\n", "") == [
        "model.hidden: missing in file c.toml, and it has no default"
    ]
    expected = ["stages[0].longest: missing in file c.toml, and it has no default"]
    assert in_file(toml, "longest = 200\n", "") == expected
    without = SMALLEST.partition("[[stages]]")[0]
    toml.write_text(without, encoding="utf-8")
    assert problems(toml) == ["stages: missing in file c.toml, and it has no default"]


def test_no_stage(toml: Path) -> None:
    toml.write_text("stages = []\n" + SMALLEST.partition("[[stages]]")[0], encoding="utf-8")
    assert problems(toml) == [
        "stages: got [] (array) from file c.toml, allowed: one stage at least, 64 at most"
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "longest = 200",
            "longest = 200\nshortest = 300",
            "shortest: got 300 (integer) from file c.toml, allowed: at most longest, which is 200",
        ),
        (
            "tokens = 1024",
            "tokens = 1023",
            "tokens: got 1023 (integer) from file c.toml, allowed: greater than or equal to 1024",
        ),
        (
            "longest = 200",
            "longest = 99",
            "longest: got 99 (integer) from file c.toml, allowed: greater than or equal to 100",
        ),
        (
            "longest = 200",
            "longest = 8001",
            "longest: got 8001 (integer) from file c.toml, allowed: less than or equal to 8000",
        ),
        (
            "longest = 200",
            "longest = 200\nshortest = 99",
            "shortest: got 99 (integer) from file c.toml, allowed: greater than or equal to 100",
        ),
        (
            "steps = 3",
            "steps = 0",
            "steps: got 0 (integer) from file c.toml, allowed: greater than or equal to 1",
        ),
    ],
)
def test_refused_stages(toml: Path, old: str, new: str, problem: str) -> None:
    assert in_file(toml, old, new) == [f"stages[0].{problem}"]


def test_a_stage_of_one_length(toml: Path) -> None:
    toml.write_text(SMALLEST.replace("longest = 200", "longest = 200\nshortest = 200"), "utf-8")
    assert load_config(WarmupConfig, [toml]).stages[0].shortest == 200


def test_no_share_above_0(toml: Path) -> None:
    none = ("--data.assignments=0.0", "--data.countdown=0.0", "--data.graph=0.0")
    (line,) = problems(toml, *none)
    given = "got 0.0 (float) from override '--data.assignments=0.0'"
    assert line == f"data.assignments: {given}, allowed: one share above 0 at least"
    for given in none:
        others = [other for other in none if other != given]
        load_config(WarmupConfig, [toml], others)  # one is enough


@pytest.mark.parametrize(
    ("name", "steps", "start"),
    [
        ("base", 6600, None),
        ("small", 1700, "runs/warmup/base/model"),
        ("tiny", 2000, "runs/warmup/base/model"),
    ],
)
def test_the_files_of_the_shipped_models(name: str, steps: int, start: str | None) -> None:
    config = load_config(WarmupConfig, [CONFIGS / f"{name}.toml"])
    assert (config.model.name, config.steps, config.model.start) == (name, steps, start)


def test_base_begins_with_a_stage_for_a_cpu() -> None:
    """tests/cpu/dataflow/test_first_steps.py runs it again."""
    first = load_config(WarmupConfig, [CONFIGS / "base.toml"]).stages[0]
    assert first == StageConfig(steps=200, tokens=1024, shortest=100, longest=200)


def test_the_files_are_all_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {"base", "small", "tiny"}


@pytest.mark.parametrize("name", ["base", "small", "tiny"])
def test_loading_the_resolved_file_gives_an_equal_configuration(name: str, tmp_path: Path) -> None:
    overrides = [f"--run.dir={tmp_path / 'run'}", "--run.workers=3", "--optimiser.rate=0.003"]
    config = load_config(WarmupConfig, [CONFIGS / f"{name}.toml"], overrides)
    again = load_config(WarmupConfig, [save_resolved(config, tmp_path)])
    assert again == config
    assert again.run.dir == tmp_path / "run"
