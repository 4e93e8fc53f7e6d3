"""What becomes of one cell: final value, collapse by each rule, realised tail, cost."""

from pathlib import Path

import pytest

from sparrow.report.study.cells import Outcome, judge, spent, worst_bin
from sparrow.report.study.reading import read_study
from tests.support import study_folders as folders


def judged(tmp_path: Path, *accuracies: float | None, **settings: object) -> Outcome:
    """The only cell of a study of one arm."""
    study = folders.study(tmp_path / "s", [folders.arm("dense", "baseline", "dense", seeds=[0])])
    folders.cell(study, "dense", 0, accuracies or (0.5, 0.6, 0.7, 0.8), **settings)  # type: ignore[arg-type]
    found = read_study(study)
    return judge(found.cells[0], found.design)


def test_final_is_the_mean_of_the_last_three(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.1, 0.6, 0.7, 0.8)
    assert cell.start == 0.5
    assert cell.final == pytest.approx(0.7)
    assert (cell.evaluations, cell.collapse, cell.short) == (3, (), False)


def test_with_fewer_evaluations_the_start_is_no_part_of_the_final(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.6, 0.8)
    assert cell.final == pytest.approx(0.7)
    assert cell.evaluations == 2


@pytest.mark.parametrize(("final", "fell"), [(0.4, ()), (0.399, ("accuracy",)), (0.6, ())])
def test_collapse_by_accuracy(tmp_path: Path, final: float, fell: tuple[str, ...]) -> None:
    """0.5 - 0.10 is the bound, and the bound itself is no collapse."""
    assert judged(tmp_path, 0.5, final, final, final).collapse == fell


def test_a_run_that_diverged_collapsed(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.6, 0.6, 0.6, status="diverged")
    assert cell.collapse == ("diverged",)
    assert cell.final == pytest.approx(0.6)


def test_an_evaluation_without_a_number_is_a_collapse(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.6, 0.7, None)
    assert cell.collapse == ("diverged",)
    assert cell.final == pytest.approx(0.65)
    assert cell.evaluations == 2


def test_short_answers_alone_are_flagged_and_no_collapse(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.9, 0.9, 0.9, medians=(1000.0, 499.0))
    assert cell.short is True
    assert cell.collapse == ()


def test_short_and_worse_is_a_collapse_by_length(tmp_path: Path) -> None:
    cell = judged(tmp_path, 0.5, 0.45, 0.45, 0.45, medians=(1000.0, 499.0))
    assert cell.collapse == ("length",)


def test_half_the_length_is_not_short(tmp_path: Path) -> None:
    assert judged(tmp_path, 0.5, 0.4, 0.4, 0.4, medians=(1000.0, 500.0)).short is False


def test_length_is_not_judged_without_medians(tmp_path: Path) -> None:
    assert judged(tmp_path, 0.5, 0.45, 0.45, 0.45, medians=(None,)).short is None


@pytest.mark.parametrize("status", [None, "failed"])
def test_a_cell_without_its_own_end_has_no_final(tmp_path: Path, status: str | None) -> None:
    cell = judged(tmp_path, 0.5, 0.1, 0.1, 0.1, status=status)
    assert cell.status == (status or "unfinished")
    assert (cell.final, cell.collapse, cell.measured) == (None, (), False)
    assert cell.worst is not None


def test_worst_bin_averages_by_bin_before_it_takes_the_lowest() -> None:
    """Bin 0 has 0.8 and 1.0, bin 512 has 0.88 and 0.86: the lowest single value is no matter."""
    steps = [folders.step(0, {0: 0.8, 512: 0.88}), folders.step(1, {0: 1.0, 512: 0.86})]
    found = worst_bin(steps)
    assert found is not None
    assert (found.bin, found.rare) == (512, ())
    assert found.p05 == pytest.approx(0.87)


def test_a_bin_in_less_than_a_third_of_the_steps_is_rare() -> None:
    steps = [folders.step(n, {0: 0.9}) for n in range(5)]
    steps += [folders.step(5, {0: 0.9, 512: 0.8, 1024: 0.1}), folders.step(6, {0: 0.9, 512: 0.8})]
    steps += [folders.step(7, {0: 0.9, 512: 0.8}), folders.step(8, {0: 0.9})]
    found = worst_bin(steps)
    assert found is not None
    assert (found.bin, found.rare) == (512, (1024,))  # 3 of 9 is a third, 1 of 9 is not
    assert worst_bin([]) is None
    assert worst_bin([{"step": 0}]) is None


def test_cost_of_rollouts() -> None:
    """Totals have prompts in them: 20000 x 900 / 1000 = 18000 answered tokens in 2 and in 4 s."""
    lines = [folders.step(n, {0: 0.9}, **{"timing_s/gen": 2.0 * (n + 1)}) for n in range(2)]
    found = spent([*lines, folders.step(2, {0: 0.9}, **{"timing_s/gen": None})])
    assert (found.seconds, found.median_seconds) == (3.0, 3.0)
    assert found.tokens_a_second == pytest.approx(36000 / 6)
    assert (found.density, found.kept) == (0.5, 400.0)
    assert spent([]).tokens_a_second is None
