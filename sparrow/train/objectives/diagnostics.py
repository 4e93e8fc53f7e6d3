"""How far the rollout's policy is from the trained one, in numbers for a metrics file."""

import numpy as np
from torch import Tensor

from sparrow.train.objectives.ratios import bounded, by_sequence

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def diagnose(log_rho_T: Tensor, weight_T: Tensor, sequence_T: Tensor) -> dict[str, float]:
    """Numbers over all tokens in the loss, rho = pi_old / mu with log rho clamped to [-20, 20].

    All expectations are means over tokens that mu sampled. Names stand behind "mismatch/":

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

    Without tokens there is nothing to tell, and the result is empty.
    """
    if not len(log_rho_T):
        return {}
    log_rho = bounded(log_rho_T.detach().double()).cpu().numpy()
    weight = weight_T.detach().double().cpu().numpy()
    rho = np.exp(log_rho)
    found = {
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
    found |= {f"ratio_{name}": value for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {f"mismatch/{name}": float(value) for name, value in found.items()}


def _effective_share(weight: np.ndarray) -> float:
    squares = np.square(weight).sum()
    return float(weight.sum() ** 2 / squares / len(weight)) if squares > 0 else 0.0


def _rejected(weight_T: Tensor, sequence_T: Tensor) -> float:
    """Of the sequences that have tokens."""
    sums_T = by_sequence("sum", weight_T.detach(), sequence_T)
    first_T = sequence_T.diff(prepend=sequence_T[:1] - 1) != 0
    return float((sums_T[first_T] == 0).double().mean())
