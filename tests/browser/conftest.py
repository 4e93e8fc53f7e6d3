"""A headless Chromium for the tests of this folder."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest
from support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
        missing("no playwright: pip install playwright")
    with sync_playwright() as playwright:
        try:
            path = chromium.find(playwright.chromium.executable_path)
        except ValueError as error:
            missing(str(error))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
