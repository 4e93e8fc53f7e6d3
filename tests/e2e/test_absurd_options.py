"""Options that no machine could serve: one message that names the option, within seconds."""

from pathlib import Path

import pytest
from support.cli import refused

from sparrow.cli.verbs import VERBS, Verb
from sparrow.schema.options import bare

ABSURD = ("1000000000000000000000000000000", "1e400", "nan", "", "9" * 5000)
FREE = {("puzzle", "--seed"), ("puzzle", "--gold")}  # any number is another puzzle
REQUIRED = {
    "calibrate": ["tiny", "--task", "assignments"],
    "eval": ["tiny"],
    "plan": ["surface.json"],
    "puzzle": ["countdown"],
    "flow": ["quest"],
    "replay": ["run"],
}


def numbers(verb: Verb) -> list[str]:
    """Options that take a number; of layers, none is meant by an empty text."""
    taken = [option for option in verb.options if bare(option.element) in (int, float)]
    return [option.long for option in taken if option.name != "dense_layers"]


def test_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = [(verb, option) for verb in VERBS.values() for option in numbers(verb)]
    assert len(options) > 60
    for verb, option in options:
        free = (verb.name, option) in FREE
        for text in ABSURD if free else (*ABSURD, "-1000000000000"):
            words = [*verb.name.split(), *REQUIRED.get(verb.name.split()[0], [])]
            assert option in refused(*words, f"{option}={text}"), (words, option, text)


def test_numbers_that_are_each_allowed() -> None:
    for words, name in (
        (["eval", "tiny", "-n", "65536", "-k", "65536"], "samples"),
        (["calibrate", "tiny", "--task", "graph", "-n", "65536", "--samples", "65536"], "samples"),
        (["bench", "decode", "--case", "999999999,999999999"], "--case"),
        (["bench", "train", "--case", "9999999999,2"], "--case"),
    ):
        assert name in refused(*words)
