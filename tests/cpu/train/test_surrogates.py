"""Losses and gradients of surrogates by hand, and aggregates over micro-batches."""

from collections.abc import Callable, Sequence
from functools import partial
from math import log

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow.training.objectives.surrogates import (
    Aggregate,
    Surrogate,
    Terms,
    cispo,
    dppo_tv,
    gspo,
    ppo,
    reference_kl,
    reinforce,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)

ALL = [ppo, gspo, cispo, dppo_tv, reinforce]
E20 = 485165195.40979  # exp(20)


def terms(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    pi: float = 0.5,
    mu: Sequence[float] | None = None,
    sequences: Sequence[int] | None = None,
) -> Terms:
    """Tokens of probability pi, and of pi / ratio when they were sampled (by mu, if given)."""
    logprob_T = torch.full((len(ratios),), log(pi), requires_grad=True)
    old_T = torch.tensor([log(pi) - log(r) for r in ratios], dtype=torch.float32)
    rollout_T = old_T if mu is None else torch.tensor([log(p) for p in mu], dtype=torch.float32)
    sequence_T = torch.tensor(list(sequences or [0] * len(ratios)), dtype=torch.int64)
    advantage_T = torch.tensor(advantages, dtype=torch.float32)
    return Terms(logprob_T, old_T, rollout_T, advantage_T, sequence_T)


def gradient(given: Terms, found: Surrogate, weight_T: Tensor | None = None) -> list[float]:
    """Of the sum of the losses, by each token's log-prob."""
    loss_T = found.loss_T if weight_T is None else found.loss_T * weight_T
    (slope_T,) = torch.autograd.grad(loss_T.sum(), given.logprob_T)
    return slope_T.tolist()


def close(found: Tensor | list[float], wanted: Sequence[float]) -> None:
    values = found.tolist() if isinstance(found, Tensor) else found
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-7)


E1 = float(np.exp(-1))  # a probability whose logarithm is -1
Numbers = list[float]
BY_HAND: list[tuple[Callable[..., Surrogate], Terms, Numbers, Numbers, list[int]]] = [
    # Surrogate, tokens; loss, gradient, whether clipped
    (ppo, terms([1, 1, 1], [2, -3, 0]), [-2, 3, 0], [-2, 3, 0], [0, 0, 0]),
    # 1.5 with A 2: held at 1.2, loss -2.4. 1.5 with A -2: r A = -3 is the smaller, loss 3.
    # 0.5 with A 2: r A = 1, loss -1.       0.5 with A -2: held at 0.8, loss 1.6.
    (ppo, terms([1.5, 1.5], [2, -2]), [-2.4, 3.0], [0, 3.0], [1, 0]),
    (ppo, terms([0.5, 0.5], [2, -2]), [-1.0, 1.6], [-1.0, 0], [0, 1]),
    (
        partial(ppo, low=0.2, high=0.28),
        *(terms([1.25, 1.5, 0.75], [1, 1, -1]), [-1.25, -1.28, 0.8], [-1.25, 0, 0], [0, 1, 1]),
    ),
    # A < 0: -min(r A, ...) is 8 at ratio 4 and at most 3 * 2 = 6; A > 0 is held by 1.2 already
    (
        partial(ppo, dual=3.0),
        *(terms([4, 2, 4], [-2, -2, 2]), [6, 4, -2.4], [0, 4, 0], [1, 0, 1]),
    ),
    # Ratios 2 and 0.5 have the geometric mean 1; 4 and 1 have 2. A band of 0.5 to 3 holds both.
    (
        partial(gspo, low=0.5, high=2.0),
        terms([2, 0.5, 4, 1], [1, 1, -3, -3], sequences=[0, 0, 1, 1]),
        *([-1, -1, 6, 6], [-1, -1, 6, 6], [0, 0, 0, 0]),
    ),
    # Whole sequences are clipped: sqrt(1.01) is above 1.0004
    (
        gspo,
        terms([1.01, 1.0, 1.0001], [1, 1, 1], sequences=[0, 0, 1]),
        *([-1.0004, -1.0004, -1.0001], [0, 0, -1.0001], [1, 1, 0]),
    ),
    # The loss is the held ratio times A; its gradient, which all tokens keep, is minus that
    (cispo, terms([10, 0.01, 2], [2, 3, -1], pi=E1), [10, 0.03, -2], [-10, -0.03, 2], [1, 0, 0]),
    (partial(cispo, low=0.5), terms([0.01], [3], pi=E1), [1.5], [-1.5], [1]),
    # By probability, pi = 0.5: mu 0.25 moved by +0.25; mu 0.75 by -0.25; mu 0.375 by +0.125
    (
        dppo_tv,
        terms([2, 2, 0.5, 0.5, 4], [1, -1, 1, -1, 1], mu=[0.25, 0.25, 0.75, 0.75, 0.375]),
        *([0, 2, -0.5, 0, -4], [0, 2, -0.5, 0, -4], [1, 0, 0, 1, 0]),
    ),
    (reinforce, terms([3, 0.1], [2, -1], pi=E1), [2, -1], [-2, 1], [0, 0]),
]


