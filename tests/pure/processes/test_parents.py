"""Children that end with the process that started them, also where that is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.leftovers import gone, marking

from sparrow.processes.supervisor import PARENT, die_with_parent, with_parent

ROOT = Path(__file__).parents[3]
CHILD = """
import os, signal
from sparrow.processes import supervisor
supervisor.die_with_parent()
print(os.getpid(), supervisor.PARENT in os.environ, flush=True)
signal.pause()
"""
STARTER = f"""
import os, signal, subprocess, sys
from sparrow.processes.supervisor import with_parent
words = [sys.executable, "-c", {CHILD!r}]
subprocess.Popen(words, env=with_parent(dict(os.environ)), start_new_session=True)
signal.pause()
"""


def started(code: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with marking() as mark, started(STARTER) as parent:
        assert parent.stdout is not None
        child, named = parent.stdout.readline().split()
        assert named == "False", "children of the child are not meant"
        os.kill(int(child), 0)
        parent.kill()
        parent.wait()
        assert gone(mark)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    with started(CHILD, **{PARENT: str(2**22 + 1)}) as child:
        assert child.wait(30) == -signal.SIGKILL


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    die_with_parent()
    assert with_parent({"A": "b"}) == {"A": "b", PARENT: str(os.getpid())}
