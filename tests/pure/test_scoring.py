"""mean@k and pass@k: values by hand, intervals that know how little few rows say."""

from itertools import combinations

import numpy as np
import pytest

from sparrow.stats import attempts, mean_at_k, pass_at_k


def test_an_interval_by_hand() -> None:
    """20 rows, 6 right. Variance 0.3 * 0.7 * 20/19, so 19 observations: below 20 rows, hence 20.

    Student's t of 19 degrees is 2.093; Wilson: (0.3 + d/2 -+ sqrt(0.21 d + d^2/4)) / (1 + d).
    """
    estimate = mean_at_k([[1.0]] * 6 + [[0.0]] * 14)
    d = 2.093**2 / 20
    half = (0.21 * d + d * d / 4) ** 0.5
    assert estimate.value == pytest.approx(0.3)
    assert estimate.low == pytest.approx((0.3 + d / 2 - half) / (1 + d), abs=1e-4)
    assert estimate.high == pytest.approx((0.3 + d / 2 + half) / (1 + d), abs=1e-4)
    # The mean is over rows, of means 1, 0.5 and 0, and not over answers, of which 5 of 7 are right.
    assert mean_at_k([[1, 1, 1, 1], [1, 0], [0]]).value == pytest.approx(0.5)


def test_more_answers_narrow_it_where_rows_are_alike_and_not_where_they_differ() -> None:
    once = mean_at_k([[1], [0]] * 8)
    alike = mean_at_k([[1, 0, 1, 0], [0, 1, 0, 1]] * 8)
    apart = mean_at_k([[1, 1, 1, 1], [0, 0, 0, 0]] * 8)
    widths = [single.high - single.low for single in (once, alike, apart)]
    assert widths[1] < 0.7 * widths[0]
    assert widths[2] == pytest.approx(widths[0])


def test_all_right_is_not_surely_right() -> None:
    for rows in (4, 16, 64):
        estimate = mean_at_k([[1, 1, 1]] * rows)
        assert (estimate.value, estimate.high) == (1.0, 1.0)
        assert estimate.low < 1 - 2 / rows
        none = mean_at_k([[0, 0, 0]] * rows)
        assert none.low == 0
        assert none.high == pytest.approx(1 - estimate.low)
    single = mean_at_k([[1, 0, 0, 1]])
    assert (single.value, single.low, single.high) == (0.5, None, None)
    two = mean_at_k([[1], [0]])
    assert two.low < 0.01 < 0.99 < two.high


def test_intervals_hold_the_truth() -> None:
    """Of 300 samples of 16 rows with 2 answers, chances of rows from Beta(1, 1)."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        estimate = mean_at_k(list((draw.random((16, 2)) < draw.random((16, 1))).astype(float)))
        held += estimate.low <= 0.5 <= estimate.high
    assert held >= 0.93 * 300


def drawn_at_random(right: int, samples: int, k: int) -> float:
    """The share of all choices of k answers that hold a right one."""
    chosen = list(combinations([1] * right + [0] * (samples - right), k))
    return sum(map(max, chosen)) / len(chosen)


def test_pass_at_k_counts_choices() -> None:
    for samples in (1, 2, 5, 8):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                estimate = pass_at_k([right], [samples], k).value
                assert estimate == pytest.approx(drawn_at_random(right, samples, k), abs=1e-12)
    # 1 right of 4: 1 - C(3,2)/C(4,2) = 1/2. 0 right: 0. 3 right: 1, never both wrong.
    assert pass_at_k([1, 0, 3], [4, 4, 4], 2).value == pytest.approx(0.5)
    # 1 right of 100 000: k / n, where binomials would have thousands of digits.
    assert pass_at_k([1], [100_000], 5_000).value == pytest.approx(0.05)
    assert pass_at_k([99_999], [100_000], 2).value == 1.0
    # They are told for powers of two, and for all.
    assert [attempts(n) for n in (1, 3, 8, 12)] == [
        *((1,), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)),
    ]


def test_refuses_what_cannot_be() -> None:
    for right, samples, k in ((5, 4, 1), (-1, 4, 1), (1, 4, 5), (1, 4, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="pass_at_k"):
            pass_at_k([right], [samples], k)
    with pytest.raises(ValueError, match="row"):
        mean_at_k([])
    for row in ([], [1.5], [float("nan")]):
        with pytest.raises(ValueError, match="row 1"):
            mean_at_k([[1.0], row])
