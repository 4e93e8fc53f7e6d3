"""Flows by text: files, import paths, built-in names, and what is said about mistakes."""

import sys
from pathlib import Path

import pytest

from sparrow.schema.schedule import Note, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.flows.loading import (
    built_in,
    library_flow,
    load_flow,
    register_flow,
    resolve_flow,
)
from sparrow.sparse.rule import Rule

ONE = """
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean, quest

def make(name="made", score=block_mean.score):
    own = block_mean
    return Flow(name=name, fields=own.fields, summarise=own.summarise, score=score)

mine = make("mine")
again = mine
"""
TWO = ONE + "other = make('other', lambda q, f, p: q[0] @ f.mean)"
BROKEN = ONE + "other = make('other', lambda q, f, p: q[0] @ f.maen)"


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
    assert load_flow("running-average(-0.5)").name == "running-average--0.5"
    assert {"quest", "oracle", "dense", "fine_means", "running_average"} <= set(built_in())
    assert not {"maximum", "int4", "Flow", "D"} & set(built_in())
    assert all(load_flow(name).name for name in built_in())


def test_the_flow_of_a_file_needs_a_name_where_it_has_several(write) -> None:
    assert load_flow(write(ONE)).name == "mine"
    assert load_flow(write(ONE) + ":again").name == "mine"
    assert load_flow(write(ONE) + ":quest") is library.quest
    assert load_flow(write("from sparrow.sparse.flows.library import quest")) is library.quest
    file = write(TWO)
    with pytest.raises(ValueError, match="mine, again, other"):
        load_flow(file)
    assert load_flow(f"{file}:other").name == "other"
    file = write(ONE)
    assert load_flow(f"{file}:make").name == "made"
    assert load_flow(f"{file}:make('so')").name == "so"
    with pytest.raises(ValueError, match="TypeError"):
        load_flow(f"{file}:make(3, 4, 5)")


def test_mistakes_say_what_is_wrong() -> None:
    for text, word in (
        ("nowhere/flow.py", "nowhere/flow.py"),
        ("qest", "quest"),
        ("zzzz", "block_mean"),
        ("no.such.module:flow", "'no'"),
        ("sparrow.sparse.flows.formats:D", "Size"),
        ("sparrow.sparse.flows.library:nothing", "'nothing'"),
        ("quest; import os", "names no flow"),
        ("fine_means(open)", "names no flow"),
        ("fine_means(3)", "P // 3"),
        ("", "names no flow"),
    ):
        with pytest.raises(ValueError, match=word):
            load_flow(text)


