"""Options that no machine could serve: one message that names the option, within seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")
import typer.main

from sparrow.cli import app, main
from sparrow.cli.output import MOST, MOST_ANSWERS, MOST_ROW, MOST_TOKENS
from sparrow.schema import types as bounds

ABSURD = ("1000000000000000000000000000000", "-1000000000000", "1e400", "nan", "", "9" * 5000)
FREE = {("puzzle", "--seed"), ("puzzle", "--gold")}  # any number is another puzzle
REQUIRED = {
    "calibrate": ["tiny", "--task", "assignments"],
    "eval": ["tiny"],
    "plan": ["surface.json"],
    "puzzle": ["countdown"],
    "flow": ["quest"],
    "replay": ["run"],
    "study": ["study.toml"],
}


def verbs(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    else:
        for name, each in inner.items():
            yield from verbs(each, *path, name)


def numbers(command: Any) -> list[str]:
    """Options that take an integer."""
    return [
        max(option.opts, key=len)
        for option in command.params
        if option.param_type_name == "option"
        and option.type_descriptor is not None
        and option.type_descriptor.annotation is int
    ]


OPTIONS = [
    (path, option)
    for path, command in verbs(typer.main.get_command(app))
    for option in numbers(command)
    if (path[0], option) not in FREE
]


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a mistake in the options."""
    sys.argv = ["sparrow", *words]
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2, words
    return " ".join(capsys.readouterr().err.split())


def test_every_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", [])
    assert len(OPTIONS) > 30
    for path, option in OPTIONS:
        for text in ABSURD:
            words = [*path, *REQUIRED.get(path[0], []), f"{option}={text}"]
            if (path[0], option) == ("eval", "--length"):
                words.append("--task=assignments")
            assert option in told(words, capsys), words


def test_numbers_that_are_each_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    for words in (
        ["eval", "tiny", "-n", "65536", "-k", "65536"],
        ["calibrate", "tiny", "--task", "assignments", "-n", "65536", "--samples", "65536"],
        ["bench", "decode", "--case", "999999999,999999999"],
        ["bench", "train", "--case", "9999999999,2"],
    ):
        text = told(words, capsys)
        assert "--samples" in text or "--case" in text


def test_options_and_settings_have_the_same_bounds() -> None:
    assert (MOST_TOKENS, MOST_ANSWERS) == (bounds.MOST_TOKENS, bounds.MOST_ANSWERS)
    (_, most) = bounds.Count.__metadata__[0].metadata
    assert most.le == MOST
    (_, seed) = bounds.Seed.__metadata__[0].metadata
    assert seed.lt == MOST_ROW + 1
