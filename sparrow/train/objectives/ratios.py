"""Ratios of probabilities from log-probs, and sums over the tokens of a sequence."""

from typing import Literal

import torch
from torch import Tensor

LIMIT = 20.0  # log-ratios are clamped to [-LIMIT, LIMIT] before exp


def bounded(log_T: Tensor) -> Tensor:
    """Log-ratios within the limits."""
    return log_T.clamp(-LIMIT, LIMIT)


def ratio(log_T: Tensor) -> Tensor:
    """exp of a clamped log-ratio. Beyond the limits it is constant, so it has no gradient there."""
    return bounded(log_T).exp()


def sequence_lengths(sequence_T: Tensor) -> Tensor:
    """Tokens of the sequences 0 to the last that is named."""
    return torch.bincount(sequence_T)


def by_sequence(kind: Literal["sum", "min"], values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """One float64 number per sequence, given to each of its tokens [T].

    By segments, and not by additions into place, whose order a GPU leaves open.
    """
    if not sequence_T.is_cuda and bool((sequence_T.diff() < 0).any()):
        raise ValueError("sequence_T: got numbers that fall, allowed: those of a sequence together")
    lengths = sequence_lengths(sequence_T)
    # "unsafe" leaves out checks of the lengths, which hold by construction, and which refuse none.
    values_S = torch.segment_reduce(values_T.double(), kind, lengths=lengths, unsafe=True)
    return values_S[sequence_T]


def sequence_mean(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The mean over a sequence, given to each of its tokens, float64."""
    sums_T = by_sequence("sum", values_T, sequence_T)
    return sums_T / sequence_lengths(sequence_T)[sequence_T]


def check_band(what: str, low: float, high: float) -> None:
    """Refuse a band of ratios that nothing, or nothing sensible, lies in."""
    if not 0 <= low <= high:
        raise ValueError(f"{what}: got low {low} and high {high}, allowed: 0 <= low <= high")


def check_positive(what: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{what}: got {value}, allowed: above 0")
