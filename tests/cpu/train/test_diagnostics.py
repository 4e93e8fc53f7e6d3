"""Numbers on how far two policies are apart, by hand."""

from math import isfinite, log

import pytest
import torch
from torch import Tensor

from sparrow.train.objectives.corrections import diagnose


def logs(*rho: float) -> Tensor:
    return torch.tensor([log(value) for value in rho], dtype=torch.float32)


def test_by_hand() -> None:
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


def test_ends() -> None:
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
