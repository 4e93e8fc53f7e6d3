"""One exception type; a line for each problem: key, given, source, allowed."""

import pickle
from pathlib import Path

import pytest

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config


def problems(*overrides: str, files: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(GenerateConfig, files, overrides)
    return str(error.value).splitlines()


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that messages name as c.toml."""
    monkeypatch.chdir(tmp_path)
    return Path("c.toml")


class TestOverrides:
    def test_key_value_and_source_are_named(self) -> None:
        for override, given in {
            "sampling.temperature=hot": "'hot' (string)",
            "sampling.temperature=nan": "nan (float)",
            "sampling.temperature=-1": "-1 (integer)",
            "sampling.n=true": "True (boolean)",
            "sampling.n=1.0": "1.0 (float)",
            "sampling.n=": "'' (string)",
            "sampling.n=-3": "-3 (integer)",
            "sampling.ignore_eos=1": "1 (integer)",
            "sampling.stop_token_ids=3": "3 (integer)",
            "sampling=3": "3 (integer)",
            "model.name=": "'' (string)",
            "run.dir=": "'' (string)",
            "model.device=gpu": "'gpu' (string)",
            "model.dtype=fp32": "'fp32' (string)",
            "model.nmae=x": "'x' (string)",
            "sampling.max-tokens=1": "1 (integer)",
            "x=1": "1 (integer)",
        }.items():
            (line,) = problems(f"--{override}")
            key = override.partition("=")[0]
            assert line.startswith(f"{key}: ")
            assert f"got {given} from override '--{override}', allowed: " in line

    def test_the_key_that_was_probably_meant(self) -> None:
        assert "did you mean name?" in problems("--model.nmae=x")[0]
        assert "did you mean max_tokens?" in problems("--sampling.max-tokens=1")[0]

    def test_places_inside_a_value(self) -> None:
        (line,) = problems("--sampling.stop_token_ids=[1, true]")
        assert line.startswith("sampling.stop_token_ids[1]: ")
        (line,) = problems("--sampling.seed.x=1")
        assert line.startswith("sampling.seed: got the table {'x': 1} from override ")

    def test_malformed(self) -> None:
        for override in (
            "", "--", "--n", "--=1", "=1", "--a..b=1", "--.a=1", "--a.=1", "--a b=1", "--é=1",
            "--model.name=\udcff",
        ):  # fmt: skip
            (line,) = problems(override)
            assert line.startswith("override "), override

    def test_only_one_line_of_toml_is_a_value(self) -> None:
        (line,) = problems("--sampling.n=1\nseed = 2")
        assert line.startswith(r"sampling.n: got '1\nseed = 2' (string)")

    def test_the_same_key_twice(self) -> None:
        (line,) = problems("--sampling.n=1", "sampling.n=2")
        assert "'sampling.n=2'" in line
        assert "'--sampling.n=1'" in line


class TestFiles:
    def test_what_cannot_be_read(self, toml: Path) -> None:
        assert problems(files=(toml,))[0].startswith("file c.toml cannot be read")
        toml.write_text("[model]\nname = \n")
        (line,) = problems(files=(toml,))
        assert "c.toml" in line
        assert "line 2" in line
        toml.write_bytes(b"\xff\xfe")
        assert "c.toml" in problems(files=(toml,))[0]

    def test_unknown_keys(self, toml: Path) -> None:
        toml.write_text("[sampling]\n[sampling.deep.er]\nx = 1\n")
        (line,) = problems(files=(toml,))
        assert line.startswith("sampling.deep: ")
        assert "from file c.toml" in line
        toml.write_text('"a\\nb.c" = 1\n')  # a key that TOML must quote stays on its line
        assert problems(files=(toml,))[0].startswith(r'"a\nb.c": ')

    def test_a_date_fits_nowhere(self, toml: Path) -> None:
        for key in ("model", "model.name", "sampling.seed"):
            toml.write_text(f"{key} = 2020-01-01\n")
            assert problems(files=(toml,))[0].startswith(f"{key}: got datetime.date")

    def test_a_table_here_and_a_value_there(self, toml: Path) -> None:
        toml.write_text("model = 3\n")
        (line,) = problems("--model.name=m", files=(toml,))
        assert line.startswith("model: ")
        assert "c.toml" in line

    def test_the_last_source_of_a_value_is_named(self, toml: Path) -> None:
        toml.write_text("[sampling]\nn = 2\ntop_p = 3\n")
        n, top_p = problems("--sampling.n=0", files=(toml,))
        assert "from override '--sampling.n=0'" in n
        assert "from file c.toml" in top_p


def test_values_that_do_not_fit_together(toml: Path) -> None:
    toml.write_text("[sampling]\nmin_tokens = 5\n")
    (line,) = problems("--sampling.max_tokens=4", files=(toml,))
    assert line.startswith("sampling.min_tokens: got 5 (integer) from file c.toml")
    for greedy in ("--sampling.temperature=0", "--sampling.top_k=1"):
        assert problems(greedy, "--sampling.n=4")[0].startswith("sampling.n: got 4")


class Required(Record):
    steps: int


class Root(Record):
    inner: Required | None = None
    name: str


def test_required_keys_and_those_of_an_optional_table() -> None:
    with pytest.raises(ConfigError, match="missing"):
        load_config(Root, [], [])
    with pytest.raises(ConfigError, match="did you mean steps"):
        load_config(Root, [], ["--name=x", "--inner.step=1", "--inner.steps=1"])


def test_every_problem_has_a_line(toml: Path) -> None:
    lines = problems("--model.device=x", "--sampling.n=0", "--sampling.top_p=2", "--runn.dir=x")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["model.device", "sampling.n", "sampling.top_p", "runn"]
    assert not any("pydantic" in line or "http" in line for line in lines)
    assert len(problems("x", "--sampling.n=1", "--sampling.n=2", files=(toml,))) == 3


def test_the_exception_can_be_pickled() -> None:
    error = ConfigError("a: wrong", "b: wrong")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a: wrong\nb: wrong"
