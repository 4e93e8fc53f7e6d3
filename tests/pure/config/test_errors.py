"""One exception type; a line for each problem: key, given, source, allowed."""

import pickle
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config

SAMPLING_KEYS = (
    "n, temperature, top_k, top_p, max_tokens, min_tokens, stop_token_ids, ignore_eos, seed"
)


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
    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("sampling.temperature=hot", "got 'hot' (string) from {}, allowed: a valid number"),
            ("sampling.temperature=nan", "got nan (float) from {}, allowed: a finite number"),
            ("sampling.temperature=1e999", "got inf (float) from {}, allowed: a finite number"),
            (
                "sampling.temperature=-1",
                "got -1 (integer) from {}, allowed: 0 (greedy) or a number >= 0.001",
            ),
            ("sampling.n=true", "got True (boolean) from {}, allowed: a valid integer"),
            ("sampling.n=1.0", "got 1.0 (float) from {}, allowed: a valid integer"),
            ("sampling.n=", "got '' (string) from {}, allowed: a valid integer"),
            ("sampling.n=-3", "got -3 (integer) from {}, allowed: an integer >= 1"),
            ("sampling.ignore_eos=1", "got 1 (integer) from {}, allowed: a valid boolean"),
            ("sampling.stop_token_ids=3", "got 3 (integer) from {}, allowed: a valid array"),
            ("sampling=3", "got 3 (integer) from {}, allowed: a table"),
            ("model.name=", "got '' (string) from {}, allowed: a text that is not empty"),
            ("run.dir=", "got '' (string) from {}, allowed: a text that is not empty"),
            (
                "model.device=gpu",
                "got 'gpu' (string) from {}, allowed: 'auto', 'cpu', 'cuda' or 'cuda:N'",
            ),
            (
                "model.dtype=fp32",
                "got 'fp32' (string) from {}, allowed: 'auto', 'float32', 'bfloat16' or 'float16'",
            ),
            (
                "model.nmae=x",
                (
                    "unknown key, got 'x' (string) from {}, "
                    "allowed: name, dtype, device; did you mean name?"
                ),
            ),
            (
                "sampling.max-tokens=1",
                (
                    f"unknown key, got 1 (integer) from {{}}, "
                    f"allowed: {SAMPLING_KEYS}; did you mean max_tokens?"
                ),
            ),
            (
                "x=1",
                (
                    "unknown key, got 1 (integer) from {}, "
                    "allowed: prompts, raw, model, sampling, attention, run"
                ),
            ),
        ],
    )
    def test_a_bad_value_or_key(self, override: str, problem: str) -> None:
        (line,) = problems(f"--{override}")
        key = override.partition("=")[0]
        assert line.startswith(f"{key}: " + problem.format(f"override '--{override}'"))

    def test_an_element_of_a_list(self) -> None:
        (line,) = problems("--sampling.stop_token_ids=[1, true]")
        assert line.startswith("sampling.stop_token_ids[1]: got True (boolean) from override ")

    def test_a_path_through_a_value(self) -> None:
        (line,) = problems("--sampling.seed.x=1")
        assert line.startswith("sampling.seed: got the table {'x': 1} from override ")
        assert line.endswith("allowed: a valid integer")

    @pytest.mark.parametrize(
        "override",
        ["", "--", "--n", "--=1", "=1", "--a..b=1", "--.a=1", "--a.=1", "--a b=1", "--é=1"],
    )
    def test_malformed(self, override: str) -> None:
        expected = f"override {override!r}: not understood, allowed: --section.key=value"
        assert problems(override) == [expected]

    def test_bytes_that_are_not_utf8(self) -> None:
        (line,) = problems("--model.name=\udcff")
        assert "not understood" in line

    def test_only_one_line_of_toml_is_a_value(self) -> None:
        (line,) = problems("--sampling.n=1\nseed = 2")
        assert line.startswith(r"sampling.n: got '1\nseed = 2' (string)")

    def test_the_same_key_twice(self) -> None:
        (line,) = problems("--sampling.n=1", "sampling.n=2")
        assert line == (
            "override 'sampling.n=2': sampling.n already given by '--sampling.n=1', allowed: once"
        )


