"""Pages of run directories in a real browser: every figure there, nothing cut, at every width."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import run_folders
from support.browsing import CUT_AND_COVERED, SIDEWAYS, Visit

from sparrow.report.page import Bars, Chart
from sparrow.report.render import html
from sparrow.report.run_page import page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def folders(kind: str, place: Path) -> list[Path]:
    if kind == "demo":
        return [run_folders.demo(place / "demo")]
    if kind == "calibration":
        return [run_folders.calibration(place / "calibrate-tiny")]
    if kind == "one":
        return [run_folders.training(place / "a-run-with-a-rather-long-name", steps=60)]
    made = [run_folders.training(place / f"sparse-{i}", after=0.6 + 0.05 * i) for i in range(5)]
    return [*made, run_folders.dense_training(place / "dense", steps=40)]


@pytest.mark.parametrize("kind", ["demo", "calibration", "one", "six"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_figure_of_a_report(
    browser: "Browser", tmp_path: Path, kind: str, width: int
) -> None:
    page = page_of(folders(kind, tmp_path))
    file = tmp_path / "report.html"
    file.write_text(html(page), encoding="utf-8")
    figures = [i.key for s in page.sections for i in s.items if isinstance(i, Chart | Bars)]
    with Visit(browser, file.as_uri(), width) as shown:
        for key in figures:
            box = shown.locator(f"#{key} svg").bounding_box()
            assert box is not None, key
            assert min(box["width"], box["height"]) > 50, key
        assert shown.evaluate(SIDEWAYS) == 0
        assert shown.evaluate(CUT_AND_COVERED) == []
        if folder := os.environ.get("SPARROW_SHOTS"):
            shown.screenshot(path=Path(folder) / f"{kind}-{width}.png", full_page=True)
