"""Losses: surrogates by token, and aggregates of them over a mini-batch.

Surrogates do not include importance weights: the caller multiplies `loss_T` by the weight of each
token. r = pi / pi_old. If a caller sets pi_old to mu (bypass), r carries the whole correction, and
there must be no weight besides.

Aggregates return a coefficient per sequence: loss = sum_s c_s sum_t loss_t. The coefficients depend
on the lengths of the whole mini-batch, so it can be split into micro-batches or over processes, and
their losses add up exactly.

A length is the number of a sequence's tokens in the loss, including those whose weight a correction
sets to 0: rejecting tokens makes the gradient smaller and does not scale up the rest. Sequences
without a token in the loss contribute nothing; their coefficients are finite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

LIMIT = 20.0  # log-ratios are clamped to [-LIMIT, LIMIT] before exp

# Ranges of settings, checked by `algorithms.bind`.
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


class Terms(NamedTuple):
    """The T tokens in the loss: whole sequences one after the other, numbered from 0."""

    logprob_T: Tensor  # of the policy in training, with gradient
    old_T: Tensor  # of the dense policy at the rollout's weights
    rollout_T: Tensor  # of the actor that sampled
    advantage_T: Tensor
    sequence_T: Tensor  # int64: the sequence of each token


class Surrogate(NamedTuple):
    """Losses by token, and the tokens at which a bound of the surrogate acted."""

    loss_T: Tensor
    clipped_T: Tensor  # bool


def ppo(
    terms: Terms, *, low: Share = 0.2, high: NotNegative = 0.2, dual: AboveOne | None = None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual`, at most -dual A where A < 0.

    A clipped token has no gradient. At r = 1 the gradient by the log-prob is -A.
    """
    ratio_T = ratio(terms.logprob_T - terms.old_T)
    surrogate = _clipped(ratio_T, terms.advantage_T, low, high)
    if dual is None:
        return surrogate
    over_T = (terms.advantage_T < 0) & (ratio_T > dual)
    loss_T = torch.where(over_T, -dual * terms.advantage_T, surrogate.loss_T)
    return Surrogate(loss_T, surrogate.clipped_T | over_T)


def gspo(terms: Terms, *, low: Share = 3e-4, high: NotNegative = 4e-4) -> Surrogate:
    """PPO's clip on the sequence's ratio s = exp(mean_t log r_t), as a loss per token (GSPO).

    Published is -min(s A, clip(s) A) once per sequence, with gradient
    -s A / n * sum_t grad log pi_t for the n tokens of a sequence that is not clipped. Here each
    token has the ratio sg(s) pi / sg(pi): its value is s and its gradient by its own log-prob is s,
    so that the mean over the sequence has the published value and gradient
    (1 / n) sum_t -s A grad log pi_t. This needs the aggregate seq-mean-token-mean. In this form an
    importance weight acts on the gradient of its own token and of no other.
    """
    log_T = (terms.logprob_T - terms.old_T).detach()
    whole_T = ratio(sequence_mean(log_T, terms.sequence_T)).to(log_T.dtype)
    ratio_T = whole_T * (terms.logprob_T - terms.logprob_T.detach()).exp()
    return _clipped(ratio_T, terms.advantage_T, low, high)


