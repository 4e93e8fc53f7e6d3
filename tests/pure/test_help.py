"""Help texts: present everywhere, sentences, and examples that the command line would take."""

import re
import shlex
from pathlib import Path

import pytest
from support import cli

from sparrow.cli import split_verb
from sparrow.cli.verbs import GROUPS, PANELS, VERBS, first_sentence, flowing
from sparrow.schema.loading import parse, resolve

COLUMNS = 80
ROOM = COLUMNS - 2  # help texts have a blank on either side
ROOT = Path(__file__).parents[2]
TEXTS = {name: flowing(verb.doc) for name, verb in VERBS.items()} | GROUPS


def examples(name: str) -> list[str]:
    """Commands after "For example:", each part of a pipe on its own, without redirections."""
    lines = [line.strip() for line in TEXTS[name].split("\n") if line.startswith(" ")]
    parts = [line if '"' in line else line.split(">")[0] for line in lines]
    return [command.strip() for part in parts for command in part.split("|")]


def test_every_verb_says_what_it_does() -> None:
    for name, text in TEXTS.items():
        first = first_sentence(text)
        assert re.match(r"[A-Z].*\.$", first), name
        assert len(first.split()) >= 4, name
        assert len(first) <= 2 * ROOM, "the list of verbs has room for two lines of it"
        assert all(len(line) <= ROOM for line in text.split("\n") if line.startswith(" ")), name


def test_every_option_is_explained() -> None:
    for name, verb in VERBS.items():
        for option in verb.options:
            assert option.help.endswith("."), (name, option.name)
            assert len(option.help) > 5, (name, option.name)


def test_no_option_has_two_meanings() -> None:
    for name, verb in VERBS.items():
        letters = [option.letter for option in verb.options if option.letter]
        names = [option.name for option in verb.options]
        assert len(set(letters)) == len(letters), name
        assert len(set(names)) == len(names), name
        assert not {"h", "c"} & {*letters}, name
        assert not {"help", "config"} & {*names}, name


def test_examples_are_commands_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in VERBS:
        commands = examples(name)
        assert any(command.startswith(f"sparrow {name}") for command in commands), name
        for command in commands:
            verb, rest = split_verb(shlex.split(command)[1:])
            parsed = parse(VERBS[verb].config, rest, VERBS[verb].extras)
            resolve(VERBS[verb].config, parsed.files, parsed.layers)


def test_help_is_shown_in_eighty_columns() -> None:
    for name in ("", *VERBS, *GROUPS):
        done = cli.run(*name.split(), "--help", columns=COLUMNS)
        lines = done.stdout.splitlines()
        assert done.code == 0
        assert max(map(len, lines)) <= COLUMNS, name
        assert not any("…" in line for line in lines), "something was cut"
        assert "Undefined" not in done.stdout
        assert cli.run(*name.split(), "-h", columns=COLUMNS) == done


def test_verbs_stand_in_the_order_in_which_people_need_them() -> None:
    wanted = [verb for verbs in PANELS.values() for verb in verbs]
    assert list(dict.fromkeys(name.split()[0] for name in VERBS)) == wanted
