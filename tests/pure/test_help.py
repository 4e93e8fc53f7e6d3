"""Help texts: present everywhere, sentences, and examples that the command line would take."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.main import get_command
from typer.testing import CliRunner

from sparrow.cli import app
from sparrow.cli.help import PANELS, flowing

COLUMNS = 80
ROOM = COLUMNS - 2  # help texts have a blank on either side
ROOT: Any = get_command(app)


def walk(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, *path, name)


TREE = dict(walk(ROOT))
VERBS = [path for path, command in TREE.items() if not hasattr(command, "commands")]


def name_of(path: tuple[str, ...]) -> str:
    return " ".join(path) or "sparrow"


def examples() -> list[tuple[str, str]]:
    """Commands after "For example:", each part of a pipe on its own, without redirections."""
    found = []
    for path, command in TREE.items():
        lines = command.help.replace("\\\n", " ").split("\n")
        for line in lines:
            text = line.strip().removeprefix("For example: ")
            if text.startswith("sparrow ") and (line.startswith(" ") or text != line.strip()):
                parts = text.split(">")[0] if '"' not in text else text
                found += [(name_of(path), each.strip()) for each in parts.split("|")]
    return found


@pytest.mark.parametrize("path", TREE, ids=name_of)
def test_every_command_says_what_it_does(path: tuple[str, ...]) -> None:
    first = TREE[path].help.split("\n\n")[0]
    assert re.match(r"[A-Z]", first)
    assert first.endswith(".")
    assert len(first.split()) >= 4
    assert len(first) <= 2 * ROOM, "the list of verbs has room for two lines of it"


@pytest.mark.parametrize("path", VERBS, ids=name_of)
def test_every_option_and_argument_is_explained(path: tuple[str, ...]) -> None:
    for parameter in TREE[path].params:
        text = parameter.help or ""
        assert text.endswith("."), f"{name_of(path)}, {parameter.opts}: {text!r}"
        assert len(text) > 5


@pytest.mark.parametrize("path", VERBS, ids=name_of)
def test_every_verb_has_an_example(path: tuple[str, ...]) -> None:
    assert any(name == name_of(path) for name, _ in examples())


@pytest.mark.parametrize(("owner", "example"), examples())
def test_examples_are_commands_that_exist(owner: str, example: str) -> None:
    words = shlex.split(example)
    assert words[0] == "sparrow", f"{owner}: {example}"
    command, rest = ROOT, words[1:]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, f"{owner}: {example}"
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("sparrow", list(rest))  # parses, raises on what is unknown; nothing runs
    settings = [word for word in rest if re.match(r"--[\w-]+\.", word)]
    if settings:
        names = [word for word in rest if word[0] != "-" and command.name != "generate"]
        _load(command.name, names, settings)


def _load(verb: str, files: list[str], settings: list[str]) -> None:
    """Settings exist, with such values."""
    pytest.importorskip("pydantic")
    from sparrow.schema.common import GenerateConfig
    from sparrow.schema.loading import load_config
    from sparrow.schema.train import TrainConfig
    from sparrow.schema.warmup import WarmupConfig

    kinds = {
        "generate": GenerateConfig,
        "train": TrainConfig,
        "warmup": WarmupConfig,
    }
    load_config(kinds[verb], files, settings)


@pytest.mark.parametrize("path", TREE, ids=name_of)
def test_help_is_shown_in_eighty_columns(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERMINAL_WIDTH", str(COLUMNS))
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert done.exception is None or isinstance(done.exception, SystemExit)
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert not any("…" in line for line in lines), "something was cut"
    assert "<bool>" not in done.output, "a switch takes no value"


@pytest.mark.parametrize("path", TREE, ids=name_of)
def test_lines_that_do_not_flow_fit(path: tuple[str, ...]) -> None:
    lines = [line for line in TREE[path].help.split("\n") if line.startswith(" ")]
    assert all(len(line) <= ROOM for line in lines)


def test_verbs_stand_in_the_order_in_which_people_need_them() -> None:
    wanted = [verb for verbs in PANELS.values() for verb in verbs]
    assert list(ROOT.commands) == wanted
    for panel, verbs in PANELS.items():
        assert {ROOT.commands[verb].rich_help_panel for verb in verbs} == {panel}


def test_paragraphs_flow_and_examples_stay() -> None:
    text = "One\ntwo.\n\nThree\nfour.\n\n  sparrow a\n  sparrow b\n"
    assert flowing(text) == "One two.\n\nThree four.\n\n  sparrow a\n  sparrow b"
    assert flowing("") == ""
