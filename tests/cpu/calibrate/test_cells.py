"""Cells: hand-made tokens to figures."""

import numpy as np
import pytest

from sparrow.calibrate.cells import Tokens, cell, cells, estimators
from sparrow.calibrate.trajectories import Measured


def measured(
    prompt: int, alpha: list[float], *, sample: int = 0, ratio: float | None = 1.0
) -> Measured:
    values = np.array(alpha, np.float32)
    return Measured(
        prompt=prompt,
        sample=sample,
        prompt_tokens=10,
        first=11,
        ids=np.zeros(11 + len(alpha), np.int32),
        alpha=values,
        entropy=np.linspace(0, 0.3, len(alpha), dtype=np.float32),
        below=np.full(len(alpha), 0.125, np.float32),
        above=np.full(len(alpha), 0.25, np.float32),
        ratio=None if ratio is None else np.full(len(alpha), ratio, np.float32),
    )


def test_tokens_are_placed_by_total_length_and_by_position() -> None:
    tokens = Tokens.of([measured(1, [0.5, 0.6]), measured(0, [0.7, 0.8, 0.9])])
    assert tokens.prompt.tolist() == [0, 0, 0, 1, 1]
    assert tokens.length.tolist() == [11, 12, 13, 11, 12]
    assert tokens.position.tolist() == [1, 2, 3, 1, 2]
    assert tokens.within(12, 13).alpha.tolist() == pytest.approx([0.8, 0.6])
    assert tokens.within(1, 2, "position").alpha.tolist() == pytest.approx([0.7, 0.5])


def test_samples_of_a_prompt_are_one_group() -> None:
    tokens = Tokens.of([measured(0, [0.5]), measured(0, [0.6], sample=1), measured(2, [0.7])])
    assert [len(group) for group in tokens.by_prompt()] == [2, 1]
    assert len(np.unique(tokens.sequence)) == 3


def test_a_cell_by_hand() -> None:
    alpha = [i / 100 for i in range(101)]
    tokens = Tokens.of([measured(n, alpha) for n in range(2)])
    found = cell(tokens, variant="v", budget=64, top_k=20, start=0, stop=200)
    assert (found.tokens, found.sequences, found.prompts) == (202, 2, 2)
    assert found.mean == pytest.approx(0.5)
    assert found.p05 == pytest.approx(0.05, abs=0.01)
    assert found.p50 == pytest.approx(0.5)
    assert found.above == pytest.approx(1 / 101, abs=1e-4)
    # The fitted Beta of a uniform is Beta(1, 1).
    a, b, ks = found.beta
    assert (a, b) == pytest.approx((1, 1), abs=0.25)
    assert ks < 0.06
    # Entropy rises along the sequence to 0.3: two thirds are over 0.1.
    assert found.uncertain == pytest.approx(134, abs=2)
    assert found.uncertain_p05 == pytest.approx(0.37, abs=0.02)


def test_estimators_by_hand() -> None:
    tokens = Tokens.of([measured(0, [0.5, 0.75], ratio=0.5), measured(1, [0.5, 0.75], ratio=0.75)])
    found = estimators(tokens, 20)
    assert found.lower_mean == pytest.approx(0.5)
    assert found.upper_mean == pytest.approx(0.875)
    assert found.widest == pytest.approx(0.375)
    assert found.ratio_mean == pytest.approx(0.625)
    # Differences to alpha add up to -0.25 and 0.25 in two prompts: their spread is 0.354.
    assert found.ratio_error == pytest.approx(0.25 * 2**0.5 * 2**0.5 / 4)


def test_bounds_stay_within_what_acceptance_can_be() -> None:
    """Gaps of 0.125 below and 0.25 above, as 16 bits may round them, beside 0 and beside 1."""
    found = estimators(Tokens.of([measured(n, [0.01, 0.01, 0.99]) for n in range(3)]), 20)
    assert found.lower_p05 == 0
    assert found.lower_mean == pytest.approx((0 + 0 + 0.865) / 3)
    assert found.upper_mean == pytest.approx((0.26 + 0.26 + 1) / 3)
    nothing = estimators(Tokens.of([measured(0, [0.0, 0.0])]), 20)
    assert (nothing.lower_mean, nothing.lower_p05) == (0, 0)


def test_given_tokens_have_no_sampled_ratio() -> None:
    found = estimators(Tokens.of([measured(0, [0.5], ratio=None)]), 20)
    assert (found.ratio_mean, found.ratio_error, found.ratio_p05) == (None, None, None)


def test_bins_without_tokens_have_no_cell() -> None:
    tokens = Tokens.of([measured(0, [0.5] * 5), measured(1, [0.5] * 5)])
    found = cells(tokens, (0, 11, 13, 20, 30), variant="v", budget=None, top_k=20)
    assert [(one.start, one.stop, one.tokens) for one in found] == [(11, 13, 4), (13, 20, 6)]
    assert Tokens.of([]).by_prompt() == []
