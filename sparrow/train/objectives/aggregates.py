"""Aggregates: how the losses of tokens become one number, as a coefficient per sequence.

loss = sum_s c_s sum_t loss_t. The coefficients come from the lengths of the whole mini-batch, so
that it may be cut into micro-batches, or spread over processes, and their losses add up exactly.

A length is the number of a sequence's tokens in the loss, those included whose weight a correction
sets to 0: rejecting tokens makes the gradient smaller, and does not lift what is left. Sequences
without a token in the loss count for nothing, so that fillers change nothing; their coefficients
are finite.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float64]

Aggregate = Callable[[IntArray], FloatArray]
"""From the lengths of all sequences of a mini-batch [S] to their coefficients [S]."""


def token_mean(lengths: IntArray) -> FloatArray:
    """The mean over all tokens: long answers count for more."""
    return np.full(len(lengths), 1.0 / max(1, int(lengths.sum())))


def seq_mean_token_mean(lengths: IntArray) -> FloatArray:
    """The mean over sequences of the mean over their tokens (GRPO as first published)."""
    return np.asarray(1.0 / (_sequences(lengths) * np.maximum(1, lengths)), np.float64)


def seq_mean_token_sum_norm(lengths: IntArray, *, longest: int) -> FloatArray:
    """The mean over sequences of the sum over their tokens by a constant (Dr.GRPO)."""
    if longest < 1:
        raise ValueError(f"seq_mean_token_sum_norm: got longest {longest}, allowed: 1 or more")
    return np.full(len(lengths), 1.0 / (_sequences(lengths) * longest))


def _sequences(lengths: IntArray) -> int:
    return max(1, int(np.count_nonzero(lengths)))
