"""From run directories to a page: what is on it, and that its figures are those of the files."""

import re
from pathlib import Path

import pytest
from support import run_folders
from support.damage import check_damage_is_named

from sparrow.files import read_document, write_document
from sparrow.report.calibration import plan_table
from sparrow.report.markdown import markdown
from sparrow.report.page import Bars, Chart, Item, Page, Remarks, Table
from sparrow.report.render import html
from sparrow.report.run_page import difference, page_of
from sparrow.report.training import verdict
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import HeldOut, read_run, read_runs


def items(page: Page) -> dict[str, Item]:
    return {item.key: item for section in page.sections for item in section.items}


def chart(page: Page, key: str) -> Chart:
    found = items(page)[key]
    assert isinstance(found, Chart)
    return found


def rows(page: Page, key: str) -> dict[str, tuple[str, ...]]:
    found = items(page)[key]
    assert isinstance(found, Table)
    return {name: tuple(values) for name, *values in found.rows}


def test_a_demo_has_every_part_that_the_page_promises(tmp_path: Path) -> None:
    page = page_of([run_folders.demo(tmp_path / "demo")])
    keys = [section.key for section in page.sections]
    assert keys == ["surface", "schedule", "learning", "tail", "kept", "time", "final"]
    assert all(section.say.endswith(".") for section in page.sections)
    assert {"surface-0", "kept-tokens", "reward-by-step", "tail-0", "kept-kv", "speed-0"} <= set(
        items(page)
    )
    assert [number.value for number in page.numbers] == ["55% → 90%", "0.900", "2.0x faster", "80%"]


def test_curves_are_those_of_the_files(tmp_path: Path) -> None:
    page = page_of([run_folders.training(tmp_path / "run")])
    (reward,) = chart(page, "reward-by-step").lines
    assert reward.points[0] == (1, 0.5)
    assert reward.points[-1] == (12, pytest.approx(0.72))
    (by_time,) = chart(page, "reward-by-time").lines
    assert by_time.points[-1][0] == pytest.approx(1.2)  # 12 steps of 6 s, in minutes
    (accuracy,) = chart(page, "accuracy-by-time").lines
    assert [x for x, _ in accuracy.points] == [0, pytest.approx(1.2)]
    assert accuracy.spans[1] == (pytest.approx(1.2), pytest.approx(0.8), pytest.approx(1.0))


def test_long_curves_are_smoothed_and_shown_raw(tmp_path: Path) -> None:
    page = page_of([run_folders.training(tmp_path / "run", steps=60)])
    raw, smooth = chart(page, "reward-by-step").lines
    assert (raw.faint, smooth.faint) == (True, False)
    assert smooth.points[3][1] == pytest.approx((0.5 + 0.52 + 0.54 + 0.56) / 4)


def test_the_tail_has_a_line_a_bin_and_the_gates_words(tmp_path: Path) -> None:
    page = page_of([run_folders.training(tmp_path / "run")])
    tail = chart(page, "tail-0")
    assert [line.name for line in tail.lines] == ["0 to 96 tokens", "96 to 192 tokens"]
    assert tail.lines[0].spans[0] == (1, 0.93, 0.97)
    assert [level.y for level in tail.levels] == [0.86]
    remarks = items(page)["gate-0"]
    assert isinstance(remarks, Remarks)
    assert remarks.lines == ["Step 3: raise: p05 0.80 [0.75, 0.84] at 96 to 192"]


def test_runs_are_compared_with_intervals(tmp_path: Path) -> None:
    folders = [
        run_folders.training(tmp_path / "a"),
        run_folders.training(tmp_path / "b", after=0.7, seed=5),
    ]
    page = page_of(folders)
    table = rows(page, "final-table")
    assert table["and after"] == ("0.90 [0.80, 1.00]", "0.70 [0.60, 0.80]")
    assert table["after, against a"] == ("-", "-0.20 [-0.34, -0.06] at 12")
    assert table["p05 of the worst length, lowest"] == ("0.890 [0.850, 0.940]",) * 2
    assert table["answers cut off at the limit"] == ("40% → 3%",) * 2
    assert rows(page, "settings") == {"run.seed": ("0", "5")}
    assert {line.role for line in chart(page, "reward-by-step").lines} == {"run-0", "run-1"}
    assert not page.numbers


def test_the_difference_joins_both_intervals() -> None:
    a = HeldOut(step=1, value=0.9, low=0.86, high=0.93)
    b = HeldOut(step=1, value=0.7, low=0.67, high=0.73)
    low, value, high = difference(a, b)
    assert (low, value, high) == (
        pytest.approx(0.2 - 0.05),
        pytest.approx(0.2),
        pytest.approx(0.2 + (0.03**2 + 0.03**2) ** 0.5),
    )


