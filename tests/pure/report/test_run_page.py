"""From run directories to a page: what is on it, and that its figures are those of the files."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import run_folders
from support.damage import check_damage_is_named

from sparrow.reporting.calibration import plan_table
from sparrow.reporting.markdown import markdown
from sparrow.reporting.page import Chart, Item, Page
from sparrow.reporting.render import html
from sparrow.reporting.run_page import difference, make_page
from sparrow.reporting.training import verdict
from sparrow.schema.common import ReportConfig
from sparrow.schema.evaluation import Estimate
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import HeldOut, read_run, read_runs
from sparrow.schema.surface import Surface


def items(page: Page) -> dict[str, Item]:
    return {item.key: item for section in page.sections for item in section.items}


def chart(page: Page, key: str) -> Any:
    return items(page)[key]


def rows(page: Page, key: str = "final-table") -> dict[str, tuple[str, ...]]:
    return {name: tuple(values) for name, *values in items(page)[key].rows}


def remarks(page: Page) -> list[str]:
    return list(items(page)["gate-0"].lines)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folders.training(tmp_path / "run")


def test_a_demo_has_every_part_that_the_page_promises(tmp_path: Path) -> None:
    folder = run_folders.demo(tmp_path / "demo")
    page = make_page([folder])
    keys = [section.key for section in page.sections]
    assert keys == ["surface", "schedule", "learning", "tail", "policy", "kept", "time", "final"]
    assert {"surface-0", "kept-tokens", "reward-by-step", "tail-0", "kept-kv", "speed-0"} <= set(
        items(page)
    )
    assert [number.value for number in page.numbers] == ["55% → 90%", "0.900", "2.0x faster", "80%"]
    speed = items(page)["speed-0"]
    assert [group.say for group in speed.groups] == [
        "Sparse is 1.10x slower",
        "Sparse is 2.00x faster",
    ]
    assert "Up to 230 tokens (32 answers): little to skip." in speed.say
    assert speed.groups[0].bars[0].interval == (10, 12)
    assert verdict(1.01) == "Sparse and dense take the same time"
    for write in (html, markdown):
        assert write(page) == write(make_page([folder]))


def test_curves_are_those_of_the_files(run: Path) -> None:
    page = make_page([run])
    (reward,) = chart(page, "reward-by-step").lines
    assert reward.points[0] == (1, 0.5)
    assert reward.points[-1] == (12, pytest.approx(0.72))
    right, *_ = chart(page, "accuracy-by-step").lines
    assert right.points == [(0, 0.55), (12, 0.9)]
    assert right.spans[1] == (12, pytest.approx(0.8), pytest.approx(1.0))
    tail = chart(page, "tail-0")
    assert [line.name for line in tail.lines] == ["0 to 96 tokens", "96 to 192 tokens"]
    assert tail.lines[0].spans[0] == (1, 0.93, 0.97)
    assert [level.y for level in tail.levels] == [0.86]
    assert remarks(page) == ["Step 3: raise: p05 0.80 [0.75, 0.84] at 96 to 192"]


def test_hard_misses_entropy_and_kl_stand_beside_p05(run: Path, tmp_path: Path) -> None:
    page = make_page([run])
    misses, far = chart(page, "misses-0"), chart(page, "far-tail-0")
    (line,) = misses.lines  # no other bin was measured
    assert (line.points[0], line.spans[0]) == ((1, 3), (1, 2, 20))
    assert [level.y for level in misses.levels] == [5]
    assert far.lines[0].points[0] == (1, 0.2)
    assert chart(page, "entropy").lines[0].points[:2] == [(1, 0.3), (2, pytest.approx(0.29))]
    assert chart(page, "kl").lines[0].points[0] == (1, 0.002)
    assert [level.y for level in chart(page, "kl").levels] == [0.1]
    outcomes = {line.name: line.points[1][1] for line in chart(page, "outcomes-by-step").lines}
    assert outcomes == {"right": 0.5, "cut off": 0.2, "wrong": 0.3}
    table = rows(page)
    assert table["hard misses per 1000 of the worst length, highest"] == ("14.0",)
    assert table["p0.1 of acceptance, first and last step"] == ("0.300 → 0.300",)
    assert table["entropy, first and last steps"] == ("0.280 → 0.210",)
    assert table["KL(new || old), first and last steps"] == ("0.002 → 0.002",)
    assert table["training answers wrong"] == ("10% → 47%",)
    both = make_page([run, run_folders.training(tmp_path / "b")])
    assert [line.name for line in chart(both, "outcomes-by-step").lines] == ["run", "b"]


def test_runs_of_older_versions_have_no_such_figures(run: Path) -> None:
    new = ("sparse/hard_misses", "sparse/accept_p0_1", "actor/", "critic/outcome/")
    lines = [run_folders.step(number) for number in range(3)]
    old = [{key: line[key] for key in line if not key.startswith(new)} for line in lines]
    run_folders.write_lines(run / "metrics.jsonl", old)
    page = make_page([run])
    assert not {"misses-0", "far-tail-0", "entropy", "kl", "outcomes-by-step"} & set(items(page))
    assert rows(page)["entropy, first and last steps"] == ("-",)


def test_asynchronous_runs_have_charts_of_their_own(run: Path, tmp_path: Path) -> None:
    assert "asynchronous" not in [section.key for section in make_page([run]).sections]
    folder = run_folders.asynchronous_training(tmp_path / "async")
    page = make_page([folder])
    drawn = {
        key: {line.name: line.points for line in chart(page, f"{key}-0").lines}
        for key in ("staleness", "idle", "buffer", "dropped")
    }
    assert drawn["staleness"]["oldest"][:2] == [(1, 1), (2, 2)]
    assert drawn["idle"]["learner"][0] == (1, 0.4)
    assert drawn["buffer"]["under way"][-1] == (12, 31)
    assert drawn["dropped"]["uninformative"][-1] == (12, 24)  # so far
    assert drawn["dropped"]["failed too often"][-1] == (12, 12)
    assert drawn["dropped"]["dispatched again"][-1] == (12, 12)
    assert "1200 sampled tokens" in chart(page, "dropped-0").say
    assert all(chart(page, f"{key}-0").say for key in drawn)
    both = items(make_page([run, folder]))
    assert both["idle-1"].title == "async: Idle time"
    assert "idle-0" not in both
    for write in (html, markdown):
        assert "Do rollout and learning overlap?" in write(page)


def test_each_of_several_policies_has_its_lines_and_its_column(tmp_path: Path) -> None:
    page = make_page([run_folders.team_training(tmp_path / "run")])
    for key in ("reward-by-step", "accuracy-by-step", "policies-version", "policies-tokens_learnt"):
        assert [line.name for line in chart(page, key).lines] == ["solver", "checker"]
    assert [y for _, y in chart(page, "policies-version").lines[1].points] == [0, 1, 1, 2, 2, 3]
    sampled = chart(page, "policies-tokens_sampled").lines
    assert [line.name for line in sampled] == ["solver", "checker", "opponent"]
    assert len({line.role for line in sampled}) == 3
    assert items(page)["final-table"].columns[1:] == ["solver", "checker", "opponent"]
    found = rows(page)
    assert found["updates"] == ("6", "3", "-")
    assert found["tokens sampled"] == ("600", "600", "600")
    assert found["tokens learnt"] == ("384", "192", "-")
    assert found["and after"][:2] == ("0.75 [0.65, 0.85]",) * 2
    assert found["p05 of the worst length, lowest"][1:] == ("-", "-")
    assert found["seconds per step"] == ("60.0",) * 3  # of the run, not of a policy's update
    assert "budgets are raised" in remarks(page)[0]
    assert {number.name.partition(":")[0] for number in page.numbers} == {"solver", "checker"}
    assert "solver" in html(page)
    assert "solver" in markdown(page)


def test_metrics_of_a_name_that_no_policy_can_have_are_of_none(tmp_path: Path) -> None:
    folder, names = run_folders.team_training(tmp_path / "run"), ("", "\x1b[2J\nspoof", "../a", "-")
    values = {f"policy/{name}/version": 1.0 for name in names} | {"policy/solver": 1.0}
    run_folders.write_lines(folder / "metrics.jsonl", [run_folders.step(0, **values)])
    (folder / "validation.jsonl").unlink()
    assert not read_run(folder).policies


def test_a_policy_has_the_gate_of_the_run_or_its_own(tmp_path: Path) -> None:
    read = read_run(run_folders.team_training(tmp_path / "run"))
    assert (read.policies["solver"].target, read.policies["checker"].target) == (0.86, 0.5)
    assert read.policies["checker"].settings.hard_misses is None  # of the run's gate
    assert read.policies["solver"].settings.hard_misses == 5.0


def test_policies_of_several_runs_are_told_apart(run: Path, tmp_path: Path) -> None:
    teams = [run_folders.team_training(tmp_path / name) for name in "abc"]
    page = make_page([run, *teams])
    lines = chart(page, "reward-by-step").lines
    assert [line.name for line in lines][:3] == ["run", "a: solver", "a: checker"]
    assert len(lines) == 7
    keys = [item.key for section in page.sections for item in section.items]
    assert len(keys) == len(set(keys))


def test_a_step_without_drops_counts_as_none(tmp_path: Path) -> None:
    folder = run_folders.asynchronous_training(tmp_path / "async")
    lines = [run_folders.step(n, **{"async/rollout_idle": 0.1}) for n in range(4)]
    lines[2] |= {"async/dropped/stale": 3.0}
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    page = make_page([folder])
    (line,) = chart(page, "dropped-0").lines
    assert line.points == [(1, 0), (2, 0), (3, 3), (4, 3)]
    assert [line.name for line in chart(page, "idle-0").lines] == ["rollout"]
    assert "staleness-0" not in items(page)


def test_a_curve_is_drawn_once_and_told_by_time(run: Path, tmp_path: Path) -> None:
    slow = run_folders.training(tmp_path / "slow", after=0.7)
    lines = [run_folders.step(number, **{"timing_s/step": 12.0}) for number in range(12)]
    run_folders.write_lines(slow / "metrics.jsonl", lines)
    page = make_page([run, slow])
    drawn = [item.title for item in items(page).values() if isinstance(item, Chart)]
    assert not [title for title in drawn if "by time" in title]
    table = rows(page, "learning-by-time")  # 12 steps of 6 s and of 12 s
    assert table["mean reward after 1.20 minutes"] == ("0.72 at step 12", "0.60 at step 6")
    assert table["mean reward after 2.40 minutes"] == ("0.72 at step 12", "0.72 at step 12")
    assert table["accuracy on held-out rows after 1.20 minutes"] == (
        "0.90 at step 12",
        "0.55 at step 0",
    )
    untimed = [run_folders.step(number, **{"timing_s/step": None}) for number in range(12)]
    run_folders.write_lines(run / "metrics.jsonl", untimed)
    assert "learning-by-time" not in items(make_page([run]))


def test_right_cut_off_and_wrong_stand_apart(run: Path, tmp_path: Path) -> None:
    def shares(page: Page, key: str = "accuracy-by-step") -> dict[str, list[float]]:
        return {line.name: [y for _, y in line.points] for line in chart(page, key).lines}

    page = make_page([run])
    near = partial(pytest.approx, abs=1e-9)
    expected = {"right": near([0.55, 0.9]), "cut off": near([0.4, 0]), "wrong": near([0.05, 0.1])}
    assert shares(page) == expected
    assert rows(page)["cut off at the token limit, before and after"] == ("0.40 → 0.00",)
    assert "| wrong though ended, before and after | 0.05 → 0.10 |" in markdown(page)
    both = make_page([run, run_folders.training(tmp_path / "b", after=0.7)])
    assert shares(both, "cut_off-by-step") == {"run": [0.4, 0.0], "b": [0.4, 0.0]}
    assert shares(both, "wrong-by-step") == {"run": near([0.05, 0.1]), "b": near([0.05, 0.3])}


def test_outcomes_of_older_runs_follow_from_accuracy_and_the_share_cut_off(run: Path) -> None:
    for cut_off, outcomes in ((0.3, (0.55, 0.3, 0.15)), (0.6, (0.55, 0.45, 0.0)), (None, None)):
        line = run_folders.validation(0, 0.55) | {"val-aux/assignments/cut_off": cut_off}
        run_folders.write_lines(run / "validation.jsonl", [line])
        (held,) = read_run(run).held_out()
        assert held.outcomes == (outcomes and pytest.approx(outcomes))
    (accuracy,) = chart(make_page([run]), "accuracy-by-step").lines  # alone where no more is known
    assert accuracy.name == "right"
    assert rows(make_page([run]))["wrong though ended, before and after"] == ("-",)


def test_long_curves_are_smoothed_and_thinned(tmp_path: Path) -> None:
    page = make_page([run_folders.training(tmp_path / "60", steps=60)])
    raw, smooth = chart(page, "reward-by-step").lines
    assert (raw.faint, smooth.faint) == (True, False)
    assert smooth.points[3][1] == pytest.approx((0.5 + 0.52 + 0.54 + 0.56) / 4)
    folder = run_folders.training(tmp_path / "2000")
    dip = {"sparse/accept_p05/bin_96": 0.5, "sparse/accept_p05_low/bin_96": 0.4}
    lines = [run_folders.step(i, **(dip if i == 1001 else {})) for i in range(2000)]
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    page = make_page([folder])
    length, tail = chart(page, "answer-length"), chart(page, "tail-0")
    assert len(length.lines[0].points) == len(tail.lines[1].points) == 500
    assert length.lines[0].points[0] == (2.5, pytest.approx(170 - 1.5))
    assert "the mean of up to 4 steps" in length.say
    assert (1002.0, 0.5) in tail.lines[1].points  # the lowest is drawn
    assert (1002.0, 0.4, 0.94) in tail.lines[1].spans
    assert "the lowest of up to 4 steps" in tail.say


def test_runs_are_compared_with_intervals(run: Path, tmp_path: Path) -> None:
    other = run_folders.training(tmp_path / "b", after=0.7, seed=5)
    page = make_page([run, other, run_folders.dense_training(tmp_path / "d")])
    table = rows(page)
    assert table["and after"][:2] == ("0.90 [0.80, 1.00]", "0.70 [0.60, 0.80]")
    assert table["after, against run"][:2] == ("-", "-0.20 [-0.34, -0.06] at 12")
    worst = "0.890 [0.850, 0.940]"
    assert table["p05 of the worst length, lowest"] == (worst, worst, "-")
    assert table["training answers cut off"][:2] == ("40% → 3%",) * 2
    assert table["keys and values read"] == ("80%", "80%", "100%")
    assert table["gate"] == ("1 action", "1 action", "nothing measured")
    assert rows(page, "settings")["run.seed"][:2] == ("0", "5")
    roles = {line.role for line in chart(page, "reward-by-step").lines}
    assert roles == {"run-0", "run-1", "run-2"}
    assert not page.numbers


def test_the_difference_joins_both_intervals() -> None:
    a = HeldOut(step=1, value=0.9, low=0.86, high=0.93)
    b = HeldOut(step=1, value=0.7, low=0.67, high=0.73)
    assert difference(a, b) == pytest.approx((0.2 - 0.05, 0.2, 0.2 + (2 * 0.03**2) ** 0.5))


def test_accuracies_of_other_or_unknown_rows_are_not_subtracted(tmp_path: Path) -> None:
    folders = [run_folders.training(tmp_path / name) for name in ("a", "b")]
    add_settings(folders[1], "[data]\nlength = 300\n")
    assert rows(make_page(folders))["after, against a"] == ("-", "other rows or settings")
    for folder in folders:
        (folder / "config.resolved.toml").unlink()
    page = make_page(folders)
    assert rows(page)["after, against a"] == rows(page)["gate"] == ("-", "-")
    assert "seed unknown" in page.foot[-1]


def add_settings(folder: Path, text: str) -> None:
    """As an edit that is meant: without the digest."""
    file = folder / "config.resolved.toml"
    _, _, below = file.read_text(encoding="utf-8").partition("\n")
    file.write_text(below + text, encoding="utf-8")


def test_a_calibration_alone_and_a_run_that_has_not_begun(run: Path, tmp_path: Path) -> None:
    page = make_page([run_folders.calibration(tmp_path / "surface", planned=False)])
    assert [section.key for section in page.sections] == ["surface"]
    for name in ("metrics.jsonl", "validation.jsonl", "actions.jsonl"):
        (run / name).write_text("", encoding="utf-8")
    assert [section.key for section in make_page([run]).sections] == ["schedule"]


def test_hard_misses_of_a_surface(tmp_path: Path) -> None:
    folder = run_folders.calibration(tmp_path / "plan")
    assert "surface-misses-0" not in items(make_page([folder]))  # as older versions have none
    surface, rate = Surface.load(folder / "surface.json"), Estimate(value=2.0, low=1.0, high=4.5)
    cells = [surface.cells[0].replace(hard_misses=rate), *surface.cells[1:]]
    surface.replace(cells=cells).save(folder / "surface.json")
    plan = PlanFile.load(folder / "plan.json")
    plan.replace(hard_misses=5.0).save(folder / "plan.json")
    misses = chart(make_page([folder]), "surface-misses-0")
    assert misses.lines[0].points == [(48, 2)]
    assert misses.lines[0].spans == [(48, 1, 4.5)]
    assert [level.y for level in misses.levels] == [5]


def test_a_schedule_and_its_plan(run: Path, tmp_path: Path) -> None:
    folder = run_folders.calibration(tmp_path / "plan")
    kept, all_tokens = chart(make_page([folder]), "kept-tokens").lines
    assert kept.points[:3] == [(0, 0), (64, 64), (96, 64)]
    assert all(y <= x for x, y in kept.points)  # no more than there is
    assert all_tokens.role == "quiet"
    assert plan_table(PlanFile.load(folder / "plan.json")).rows == [
        ["0 to 96", "64", "0.950 [0.930, 0.970]", "100%"],
        ["96 to 192", "96", "0.900 [0.880, 0.920]", "70%"],
        ["192 on", "all", "-", "100%"],
    ]
    bounded = PlanFile.load(folder / "plan.json").replace(hard_misses=5.0)
    rate = Estimate(value=2.0, low=1.0, high=4.5)
    bins = [bounded.bins[0].replace(hard_misses=rate), *bounded.bins[1:]]
    table = plan_table(bounded.replace(bins=bins))
    assert [row[3] for row in table.rows] == ["2.00 [1.00, 4.50]", "-", "-"]
    assert "at most 5 per 1000" in table.say
    add_settings(run, "[rollout]\nmax_prompt = 64\nmax_tokens = 336\n")
    kept, _ = chart(make_page([run]), "kept-tokens").lines
    assert kept.points[-1] == (400, 400)  # to where answers end; the last bin keeps everything


def test_what_was_not_measured_is_left_out(run: Path) -> None:
    values = ("NaN", "Infinity", "1e999", "null", "0.5")
    text = "".join(f'{{"step": {i}, "critic/score/mean": {v}}}\n' for i, v in enumerate(values))
    (run / "metrics.jsonl").write_text(text + '{"step": 12, "critic', encoding="utf-8")
    assert read_run(run).values("critic/score/mean") == [(4, 0.5)]
    assert "nan" not in html(make_page([run])).lower()
    lines = [run_folders.step(i, **{"sparse/accept_p05/bin_96": None}) for i in range(3)]
    run_folders.write_lines(run / "metrics.jsonl", lines)
    names = [line.name for line in chart(make_page([run]), "tail-0").lines if line.points]
    assert names == ["0 to 96 tokens"]  # bins are named by the schedule's edges


def test_broken_files_are_named(run: Path) -> None:
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
        whole = (run / file).read_text(encoding="utf-8") if (run / file).exists() else None
        (run / file).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(str(run / file))) as error:
            make_page([run])
        assert place in str(error.value), file
        (run / file).unlink() if whole is None else (run / file).write_text(whole)


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """One changed bit anywhere: the file is named, or the page is the same."""
    folder = run_folders.demo(tmp_path / "demo")
    assert len(check_damage_is_named(folder, lambda: make_page([folder]), 40)) == 8


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    many = [run_folders.training(tmp_path / f"r{i}") for i in range(7)]
    for folders, named in (
        ([tmp_path / "other"], "other"),
        ([tmp_path / "absent"], "absent"),
        ([many[0], tmp_path / "r0" / ".." / "r0"], "r0"),
    ):
        with pytest.raises(ValueError, match=named):
            make_page(folders)
    for runs in ([], many):
        with pytest.raises(ValueError, match="runs"):
            ReportConfig(runs=runs)
    both = [run_folders.training(tmp_path / side / "run") for side in ("a", "b")]
    assert [run_.name for run_ in read_runs(both)] == ["a/run", "b/run"]


def test_a_silent_gate_says_why(run: Path) -> None:
    (run / "actions.jsonl").write_text("", encoding="utf-8")
    lines = [run_folders.step(i, **{"sparse/accept_p05/bin_96": 0.84 + 0.01 * i}) for i in range(4)]
    run_folders.write_lines(run / "metrics.jsonl", lines)
    assert "at 2 of 4 steps" in remarks(make_page([run]))[0]
    run_folders.write_lines(run / "metrics.jsonl", [{"step": 0, "sparse/accept_p05": 0.93}])
    page = make_page([run])
    assert "nothing to act on" in remarks(page)[0]
    assert rows(page)["gate"] == ("nothing measured",)
