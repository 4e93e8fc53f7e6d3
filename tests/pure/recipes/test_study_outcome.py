"""Cells, arms and controls of a study, judged; and what is said of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support import study_folders as folders
from support.study_folders import FINALS

from sparrow.schema.run_folder import Metrics
from sparrow_recipes.study import judging, outcome
from sparrow_recipes.study.files import read_study
from sparrow_recipes.study.verdicts import incomplete, inconclusive, verdicts


def lines(*steps: folders.Plain) -> list[Metrics]:
    return [Metrics.from_line(step) for step in steps]


def judged(tmp_path: Path, *accuracies: float | None, **settings: object) -> judging.CellOutcome:
    """The only cell of a study of one arm."""
    study = folders.study(
        tmp_path / "s", [folders.make_arm("dense", "baseline", "dense", seeds=[0])]
    )
    folders.cell(study, "dense", 0, accuracies or (0.5, 0.6, 0.7, 0.8), **settings)
    found = read_study(study)
    return judging.judge(found.cells["dense"][0], found.design)


def test_final_is_the_mean_of_the_last_three_after_the_start(tmp_path: Path) -> None:
    cell = judged(tmp_path / "a", 0.5, 0.1, 0.6, 0.7, 0.8)
    assert (cell.start, cell.final, cell.evaluations) == (0.5, pytest.approx(0.7), 3)
    assert (cell.collapse, cell.short) == ((), False)
    cell = judged(tmp_path / "b", 0.5, 0.6, 0.8)
    assert (cell.final, cell.evaluations) == (pytest.approx(0.7), 2)


def test_collapse_by_each_rule(tmp_path: Path) -> None:
    """0.5 - 0.10 is the bound of accuracy, half the length that of answers; bounds are in."""
    for rank, (accuracies, settings, fell, short) in enumerate(
        (
            ((0.4, 0.4, 0.4), {}, (), False),
            ((0.399, 0.399, 0.399), {}, ("accuracy",), False),
            ((0.6, 0.6, 0.6), {"status": "diverged"}, ("diverged",), False),
            ((0.6, 0.7, None), {}, ("diverged",), False),
            ((0.9, 0.9, 0.9), {"medians": (1000.0, 499.0)}, (), True),
            ((0.45, 0.45, 0.45), {"medians": (1000.0, 499.0)}, ("length",), True),
            ((0.4, 0.4, 0.4), {"medians": (1000.0, 500.0)}, (), False),
            ((0.45, 0.45, 0.45), {"medians": (None,)}, (), None),
        )
    ):
        cell = judged(tmp_path / str(rank), 0.5, *accuracies, **settings)
        assert (cell.collapse, cell.short) == (fell, short), rank
        known = [value for value in accuracies if value is not None]
        assert cell.final == pytest.approx(sum(known) / len(known))
        assert cell.evaluations == len(known)


def test_a_cell_without_its_own_end_has_no_final(tmp_path: Path) -> None:
    for status in (None, "failed"):
        cell = judged(tmp_path / str(status), 0.5, 0.1, 0.1, 0.1, status=status)
        assert cell.status == (status or "unfinished")
        assert (cell.final, cell.collapse, cell.measured) == (None, (), False)
        assert cell.worst is not None


def test_worst_bin_averages_by_bin_before_it_takes_the_lowest() -> None:
    """Bin 0 has 0.8 and 1.0, bin 512 has 0.88 and 0.86: the lowest single value is no matter.

    A bin in less than a third of the steps is rare: 3 of 9 is a third, 1 of 9 is not.
    """
    steps = [folders.step(0, {0: 0.8, 512: 0.88}), folders.step(1, {0: 1.0, 512: 0.86})]
    found = judging.worst_bin(lines(*steps))
    assert (found.bin, found.rare, found.p05) == (512, (), pytest.approx(0.87))
    bins = [{0: 0.9}] * 6 + [{0: 0.9, 512: 0.8}] * 2 + [{0: 0.9, 512: 0.8, 1024: 0.1}]
    found = judging.worst_bin(lines(*(folders.step(n, own) for n, own in enumerate(bins))))
    assert (found.bin, found.rare) == (512, (1024,))
    assert judging.worst_bin([]) is judging.worst_bin(lines({"step": 0})) is None


def test_bins_that_few_watched_answers_reach_are_rare() -> None:
    """Bin 512 is in both steps; 0.75 and 0 of the answers reach it: 0.375 in the mean."""

    def steps(*reached: float) -> list[Metrics]:
        share = "sparse/step/survivors/bin_"
        tails = {0: 0.9, 512: 0.7}
        return lines(
            *(
                folders.step(n, tails, **{f"{share}0": 1.0, f"{share}512": part})
                for n, part in enumerate(reached)
            )
        )

    found = judging.worst_bin(steps(0.75, 0.0))
    assert (found.bin, found.rare) == (512, ())
    assert (found.bins[512].p05, found.bins[512].survivors) == (pytest.approx(0.7), 0.375)
    found = judging.worst_bin(steps(0.5, 0.0))
    assert (found.bin, found.rare, found.p05) == (0, (512,), pytest.approx(0.9))
    assert found.bins[512].survivors == 0.25


def test_cost_of_rollouts() -> None:
    """Totals have prompts in them: 20000 x 900 / 1000 = 18000 answered tokens in 2 and in 4 s."""
    timed = [folders.step(n, {0: 0.9}, **{"timing_s/gen": 2.0 * (n + 1)}) for n in range(2)]
    found = judging.measures(lines(*timed, folders.step(2, {0: 0.9}, **{"timing_s/gen": None})))
    assert (found["seconds"], found["median_seconds"]) == (3.0, 3.0)
    assert found["tokens_a_second"] == pytest.approx(36000 / 6)
    assert (found["density"], found["kept"]) == (0.5, 400.0)
    assert judging.measures([])["tokens_a_second"] is None


def concluded(folder: Path) -> outcome.StudyResults:
    return outcome.conclude(read_study(folder))


def whole(tmp_path: Path, finals: Mapping[str, Sequence[float]] = FINALS) -> outcome.StudyResults:
    return concluded(folders.controlled(tmp_path / "study", finals))


def said(found: outcome.StudyResults) -> str:
    return " ".join(verdicts(found))


def test_a_good_study_by_hand(tmp_path: Path) -> None:
    """0.75 is 0.3 below. Runs of dense: binomial 0.09 / 768; its own seeds: variance 0.0004.

    Recalibrated: 0.75 to 0.76, entropy 0.4 to 0.3; 6 steps, so that a quarter is one step.
    """
    found = whole(tmp_path)
    base, low, near = found.arms[:3]
    assert base.gap is base.lags is None
    assert (low.lags, near.lags, low.collapsed) == (True, False, ())
    assert low.gap.value == pytest.approx(0.3)
    assert low.gap.error == pytest.approx(math.sqrt(0.09 / 768 / 3 + max(0.0004, 0.24 / 768) / 3))
    drifts = low.start_against_end
    assert drifts["worst"] == pytest.approx((0.75, 0.76))
    assert drifts["entropy"] == pytest.approx((0.4, 0.3))
    assert low.same_bins == pytest.approx(0.01)
    assert drifts["step_entropy"] == pytest.approx((0.3, 0.295))
    assert (inconclusive(found), incomplete(found)) == ([], "")
    for arm in ("p0.75", "starved", "still"):
        assert arm in said(found)


UP, FELL, SAME = (0.5, 0.8, 0.8, 0.8), (0.5, 0.1, 0.1, 0.1), (0.5, 0.5, 0.5, 0.5)


def test_controls_decide_whether_the_study_can_tell_anything(tmp_path: Path) -> None:
    """One of several positive controls is enough; one without a run does not stand for one."""
    base, flat = {"dense baseline": [UP]}, {"still flat": [SAME]}
    for number, (runs, reasons) in enumerate(
        (
            ({"dense baseline": [()]}, ["(dense) has no", "no positive", "no negative"]),
            ({"dense baseline": [FELL]}, ["itself collapsed", "no positive", "no negative"]),
            (base | flat | {"a collapses": [UP]}, ["no positive control (a) collapsed"]),
            (base | flat | {"a collapses": [UP], "b collapses": [FELL]}, []),
            (base | flat | {"a collapses": [()], "b collapses": [FELL]}, []),
            (base | flat | {"a collapses": [()]}, ["(a) has a finished run"]),
        )
    ):
        found = concluded(folders.ran(tmp_path / str(number), runs))
        assert len(inconclusive(found)) == len(reasons)
        for reason, told in zip(inconclusive(found), reasons, strict=True):
            assert told in reason


def test_inconclusive_where_the_negative_control_moves(tmp_path: Path) -> None:
    """From 0.5: the error is sqrt(0.25 / 256 + f (1 - f) / 768), 0.0361; twice that is 0.072."""
    for final, moves in ((0.57, False), (0.58, True), (0.42, True)):
        runs = {"dense baseline": [UP], "a collapses": [FELL], "still flat": [(0.5, *[final] * 3)]}
        found = concluded(folders.ran(tmp_path / str(final), runs))
        assert found.negative_control.error == pytest.approx(
            math.sqrt(0.25 / 256 + final * (1 - final) / 768)
        )
        moved = ["negative control (still) moved" in reason for reason in inconclusive(found)]
        assert moved == [True] * moves


def test_unfinished_cells_are_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    study = folders.ran(tmp_path, {"dense baseline": [UP, UP, ()], "p arm 0.8": [SAME, (), SAME]})
    folders.cell(study, "p", 1, (0.5, 0.6), status=None)
    found = concluded(study)
    text = incomplete(found)
    assert text.startswith("Incomplete: 2 of 6 cells")
    assert "dense-2 (not begun), p-1 (unfinished)" in text
    assert sorted(found.arms[1].finals.finals) == [0, 2]


def test_a_diverged_cell_has_collapsed(tmp_path: Path) -> None:
    """And without a second seed errors are said to be of the evaluations alone."""
    study = folders.ran(tmp_path / "a", {"dense baseline": [UP], "p arm 0.8": [()]})
    folders.cell(study, "p", 0, (0.5, 0.85), p05=0.8, status="diverged")
    found = concluded(study)
    assert "Collapsed: p in 1 of 1 runs (diverged)." in said(found)
    assert "know nothing of how runs differ" in said(found)


def test_an_arm_with_one_seed_borrows_no_variance_from_a_collapsed_one(tmp_path: Path) -> None:
    """dense has 0.0001 over seeds, the collapsed arm far more; pooled is dense's alone."""
    finals = {"dense": (0.89, 0.90, 0.91), "0.75": (0.9, 0.1, 0.5)}
    found = whole(tmp_path, finals)
    assert found.arms[1].collapsed == (1,)
    assert found.common_variance == pytest.approx(0.0001)


