"""Falls of accuracy and alarms of indicators, by hand."""

from pathlib import Path

from support import study_folders as folders

from sparrow_recipes.study.files import StudyCell, read_study
from sparrow_recipes.study.leading import FIRST, RunAlarms, alarm, fall, indicators, run_alarms

STEADY = [1.0, 2.0] * (FIRST // 2)  # mean 1.5, standard deviation 0.527: the band ends at 2.554


def points(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values))


def test_an_alarm_needs_three_steps_beyond_the_band_of_the_first_ten() -> None:
    """The mean of (2, 3, 3) is 2.667; of (2, 2, 3) it is not enough. Falling is the other side."""
    assert alarm(points(*STEADY, 2.0, 2.0, 3.0), 1) is None
    assert alarm(points(*STEADY, 2.0, 2.0, 3.0, 3.0), 1) == FIRST + 3
    assert alarm(points(*STEADY, 2.0, 3.0, 3.0), -1) is None
    assert alarm(points(*STEADY, 0.0, 0.0, 0.0), -1) == FIRST + 2


def cell(folder: Path, *accuracies: float, **metrics: float) -> StudyCell:
    study = folders.study(folder, [folders.make_arm("dense", "baseline", "dense", seeds=[0])])
    folders.cell(study, "dense", 0, accuracies, every=10, **metrics)
    return read_study(study).cells["dense"][0]


def test_a_fall_is_from_the_best_evaluation_so_far(tmp_path: Path) -> None:
    """0.10 less is not yet one; the evaluation before it did not show it."""
    for number, (accuracies, expected) in enumerate(
        (
            ((0.5, 0.9, 0.8), (None, None)),
            ((0.5, 0.9, 0.85, 0.79, 0.9), (30, 20)),
            ((0.9, 0.7), (10, 0)),
        )
    ):
        assert fall(cell(tmp_path / str(number), *accuracies)) == expected


def test_indicators_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    found = run_alarms(cell(tmp_path, 0.5, 0.6, 0.7, 0.8, **{"actor/entropy": 0.3}))
    assert (found.cell, found.fell) == ("dense-0", None)
    assert found.alarms == {"p05": None, "entropy": None}
    missing = {part.name: part.missing for part in indicators([found])}
    assert missing == {"p05": 0, "p0.1": 1, "hard misses": 1, "entropy": 0, "KL": 1}


def run(fell: int | None, entropy: int | None, p05: int | None = None) -> RunAlarms:
    before = None if fell is None else fell - 10
    return RunAlarms(cell="c", fell=fell, before=before, alarms={"entropy": entropy, "p05": p05})


def test_which_indicator_leads_over_all_runs() -> None:
    """Five of five leads have p = 1/32. Between two evaluations counts for neither.

    A quarter of false alarms is allowed.
    """
    runs = [run(40, 30, 41), run(40, 12), run(40, 20, 20), run(60, 50), run(30, 15, 25)]
    runs += [run(None, None), run(None, None), run(None, 33), run(None, None)]
    found = {part.name: part for part in indicators(runs)}
    entropy, p05 = found["entropy"], found["p05"]
    assert (entropy.fallen, entropy.leads, entropy.follows, entropy.first) == (5, 5, 0, 5)
    assert (entropy.p, entropy.others, entropy.false) == (1 / 32, 4, 1)
    assert (p05.leads, p05.follows, p05.first) == (1, 3, 1)
    assert (entropy.leading, p05.leading) == (True, False)
    assert found["KL"].leading is None
    worse = {part.name: part for part in indicators([*runs, run(None, 20)])}
    assert worse["entropy"].leading is False
