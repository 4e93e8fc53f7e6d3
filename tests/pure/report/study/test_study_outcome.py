"""Arms against the baseline, controls, and what a study says in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.report.study.outcome import StudyOutcome, conclude
from sparrow.report.study.reading import read_study
from sparrow.report.study.verdicts import incomplete, inconclusive, verdicts
from tests.support import study_folders as folders

LEARNT = (0.9, 0.9, 0.9)
FINALS: Mapping[str, Sequence[float]] = {
    "dense": LEARNT,
    "0.75": (0.6, 0.62, 0.58),
    "0.86": (0.89, 0.90, 0.91),
}


def concluded(folder: Path) -> StudyOutcome:
    return conclude(read_study(folder))


def whole(tmp_path: Path, finals: Mapping[str, Sequence[float]] = FINALS) -> StudyOutcome:
    return concluded(folders.controlled(tmp_path / "study", finals))


def said(found: StudyOutcome) -> str:
    return " ".join(verdicts(found))


def test_lag_by_hand(tmp_path: Path) -> None:
    """0.75 is 0.3 below. Runs of dense: binomial 0.09 / 768; its own seeds: variance 0.0004."""
    found = whole(tmp_path)
    base, low, near = found.arms[:3]
    assert base.gap is None
    assert base.lags is None
    assert low.gap is not None
    assert low.gap.value == pytest.approx(0.3)
    assert low.gap.error == pytest.approx(math.sqrt(0.09 / 768 / 3 + max(0.0004, 0.24 / 768) / 3))
    assert (low.lags, near.lags) == (True, False)
    assert low.collapsed == ()


def test_points_are_paired_by_seed_and_controls_stay_out(tmp_path: Path) -> None:
    found = whole(tmp_path)
    assert len(found.points) == 9
    gaps = [point.gap for point in found.points if point.arm == "p0.75"]
    assert gaps == pytest.approx([0.3, 0.28, 0.32])
    assert [point.gap for point in found.points if point.baseline] == [0, 0, 0]
    assert [point.arm for point in found.aside] == ["starved"]
    assert found.left_out == (("starved-0", "correction none; shown, not fitted"),)


def test_the_threshold_of_a_whole_study(tmp_path: Path) -> None:
    found = whole(tmp_path)
    assert found.threshold is not None
    assert found.threshold.value == pytest.approx(0.86)
    assert found.threshold.low == pytest.approx(0.75)
    assert found.threshold.holds(0.86)
    assert "between 0.750 (gap still larger) and 0.860 (gap within)" in said(found)
    assert "0.86 lies inside it" in said(found)


def test_a_threshold_below_the_lowest_studied_is_not_the_published_one(tmp_path: Path) -> None:
    found = whole(tmp_path, {"dense": LEARNT, "0.75": LEARNT, "0.86": LEARNT})
    assert "below 0.750, the lowest studied" in said(found)
    assert "interval over seeds (open below, 0.750]; the published 0.86 lies outside" in said(found)


def test_an_open_interval_may_hold_the_published_one(tmp_path: Path) -> None:
    found = whole(tmp_path, {"dense": LEARNT, "0.9": LEARNT})
    assert "(open below, 0.900]; the published 0.86 lies inside" in said(found)
    found = concluded(
        folders.controlled(tmp_path / "above", {"dense": LEARNT, "0.8": (0.6, 0.6, 0.6)})
    )
    assert "above 0.800, the highest studied" in said(found)
    assert "[0.800, open above); the published 0.86 lies inside" in said(found)


def test_a_good_study_is_conclusive(tmp_path: Path) -> None:
    found = whole(tmp_path)
    assert inconclusive(found) == []
    assert incomplete(found) == ""
    text = said(found)
    assert "No arm collapsed." in text
    assert "Below the baseline by more than 2 standard errors: p0.75 (by 0.300)." in text
    assert "The positive control starved collapsed (accuracy)." in text
    assert "The negative control (still) stayed where it was (+0.000" in text


def controls(tmp_path: Path, starved: Sequence[float], still: Sequence[float]) -> StudyOutcome:
    arms = [
        folders.arm("dense", "baseline", "dense", seeds=[0]),
        folders.arm("starved", "collapses", "budget", seeds=[0], correction="none"),
        folders.arm("still", "flat", "dense", seeds=[0]),
    ]
    study = folders.study(tmp_path / "study", arms)
    folders.cell(study, "dense", 0)
    folders.cell(study, "starved", 0, starved)
    folders.cell(study, "still", 0, still)
    return concluded(study)


def test_inconclusive_where_the_positive_control_holds(tmp_path: Path) -> None:
    (reason,) = inconclusive(controls(tmp_path, (0.5, 0.6, 0.6, 0.6), (0.5, 0.5, 0.5, 0.5)))
    assert "no positive control (starved) collapsed" in reason


@pytest.mark.parametrize(("finals", "reasons"), [((0.6, 0.1), 0), ((0.1, 0.1), 0), ((0.6, 0.6), 1)])
def test_one_of_several_positive_controls_is_enough(
    tmp_path: Path, finals: Sequence[float], reasons: int
) -> None:
    """Inconclusive only where none collapsed; each is told by its name."""
    arms = [
        folders.arm("dense", "baseline", "dense", seeds=[0]),
        folders.arm("starved-64", "collapses", "budget", seeds=[0], correction="none"),
        folders.arm("starved-96", "collapses", "budget", seeds=[0], correction="none"),
        folders.arm("still", "flat", "dense", seeds=[0]),
    ]
    study = folders.study(tmp_path / "study", arms)
    folders.cell(study, "dense", 0)
    folders.cell(study, "still", 0, (0.5, 0.5, 0.5, 0.5))
    names = ("starved-64", "starved-96")
    for name, final in zip(names, finals, strict=True):
        folders.cell(study, name, 0, (0.5, final, final, final))
    found = concluded(study)
    assert len(inconclusive(found)) == reasons
    if reasons:
        assert "no positive control (starved-64, starved-96) collapsed" in said(found)
    for name, final in zip(names, finals, strict=True):
        fate = "collapsed (accuracy)" if final < 0.4 else "did not collapse in 1 of 1 runs"
        assert f"The positive control {name} {fate}." in said(found)


def test_a_positive_control_without_a_run_does_not_stand_for_one(tmp_path: Path) -> None:
    arms = [
        folders.arm("dense", "baseline", "dense", seeds=[0]),
        *(folders.arm(name, "collapses", "budget", seeds=[0]) for name in ("a", "b")),
    ]
    study = folders.study(tmp_path / "study", arms)
    folders.cell(study, "dense", 0)
    assert "no positive control (a, b) has a finished run" in said(concluded(study))
    folders.cell(study, "b", 0, (0.5, 0.1, 0.1, 0.1))
    assert not any("positive" in reason for reason in inconclusive(concluded(study)))


@pytest.mark.parametrize(("final", "moves"), [(0.57, False), (0.58, True), (0.42, True)])
def test_inconclusive_where_the_negative_control_moves(
    tmp_path: Path, final: float, moves: bool
) -> None:
    """From 0.5: the error is sqrt(0.25 / 256 + f (1 - f) / 768), 0.0361; twice that is 0.072."""
    found = controls(tmp_path, (0.5, 0.1, 0.1, 0.1), (0.5, final, final, final))
    assert found.flat is not None
    assert found.flat.error == pytest.approx(math.sqrt(0.25 / 256 + final * (1 - final) / 768))
    reasons = inconclusive(found)
    assert bool(reasons) == moves
    assert all("negative control (still) moved" in reason for reason in reasons)


def test_inconclusive_without_controls_or_a_baseline_that_stands(tmp_path: Path) -> None:
    study = folders.study(tmp_path, [folders.arm("dense", "baseline", "dense", seeds=[0])])
    reasons = inconclusive(concluded(study))
    assert len(reasons) == 3
    assert "baseline (dense) has no finished run" in reasons[0]
    assert "no positive control" in reasons[1]
    assert "no negative control" in reasons[2]
    folders.cell(study, "dense", 0, (0.5, 0.1, 0.1, 0.1))
    assert "itself collapsed in seed 0" in inconclusive(concluded(study))[0]


def test_unfinished_cells_are_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    arms = [folders.arm("dense", "baseline", "dense"), folders.arm("p", target=0.8)]
    study = folders.study(tmp_path, arms)
    for seed in (0, 1):
        folders.cell(study, "dense", seed, (0.5, 0.9, 0.9, 0.9), p05=0.99)
    folders.cell(study, "p", 0, (0.5, 0.6, 0.6, 0.6), p05=0.8)
    folders.cell(study, "p", 1, (0.5, 0.6), p05=0.8, status=None)
    folders.cell(study, "p", 2, (0.5, 0.6, 0.6, 0.6), p05=0.8)
    found = concluded(study)
    text = incomplete(found)
    assert text.startswith("**Incomplete:** 2 of 6 cells")
    assert "dense-2 (not begun), p-1 (unfinished)" in text
    assert found.arms[1].sample is not None
    assert sorted(found.arms[1].sample.finals) == [0, 2]
    reasons = dict(found.left_out)
    assert reasons["p-1"] == "unfinished"
    assert reasons["p-2"] == "the baseline has no final accuracy with this seed"
    assert [point.seed for point in found.points if point.arm == "p"] == [0]


def test_a_diverged_cell_counts_with_nothing_in_the_fit(tmp_path: Path) -> None:
    arms = [folders.arm("dense", "baseline", "dense", seeds=[0])]
    arms.append(folders.arm("p", target=0.8, seeds=[0]))
    study = folders.study(tmp_path, arms)
    folders.cell(study, "dense", 0, (0.5, 0.9, 0.9, 0.9), p05=0.99)
    folders.cell(study, "p", 0, (0.5, 0.85), p05=0.8, status="diverged")
    found = concluded(study)
    assert [point.gap for point in found.points] == pytest.approx([0.0, 0.9])
    assert "Collapsed: p in 1 of 1 runs (diverged)." in said(found)


def test_an_arm_with_one_seed_borrows_no_variance_from_a_collapsed_one(tmp_path: Path) -> None:
    """dense has 0.0001 over seeds, the collapsed arm far more; pooled is dense's alone."""
    finals = {"dense": (0.89, 0.90, 0.91), "0.75": (0.9, 0.1, 0.5)}
    found = whole(tmp_path, finals)
    assert found.arms[1].collapsed == (1,)
    assert found.common == pytest.approx(0.0001)


