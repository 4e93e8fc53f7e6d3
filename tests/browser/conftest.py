"""A headless Chromium for the tests of this folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def missing(what: str) -> NoReturn:
    """Fail where a browser is promised, else skip; either way say how to get it."""
    if os.environ.get("CI") or os.environ.get("SPARROW_BROWSER") == "1":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("no playwright: pip install playwright (its own browsers are not needed)")
    found = [os.environ.get("SPARROW_CHROMIUM"), *map(shutil.which, CHROMIUM)]
    path = next(filter(None, found), None)
    if path is None or not Path(path).exists():
        missing(
            f"no Chromium ({path or ', '.join(CHROMIUM)}): install it (apt install chromium) or "
            "set SPARROW_CHROMIUM to its path"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
