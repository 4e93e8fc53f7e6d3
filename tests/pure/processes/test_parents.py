"""Children that end with the process that started them, also where that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparrow.processes.supervisor import PARENT, die_with_parent, with_parent

ROOT = Path(__file__).parents[3]
CHILD = """
import os, sys, time
from sparrow.processes import supervisor as parents
parents.LOOK_EVERY = 0.05
parents.sys = type("Platform", (), {"platform": sys.argv[1]})
parents.die_with_parent()
print(os.getpid(), parents.PARENT in os.environ, flush=True)
time.sleep(60)
"""
STARTER = f"""
import os, subprocess, sys, time
from sparrow.processes.supervisor import with_parent
words = [sys.executable, "-c", {CHILD!r}, sys.argv[1]]
subprocess.Popen(words, env=with_parent(dict(os.environ)), start_new_session=True)
time.sleep(60)
"""


def started(code: str, platform: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, platform],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("platform", ["linux", "another"])
def test_a_child_ends_with_a_parent_that_is_killed(platform: str) -> None:
    with started(STARTER, platform) as parent:
        assert parent.stdout is not None
        child, named = parent.stdout.readline().split()
        assert named == "False", "children of the child are not meant"
        assert runs(int(child))
        parent.kill()
        parent.wait()
        until = time.monotonic() + 5
        while runs(int(child)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not runs(int(child))


@pytest.mark.parametrize("platform", ["linux", "another"])
def test_a_child_whose_parent_is_gone_already_ends_at_once(platform: str) -> None:
    with started(CHILD, platform, **{PARENT: str(2**22 + 1)}) as child:
        assert child.wait(30) == -signal.SIGKILL


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    die_with_parent()
    assert with_parent({"A": "b"}) == {"A": "b", PARENT: str(os.getpid())}
