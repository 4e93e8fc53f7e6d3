"""The command line in this process, as a user meets it."""

import io
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from sparrow.cli import main, output


class Ended(NamedTuple):
    """How a command ended. Lines are wide: what is said stands in one piece."""

    code: Any
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Everything, without the line breaks that a terminal makes."""
        return " ".join(f"{self.stdout} {self.stderr}".split())


def run(*words: str | Path, stdin: str = "", columns: int = 1000) -> Ended:
    """`sparrow WORDS`; an error that is no message is raised."""
    out, err = io.StringIO(), io.StringIO()
    environment = patch.dict("os.environ", {"COLUMNS": str(columns), "TERM": "dumb"})
    keyboard = patch("sys.stdin", io.StringIO(stdin))
    with ExitStack() as stack:
        for console in (output.console, output.notes):  # made at import, maybe for fewer columns
            stack.enter_context(patch.object(console, "_width", columns))
        for context in (environment, keyboard, redirect_stdout(out), redirect_stderr(err)):
            stack.enter_context(context)
        try:
            main([*map(str, words)])
        except SystemExit as end:
            return Ended(end.code or 0, out.getvalue(), err.getvalue())
    raise AssertionError("main() exits always")


def refused(*words: str | Path) -> str:
    """What is said of a mistake: one message, exit code 2."""
    ended = run(*words)
    assert ended.code == 2, ended
    assert ended.stderr.count("error:") == 1, ended.stderr
    return ended.said