def test_files_and_modules_that_fail_are_told_with_their_line(tmp_path, monkeypatch) -> None:
    for number, (text, word) in enumerate(
        (
            ("x = 1", "no flow"),
            ("x = 1\ny = x / 0\n", r"flow0*1\.py:2: `y = x / 0`: ZeroDivisionError"),
            ("x = (1\n", r"flow2\.py:1: .*SyntaxError"),
            ("import no_such_thing", r"flow3\.py:1: .*ModuleNotFoundError"),
            ("import sys\nsys.exit(0)\n", "SystemExit"),
            ("def score(query, fields, position):\n    return position.page\n", "no flow"),
            (BROKEN, r"flow6\.py:11: .*'mean'"),
        )
    ):
        file = tmp_path / f"flow{number}.py"
        file.write_text(text)
        with pytest.raises(ValueError, match=word):
            load_flow(str(file))
    with pytest.raises(ValueError, match="TypeError"):
        load_flow(f"{tmp_path / 'flow5.py'}:score")
    (tmp_path / "broken_flow_module.py").write_text("x = 1\ny = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"broken_flow_module\.py:2.*ZeroDivisionError"):
        load_flow("broken_flow_module:x")


# What a schedule says of its flow is looked up, never run; a flow that a person names must fit.

EVIL = (
    "import pathlib; pathlib.Path({marker!r}).touch()\nfrom sparrow.sparse.flows.library import *"
)
MINE = """
from sparrow.sparse.flows.flow import Flow
mine = Flow(name="mine", score=lambda query, fields, position: position.page * {factor})
"""


def schedule(source: str, flow: str = "quest", **changes: object) -> Schedule:
    note = Note(key="flow", text=source)
    return Schedule.fixed(64, flow=flow).replace(provenance=(note,), **changes)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Touched by a flow file and a module, `evil`, when either is run."""
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return marker


def test_a_schedule_runs_nothing(marker: Path) -> None:
    touch = f"os:system('touch {marker}')"
    sources = [
        touch,
        f"posix:system('touch {marker}')",
        f"{touch}, program 5d5ba2a4ba9a1994",
        "evil.py",
        "./evil.py:quest",
        str(marker.parent / "evil.py"),
        "evil:quest",
        "evil",
        f"sparrow.sparse.flows.loading:load_flow({str(marker.parent / 'evil.py')!r})",
        "sparrow.sparse.flows.library:quest",  # an import path, even to the library
        "Flow(name='quest', score=None)",
        "math",
        "maximum(1, 2)",
        "_mean(1, 2)",
        "__loader__",
        "quest.score",
        "fine_means(4).score(1, 2, 3)",
        "fine_means(__import__('os').getpid())",
        "fine_means(*[4])",
        "fine_means(**{'tokens': 4})",
        "[quest for quest in [1]][0]",
        "fine_means(" + "(" * 150 + ")" * 150 + ")",
        "quest" * 100_000,
        "",
    ]
    for source in sources:
        with pytest.raises(ValueError, match="flow"):
            resolve_flow(schedule(source))
        assert not marker.exists(), source
    assert "evil" not in sys.modules


def test_a_flow_of_the_library_is_found_by_name_and_constants() -> None:
    older = "block_mean, program 5d5ba2a4ba9a1994"  # as older versions wrote it
    sources = {"quest": "quest", "fine_means(tokens=2)": "fine-means-2", older: "block-mean"}
    for source, flow in sources.items():
        assert resolve_flow(schedule(source, flow)).name == flow
    assert all(library_flow(name).name for name in built_in())
    assert resolve_flow(Schedule.fixed(64)) is library.block_mean  # without provenance
    with pytest.raises(ValueError, match="'quest'"):
        resolve_flow(schedule("window", flow="quest"))


def test_a_library_flow_whose_formula_changed_does_not_fit() -> None:
    made = schedule("quest", flow_digest=library.quest.digest)
    Rule.of(made, resolve_flow(made))
    other = made.replace(flow_digest=library.window.digest)
    for check in (Rule.of, lambda s, f: Rule.like(s, f).check(s, page=16)):
        with pytest.raises(ValueError, match=library.window.digest):
            check(other, resolve_flow(other))


def test_a_flow_that_a_person_names_must_have_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(factor=1))
    right = load_flow(str(file))
    made = schedule(str(file), flow="mine", flow_digest=right.digest)
    with pytest.raises(ValueError, match="--flow"):
        resolve_flow(made)  # even what the schedule's own maker named is not run
    Rule.of(made, resolve_flow(made, str(file)))
    file.write_text(MINE.format(factor=2))
    wrong = resolve_flow(made, str(file))
    with pytest.raises(ValueError, match=right.digest):
        Rule.of(made, wrong)
    forced = made.forced_onto(flow=wrong.name, flow_digest=wrong.digest)
    assert Rule.of(forced, wrong).flow is wrong
    assert right.digest in forced.describe()
    undigested = schedule("quest", flow="mine")
    with pytest.raises(ValueError, match="flow_digest"):
        resolve_flow(undigested, str(file))
    assert resolve_flow(undigested, str(file), force=True).name == "mine"
    assert resolve_flow(undigested, register_flow(right)) is right  # an object of this process


def test_older_schedules_are_checked_by_name(tmp_path: Path) -> None:
    made = schedule("quest")
    made.save(tmp_path / "new.json")
    text = (tmp_path / "new.json").read_text().split("\n")
    old = [line for line in text if not line.startswith(('  "flow_digest"', '  "digest"'))]
    old[-3] = old[-3].rstrip(",")
    (tmp_path / "old.json").write_text("\n".join(old))
    assert Schedule.load(tmp_path / "old.json") == Schedule.load(tmp_path / "new.json") == made
