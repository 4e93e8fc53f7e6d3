"""A study's folder read and checked, and its report written: whole, broken, unfinished, empty."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import study_folders as folders
from support.damage import check_damage_is_named
from support.run_folders import write_lines
from support.study_folders import FINALS

from sparrow_recipes.study.files import read_study
from sparrow_recipes.study.outcome import conclude
from sparrow_recipes.study.page import study_page
from sparrow_recipes.study.page import write_study as write
from sparrow_recipes.study.tables import DASH, TEXTS
from sparrow_recipes.study.verdicts import with_verdicts

SECTIONS = ["arms", "accuracy", "tails", "drift", "rollout", "budgets", "cells"]


def write_study(folder: Path) -> Path:
    """As `sparrow study --report` does."""
    study = read_study(folder)
    results = with_verdicts(conclude(study))
    results.save(folder / "results.json")
    return write(folder, study, results)


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
    assert titles == [TEXTS[key]["title"] for key in SECTIONS] + ["Commands"]
    assert text.index("The baseline (dense, seeds: 3) ended at 0.900") < text.index("## Arms")
    row = next(line for line in text.splitlines() if line.startswith("| p0.75 |"))
    assert f"| 0.600 0.620 0.580 | 0.600 | {DASH} / {DASH} | 0.600 0.620 0.580 | +0.300" in row
    assert "| lags |" in row
    assert "sparrow study small.toml" in text


def test_answers_cut_off_and_wrong_stand_apart(tmp_path: Path) -> None:
    study = folders.controlled(tmp_path, FINALS)
    page = study_page(read_study(study), conclude(read_study(study)))
    assert "accuracy-cut_off" not in {item.key for part in page.sections for item in part.items}
    for cell in (study / "cells").glob("dense-*"):
        lines = [folders.evaluation(0, 0.5, cut_off=0.4), folders.evaluation(6, 0.9, cut_off=0.02)]
        write_lines(cell / "validation.jsonl", lines)
    page = study_page(read_study(study), conclude(read_study(study)))
    items = {item.key: item for part in page.sections for item in part.items}
    chart, table = items["accuracy-cut_off"], items["outcomes-table"]
    assert list(chart.lines[-1].points) == [(0, pytest.approx(0.4)), (6, pytest.approx(0.02))]
    assert table.rows == [["dense", "0.500", "0.400", "0.100", "0.900", "0.020", "0.080"]]
    assert "| dense | 0.500 | 0.400 | 0.100 |" in write_study(study).read_text(encoding="utf-8")


def test_arms_without_a_target_have_colours_of_their_own(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    arms = [folders.make_arm("dense", "baseline", "dense")]
    study = folders.study(tmp_path, [*arms, *(folders.make_arm(n, kind="schedule") for n in names)])
    for name in ("dense", *names):
        folders.cell(study, name, 0)
    page = study_page(read_study(study), conclude(read_study(study)))
    charts = {item.key: item for part in page.sections for item in part.items}
    found = {line.name: line.role for line in charts["accuracy-arms"].lines}
    assert found["dense"] == "dense"
    assert len(set(found.values())) == 5
    assert "accuracy-controls" not in charts  # there are none


def test_figures_and_results_are_there_and_the_same_every_time(written: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in results.json")

    report = (written / "report.md").read_text(encoding="utf-8")
    figures = ("accuracy.svg", "tails.svg", "budgets.svg")
    assert all(f"({name})" in report for name in figures)
    before = {
        name: (written / name).read_text() for name in ("report.md", "results.json", *figures)
    }
    assert all("<svg" in before[name] for name in figures)
    data = json.loads(before["results.json"], parse_constant=refuse)
    assert data["inconclusive"] == []
    assert data["arms"][1]["gap"]["value"] == pytest.approx(0.3)
    assert [len(arm["cells"]) for arm in data["arms"]] == [3, 3, 3, 1, 1]
    write_study(written)
    assert {name: (written / name).read_text() for name in before} == before


def test_a_study_that_has_not_begun_or_not_ended_is_reported(tmp_path: Path) -> None:
    study = folders.study(tmp_path, [folders.make_arm("dense", "baseline", "dense", seeds=[0, 1])])
    text = write_study(study).read_text(encoding="utf-8")
    assert "Incomplete: 2 of 2 cells have no result: dense-0 (not begun)" in text
    assert "no finished run" in text
    folders.cell(study, "dense", 0)
    half = folders.cell(study, "dense", 1, (0.5, 0.6), status=None)
    with (half / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "sparse/st')  # being written
    assert "| dense-1 | unfinished | 2 |" in write_study(study).read_text(encoding="utf-8")


def base(tmp_path: Path) -> Path:
    study = folders.study(tmp_path, [folders.make_arm("dense", "baseline", "dense", seeds=[0])])
    folders.cell(study, "dense", 0)
    return study


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """One changed bit anywhere: the file is named, or the study reads the same."""
    place = base(tmp_path)
    folders.plan(place, "dense", [0, 512], [64, 128])
    files = check_damage_is_named(place, lambda: read_study(place), 25)
    assert {file.name for file in files} >= {"design.json", "end.json", "metrics.jsonl"}


def test_designs_that_do_not_fit(tmp_path: Path) -> None:
    cases: tuple[tuple[list[dict[str, Any]], dict[str, Any], str], ...] = (
        ([folders.make_arm("a")], {}, "baseline"),
        ([folders.make_arm("a", "baseline"), folders.make_arm("a")], {}, "unique"),
        ([folders.make_arm("a", "baseline", "odd")], {}, "kind"),
        ([folders.make_arm("a", "baseline", seeds=[])], {}, "seeds"),
        ([folders.make_arm("a", "baseline", like="b")], {}, "like"),
        ([folders.make_arm("a", "baseline")], {"problems": 0}, "problems"),
        ([folders.make_arm("a", "baseline")], {"lag": "two"}, "lag"),
    )
    for rank, (arms, changes, field) in enumerate(cases):
        study = folders.study(tmp_path / str(rank), arms, **changes)
        with pytest.raises(ValueError, match=field) as error:
            read_study(study)
        assert "design.json" in str(error.value)
    with pytest.raises(ValueError, match=r"design\.json"):
        read_study(tmp_path)
