"""Command-line words to configurations: forms of options, files, mistakes that name the word."""

from pathlib import Path
from typing import ClassVar

import pytest

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import ConfigError, load_config, parse, resolve
from sparrow.schema.options import Option, argument, list_options, option
from sparrow.schema.types import Count, FilePath, Fraction, LayerNumbers, Name, Several


class Section(Record):
    depth: int = 1
    quick: bool = False


class Words(Record):
    model: Name = argument(..., "A model.")
    runs: Several[FilePath] = argument((), "Runs.")
    rows: Name | None = None
    budget: Several[Count] = ()
    task: Name | None = None
    target: Fraction = 0.86
    dense_layers: Several[LayerNumbers] = option((), "Layers.")
    plots: bool = option(True, "Plots.")
    force: bool = option(False, "Force.")
    section: Section = Section()

    shortcuts: ClassVar = {"seed": "section.depth", "file": "rows", "part": "section"}


def words(text: str) -> Words:
    return load_config(Words, [], text.split())


def parse_words(text: str) -> None:
    """With an option of the command line alone, a flag that takes no value."""
    parsed = parse(Words, text.split(), [Option("extra", (), bool)])
    resolve(Words, parsed.files, parsed.layers)


def test_forms_of_an_option() -> None:
    for text in ("--target 0.5", "--target=0.5", "-t 0.5", "-t0.5", "-t=0.5", "--target .5"):
        assert words(f"m {text}").target == 0.5, text
    for text in ("--dense-layers 0,1", "--dense_layers=0,1", "--dense-layers=1,0"):
        assert words(f"m {text}").dense_layers == ((0, 1),), text
    assert words("m --dense-layers none --dense-layers 3").dense_layers == ((), (3,))
    assert words("m -b 1 -b2 --budget=[3, 4]".replace(", ", ",")).budget == (1, 2, 3, 4)
    assert words("m --file x.jsonl").rows == words("m --rows x.jsonl").rows == "x.jsonl"
    assert words("m --rows 3").rows == "3"
    assert not words("m --no-plots").plots
    assert words("m --force --plots=true").force
    assert not words("m --force=false").force
    assert words("m --section.depth=3").section == words("m --seed 3").section == Section(depth=3)
    assert words("m --part.depth=3").section == Section(depth=3)
    assert words("m -s 3 --section.quick").section == Section(depth=3, quick=True)
    assert not words("m --no-section.quick").section.quick


def test_the_same_name_has_the_same_letter_and_help() -> None:
    shown = {option.name: option for option in list_options(Words)}
    assert {name: option.letter for name, option in shown.items() if option.letter} == {
        "budget": "b",
        "target": "t",
        "seed": "s",
    }
    assert (shown["budget"].metavar, shown["runs"].metavar) == ("N", "RUNS")
    assert shown["seed"].default == 1
    assert "presets" not in shown["budget"].help
    assert shown["task"].help


def test_words_without_a_dash() -> None:
    assert words("m a b").runs == (Path("a"), Path("b"))
    assert words("-- m -a").runs == (Path("-a"),)
    prompts = ["-- no", "a.toml", "x\x1b\n", "-5"]
    assert load_config(GenerateConfig, [], prompts).prompts == tuple(prompts)
    assert load_config(GenerateConfig, [], ["--", "--raw", "-m"]).prompts == ("--raw", "-m")


def test_files_come_first(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "m"\ntarget = 0.1\nbudget = [1]\n[section]\ndepth = 2\n')
    for given in (f"{file}", f"-c {file}", f"--config={file}"):
        assert words(f"--target 0.2 -b 5 {given}") == Words(
            model="m", target=0.2, budget=(5,), section=Section(depth=2)
        )


def test_from_python_one_value_stands_for_several() -> None:
    made = Words(model="m", budget=3, runs="a", dense_layers=["0,1", (2,)])
    assert (made.budget, made.runs) == ((3,), (Path("a"),))
    assert made.dense_layers == ((0, 1), (2,))


def test_a_mistake_names_the_word() -> None:
    for text, said in (
        ("m --traget 0.5", "did you mean --target"),
        ("m --no-target", "--no-target"),
        ("m -x", "-x"),
        ("m --target", "--target"),
        ("m --target 0.5 --target 0.6", "--target 0.6"),
        ("m --target 1.5", "--target 1.5"),
        ("m --force=maybe", "--force=maybe"),
        ("m -b 0", "-b 0"),
        ("m --section.dpeth=1", "did you mean depth"),
        ("m --section.depth=1 --section.depth=2", "section.depth"),
        ("--target 0.5", "model"),
        ("m --dense-layers a", "--dense-layers a"),
        ("m --rows \x1b[2J", r"\x1b"),
        ("m \udcff", r"\udcff"),
        ("nowhere.toml", "nowhere.toml"),
        ("m --seed 6 --section.depth=5", "section.depth"),
        ("m --section.depth 5 --section.depth=7", "section.depth"),
        ("m --no-plots=true", "--no-plots=true"),
        ("m --plots=maybe", "--plots=maybe"),
        ("m --target --force", "--target"),
        ("m --rows -t0.5", "--rows"),
        ("m a b --extra=true", "--extra=true"),
    ):
        with pytest.raises(ConfigError) as error:
            parse_words(text)
        assert said in str(error.value), text
        assert str(error.value).isprintable()
