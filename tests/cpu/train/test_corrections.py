"""Weights from the rollout's policy to the trained one, by hand."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, log

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow.training.objectives.corrections import (
    combine,
    diagnose,
    geometric_mask,
    icepop,
    m2po,
    sequence_tis,
    sparse_rl_paper,
    sparse_rl_release,
    token_tis,
    veto,
)

band = partial(geometric_mask, low=0.9, high=1.1)
ALL = [token_tis, sequence_tis, icepop, band, veto, sparse_rl_paper, sparse_rl_release, m2po]
E20 = 485165195.40979  # exp(20)


def logs(*rho: float) -> Tensor:
    return torch.tensor([log(value) for value in rho], dtype=torch.float32)


def numbers(*sequence: int) -> Tensor:
    return torch.tensor(sequence, dtype=torch.int64)


def close(found: Tensor, wanted: Sequence[float]) -> None:
    np.testing.assert_allclose(found.tolist(), wanted, rtol=1e-5)


MANY = [1.1] * 100  # 1.1^100 = 13 780: what the reference says of it
BY_HAND: list[tuple[Callable[..., Tensor], list[float], list[int], list[float]]] = [
    # Correction, rho, sequences; weights
    (token_tis, [0.25, 1, 1.75, 16], [0, 0, 0, 0], [0.25, 1, 1.75, 10]),
    (partial(token_tis, cap=3.0), [0.25, 8], [0, 0], [0.25, 3]),
    # 0.5 * 3 = 1.5; 2 * 4 = 8, capped; 0.5 * 0.5 = 0.25
    (sequence_tis, [0.5, 3, 2, 4, 0.5, 0.5], [0, 0, 1, 1, 2, 2], [1.5, 1.5, 2, 2, 0.25, 0.25]),
    (partial(sequence_tis, cap=1e6), MANY, [0] * 100, [1.1**100] * 100),
    (icepop, [0.4, 0.6, 1, 4.9, 5.1], [0, 0, 0, 0, 0], [0, 0.6, 1, 4.9, 0]),
    (partial(icepop, low=0.5, high=2.0), [0.6, 4.9], [0, 0], [0.6, 0]),
    # sqrt(2 * 0.5) = 1; sqrt(1.5 * 1.5) = 1.5; 0.5
    (band, [2, 0.5, 1.5, 1.5, 0.5], [0, 0, 1, 1, 2], [1, 1, 0, 0, 0]),
    (veto, [1, 0.9e-4, 1.1e-4, 1, 5], [0, 0, 1, 1, 2], [0, 0, 1, 1, 1]),
    (partial(veto, least=0.3), [0.5, 0.2], [0, 1], [1, 0]),
    (sparse_rl_paper, [2, 0.5e-4, 8, 0.1], [0, 0, 1, 1], [0, 0, 8, 0.1]),
    # min(xi, 1.5): 1, 1.25, 1.5, 0.25 and, rejected, 1 and about 0: sum 5, mean 5 / 6.
    # Kept are 1 and 1.25: 1 / (5 / 6) = 1.2 and 1.5.
    (sparse_rl_release, [1, 1.25, 2, 0.25, 1, 1e-13], [0, 0, 0, 0, 1, 1], [1.2, 1.5, 0, 0, 0, 0]),
]


def test_weights_by_hand() -> None:
    for correction, rho, sequences, weights in BY_HAND:
        close(correction(logs(*rho), numbers(*sequences)), weights)
    for correction in (sequence_tis, veto, band):
        with pytest.raises(ValueError, match="sequence_T"):
            correction(torch.zeros(3), numbers(0, 1, 0))


def test_m2po_masks_the_largest_until_the_mean_fits() -> None:
    # Squares 0.01, 0.25, 0, 0.09: means of the smallest 0, 0.005, 0.0333, 0.0875: three are kept
    log_rho_T = torch.tensor([0.1, -0.5, 0.0, 0.3])
    assert m2po(log_rho_T, numbers(0, 0, 1, 1)).tolist() == [1, 0, 1, 1]
    assert m2po(log_rho_T, numbers(0, 0, 1, 1), most=0.03).tolist() == [1, 0, 1, 0]
    assert m2po(log_rho_T, numbers(0, 0, 1, 1), most=0.1).tolist() == [1, 1, 1, 1]
    assert m2po(torch.tensor([1.0, -1.0]), numbers(0, 1)).tolist() == [0, 0]
    # Equal squares 0.0625: with a zero beside them means 0, 0.03125, 0.041666: the later one goes
    found = m2po(torch.tensor([0.25, 0.0, -0.25]), numbers(0, 1, 2))
    assert found.tolist() == [1, 1, 0]


def test_combine_multiplies() -> None:
    log_rho_T, sequence_T = logs(16, 0.5, 4, 1e-5), numbers(0, 0, 1, 1)
    close(combine([token_tis, veto], log_rho_T, sequence_T), [10, 0.5, 0, 0])
    assert combine([], log_rho_T, sequence_T).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("correction", ALL)
def test_what_holds_for_every_correction(correction: Callable[..., Tensor]) -> None:
    """Equal policies have weight 1; no gradient; extremes stay finite; no tokens, no weights."""
    assert correction(torch.zeros(3), numbers(0, 0, 1)).tolist() == [1, 1, 1]
    log_rho_T = torch.tensor([0.1, -0.1, 0.0], requires_grad=True)
    weight_T = correction(log_rho_T, numbers(0, 0, 1))
    assert not weight_T.requires_grad
    assert weight_T.dtype == torch.float32
    assert not combine([correction], log_rho_T, numbers(0, 0, 1)).requires_grad
    log_rho_T = torch.tensor([1e4, -1e4, 3e38, -3e38, 0.0, float("-inf"), float("inf")])
    weight_T = correction(log_rho_T, numbers(0, 1, 2, 3, 4, 5, 6))
    assert weight_T.isfinite().all()
    assert (weight_T >= 0).all()
    assert correction(torch.zeros(0), numbers()).shape == (0,)


def test_log_ratios_are_clamped() -> None:
    found = token_tis(torch.tensor([1000.0, -1000.0]), numbers(0, 0), cap=1e12)
    close(found, [E20, 1 / E20])
    close(sequence_tis(torch.tensor([15.0, 15.0]), numbers(0, 0), cap=1e12), [E20, E20])


# Numbers on how far two policies are apart, by hand.


def test_diagnostics_by_hand() -> None:
    # rho 0.5, 1, 2, 1 with log 2 = 0.693147: mean log rho 0.
    # k3: (0.5 - 1 + 0.693147) + 0 + (2 - 1 - 0.693147) + 0 = 0.5, over 4. rho^2: 6.25 / 4 - 1.
    # min(1, rho): 3.5 / 4. Weights 1, 0, 2, 0: sum 3, squares 5, 9 / 5 / 4 = 0.45.
    weight_T, sequence_T = torch.tensor([1.0, 0, 2, 0]), torch.tensor([0, 0, 1, 2])
    found = diagnose(logs(0.5, 1, 2, 1), weight_T, sequence_T)
    wanted = {
        "mismatch/k1": 0.0,
        "mismatch/k3": 0.125,
        "mismatch/chi2": 0.5625,
        "mismatch/accept_estimate": 0.875,
        "mismatch/ess": 0.45,
        "mismatch/weight_mean": 0.75,
        "mismatch/masked": 0.5,
        "mismatch/rejected": 1 / 3,
        "mismatch/ratio_p01": 0.515,  # 0.03 of the way from 0.5 to 1
        "mismatch/ratio_p50": 1.0,
        "mismatch/ratio_p99": 1.97,  # 0.97 of the way from 1 to 2
    }
    assert found == pytest.approx(wanted, abs=1e-6)


def test_equal_policies() -> None:
    found = diagnose(torch.zeros(3), torch.ones(3), torch.tensor([0, 1, 1]))
    zero = {"k1", "k3", "chi2", "masked", "rejected"}
    for name, value in found.items():
        assert value == (0.0 if name.removeprefix("mismatch/") in zero else 1.0), name


def test_estimates_agree_with_sums_over_the_vocabulary() -> None:
    """Tokens in mu's proportions 0.5, 0.25, 0.25 under pi_old 0.25, 0.25, 0.5.

    KL = 0.5 log 2 - 0.25 log 2 = 0.173287; alpha = 0.25 * 3 = 0.75;
    chi^2 = 0.0625 / 0.5 + 0.0625 / 0.25 + 0.25 / 0.25 - 1 = 0.375.
    """
    found = diagnose(logs(0.5, 0.5, 1, 2), torch.ones(4), torch.zeros(4, dtype=torch.int64))
    assert found["mismatch/k1"] == pytest.approx(0.173287, abs=1e-6)
    assert found["mismatch/k3"] == pytest.approx(0.173287, abs=1e-6)
    assert found["mismatch/chi2"] == pytest.approx(0.375, abs=1e-6)
    assert found["mismatch/accept_estimate"] == pytest.approx(0.75, abs=1e-6)


def test_ends_of_diagnostics() -> None:
    """All rejected, a sequence without tokens, extremes, no tokens; gradients are left alone."""
    found = diagnose(torch.zeros(2, requires_grad=True), torch.zeros(2), torch.tensor([0, 1]))
    names = ("ess", "masked", "rejected")
    assert [found[f"mismatch/{name}"] for name in names] == [0.0, 1.0, 1.0]
    found = diagnose(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]))
    assert found["mismatch/rejected"] == 0.5
    log_rho_T = torch.tensor([1e30, -1e30, float("inf"), float("-inf")])
    found = diagnose(log_rho_T, torch.full((4,), 1e9), torch.tensor([0, 0, 1, 1]))
    assert all(isfinite(value) for value in found.values())
    assert diagnose(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == {}