def test_a_dense_run_beside_a_sparse_one(tmp_path: Path) -> None:
    folders = [
        run_folders.training(tmp_path / "sparse"),
        run_folders.dense_training(tmp_path / "d"),
    ]
    table = rows(page_of(folders), "final-table")
    assert table["keys and values read"] == ("80%", "100%")
    assert table["p05 of the worst length, lowest"] == ("0.890 [0.850, 0.940]", "-")
    assert table["gate"] == ("1 action", "nothing judged")


def test_a_calibration_alone_and_a_run_that_has_not_begun(tmp_path: Path) -> None:
    page = page_of([run_folders.calibration(tmp_path / "surface", planned=False)])
    assert [section.key for section in page.sections] == ["surface"]
    empty = run_folders.training(tmp_path / "new")
    for name in ("metrics.jsonl", "validation.jsonl", "actions.jsonl"):
        (empty / name).write_text("", encoding="utf-8")
    assert [section.key for section in page_of([empty]).sections] == ["schedule"]


def test_a_schedule_keeps_no_more_than_there_is(tmp_path: Path) -> None:
    page = page_of([run_folders.calibration(tmp_path / "plan")])
    own, everything = chart(page, "kept-tokens").lines
    assert own.points[:3] == [(0, 0), (64, 64), (96, 64)]
    assert all(y <= x for x, y in own.points)
    assert everything.role == "quiet"


def test_the_plan_as_a_table(tmp_path: Path) -> None:
    folder = run_folders.calibration(tmp_path / "plan")
    table = plan_table(PlanFile.load(folder / "plan.json"))
    assert table.rows == [
        ["0 to 96", "64", "0.950 [0.930, 0.970]", "100%"],
        ["96 to 192", "96", "0.900 [0.880, 0.920]", "70%"],
        ["192 on", "all", "-", "100%"],
    ]


def test_speed_says_which_is_faster(tmp_path: Path) -> None:
    speed = items(page_of([run_folders.demo(tmp_path / "demo")]))["speed-0"]
    assert isinstance(speed, Bars)
    assert [group.say for group in speed.groups] == [
        "Sparse is 1.10x slower",
        "Sparse is 2.00x faster",
    ]
    assert "Up to 230 tokens (32 answers): little to skip." in speed.say
    assert speed.groups[0].bars[0].interval == (10, 12)
    assert verdict(1.01) == "Sparse and dense take the same time"


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    folder = run_folders.demo(tmp_path / "demo")
    for write in (html, markdown):
        assert write(page_of([folder])) == write(page_of([folder]))