class TestFiles:
    def test_missing(self, toml: Path) -> None:
        assert problems(files=(toml,)) == ["file c.toml cannot be read: No such file or directory"]

    def test_syntax_error_names_file_and_line(self, toml: Path) -> None:
        toml.write_text("[model]\nname = \n")
        (line,) = problems(files=(toml,))
        assert line.startswith("file c.toml: not a TOML file: ")
        assert "line 2" in line

    def test_not_utf8(self, toml: Path) -> None:
        toml.write_bytes(b"\xff\xfe")
        (line,) = problems(files=(toml,))
        assert line.startswith("file c.toml is not UTF-8 text: ")

    def test_nested_unknown_key(self, toml: Path) -> None:
        toml.write_text("[sampling]\n[sampling.deep.er]\nx = 1\n")
        (line,) = problems(files=(toml,))
        assert line == (
            "sampling.deep: unknown key, got the table {'er': {'x': 1}} from file c.toml, "
            f"allowed: {SAMPLING_KEYS}"
        )

    def test_a_key_that_toml_must_quote_stays_on_its_line(self, toml: Path) -> None:
        toml.write_text('"a\\nb.c" = 1\n')
        (line,) = problems(files=(toml,))
        assert line.startswith(r'"a\nb.c": unknown key, got 1 (integer) from file c.toml')

    @pytest.mark.parametrize("key", ["model", "model.name", "sampling.seed"])
    def test_a_date_fits_nowhere(self, toml: Path, key: str) -> None:
        toml.write_text(f"{key} = 2020-01-01\n")
        (line,) = problems(files=(toml,))
        assert line.startswith(f"{key}: got datetime.date(2020, 1, 1) (date) from file c.toml")

    def test_a_table_here_and_a_value_there(self, toml: Path) -> None:
        toml.write_text("model = 3\n")
        assert problems("--model.name=m", files=(toml,)) == [
            (
                "model: got the table {'name': 'm'} from override '--model.name=m' and 3 (integer) "
                "from file c.toml, allowed: a table in both or in neither"
            )
        ]

    def test_the_last_source_of_a_value_is_named(self, toml: Path) -> None:
        toml.write_text("[sampling]\nn = 2\ntop_p = 3\n")
        n, top_p = problems("--sampling.n=0", files=(toml,))
        assert "from override '--sampling.n=0'" in n
        assert "from file c.toml" in top_p


class TestCombinations:
    def test_min_tokens_above_max_tokens_blames_min_tokens(self, toml: Path) -> None:
        toml.write_text("[sampling]\nmin_tokens = 5\n")
        assert problems("--sampling.max_tokens=4", files=(toml,)) == [
            (
                "sampling.min_tokens: got 5 (integer) from file c.toml, "
                "allowed: an integer from 0 to max_tokens, 4"
            )
        ]

    @pytest.mark.parametrize("greedy", ["--sampling.temperature=0", "--sampling.top_k=1"])
    def test_several_samples_that_would_all_be_equal(self, greedy: str) -> None:
        (line,) = problems(greedy, "--sampling.n=4")
        assert line.startswith(
            "sampling.n: got 4 (integer) from override '--sampling.n=4', "
            "allowed: 1 where temperature is 0 or top_k is 1"
        )


class Required(Record):
    steps: int


class Root(Record):
    inner: Required | None = None
    name: str


def test_a_required_key() -> None:
    with pytest.raises(ConfigError, match=r"^name: missing, and it has no default$"):
        load_config(Root, [], [])


def test_the_keys_of_an_optional_section_are_known() -> None:
    with pytest.raises(ConfigError, match="allowed: steps; did you mean steps"):
        load_config(Root, [], ["--name=x", "--inner.step=1", "--inner.steps=1"])


def test_every_problem_has_a_line() -> None:
    lines = problems("--model.device=x", "--sampling.n=0", "--sampling.top_p=2", "--runn.dir=x")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["model.device", "sampling.n", "sampling.top_p", "runn"]
    assert not any("pydantic" in line or "http" in line for line in lines)


def test_every_unreadable_layer_has_a_line(toml: Path) -> None:
    assert len(problems("x", "--sampling.n=1", "--sampling.n=2", files=(toml,))) == 3


def test_the_exception_can_be_pickled() -> None:
    error = ConfigError("a: wrong", "b: wrong")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a: wrong\nb: wrong"