def cispo(terms: Terms, *, low: Share = 1.0, high: NotNegative = 4.0) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps a bounded gradient (CISPO).

    `clipped_T` marks tokens whose ratio was bounded. By default there is no lower bound, as
    published, and the upper one is 5.
    """
    ratio_T = ratio(terms.logprob_T - terms.old_T).detach()
    held_T = ratio_T.clamp(1 - low, 1 + high)
    return Surrogate(-held_T * terms.advantage_T * terms.logprob_T, held_T != ratio_T)


def dppo_tv(terms: Terms, *, most: Positive = 0.2) -> Surrogate:
    """-r A, without tokens whose probability moved more than `most` from mu in A's direction.

    Dropped (loss 0) where A > 0 and pi - mu > most, or A < 0 and mu - pi > most. The trust region
    is around mu, the actor that sampled; r is pi / pi_old as everywhere, so that with a weight of
    pi_old / mu the whole ratio is the published pi / mu. Ratios are not bounded otherwise.
    """
    moved_T = (terms.logprob_T.exp() - terms.rollout_T.exp()).detach()
    advantage_T = terms.advantage_T
    up_T = (advantage_T > 0) & (moved_T > most)
    down_T = (advantage_T < 0) & (-moved_T > most)
    loss_T = -ratio(terms.logprob_T - terms.old_T) * advantage_T
    dropped_T = up_T | down_T
    return Surrogate(loss_T.masked_fill(dropped_T, 0.0), dropped_T)


def reinforce(terms: Terms) -> Surrogate:
    """-A log pi, without bounds: for one update per rollout."""
    loss_T = -terms.advantage_T * terms.logprob_T
    return Surrogate(loss_T, torch.zeros_like(loss_T, dtype=torch.bool))


def _clipped(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Surrogate:
    plain_T = -ratio_T * advantage_T
    held_T = -ratio_T.detach().clamp(1 - low, 1 + high) * advantage_T
    clipped_T = held_T > plain_T.detach()
    return Surrogate(torch.where(clipped_T, held_T, plain_T), clipped_T)


IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float64]

Aggregate = Callable[[IntArray], FloatArray]
"""From the lengths of all sequences of a mini-batch [S] to their coefficients [S]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss: a surrogate by token, an aggregate over tokens, regularisers."""

    surrogate: Callable[[Terms], Surrogate]
    aggregate: Aggregate
    entropy: float = 0.0  # coefficient of the entropy bonus
    kl: float = 0.0  # coefficient of the KL divergence from the reference model


def token_mean(lengths: IntArray) -> FloatArray:
    """The mean over all tokens: long answers weigh more."""
    return np.full(len(lengths), 1.0 / max(1, int(lengths.sum())))


def seq_mean_token_mean(lengths: IntArray) -> FloatArray:
    """The mean over sequences of the mean over their tokens (GRPO as first published)."""
    return np.asarray(1.0 / (_sequences(lengths) * np.maximum(1, lengths)), np.float64)


def seq_mean_token_sum_norm(lengths: IntArray, *, longest: int) -> FloatArray:
    """The mean over sequences of the sum over their tokens, divided by a constant (Dr.GRPO)."""
    return np.full(len(lengths), 1.0 / (_sequences(lengths) * longest))


def _sequences(lengths: IntArray) -> int:
    return max(1, int(np.count_nonzero(lengths)))


def reference_kl(logprob_T: Tensor, reference_T: Tensor) -> Tensor:
    """KL(pi || reference) by the k3 estimator, per token: q / p - 1 - log(q / p), at least 0.

    As GRPO has it in its loss. Its gradient by the log-prob is 1 - q / p.
    """
    log_T = bounded(reference_T - logprob_T)
    return log_T.exp() - 1 - log_T


# Ratios of probabilities from log-probs, and sums over the tokens of a sequence.


def bounded(log_T: Tensor) -> Tensor:
    """Log-ratios clamped to the limits."""
    return log_T.clamp(-LIMIT, LIMIT)


def ratio(log_T: Tensor) -> Tensor:
    """exp of a clamped log-ratio; constant, so without gradient, beyond the limits."""
    return bounded(log_T).exp()


def by_sequence(kind: Literal["sum", "min"], values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Sum or minimum over a sequence, repeated for each of its tokens [T], float64.

    By segments and not by scatter-add, whose order on a GPU is not deterministic.
    """
    if not sequence_T.is_cuda and bool((sequence_T.diff() < 0).any()):
        raise ValueError("sequence_T: expected numbers that do not decrease")
    lengths = torch.bincount(sequence_T)
    # "unsafe" skips checks of the lengths, which hold by construction.
    values_S = torch.segment_reduce(values_T.double(), kind, lengths=lengths, unsafe=True)
    return values_S[sequence_T]


def sequence_mean(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The mean over a sequence, repeated for each of its tokens, float64."""
    sums_T = by_sequence("sum", values_T, sequence_T)
    return sums_T / torch.bincount(sequence_T)[sequence_T]
