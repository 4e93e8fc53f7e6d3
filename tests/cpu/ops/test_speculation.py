"""Acceptance of drafts: what is emitted has the policy's distribution, whatever was drafted."""

from typing import NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference.sampling import inverse_cdf, uniforms

ROWS, DRAFTS, VOCABULARY = 20_000, 3, 7


def distributions(seed: int, *shape: int) -> Tensor:
    noise = torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return (1.5 * noise).log_softmax(-1)


class Rounds(NamedTuple):
    """Tokens of a round of many rows, [B, Q], and how many of them are emitted."""

    tokens_BQ: Tensor
    emitted_B: Tensor


def rounds(logp_QV: Tensor, logq_JV: Tensor, residual_JV: Tensor | None = None) -> Rounds:
    """A round of many rows with the same distributions, each row with its own seed."""
    seeds_B, counters_Q = torch.arange(ROWS) * 7919, torch.arange(5, 5 + DRAFTS + 1)
    drafts_BJ = torch.stack(
        [
            inverse_cdf(logq_V.exp().expand(ROWS, -1), uniforms(seeds_B, counter))
            for logq_V, counter in zip(logq_JV, counters_Q[:-1], strict=True)
        ],
        dim=1,
    )
    logp_BJ, logq_BJ = (logp_V[:DRAFTS].gather(1, drafts_BJ.T).T for logp_V in (logp_QV, logq_JV))
    count_B = torch.full((ROWS,), DRAFTS)
    numbers_BJ = counters_Q[:-1].expand(ROWS, -1)
    accepted_B = ops.accept_by_ratio(logp_BJ, logq_BJ, count_B, seeds_B, numbers_BJ)
    draft_B = accepted_B.clamp(max=DRAFTS - 1)
    logq_BV = (logq_JV if residual_JV is None else residual_JV)[draft_B]
    rejected_B, counters_B = accepted_B < DRAFTS, counters_Q[accepted_B]
    last_B = ops.resample(logp_QV[accepted_B], logq_BV, rejected_B, seeds_B, counters_B)
    tokens_BQ = torch.nn.functional.pad(drafts_BJ, (0, 1))
    return Rounds(tokens_BQ.scatter(1, accepted_B[:, None], last_B[:, None]), accepted_B + 1)


def chi_square(counts: Tensor, weights: Tensor) -> float:
    """The p-value of counts under a distribution."""
    expected = weights.double() / weights.double().sum() * counts.sum()
    return float(stats.chisquare(counts, expected).pvalue)


def p_values(verdict: Rounds, logp_QV: Tensor) -> list[float]:
    """Of a chi-square test for each position: the emitted tokens against the policy."""
    return [
        chi_square(
            verdict.tokens_BQ[verdict.emitted_B > q, q].bincount(minlength=VOCABULARY), logp_V.exp()
        )
        for q, logp_V in enumerate(logp_QV)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_emitted_tokens_have_the_policys_distribution(seed: int) -> None:
    """Under drafts far from the policy; neighbouring tokens are independent, as in the policy."""
    logp_QV, logq_JV = distributions(seed, DRAFTS + 1), distributions(seed + 50, DRAFTS)
    verdict = rounds(logp_QV, logq_JV)
    assert min(p_values(verdict, logp_QV)) > 1e-4
    pairs = verdict.tokens_BQ[verdict.emitted_B > 1, :2]
    table = (pairs[:, 0] * VOCABULARY + pairs[:, 1]).bincount(minlength=VOCABULARY**2)
    conditional = logp_QV[1].double().exp() * table.view(VOCABULARY, -1).sum(1, keepdim=True)
    assert chi_square(table, conditional.flatten()) > 1e-4
    alpha = torch.minimum(logp_QV[0], logq_JV[0]).exp().sum()
    assert abs((verdict.emitted_B > 1).float().mean() - alpha) < 0.02


def test_a_wrong_residual_is_found() -> None:
    """Resampling from the policy itself, not from what the drafts left over."""
    logp_QV, logq_JV = distributions(0, DRAFTS + 1), distributions(50, DRAFTS)
    nothing = torch.full_like(logq_JV, float("-inf"))
    assert min(p_values(rounds(logp_QV, logq_JV, residual_JV=nothing), logp_QV)) < 1e-9


def test_drafts_of_the_policy_itself_are_all_accepted() -> None:
    logp_QV = distributions(0, DRAFTS + 1)
    assert (rounds(logp_QV, logp_QV[:-1]).emitted_B == DRAFTS + 1).all()


def test_drafts_of_broken_logits_are_rejected_and_cost_nothing() -> None:
    """Whatever token was recorded: the policy alone decides then."""
    logp_V = distributions(0)
    state = ops.DraftState(
        count_R=torch.zeros(ROWS, dtype=torch.long),
        inputs_RJ=torch.zeros(ROWS, 1, dtype=torch.long),
        logprobs_RJ=torch.zeros(ROWS, 1),
        logits_RJV=torch.zeros(ROWS, 1, VOCABULARY),
    )
    at_B, zeros_B = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.long)
    broken = ops.Draws(zeros_B, torch.zeros(ROWS), torch.zeros(ROWS), zeros_B.bool())
    ops.record_drafts(at_B, zeros_B, broken, torch.full((ROWS, VOCABULARY), torch.inf), state)
    assert (state.count_R == 1).all()
    logp_BJ, seeds_B = logp_V[0].expand(ROWS, 1), at_B * 7919
    accepted_B = ops.accept_by_ratio(
        logp_BJ, state.logprobs_RJ, state.count_R, seeds_B, zeros_B[:, None]
    )
    assert not accepted_B.any()
    logq_BV = ops.log_distribution(state.logits_RJV[:, 0], torch.ones(ROWS))
    drawn = (logp_V.expand(ROWS, -1), logq_BV, accepted_B < 1, seeds_B, zeros_B)
    tokens_B = ops.resample(*drawn)
    assert chi_square(tokens_B.bincount(minlength=VOCABULARY), logp_V.exp()) > 1e-4
