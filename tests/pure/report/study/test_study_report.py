"""A study's folder read and checked, and its report written: whole, broken, unfinished, empty."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from support.damage import check_damage_is_named

from sparrow.report.study.reading import read_study
from sparrow.report.study.write import write_study
from tests.support import study_folders as folders

FINALS = {"dense": (0.9, 0.9, 0.9), "0.75": (0.6, 0.62, 0.58), "0.86": (0.89, 0.9, 0.91)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study with its report."""
    study = folders.controlled(
        tmp_path_factory.mktemp("study"), FINALS, command="sparrow study small.toml"
    )
    folders.plan(study, "p0.75", [0, 512], [64, 128])
    folders.plan(study, "p0.86", [0, 512], [128, 2**31 - 1])
    write_study(study)
    return study


def test_the_report_has_its_parts_in_order(written: Path) -> None:
    text = (written / "report.md").read_text(encoding="utf-8")
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "Arms",
        "Threshold",
        "Tail and entropy, start against end",
        "Rollout",
        "Figures",
        "Cells",
        "Commands",
    ]
    assert text.index("The baseline (dense, 3 seeds) ended at 0.900") < text.index("## Arms")
    row = next(line for line in text.splitlines() if line.startswith("| p0.75 |"))
    assert "| 0.600 0.620 0.580 | 0.600 | 0.600 0.620 0.580 | +0.300 [" in row
    assert "| lags |" in row
    assert "sparrow study small.toml" in text


def test_every_figure_is_there_and_shown(written: Path) -> None:
    text = (written / "report.md").read_text(encoding="utf-8")
    for stem in ("accuracy", "gaps", "tails", "budgets"):
        assert f"({stem}.svg)" in text
        assert "<svg" in (written / f"{stem}.svg").read_text(encoding="utf-8")


def test_results_are_plain_json_without_nan(written: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in results.json")

    text = (written / "results.json").read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=refuse)
    assert data["inconclusive"] == []
    assert data["threshold"]["kind"] == "closed"
    assert data["threshold"]["holds_published"] is True
    assert data["arms"][1]["gap"]["value"] == pytest.approx(0.3)
    assert [len(arm["cells"]) for arm in data["arms"]] == [3, 3, 3, 1, 1]


def test_the_same_study_gives_the_same_bytes(written: Path) -> None:
    names = ("report.md", "results.json", "accuracy.svg", "gaps.svg", "tails.svg", "budgets.svg")
    before = [(written / name).read_bytes() for name in names]
    write_study(written)
    assert [(written / name).read_bytes() for name in names] == before


def test_open_ends_are_null_and_named(tmp_path: Path) -> None:
    study = folders.controlled(tmp_path, {"dense": (0.9,) * 3, "0.8": (0.9,) * 3})
    write_study(study)
    found = json.loads((study / "results.json").read_text(encoding="utf-8"))["threshold"]
    assert (found["kind"], found["at"]["value"], found["open_below"]) == ("open below", None, 27)
    assert (found["low_kind"], found["low"]) == ("open below", None)
    assert found["high"] == pytest.approx(0.8)


def test_a_study_that_has_not_begun_is_reported(tmp_path: Path) -> None:
    study = folders.study(tmp_path, [folders.arm("dense", "baseline", "dense")])
    text = write_study(study).read_text(encoding="utf-8")
    assert "**Incomplete:** 3 of 3 cells have no result: dense-0 (not begun)" in text
    assert "no finished run" in text


def test_unfinished_and_strange_folders_are_in_the_report(tmp_path: Path) -> None:
    study = folders.study(tmp_path, [folders.arm("dense", "baseline", "dense", seeds=[0, 1])])
    folders.cell(study, "dense", 0)
    half = folders.cell(study, "dense", 1, (0.5, 0.6), status=None)
    with (half / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "sparse/st')  # being written
    folders.cell(study, "pilot", 0)
    text = write_study(study).read_text(encoding="utf-8")
    assert "| dense-1 | unfinished | 2 |" in text
    assert "that no arm has, not read: pilot-0." in text


def base(tmp_path: Path) -> Path:
    study = folders.study(tmp_path, [folders.arm("dense", "baseline", "dense", seeds=[0])])
    folders.cell(study, "dense", 0)
    return study


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "cells/dense-0/metrics.jsonl",
            '{"step": 0}\n{"step": \n',
            "metrics.jsonl, line 2: not valid JSON",
        ),
        ("cells/dense-0/metrics.jsonl", '{"step": 0, "a": "b"}\n', "line 1, a: got"),
        ("cells/dense-0/metrics.jsonl", '{"step": 0}\n{"step": 0}\n', "step 0 is there twice"),
        ("cells/dense-0/validation.jsonl", '{"step": 0}\n', "step 0: got no accuracy"),
        ("cells/dense-0/end.json", '{"status": "done"}', "end.json has no 'message'"),
        ("cells/dense-0/tail.json", "{\n[}", "tail.json: not valid JSON.*line 2"),
        ("plans/dense.json", '{"lengths": [0, 1], "budgets": [1]}', "1 budgets for 2 lengths"),
        ("design.json", "[]", "design.json: got list, allowed: a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    study = base(tmp_path)
    (study / file).parent.mkdir(exist_ok=True)
    (study / file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_study(study)


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """One changed bit anywhere: the file is named, or the study reads the same."""
    place = base(tmp_path)
    folders.plan(place, "dense", [0, 512], [64, 128])
    files = check_damage_is_named(place, lambda: read_study(place), 25)
    assert {file.name for file in files} >= {"design.json", "end.json", "metrics.jsonl"}


def test_a_status_that_nobody_knows(tmp_path: Path) -> None:
    study = base(tmp_path)
    end = {"status": "lost", "message": None, "steps": 1, "seconds": None}
    (study / "cells/dense-0/end.json").write_text(json.dumps(end), encoding="utf-8")
    with pytest.raises(ValueError, match=r"got status 'lost', allowed: done, diverged, failed"):
        read_study(study)


@pytest.mark.parametrize(
    ("arms", "changes", "message"),
    [
        ([folders.arm("a")], {}, "got 0 arms with role baseline, allowed: one"),
        ([folders.arm("a", "baseline"), folders.arm("a")], {}, "allowed: each name once"),
        ([folders.arm("a", "baseline", "odd")], {}, "got kind 'odd', allowed: dense, target"),
        ([folders.arm("a", "baseline", seeds=[1, 1])], {}, r"got seeds \[1, 1\], allowed"),
        ([folders.arm("a", "baseline", like="b")], {}, "a is like 'b', allowed: another arm"),
        ([folders.arm("a", "baseline")], {"problems": 0}, "got problems 0, allowed: at least 1"),
        ([folders.arm("a", "baseline")], {"lag": "two"}, "design.json, lag: got"),
    ],
)
def test_designs_that_do_not_fit(
    tmp_path: Path, arms: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    study = folders.study(tmp_path, arms, **changes)
    with pytest.raises(ValueError, match=message):
        read_study(study)


def test_no_study_at_all(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"design\.json is not there: this is no folder of a study"
    ):
        read_study(tmp_path)
