"""Corrections from the rollout's policy to the trained one: a weight per token, without gradient.

rho = pi_old / mu (Sparse-RL calls it xi), log-ratios clamped to [-20, 20] before exp. All are
computed over the whole batch of a step, on the CPU, before it is split into updates: so weights do
not depend on the split. Several corrections multiply. `diagnose` measures how far the two policies
are apart.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparrow.training.objectives.surrogates import (
    NotNegative,
    Positive,
    bounded,
    by_sequence,
    ratio,
    sequence_mean,
)

Correction = Callable[[Tensor, Tensor], Tensor]
"""From log rho = old - rollout of the tokens in the loss [T], and the sequence each belongs to (as
in `Terms`), to their weights >= 0 [T]."""

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def combine(corrections: Sequence[Correction], log_rho_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The product of the weights of all corrections; ones without any."""
    weight_T = torch.ones_like(log_rho_T)
    for correction in corrections:
        factor_T = correction(log_rho_T, sequence_T)
        if factor_T.shape != log_rho_T.shape:
            shape, expected = tuple(factor_T.shape), tuple(log_rho_T.shape)
            raise ValueError(f"correction: expected weights of shape {expected}, got {shape}")
        weight_T = weight_T * factor_T.detach()
    return weight_T


def token_tis(log_rho_T: Tensor, sequence_T: Tensor, *, cap: Positive = 10.0) -> Tensor:
    """Truncated importance sampling: min(rho, cap).

    Under a fixed budget, from `small`: with a cap of 2 six of six runs fell, with 10 none
    (docs/results/control-study-2.md).
    """
    return _rho(log_rho_T).clamp(max=cap)


def sequence_tis(log_rho_T: Tensor, sequence_T: Tensor, *, cap: Positive = 2.0) -> Tensor:
    """min(product of rho over the sequence, cap), for each of its tokens.

    Of little use on long answers: a hundred tokens of rho 1.1 have the product 13 780.
    """
    whole_T = ratio(by_sequence("sum", log_rho_T.detach(), sequence_T))
    return whole_T.clamp(max=cap).to(log_rho_T.dtype)


def icepop(
    log_rho_T: Tensor, sequence_T: Tensor, *, low: NotNegative = 0.5, high: float = 5.0
) -> Tensor:
    """rho where low <= rho <= high, otherwise 0."""
    rho_T = _rho(log_rho_T)
    return rho_T * _within(rho_T, low, high)


def geometric_mask(
    log_rho_T: Tensor, sequence_T: Tensor, *, low: NotNegative, high: float
) -> Tensor:
    """1 for sequences with low <= exp(mean log rho) <= high, otherwise 0.

    No defaults: the mean shrinks with the share of tokens that agree, so a band fits one sparsity.
    """
    mean_T = ratio(sequence_mean(log_rho_T.detach(), sequence_T))
    return _within(mean_T, low, high).to(log_rho_T.dtype)


def veto(log_rho_T: Tensor, sequence_T: Tensor, *, least: Positive = 1e-4) -> Tensor:
    """0 for sequences with any rho < least, otherwise 1."""
    lowest_T = by_sequence("min", log_rho_T.detach(), sequence_T)
    return (lowest_T >= math.log(least)).to(log_rho_T.dtype)


def sparse_rl_paper(log_rho_T: Tensor, sequence_T: Tensor, *, least: Positive = 1e-4) -> Tensor:
    """Sparse-RL (arXiv 2601.10079) as written: xi, and 0 for trajectories with any xi < least."""
    return _rho(log_rho_T) * veto(log_rho_T, sequence_T, least=least)


def sparse_rl_release(
    log_rho_T: Tensor,
    sequence_T: Tensor,
    *,
    least: Positive = 1e-4,
    cap: Positive = 1.5,
    low: NotNegative = 0.5,
    high: float = 1.5,
) -> Tensor:
    """Sparse-RL as released: min(xi, cap) over its batch mean, with tokens and trajectories masked.

    Masked are trajectories with any xi < least, and tokens with xi outside [low, high]. The mean is
    that of min(xi, cap) over all tokens in the loss, including masked ones. This is our reading:
    over the others alone, a cap at `high` would change nothing.
    """
    xi_T = _rho(log_rho_T)
    weight_T = xi_T.clamp(max=cap)
    mean = weight_T.double().mean().to(xi_T.dtype)
    kept_T = _within(xi_T, low, high) * veto(log_rho_T, sequence_T, least=least)
    return weight_T / mean * kept_T