def test_values_that_are_null_are_left_out(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    lines = [run_folders.step(0), run_folders.step(1, **{"critic/score/mean": None})]
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    (reward,) = chart(page_of([folder]), "reward-by-step").lines
    assert len(reward.points) == 1


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 12, "critic')
    assert len(read_run(folder).steps) == 12


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    for file, text, place in (
        ("metrics.jsonl", "{]\n", "line 1"),
        ("metrics.jsonl", "{}\n", "line 1: step"),
        ("metrics.jsonl", '{"step": true}\n', "line 1: step"),
        ("metrics.jsonl", '{"step": 1}\n' * 2, "step 1"),
        ("metrics.jsonl", '{"step": 1, "critic/score/mean": "x"}\n', "critic/score/mean"),
        ("validation.jsonl", "\x00\x01\n", "line 1"),
        ("actions.jsonl", '{"step": "x"}\n', "line 1: step"),
        ("config.resolved.toml", "=", ""),
        ("schedule.json", "[1]", ""),
        ("plan.json", "nothing", ""),
        ("surface.json", '{"format": 9}', "format"),
    ):
        whole = (folder / file).read_text(encoding="utf-8") if (folder / file).exists() else None
        (folder / file).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(str(folder / file))) as error:
            page_of([folder])
        assert place in str(error.value), file
        (folder / file).unlink() if whole is None else (folder / file).write_text(whole)


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """One changed bit anywhere: the file is named, or the page is the same."""
    folder = run_folders.demo(tmp_path / "demo")
    assert len(check_damage_is_named(folder, lambda: page_of([folder]), 40)) == 8


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    run = run_folders.training(tmp_path / "run")
    (tmp_path / "other").mkdir()
    many = [run_folders.training(tmp_path / f"r{i}") for i in range(7)]
    for folders, named in (
        ([tmp_path / "other"], "other"),
        ([tmp_path / "absent"], "absent"),
        ([run, tmp_path / "run" / ".." / "run"], "twice"),
        ([], "directory"),
        (many, "7"),
    ):
        with pytest.raises(ValueError, match=named):
            page_of(folders)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    folders = [run_folders.training(tmp_path / side / "run") for side in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_a_silent_gate_says_why(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    (folder / "actions.jsonl").write_text("", encoding="utf-8")
    assert said(folder) == ["It watched and had no reason to act."]
    lines = [run_folders.step(i, **{"sparse/accept_p05/bin_96": 0.84 + 0.01 * i}) for i in range(4)]
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    (told,) = said(folder)
    assert "at 2 of 4 looks p05 of the worst length was below the target" in told


def said(folder: Path) -> list[str]:
    remarks = items(page_of([folder]))["gate-0"]
    assert isinstance(remarks, Remarks)
    return list(remarks.lines)


def test_what_files_hold_inside_is_checked(tmp_path: Path) -> None:
    folder = run_folders.demo(tmp_path / "demo")
    for file, field, value in (
        ("speed.json", "cases", []),
        ("calibration/surface.json", "cells", [{"p05": "high"}]),
        ("calibration/plan.json", "by", 3),
        ("train/schedule.json", "budgets", [64]),
    ):
        whole = read_document(folder / file)
        write_document(folder / file, whole | {field: value})
        with pytest.raises(ValueError, match=field) as error:
            page_of([folder])
        assert str(folder / file) in str(error.value)
        write_document(folder / file, whole)


def test_numbers_that_are_none_count_as_not_measured(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    values = ("NaN", "Infinity", "1e999", "0.5")
    text = "".join(f'{{"step": {i}, "critic/score/mean": {v}}}\n' for i, v in enumerate(values))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert read_run(folder).values("critic/score/mean") == [(3, 0.5)]
    assert "nan" not in html(page_of([folder])).lower()


def test_very_long_curves_are_drawn_by_means(tmp_path: Path) -> None:
    page = page_of([run_folders.training(tmp_path / "run", steps=2000)])
    length = chart(page, "answer-length")
    (line,) = length.lines
    assert len(line.points) == 500
    assert line.points[0] == (2.5, pytest.approx(170 - 1.5))
    assert "the mean of up to 4 steps" in length.say


def add_settings(folder: Path, text: str) -> None:
    """As an edit that is meant: without the digest."""
    file = folder / "config.resolved.toml"
    _, _, below = file.read_text(encoding="utf-8").partition("\n")
    file.write_text(below + text, encoding="utf-8")


def test_accuracies_of_other_rows_are_not_subtracted(tmp_path: Path) -> None:
    folders = [run_folders.training(tmp_path / name) for name in ("a", "b")]
    add_settings(folders[1], "[data]\nlength = 300\n")
    table = rows(page_of(folders), "final-table")
    assert table["after, against a"] == ("-", "measured otherwise")


def test_the_lowest_p05_of_a_long_run_is_drawn(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    dip = {"sparse/accept_p05/bin_96": 0.5, "sparse/accept_p05_low/bin_96": 0.4}
    lines = [run_folders.step(i, **(dip if i == 1001 else {})) for i in range(2000)]
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    tail = chart(page_of([folder]), "tail-0")
    assert (1002.0, 0.5) in tail.lines[1].points
    assert (1002.0, 0.4, 0.94) in tail.lines[1].spans
    assert len(tail.lines[1].points) == 500
    assert "the lowest of up to 4 steps" in tail.say


def test_words_follow_the_run(tmp_path: Path) -> None:
    dense = {section.key: section.say for section in dense_page(tmp_path).sections}
    assert "densely" in dense["learning"]
    assert "rounding alone" in dense["tail"]
    sparse = page_of([run_folders.training(tmp_path / "sparse")])
    said = {section.key: section.say for section in sparse.sections}
    assert "sparse actor" in said["learning"]
    assert "surely below the target" in said["tail"]
    assert "how it was chosen is not among the files" in said["schedule"]


def dense_page(folder: Path) -> Page:
    return page_of([run_folders.dense_training(folder / "dense")])


def test_nothing_judged_is_said(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run", steps=1)
    (folder / "actions.jsonl").write_text("", encoding="utf-8")
    run_folders.write_lines(folder / "metrics.jsonl", [{"step": 0, "sparse/accept_p05": 0.93}])
    (told,) = said(folder)
    assert "nothing to act on" in told
    assert rows(page_of([folder]), "final-table")["gate"] == ("nothing judged",)


def test_bins_are_named_by_the_schedules_edges(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    lines = [run_folders.step(i, **{"sparse/accept_p05/bin_96": None}) for i in range(3)]
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    names = [line.name for line in chart(page_of([folder]), "tail-0").lines if line.points]
    assert names == ["0 to 96 tokens"]


def test_a_schedule_is_drawn_to_where_answers_end(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    add_settings(folder, "[rollout]\nmax_prompt = 64\nmax_tokens = 336\n")
    own, _ = chart(page_of([folder]), "kept-tokens").lines
    assert own.points[-1] == (400, 400)  # the last bin keeps everything


def test_without_settings_nothing_is_claimed(tmp_path: Path) -> None:
    folders = [run_folders.training(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        (folder / "config.resolved.toml").unlink()
    page = page_of(folders)
    table = rows(page, "final-table")
    assert table["after, against a"] == ("-", "-")
    assert table["gate"] == ("-", "-")
    assert "seed unknown" in page.foot[-1]
