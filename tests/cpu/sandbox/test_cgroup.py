"""A cgroup for each program, where cgroup v2 can be written; what is refused, everywhere."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits, SandboxRefused
from sparrow.sandbox.bubblewrap import Bubblewrap

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
FILES = """
import os
for number in range(10**7):
    os.mkdir(f"/tmp/{number}")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A cgroup whose children are limited in memory and processes."""
    mounts = Path("/proc/self/mounts").read_text()
    found = re.search(r"^\S+ (\S+) cgroup2 ", mounts, re.M)
    if found is None or "memory" not in Path(found[1], "cgroup.controllers").read_text():
        pytest.skip("needs cgroup v2 with the memory controller")
    folder = Path(found[1], f"sparrow-test-{os.getpid()}")
    try:
        Path(found[1], "cgroup.subtree_control").write_text("+memory +pids")
        folder.mkdir()
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as error:
        pytest.skip(f"needs a cgroup that can be written: {error}")
    yield folder
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    folder.rmdir()


@needs_bwrap
def test_memory_of_the_kernel_is_the_programs(folder: Path) -> None:
    limits = Limits(memory_bytes=128 << 20, scratch_bytes=8 << 20, cpu_seconds=60)
    sandbox = open_sandbox("bwrap", cgroup=folder)
    assert "cgroup" in sandbox.isolation
    outcome = sandbox.start(FILES, "script", limits).finish()
    assert (outcome.ending, outcome.problem) == ("memory", "out of memory")


@needs_bwrap
def test_other_programs_end_as_without_it(folder: Path) -> None:
    sandbox = Bubblewrap(cgroup=folder)
    assert sandbox.start("print(6 * 7)", "script", Limits()).finish().stdout == b"42\n"
    loop = sandbox.start("while True: pass", "script", Limits(cpu_seconds=1))
    assert loop.finish().ending == "time"
    sleeper = sandbox.start("import time; time.sleep(99)", "script", Limits(wall_seconds=1.0))
    assert sleeper.finish().ending == "wall"
    sandbox.start("import time; time.sleep(99)", "script", Limits()).end()


@needs_bwrap
def test_a_folder_that_limits_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxRefused, match="no folder of cgroup v2"):
        open_sandbox("bwrap", cgroup=tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids")
    with pytest.raises(SandboxRefused, match="does not limit memory"):
        open_sandbox("bwrap", cgroup=tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    with pytest.raises(SandboxRefused, match="cannot be made"):
        open_sandbox("bwrap", cgroup=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


def test_backends_without_cgroups_refuse_one(tmp_path: Path) -> None:
    for name in ("nsjail", "gvisor", "wasm", "unsafe"):
        with pytest.raises(SandboxRefused, match="for bwrap"):
            open_sandbox(name, cgroup=tmp_path)