def test_without_a_second_seed_errors_are_said_to_be_of_evaluations(tmp_path: Path) -> None:
    arms = [folders.arm("dense", "baseline", "dense", seeds=[0])]
    arms.append(folders.arm("p", target=0.8, seeds=[0]))
    study = folders.study(tmp_path, arms)
    folders.cell(study, "dense", 0)
    folders.cell(study, "p", 0)
    assert "know nothing of how runs differ" in said(concluded(study))


def test_a_schedule_against_its_fixed_budget(tmp_path: Path) -> None:
    arms = [
        folders.arm("dense", "baseline", "dense"),
        folders.arm("plan", target=0.86),
        folders.arm("fixed", kind="fixed", budget=400, seeds=[0], like="plan"),
    ]
    study = folders.study(tmp_path, arms)
    for seed, final in enumerate((0.89, 0.90, 0.91)):
        folders.cell(study, "dense", seed, (0.5, final, final, final), p05=0.99)
        folders.cell(study, "plan", seed, (0.5, final, final, final), p05=0.87)
    cost = {"timing_s/gen": 1.5, "sparse/kv_budget": 390.0}
    folders.cell(study, "fixed", 0, (0.5, 0.8, 0.8, 0.8), p05=0.80, **cost)
    (pair,) = concluded(study).fixed
    assert pair.accuracy is not None
    assert pair.accuracy.value == pytest.approx(0.1)
    assert (pair.better, pair.worse) == (True, False)
    assert pair.p05 == pytest.approx(0.07)
    assert (pair.seconds, pair.kept, pair.density) == pytest.approx((0.5, 10.0, 0.0))
    assert "Scheduling was better: the schedule plan" in said(concluded(study))


def test_start_against_end(tmp_path: Path) -> None:
    """Recalibrated: 0.75 to 0.76, entropy 0.4 to 0.3; steps: 6, so that a quarter is one step."""
    drifts = whole(tmp_path).arms[1].drifts
    assert (drifts.worst.start, drifts.worst.end) == pytest.approx((0.75, 0.76))
    assert (drifts.entropy.start, drifts.entropy.end) == pytest.approx((0.4, 0.3))
    assert drifts.same_bins == pytest.approx(0.01)
    assert (drifts.step_entropy.start, drifts.step_entropy.end) == pytest.approx((0.3, 0.295))


def test_inconclusive_where_the_baseline_gained_less_than_was_asked_for(tmp_path: Path) -> None:
    found = whole(tmp_path)
    asked = replace(found, design=replace(found.design, gain=0.5))
    (reason,) = inconclusive(asked)
    assert reason == "the baseline did not learn: dense-0 gained +0.400 of 0.5"
    assert inconclusive(replace(found, design=replace(found.design, gain=0.3))) == []
