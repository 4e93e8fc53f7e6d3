"""Which browser the tests of pages take: one that runs, not one that is only named."""

from pathlib import Path

import pytest
from support import chromium


def program(file: Path, code: int) -> str:
    file.write_text(f"#!/bin/sh\nexit {code}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing but this folder is on the path."""
    monkeypatch.delenv(chromium.SETTING, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_stub_on_the_path_is_passed_over(path: Path) -> None:
    program(path / "chromium-browser", 1)  # Ubuntu's, which only asks for a snap
    chrome = program(path / "google-chrome-stable", 0)
    assert chromium.find(str(path / "own")) == chrome


def test_playwrights_own_comes_last(path: Path) -> None:
    program(path / "chromium", 1)
    own = program(path / "own", 0)
    assert chromium.find(own) == own


def test_none_that_works(path: Path) -> None:
    program(path / "chromium", 1)
    with pytest.raises(ValueError, match=r"no Chromium that works .*playwright install chromium"):
        chromium.find(str(path / "own"))


def test_the_one_that_is_named_counts_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "chromium", 0)
    monkeypatch.setenv(chromium.SETTING, program(path / "mine", 0))
    assert chromium.find(str(path / "own")) == str(path / "mine")
    monkeypatch.setenv(chromium.SETTING, str(path / "not_there"))
    with pytest.raises(ValueError, match=r"SPARROW_CHROMIUM is .*not_there, of which --version"):
        chromium.find(str(path / "own"))
