"""Texts of strangers' files on pages and in reports: shown as they are, nothing acts on them."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.damage import damaged, value_or_message
from support.pages import Reader
from support.run_folders import demo
from support.study_folders import controlled, plan

from sparrow.reporting.markdown import code_block, markdown, name, prose
from sparrow.reporting.render import html
from sparrow.reporting.run_page import make_page
from sparrow_recipes.study.files import read_study
from sparrow_recipes.study.outcome import conclude
from sparrow_recipes.study.page import write_study
from sparrow_recipes.study.verdicts import with_verdicts

ESCAPES = "x\x1b]0;\x07\x1b[2J\r\x9b31m\ud800"
MARKUP = (
    "pwned <img src=x onerror=alert(1)> <script>alert(1)</script>"
    " ![i](http://evil) [l](javascript:x) https://evil.example www.evil.example <http://evil>"
    " `<b>` ``<i>` ``` \n```\n# heading\n---\n| cell | ~~s~~ **b** $x^2$ \\ --> </code></svg>"
)
TEXT = ESCAPES + MARKUP
CHOICES = {"by"}
PLAIN = {"paragraph_open", "paragraph_close", "inline", "text"}  # kinds of a paragraph
ODD: tuple[Any, ...] = (None, True, -1, 10**400, 1e300, TEXT, [], {}, [[]], 2**63, float("nan"))


def strings(value: Any, replace: Callable[[str], str]) -> Any:
    """The value with every text in it replaced, but for those that are one of a few words."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {k: v if k in CHOICES else strings(v, replace) for k, v in value.items()}
    return [strings(inner, replace) for inner in value] if isinstance(value, list) else value


def spoil(folder: Path) -> None:
    """A stranger's words in every text of every JSON file; documents have no control characters."""
    for file in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        lines, words = [file.read_text()], MARKUP
        if file.suffix == ".jsonl":
            lines, words = lines[0].splitlines(), TEXT
        values = [strings(unsigned(line), lambda text, words=words: text + words) for line in lines]
        file.write_text("\n".join(map(json.dumps, values)) + "\n", encoding="utf-8")


def unsigned(text: str) -> dict[str, Any]:
    """The object of a text, without its digest."""
    value = json.loads(text)
    value.pop("digest", None)
    return value


def refuse_control(text: str) -> None:
    assert not [c for c in text if c != "\n" and c != "\t" and ord(c) < 32]
    assert not [c for c in text if 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000]


def kinds(text: str) -> set[str]:
    """What a reader of Markdown makes of a text."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    inner = [child for token in tokens for child in token.children or ()]
    return {token.type for token in (*tokens, *inner)}


def refuse_markup(text: str) -> None:
    refuse_control(text)
    token_kinds = kinds(text)
    assert not {kind for kind in token_kinds if kind.startswith(("html", "link", "image"))}


def tags(text: str) -> set[tuple[str, str]]:
    """Every element and attribute of a document."""
    return {(tag, key) for tag, attributes in Reader(text).elements for key in ("", *attributes)}


def test_a_page_of_hostile_files(tmp_path: Path) -> None:
    plain = html(make_page([demo(tmp_path / "plain")]))
    spoil(demo(tmp_path / "spoilt"))
    page = make_page([tmp_path / "spoilt"])
    text = html(page)
    assert "pwned" in text
    refuse_control(text)
    assert tags(text) == tags(plain)
    written = markdown(page)
    assert "pwned" in written
    refuse_markup(written)


def test_a_folder_with_a_hostile_name(tmp_path: Path) -> None:
    folder = demo(tmp_path / "a\x1b[2J\x9b31m<img src=x>`|$")
    refuse_markup(markdown(make_page([folder])))


def test_names_and_prose_are_inert() -> None:
    for text in (TEXT, *TEXT.split(), "---", "- ", "1.", "#", "``<b>`", "`a``<b>`c`", "www.x.y"):
        for shown in (name(text), prose(text), f"- {name(text)}", f"# {name(text)}"):
            refuse_markup(f"before\n\n{shown}\n\nafter\n")
        assert "://" not in name(text)  # GitHub makes links of these
        assert "www." not in name(text)
        assert kinds(f"a\n\n{name(text)}\n") <= PLAIN | {"text_special"}


def test_no_line_closes_a_block_of_code() -> None:
    block = code_block(["sparrow study", "```\n<img src=x>", "````", TEXT])
    refuse_control(block)
    assert kinds(f"a\n\n{block}\n\nb\n") == PLAIN | {"fence"}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = controlled(tmp_path / "study", {"dense": [0.8, 0.82], "0.86": [0.8, 0.79]})
    plan(folder, "p0.86", [0, 512], [64, 128])
    return folder


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(unsigned(file.read_text()) | changes), encoding="utf-8")


def test_a_study_of_hostile_files(study: Path) -> None:
    (study / "cells" / "stray <img src=x> ![i](http:)").mkdir()
    change(study / "design.json", name=f"$\\frac{{ {MARKUP}", command=[MARKUP, "```"])
    change(study / "cells" / "dense-0" / "end.json", status="failed", message=MARKUP)
    text = write_study(
        study, folder := read_study(study), with_verdicts(conclude(folder))
    ).read_text(encoding="utf-8")
    refuse_control(text)
    assert {kind for kind in kinds(text) if kind.startswith(("html", "link"))} == set()
    assert text.partition("## Commands")[0].count("![") == 3  # its own figures
    for figure in study.glob("*.svg"):
        refuse_control(figure.read_text(encoding="utf-8"))


def test_names_of_arms_are_names_of_folders(study: Path) -> None:
    design = json.loads((study / "design.json").read_text())
    for text in (TEXT, "../up", "a|b", "<b>", "", ".", "a\nb"):
        design["arms"][1]["name"] = text
        change(study / "design.json", arms=design["arms"])
        with pytest.raises(ValueError, match=r"design\.json.* arms[.[]1"):
            read_study(study)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything inside: the object or list that holds it, and by which key."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def refused_or_read(folder: Path, file: Path) -> None:
    def write() -> None:
        page = make_page([folder])
        html(page)
        markdown(page)

    message = value_or_message(write)
    assert message is None or file.name in message, message


def test_damage_and_odd_values_in_files_of_a_run_are_named(tmp_path: Path) -> None:
    folder, draw = demo(tmp_path / "run"), random.Random(0)
    for file in [*folder.rglob("*.json"), *folder.rglob("*.jsonl"), *folder.rglob("*.toml")]:
        whole = file.read_bytes()
        for seed in range(15):
            file.write_bytes(damaged(whole, seed))
            refused_or_read(folder, file)
        data = json.loads(whole) if file.suffix == ".json" else {}
        inside = [*places(data)]
        for holder, key in draw.sample(inside, min(15, len(inside))):
            plain = holder[key]
            for odd in ODD:
                holder[key] = odd
                file.write_text(json.dumps(data), encoding="utf-8")
                refused_or_read(folder, file)
            holder[key] = plain
        file.write_bytes(whole)


def test_settings_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = demo(tmp_path / "run")
    (file,) = folder.rglob("config.resolved.toml")
    texts = ("x = " + "[" * 5000, "gate = 1", "run = 2020-01-01", "rollout.attention = true")
    for text in (*texts, "gate.target = 'x'", "model.name = '\x1b'"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"config\.resolved\.toml"):
            make_page([folder])
    file.unlink()
    file.mkdir()  # a folder in place of a file
    with pytest.raises(ValueError, match=r"config\.resolved\.toml"):
        make_page([folder])
