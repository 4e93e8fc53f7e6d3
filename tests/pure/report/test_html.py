"""The page as HTML: complete, alone in the world, safe, and in colours that can be told apart."""

import base64
import hashlib
import json
import math
import re
from importlib.resources import files
from itertools import combinations, pairwise, product

import numpy as np
from support.pages import Reader, reward, rich_page, schedule, surface, table, times

from sparrow.reporting.page import Axis, Chart, Item, Line, Page, Remarks, Section, Table
from sparrow.reporting.render import arrange_items, html, tooltips

PAGE = rich_page()
TEXT = html(PAGE)


READ = Reader(TEXT)


def page_with(*items: Item) -> Page:
    return Page(title="t", lead="", sections=(Section(key="s", title="S", say="", items=items),))


def test_every_item_is_a_figure_and_ids_are_unique() -> None:
    figures = [attributes["id"] for tag, attributes in READ.elements if tag == "figure"]
    assert figures == [item.key for part in PAGE.sections for item in part.items]
    assert html(rich_page()) == TEXT
    ids = [attributes["id"] for _, attributes in READ.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for tag, attributes in READ.elements if tag == "a"}
    assert {str(target).removeprefix("#") for target in targets} <= set(ids)


def test_nothing_is_fetched() -> None:
    for tag, attributes in READ.elements:
        assert "src" not in attributes
        assert "style" not in attributes  # the policy allows the one style sheet alone
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "action", "data"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:")), tag
    assert re.findall(r"url\((?!#)", TEXT) == []
    assert "@import" not in TEXT


def test_the_policy_allows_this_style_and_this_script() -> None:
    (policy,) = (
        str(attributes["content"])
        for _, attributes in READ.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag, name in (("style", "page.css"), ("script", "page.js")):
        text = files("sparrow.reporting").joinpath("templates", name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert (tag, text) in READ.texts


def test_backticks_are_code_in_sentences_alone() -> None:
    assert ("code", "sparrow report RUN") in READ.texts
    item = Table(key="t", columns=("`a`",), rows=())
    assert "<code>" not in html(page_with(item))
    assert "<code>&lt;b&gt;</code>" in html(Page(title="t", lead="see `<b>`"))


def test_tips_hold_what_the_chart_says() -> None:
    points, spans = ((0, 0.25), (1, 0.5)), ((1, 0.4, 0.6),)
    drawn = Line(name="</script>", points=points, spans=spans, role="run-1", shape="steps")
    axis = Axis(name="y", low=0, high=1, form=".2f")
    item = Chart(key="c", title="C", x=Axis(name="step", form=".0f"), y=axis, lines=(drawn,))
    (text,) = (text for tag, text in Reader(html(page_with(item))).texts if '"lines"' in text)
    assert "<" not in text
    line = json.loads(text)["lines"][0]
    assert json.loads(text) == json.loads(json.dumps(tooltips(item)))
    assert (line["name"], line["role"], line["holds"]) == ("</script>", "run-1", True)
    assert [point[1:] for point in line["points"]] == [
        [185.5, "step 0", "0.25"],
        [135.0, "step 1", "0.50 (0.40 to 0.60)"],
    ]


def test_no_row_is_half_empty() -> None:
    first, second, third = reward(), surface(), schedule()
    rows, remarks = table(), Remarks(key="r", lines=("x",))

    def classes(*items: Item) -> list[str]:
        return [place for _, place in arrange_items(items)]

    assert classes() == []
    assert classes(first) == ["full alone"]
    assert classes(first, second) == ["", ""]
    assert classes(first, second, third) == ["", "", "full alone"]
    assert classes(first, rows) == ["full alone", "full"]
    assert classes(first, remarks) == ["", ""]
    assert classes(remarks, first) == ["full", "full alone"]
    assert classes(first, second, remarks, rows) == ["", "", "full", "full"]


def test_an_empty_page_is_a_page() -> None:
    Reader(html(Page(title="", lead="")))
    Reader(html(page_with()))
    Reader(html(page_with(times(), Remarks(key="r", lines=()))))


# Colours, as the style sheet has them.

CSS = files("sparrow.reporting").joinpath("templates", "page.css").read_text(encoding="utf-8")
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS)
}

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216]]
PROTAN += [[-0.003882, -0.048116, 1.051998]]
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413]]
DEUTAN += [[-0.011820, 0.042940, 0.968881]]
TRITAN = [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602]]
TRITAN += [[0.004733, 0.691367, 0.303900]]
EYES = {"all cones": np.eye(3), "protan": PROTAN, "deutan": DEUTAN, "tritan": TRITAN}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    shares = np.array([*bytes.fromhex(colour[1:])]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(TO_XYZ[1] @ linear(colour))


def contrast(colour: str, other: str) -> float:
    high, low = sorted((luminance(colour), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    """CIE Lab of what such an eye sees."""
    seen = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
    xyz = TO_XYZ @ seen / (0.95047, 1, 1.08883)
    fx, fy, fz = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_colours_have_contrast() -> None:
    roles = {name for name in COLOURS if re.match("run-|ramp-|dense|sparse|target|quiet", name)}
    assert len(roles) == 18
    for theme in (0, 1):
        paper = COLOURS["paper"][theme]
        for name in roles:
            assert contrast(COLOURS[name][theme], paper) >= 3, name
        for name, ground in product(("ink", "soft", "accent"), ("paper", "panel")):
            assert contrast(COLOURS[name][theme], COLOURS[ground][theme]) >= 4.5, (name, ground)


def test_runs_are_told_apart_by_any_eye_and_the_ramp_by_lightness() -> None:
    for theme in (0, 1):
        for eye in EYES:
            seen = [lab(COLOURS[f"run-{i}"][theme], eye) for i in range(6)]
            assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 20, (theme, eye)
        levels = [luminance(COLOURS[f"ramp-{i}"][theme]) for i in range(8)]
        assert all(b > a for a, b in pairwise(levels if theme else levels[::-1]))


def test_runs_have_dashes_of_their_own() -> None:
    dashes = re.findall(r"\.run-\d \{ --c: var\(--run-\d\);(.*?)\}", CSS)
    assert len(dashes) == len(set(dashes)) == 6