def m2po(log_rho_T: Tensor, sequence_T: Tensor, *, most: Positive = 0.04) -> Tensor:
    """M2PO (arXiv 2510.01161), the masking form: 1 for tokens that are kept, otherwise 0.

    The tokens of largest (log rho)^2 are masked, one after the other, until the mean of (log rho)^2
    over those kept is at most `most`. Over all tokens in the loss of the whole batch, whatever
    their advantage, by pi_old / mu, once per rollout; of equal tokens the earlier is kept.
    """
    square_T, order_T = log_rho_T.detach().double().square().sort(stable=True)
    counts_T = torch.arange(1, len(square_T) + 1, dtype=torch.float64)
    mean_T = square_T.cumsum(0) / counts_T  # of the smallest 1, 2, ... tokens; never falls
    kept = int((mean_T <= most).sum())
    weight_T = torch.zeros_like(log_rho_T)
    weight_T[order_T[:kept]] = 1.0
    return weight_T


def _rho(log_rho_T: Tensor) -> Tensor:
    return ratio(log_rho_T.detach())


def _within(ratio_T: Tensor, low: float, high: float) -> Tensor:
    if not low <= high:
        raise ValueError(f"expected low <= high, got low {low} and high {high}")
    return (ratio_T >= low) & (ratio_T <= high)


def diagnose(log_rho_T: Tensor, weight_T: Tensor, sequence_T: Tensor) -> dict[str, float]:
    """Mismatch metrics over all tokens in the loss; rho = pi_old / mu, log rho within [-20, 20].

    All expectations are means over tokens that mu sampled. Names have the prefix "mismatch/":

    k1, k3           two estimates of KL(mu || pi_old): mean of -log rho, which may be negative, and
                     of rho - 1 - log rho, which is not, and spreads less while rho is close to 1
    chi2             chi^2 divergence of pi_old from mu, the mean of rho^2, less 1
    ratio_p01 ...    quantiles of rho
    accept_estimate  mean of min(1, rho): unbiased for the mean of alpha, and not alpha; quantiles
                     of min(1, rho) are not those of alpha
    ess              effective sample size of the weights, (sum w)^2 / sum w^2, as a share of tokens
    weight_mean      mean weight
    masked           share of tokens with weight 0
    rejected         share of sequences of which all tokens have weight 0

    Without tokens the result is empty.
    """
    if not len(log_rho_T):
        return {}
    log_rho = bounded(log_rho_T.detach().double()).cpu().numpy()
    weight = weight_T.detach().double().cpu().numpy()
    rho = np.exp(log_rho)
    metrics = {
        "k1": -log_rho.mean(),
        "k3": (rho - 1 - log_rho).mean(),
        "chi2": np.square(rho).mean() - 1,
        "accept_estimate": np.minimum(1, rho).mean(),
        "ess": _effective_share(weight),
        "weight_mean": weight.mean(),
        "masked": (weight == 0).mean(),
        "rejected": _rejected(weight_T, sequence_T),
    }
    quantiles = np.quantile(rho, list(QUANTILES.values()))
    metrics |= {f"ratio_{name}": value for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def _effective_share(weight: np.ndarray) -> float:
    squares = np.square(weight).sum()
    return float(weight.sum() ** 2 / squares / len(weight)) if squares > 0 else 0.0


def _rejected(weight_T: Tensor, sequence_T: Tensor) -> float:
    """Share of sequences, of those with tokens, whose weights are all 0."""
    sums_T = by_sequence("sum", weight_T.detach(), sequence_T)
    first_T = sequence_T.diff(prepend=sequence_T[:1] - 1) != 0
    return float((sums_T[first_T] == 0).double().mean())
