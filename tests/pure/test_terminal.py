"""What verbs print with: text of files and models is shown, and a terminal obeys none of it."""

import io
import sys

import pytest
from rich.table import Table
from rich.text import Text

from sparrow.cli import main, output
from sparrow.cli.output import PlainConsole, plain, write
from sparrow.files import printable

HOSTILE = "a\x1b]0;pwned\x07\x1b[2J\rb\x9b31m\x00\x7f[/x][bold]c[/] :smile: \u202e\ud800d"
OBEYED = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0xD800)]


def shown(**settings: object) -> tuple[PlainConsole, io.StringIO]:
    file = io.StringIO()
    return PlainConsole(file=file, width=400, **settings), file


def refuse_obeyed(text: str) -> None:
    assert not [char for char in OBEYED if char in text], repr(text)


def test_control_characters_are_spelled_out() -> None:
    refuse_obeyed(printable(HOSTILE))
    assert printable("\x1b[2J\r\x9b\x00\ud800") == r"\x1b[2J\r\x9b\x00\ud800"
    assert printable("tab\tand line\n") == "tab\tand line\n"


def test_strings_texts_tables_and_rules() -> None:
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    console, file = shown()
    for what in (HOSTILE, Text(HOSTILE), table):
        console.print(what)
        assert "[/x][bold]c[/] :smile:" in file.getvalue()
    console.rule(HOSTILE)
    console.out(HOSTILE)
    refuse_obeyed(file.getvalue())


def test_styles_still_reach_a_terminal() -> None:
    console, file = shown(force_terminal=True, color_system="standard")
    console.print(f"[bold]{plain(HOSTILE)}[/]", markup=True, highlight=False)
    text = file.getvalue()
    assert text.startswith("\x1b[1m")
    refuse_obeyed(text.replace("\x1b[1m", "").replace("\x1b[0m", ""))


def test_progress_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = shown(force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "notes", console)
    with output.measuring(HOSTILE) as say:
        say(HOSTILE)
    before = file.tell()
    with output.progress_bar() as bar:
        bar.add_task(HOSTILE, total=1)
        bar.refresh()
    assert "pwned" in file.getvalue()[before:]
    output.report(HOSTILE)
    output.alert("error:", HOSTILE)
    assert "pwned" in file.getvalue()
    for code in ("\x1b]0", "\x1b[2J[", "\x9b", "\x07", "\x00", "\ud800"):
        assert code not in file.getvalue()


def test_results_are_spelled_out_for_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("\x1b[2Ja", end="")
    assert capsys.readouterr().out == "\x1b[2Ja"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write("\x1b[2Ja\n\t", end="")
    assert capsys.readouterr().out == "\\x1b[2Ja\n\t"


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        [HOSTILE],
        ["flow", HOSTILE],
        ["plan", f"--{HOSTILE}"],
        ["plan", "x", "--prompts", HOSTILE],
        ["report", HOSTILE],
        ["train", f"--run.name={HOSTILE}"],
        ["generate", f"--{HOSTILE}", "prompt"],
        ["generate", f"--sampling.n={HOSTILE}", "prompt"],
        ["eval", "tiny", "--task", HOSTILE],
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        out, err = capsys.readouterr()
        assert "pwned" in out + err
        refuse_obeyed(out + err)
