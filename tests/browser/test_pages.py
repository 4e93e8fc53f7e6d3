"""Pages in a real browser: nothing complains, nothing is cut, every theme and width works."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import run_folders
from support.browsing import CUT_AND_COVERED, SIDEWAYS, Visit
from support.pages import rich_page

from sparrow.reporting.page import Bars, Chart, Page
from sparrow.reporting.render import html
from sparrow.reporting.run_page import make_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Whether links lie outside of the navigation's box, behind an edge that fades.
NAVIGATION_SCROLLS = """() => {
  const nav = document.querySelector("nav");
  return nav.scrollWidth > nav.clientWidth && getComputedStyle(nav).maskImage !== "none";
}"""
# Links that are not wholly in the part of the navigation that is neither cut nor faded.
HIDDEN_LINKS = """() => {
  const nav = document.querySelector("nav");
  const { left, right, top, bottom } = nav.getBoundingClientRect();
  const faded = getComputedStyle(nav).maskImage === "none" ? 0 : 24;
  return [...nav.querySelectorAll("a")].filter((link) => {
    const box = link.getBoundingClientRect();
    return box.left < left - 1 || box.right > right - faded + 1
      || box.top < top - 1 || box.bottom > bottom + 1;
  }).map((link) => link.textContent);
}"""
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


def page(kind: str, place: Path) -> Page:
    if kind == "rich":
        return rich_page()
    if kind == "demo":
        return make_page([run_folders.demo(place / "demo")])
    if kind == "calibration":
        return make_page([run_folders.calibration(place / "calibrate-tiny")])
    if kind == "one":
        return make_page([run_folders.training(place / "a-run-with-a-rather-long-name", steps=60)])
    runs = [run_folders.training(place / f"sparse-{i}", after=0.6 + 0.05 * i) for i in range(5)]
    return make_page([*runs, run_folders.dense_training(place / "dense", steps=40)])


def write_page(report: Page, folder: Path) -> str:
    (folder / "page.html").write_text(html(report), encoding="utf-8")
    return (folder / "page.html").as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(rich_page(), tmp_path_factory.mktemp("page"))


def pixels(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize("kind", ["rich", "demo", "calibration", "one", "six"])
def test_every_figure_is_there_and_nothing_is_cut_or_covered(
    browser: "Browser", tmp_path: Path, kind: str
) -> None:
    report = page(kind, tmp_path)
    address = write_page(report, tmp_path)
    figures = [i.key for s in report.sections for i in s.items if isinstance(i, Chart | Bars)]
    for width in (360, 390, 768, 1280):
        with Visit(browser, address, width) as shown:
            for key in figures:
                drawing = shown.locator(f"#{key} svg")
                box = drawing.bounding_box()
                assert box is not None, key
                assert min(box["width"], box["height"]) > 50, key
                assert drawing.locator("path, rect").count() > 0, key
            assert shown.evaluate(SIDEWAYS) == 0
            assert shown.evaluate(CUT_AND_COVERED) == []


@pytest.mark.parametrize("kind", ["demo", "six"])
def test_every_link_of_the_navigation_can_be_read(
    browser: "Browser", tmp_path: Path, kind: str
) -> None:
    """Links wrap; on a phone they scroll behind a faded edge, which the last one leaves."""
    address = write_page(page(kind, tmp_path), tmp_path)
    for width in (360, 390, 600, 768, 900, 1024, 1280):
        with Visit(browser, address, width) as shown:
            assert shown.locator("nav a").count() >= 5
            scrolls = shown.evaluate(NAVIGATION_SCROLLS)
            assert scrolls == (width < 760), width
            shown.locator("nav").evaluate("nav => { nav.scrollLeft = nav.scrollWidth; }")
            hidden = shown.evaluate(HIDDEN_LINKS)
            assert hidden == [] or (scrolls and len(hidden) < shown.locator("nav a").count())
            assert shown.locator("nav a").last.inner_text() not in hidden, width


def test_without_scripts(browser: "Browser", address: str) -> None:
    for script in (True, False):
        with Visit(browser, address, java_script_enabled=script) as page:
            assert page.locator("#reward svg").is_visible()
            assert page.locator(".toggle").is_visible() == script


def test_words_can_be_read_on_a_phone(browser: "Browser", address: str) -> None:
    with Visit(browser, address, 390, device_scale_factor=2) as page:
        box = page.locator("#reward svg").bounding_box()
        assert 13 * box["width"] / 460 > 9.5  # pixels of the charts' words
        scrolls = "() => document.querySelector('.scroll').scrollWidth > 390"
        assert page.evaluate(scrolls), "the table scrolls inside its own box"


def test_dark_and_light(browser: "Browser", address: str) -> None:
    with Visit(browser, address, color_scheme="light") as page:
        assert pixels(page.evaluate(BACKGROUND)) == [255, 255, 255]
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(BACKGROUND)
        assert max(pixels(dark)) < 60
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate(BACKGROUND) == dark
        page.get_by_role("button", name="Light").click()
        assert pixels(page.evaluate(BACKGROUND)) == [255, 255, 255]


def test_values_under_the_pointer(browser: "Browser", address: str) -> None:
    with Visit(browser, address) as page:
        tip = page.locator("#reward .tip")
        assert not tip.is_visible()
        page.locator("#reward svg").hover()
        assert tip.is_visible()
        tip_text = tip.inner_text()
        assert tip_text.startswith("step ")
        assert "dense" in tip_text
        assert "sparse" in tip_text
        page.locator("h1").hover()
        assert not tip.is_visible()


def test_steps_hold_their_value_under_the_pointer(browser: "Browser", address: str) -> None:
    with Visit(browser, address) as page:
        drawing = page.locator("#schedule svg")
        box = drawing.bounding_box()
        # The line "all of them" ends at 420 tokens, where 320 are planned since 384.
        drawing.hover(position={"x": box["width"] * 0.57, "y": box["height"] / 2})
        words = page.locator("#schedule .tip").inner_text().split()
        assert words[:4] == ["tokens", "so", "far", "420"]
        assert words[words.index("planned") + 1] == "320"


def test_values_under_a_finger(browser: "Browser", address: str) -> None:
    with Visit(browser, address, 390, has_touch=True, is_mobile=True) as page:
        page.locator("#six svg").tap(position={"x": 200, "y": 100})
        tip = page.locator("#six .tip")
        assert tip.is_visible()
        inner, outer = tip.bounding_box(), page.locator("#six .plot").bounding_box()
        assert inner["x"] >= outer["x"]
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1
        assert page.evaluate(SIDEWAYS) == 0
        page.locator("h1").tap()
        assert not tip.is_visible()


def test_on_paper(browser: "Browser", address: str) -> None:
    with Visit(browser, address, 800, color_scheme="dark") as page:
        page.get_by_role("button", name="Light").click()
        page.get_by_role("button", name="Dark").click()  # dark by choice: paper stays white
        page.emulate_media(media="print")
        assert not page.locator(".toggle").is_visible()
        assert pixels(page.evaluate(BACKGROUND)) == [255, 255, 255]
        left, right = (page.locator(f"#{key}").bounding_box() for key in ("reward", "tail"))
        assert left["y"] == right["y"], "two columns"
        assert page.pdf(format="A4").startswith(b"%PDF")