def test_a_schedule_against_its_fixed_budget(tmp_path: Path) -> None:
    arms = [
        folders.make_arm("dense", "baseline", "dense"),
        folders.make_arm("plan", target=0.86),
        folders.make_arm("fixed", kind="fixed", budget=400, seeds=[0], like="plan"),
    ]
    study = folders.study(tmp_path, arms)
    for seed, final in enumerate((0.89, 0.90, 0.91)):
        folders.cell(study, "dense", seed, (0.5, final, final, final), p05=0.99)
        folders.cell(study, "plan", seed, (0.5, final, final, final), p05=0.87)
    cost = {"timing_s/gen": 1.5, "sparse/kv_budget": 390.0}
    folders.cell(study, "fixed", 0, (0.5, 0.8, 0.8, 0.8), p05=0.80, **cost)
    (pair,) = concluded(study).schedule_against_fixed
    assert pair.accuracy.value == pytest.approx(0.1)
    assert (pair.better, pair.worse) == (True, False)
    expected = {"p05": 0.07, "density": 0.0, "kept": 10.0, "seconds": 0.5}
    assert pair.less == pytest.approx(expected)
    assert "Scheduling was better: the schedule plan" in said(concluded(study))


def test_inconclusive_where_the_baseline_gained_less_than_was_asked_for(tmp_path: Path) -> None:
    found = whole(tmp_path)
    (reason,) = inconclusive(found.replace(design=found.design.replace(gain=0.5)))
    assert reason == "the baseline did not learn: dense-0 gained +0.400 of 0.5"
    assert inconclusive(found.replace(design=found.design.replace(gain=0.3))) == []
