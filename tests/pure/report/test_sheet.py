"""Figures as one SVG file: well formed, complete by itself, both themes."""

from xml.etree import ElementTree

from support.pages import rich_page

from sparrow.report.page.parts import Bars, Chart
from sparrow.report.page.sheet import sheet, style


def figures() -> list[Chart | Bars]:
    parts = [item for section in rich_page().sections for item in section.items]
    return [item for item in parts if isinstance(item, Chart | Bars)][:3]


def test_a_sheet_is_xml_with_every_figure() -> None:
    shown = figures()
    root = ElementTree.fromstring(sheet(shown))
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 3
    text = "".join(root.itertext())
    assert all(one.title in text for one in shown)


def test_its_colours_need_no_page() -> None:
    rules = style()
    assert "light-dark(" not in rules
    assert "prefers-color-scheme: dark" in rules
    used = {name.split(")")[0] for name in rules.split("var(")[1:]}
    defined = {part.split(":")[0].strip() for part in rules.replace("{", ";").split(";")}
    assert {name.split(",")[0] for name in used} <= defined | {"--dash"}
