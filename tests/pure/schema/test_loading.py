"""Files left to right, then options: what wins, how a value is read, and what is said of mistakes.

One exception type; a line for each problem: key, given, source, allowed.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig, GenerateSampling, ModelConfig, RunConfig
from sparrow.schema.loading import ConfigError, load_config
from sparrow.schema.train import TrainConfig


def load(*words: str) -> GenerateConfig:
    return load_config(GenerateConfig, [], words)


def problems(*words: str, files: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(GenerateConfig, files, words)
    return str(error.value).splitlines()


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that messages name as c.toml."""
    monkeypatch.chdir(tmp_path)
    return Path("c.toml")


def test_defaults_and_what_is_changed_of_them() -> None:
    config = load()
    assert config == GenerateConfig()
    assert config.sampling == GenerateSampling()
    assert (config.model.name, config.sampling.top_p) == ("smollm2-135m", 0.9)
    sampling = load("--sampling.max_tokens=7").sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 0.2)


def test_later_files_win_key_by_key_and_options_last(toml: Path) -> None:
    first = "n = 2\ntop_k = 5\nseed = 1\ntemperature = 1\nstop_token_ids = [1, 2]\n"
    toml.write_text(f"[sampling]\n{first}")
    second = Path("2.toml")
    second.write_text("[sampling]\nn = 3\ntop_k = 6\nstop_token_ids = [4]\n[model]\nname = 'm'\n")
    config = load_config(GenerateConfig, [toml, second], ["--sampling.n=4"])
    sampling = config.sampling
    assert (sampling.n, sampling.top_k, sampling.seed, config.model.name) == (4, 6, 1, "m")
    assert sampling.stop_token_ids == (4,)  # lists replace
    assert isinstance(sampling.temperature, float)  # an integer may stand for it


def test_values_are_toml_or_text() -> None:
    for words, (section, field), value in (
        ("--model.name=3", ("model", "name"), "3"),
        ("--model.name=a=b", ("model", "name"), "a=b"),
        ("--model.name='x'", ("model", "name"), "'x'"),
        ("--sampling.temperature=1e-2", ("sampling", "temperature"), 0.01),
        ("--sampling.temperature=2", ("sampling", "temperature"), 2.0),
        ("--sampling.top_k=1_000", ("sampling", "top_k"), 1000),
        ("--sampling.stop_token_ids=[1, 2]", ("sampling", "stop_token_ids"), (1, 2)),
        ("--sampling.ignore_eos=true", ("sampling", "ignore_eos"), True),
        ("--run.out=a b", ("run", "out"), Path("a b")),
    ):
        got = getattr(getattr(load(words), section), field)
        assert (got, type(got)) == (value, type(value)), words


# Mistakes.


def test_key_value_and_source_of_an_option_are_named() -> None:
    for word, given in {
        "sampling.temperature=hot": "'hot' (string)",
        "sampling.temperature=nan": "nan (float)",
        "sampling.n=true": "True (boolean)",
        "sampling.n=1.0": "1.0 (float)",
        "sampling.n=": "'' (string)",
        "sampling.n=-3": "-3 (integer)",
        "sampling.n=1\nseed = 2": r"'1\nseed = 2' (string)",
        "sampling.ignore_eos=1": "1 (integer)",
        "sampling=3": "3 (integer)",
        "sampling.seed.x=1": "the table {'x': 1}",
        "model.name=": "'' (string)",
        "run.out=": "'' (string)",
        "model.device=gpu": "'gpu' (string)",
        "model.nmae=x": "'x' (string)",
    }.items():
        (line,) = problems(f"--{word}")
        key = word.partition("=")[0].removesuffix(".x")
        assert line.startswith(f"{key}: "), line
        assert f"got {given} from option {f'--{word}'!r}, allowed: " in line, line
    assert problems("--sampling.stop_token_ids=[1, true]")[0].startswith(
        "sampling.stop_token_ids[1]: "
    )
    assert "did you mean name?" in problems("--model.nmae=x")[0]
    assert "did you mean max_tokens?" in problems("--sampling.max-tokns=1")[0]
    assert "--sampling.n=1" in problems("--sampling.n=1", "--sampling.n=2")[0]


def test_mistakes_in_files(toml: Path) -> None:
    assert problems(files=(toml,))[0].startswith("file c.toml cannot be read")
    for text, said in (
        ("[model]\nname = \n", "line 2"),
        ("[sampling]\n[sampling.deep.er]\nx = 1\n", "sampling.deep: "),
        ('"a\\nb.c" = 1\n', r'"a\nb.c": '),  # a key that TOML must quote stays on its line
        ("model = 2020-01-01\n", "model: got datetime.date"),
        ("sampling.seed = 2020-01-01\n", "sampling.seed: got datetime.date"),
    ):
        toml.write_text(text)
        (line,) = problems(files=(toml,))
        assert said in line
        assert "c.toml" in line
    toml.write_text("[sampling]\nn = 2\ntop_p = 3\n")
    n, top_p = problems("--sampling.n=0", files=(toml,))
    assert "from option '--sampling.n=0'" in n
    assert "from file c.toml" in top_p


def test_values_that_do_not_fit_together(toml: Path) -> None:
    toml.write_text("[sampling]\nmin_tokens = 5\n")
    (line,) = problems("--sampling.max_tokens=4", files=(toml,))
    assert line.startswith("sampling.min_tokens: got 5 (integer) from file c.toml")
    for greedy in ("--sampling.temperature=0", "--sampling.top_k=1"):
        assert problems(greedy, "--sampling.n=4")[0].startswith("sampling.n: got 4")


def test_a_folder_or_a_model_instead_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").touch()
    for word, said in ((str(tmp_path), "config.resolved.toml"), ("smollm2-135m", "--model smol")):
        with pytest.raises(ConfigError, match=said):
            load_config(TrainConfig, [], [word])


class Required(Record):
    steps: int


class Root(Record):
    inner: Required | None = None
    name: str


def test_required_keys_and_those_of_an_optional_table() -> None:
    with pytest.raises(ConfigError, match="name: missing"):
        load_config(Root, [], [])
    with pytest.raises(ConfigError, match=r"inner\.step: .* steps\?"):
        load_config(Root, [], ["--name=x", "--inner.step=1", "--inner.steps=1"])


def test_settings_of_the_chat() -> None:
    words = ["--system", "Be brief.", "--chat.template.enable_thinking=false", "Hello"]
    config = load_config(GenerateConfig, [], words)
    assert (config.chat.system, config.chat.template) == ("Be brief.", {"enable_thinking": False})
    (line, *_) = problems("--chat.template.list=[1, 2]")
    assert line.startswith("chat.template.list")


def test_every_problem_has_a_line() -> None:
    lines = problems("--model.device=x", "--sampling.n=0", "--sampling.top_p=2", "--runn.dir=x")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["model.device", "sampling.n", "sampling.top_p", "runn"]
    assert not any("pydantic" in line or "http" in line for line in lines)
    error = ConfigError(*lines)
    assert str(pickle.loads(pickle.dumps(error))) == "\n".join(lines)


@pytest.mark.parametrize("section", [GenerateConfig, ModelConfig, RunConfig])
def test_sections_are_frozen_and_what_may_be_none_is_none_by_default(section: Any) -> None:
    """Otherwise a None that was set would be lost in config.resolved.toml."""
    config = section()
    assert hash(config) == hash(section())
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, next(iter(section.model_fields)), None)
    for field in section.model_fields.values():
        assert type(None) not in getattr(field.annotation, "__args__", ()) or field.default is None
