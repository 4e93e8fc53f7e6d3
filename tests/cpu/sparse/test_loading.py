"""Flows by text: files, import paths, built-in names, and what is said about mistakes."""

from pathlib import Path

import pytest

from sparrow.sparse.flows import library
from sparrow.sparse.flows.loading import built_in, load_flow
from sparrow.sparse.flows.tensor import FlowError

ONE = """
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.formats import D, bf16
from sparrow.sparse.flows.library import block_mean, quest

def summarise(keys, values):
    return {"top": keys.max(0)}

def score(query, fields, position):
    return query.mean(0) @ fields.top

mine = Flow(name="mine", fields={"top": bf16(D)}, summarise=summarise, score=score)
again = mine
"""
TWO = ONE + 'other = Flow(name="other", fields={"b": bf16(D)}, summarise=lambda k, v: {"b": k[0]}, '
TWO += "score=lambda q, f, p: q[0] @ f.b)\n"
MAKER = ONE + "def make(name='made'):\n"
MAKER += "    return Flow(name=name, fields=mine.fields, summarise=summarise, score=score)\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        file = tmp_path / "flow-file.py"
        file.write_text(text)
        return str(file)

    return write


def test_built_in_names() -> None:
    assert load_flow("quest") is library.quest
    assert load_flow("block-mean") is library.block_mean
    assert load_flow("fine_means").name == "fine-means-4"
    assert load_flow("fine_means(2)").name == load_flow("fine_means(tokens=2)").name
    assert load_flow("sparrow.sparse.flows.library:sub_quest(8)").name == "sub-quest-8"
    assert {"quest", "oracle", "dense", "fine_means", "running_average"} <= set(built_in())
    assert not {"maximum", "int4", "Flow", "D"} & set(built_in())


def test_every_built_in_name_loads() -> None:
    assert all(load_flow(name).name for name in built_in())


def test_a_file_with_one_flow_needs_no_name(write) -> None:
    assert load_flow(write(ONE)).name == "mine"
    assert load_flow(write(ONE) + ":again").name == "mine"
    assert load_flow(write(ONE) + ":quest") is library.quest
    assert load_flow(write("from sparrow.sparse.flows.library import quest")) is library.quest


def test_a_file_with_several_wants_a_name(write) -> None:
    file = write(TWO)
    with pytest.raises(ValueError, match=r"several flows \(mine, again, other\); name one"):
        load_flow(file)
    assert load_flow(f"{file}:other").name == "other"


def test_a_function_of_a_file_makes_a_flow(write) -> None:
    file = write(MAKER)
    assert load_flow(f"{file}:make").name == "made"
    assert load_flow(f"{file}:make('so')").name == "so"
    with pytest.raises(ValueError, match="make\\(3, 4\\): TypeError: make"):
        load_flow(f"{file}:make(3, 4)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere/flow.py", "no file nowhere/flow.py"),
        ("qest", "did you mean quest"),
        ("zzzz", "it has block_mean"),
        ("no.such.module:flow", "no module 'no' can be imported"),
        ("sparrow.sparse.flows.formats:D", "is a Size, not a Flow"),
        ("sparrow.sparse.flows.library:nothing", "has no flow 'nothing'"),
        ("quest; import os", "names no flow"),
        ("fine_means(open)", "names no flow"),
        ("fine_means(3)", "not whole"),
        ("", "names no flow"),
    ],
)
def test_mistakes_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_flow(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no flow in it"),
        ("x = 1\ny = x / 0\n", r"flow-file.py:2: `y = x / 0`: ZeroDivisionError"),
        ("x = (1\n", r"flow-file.py:1: .*SyntaxError"),
        ("import no_such_thing", r"flow-file.py:1: .*ModuleNotFoundError"),
    ],
)
def test_a_file_that_fails_is_told_with_its_line(write, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_flow(write(text))


def test_a_broken_flow_names_the_authors_line(write) -> None:
    with pytest.raises(FlowError, match=r"flow-file.py:10: .*fields.tpo.*did you mean 'top'"):
        load_flow(write(ONE.replace("fields.top", "fields.tpo")))