def test_losses_and_gradients_by_hand() -> None:
    for surrogate, given, loss, slope, clipped in BY_HAND:
        found = surrogate(given)
        close(found.loss_T, loss)
        close(gradient(given, found), slope)
        assert found.clipped_T.tolist() == list(map(bool, clipped))
    with pytest.raises(ValueError, match="sequence_T"):
        gspo(terms([1, 1, 1], [1, 1, 1], sequences=[0, 1, 0]))


def test_gspo_has_the_published_gradient() -> None:
    """Of -(1/2) sum_i s_i A_i: -(1/2) A_i s_i / n_i for each token, with s = 1 and 2, n = 2 and 3.

    Sequence 0: -(1/2) 1 * 1 / 2 = -0.25. Sequence 1 (ratios 4, 2, 1; s = 2): -(1/2) -3 * 2 / 3 = 1.
    """
    given = terms([2, 0.5, 4, 2, 1], [1, 1, -3, -3, -3], sequences=[0, 0, 1, 1, 1])
    found = gspo(given, low=0.5, high=2.0)
    coefficients = torch.from_numpy(seq_mean_token_mean(np.array([2, 3])))[given.sequence_T]
    close(gradient(given, found, coefficients), [-0.25, -0.25, 1, 1, 1])

    log_ratio_T = given.logprob_T - given.old_T
    s0, s1 = log_ratio_T[:2].mean().exp(), log_ratio_T[2:].mean().exp()
    (published_T,) = torch.autograd.grad(-(s0 * 1 + s1 * -3) / 2, given.logprob_T)
    close(published_T, [-0.25, -0.25, 1, 1, 1])


def test_log_ratios_are_clamped() -> None:
    far_T = torch.tensor([0.0, -1000.0], requires_grad=True)
    old_T = torch.tensor([-1000.0, 0.0])
    given = Terms(far_T, old_T, old_T, torch.tensor([-1.0, 1.0]), torch.tensor([0, 1]))
    found = ppo(given)
    close(found.loss_T, [E20, -1 / E20])
    close(gradient(given, found), [0, 0])
    close(gspo(given, high=1.0).loss_T, [E20, -1 / E20])


@pytest.mark.parametrize("surrogate", ALL)
def test_what_holds_for_every_surrogate(surrogate: Callable[..., Surrogate]) -> None:
    """Extremes stay finite; no tokens, no losses; where all policies agree the slope is -A."""
    for sign in (1.0, -1.0):
        logprob_T = torch.tensor([0.0, -1e4, -5.0, 0.0], requires_grad=True)
        other_T = torch.tensor([-1e4, 0.0, -5.0, -30.0])
        advantage_T = torch.full((4,), sign * 10)
        given = Terms(logprob_T, other_T, other_T, advantage_T, torch.tensor([0, 0, 1, 2]))
        found = surrogate(given)
        assert found.loss_T.isfinite().all()
        assert np.isfinite(gradient(given, found)).all()
    found = surrogate(terms([], []))
    assert found.loss_T.shape == found.clipped_T.shape == (0,)
    assert found.clipped_T.dtype == torch.bool
    given = terms([1, 1, 1], [2, 2, -3], sequences=[0, 0, 1])
    close(gradient(given, surrogate(given)), [-2, -2, 3])


# Aggregates: coefficients of 1 and 3 tokens, and the loss of 1, 2 | 3, 4, 5 | 6 (sums 3, 12, 6).
AGGREGATES: list[tuple[Aggregate, list[float], float]] = [
    (token_mean, [0.25, 0.25], 3.5),  # 4 tokens; 21 / 6
    (seq_mean_token_mean, [0.5, 1 / 6], 11.5 / 3),  # 2 sequences; (1.5 + 4 + 6) / 3
    (partial(seq_mean_token_sum_norm, longest=10), [0.05, 0.05], 0.7),  # 21 / 3 / 10
]


def test_coefficients_whose_micro_batches_add_up() -> None:
    """Sequences without tokens count for nothing."""
    for aggregate, coefficients, loss in AGGREGATES:
        np.testing.assert_allclose(aggregate(np.array([1, 3])), coefficients, rtol=1e-12)
        with_empty = aggregate(np.array([1, 0, 3, 0]))
        np.testing.assert_allclose(with_empty[[0, 2]], coefficients, rtol=1e-12)
        for lengths in ([1, 0, 3, 0], [0, 0]):
            assert np.isfinite(aggregate(np.array(lengths))).all()
        assert aggregate(np.zeros(0, np.int64)).shape == (0,)
        first, *others = aggregate(np.array([2, 3, 1])) * [3.0, 12.0, 6.0]
        assert first + sum(others) == pytest.approx(loss, rel=1e-12)


def test_kl_from_a_reference_by_hand() -> None:
    """p = 1/2 and q = 1/4, 1/2, 1: q / p - 1 - log(q / p), with the gradient 1 - q / p."""
    logprob_T = torch.full((3,), log(0.5), requires_grad=True)
    kl_T = reference_kl(logprob_T, torch.tensor([0.25, 0.5, 1.0]).log())
    torch.testing.assert_close(kl_T, torch.tensor([0.5 - 1 + log(2), 0.0, 2 - 1 - log(2)]))
    kl_T.sum().backward()
    torch.testing.assert_close(logprob_T.grad, torch.tensor([0.5, 0.0, -1.0]))
