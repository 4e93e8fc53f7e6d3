"""Acceptance of drafts: what is emitted has the policy's distribution, whatever was drafted."""

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


def rounds(logp_QV: Tensor, logq_JV: Tensor, residual_of: Tensor | None = None) -> ops.Verdict:
    """A round of many rows with the same distributions, each row with its own seed."""
    seeds_B = torch.arange(ROWS) * 7919
    counters_BQ = torch.arange(5, 5 + DRAFTS + 1).expand(ROWS, -1)
    drafts_BJ = torch.stack(
        [
            inverse_cdf(logq_JV[j].exp().expand(ROWS, -1), uniforms(seeds_B, counters_BQ[:, j]))
            for j in range(DRAFTS)
        ],
        dim=1,
    )
    residual_JV = logq_JV if residual_of is None else residual_of
    return ops.accept_by_ratio(
        logp_QV.expand(ROWS, -1, -1),
        lambda number_B: residual_JV[number_B.clamp(max=DRAFTS - 1)],
        torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), drafts_BJ], dim=1),
        logq_JV.gather(1, drafts_BJ.T).T,
        torch.full((ROWS,), DRAFTS),
        seeds_B,
        counters_BQ,
    )


def chi_square(counts: Tensor, weights: Tensor) -> float:
    """The p-value of counts under a distribution."""
    expected = weights.double() / weights.double().sum() * counts.sum()
    return float(stats.chisquare(counts, expected).pvalue)


def p_values(verdict: ops.Verdict, logp_QV: Tensor) -> list[float]:
    """Of a chi-square test for each position: the emitted tokens against the policy."""
    return [
        chi_square(
            verdict.tokens_BQ[verdict.emitted_B > q, q].bincount(minlength=VOCABULARY), logp_V.exp()
        )
        for q, logp_V in enumerate(logp_QV)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_emitted_tokens_have_the_policys_distribution(seed: int) -> None:
    """Under drafts far from the policy; neighbouring tokens are independent, as the policy's are."""
    logp_QV, logq_JV = distributions(seed, DRAFTS + 1), distributions(seed + 50, DRAFTS)
    verdict = rounds(logp_QV, logq_JV)
    assert min(p_values(verdict, logp_QV)) > 1e-4
    pairs = verdict.tokens_BQ[verdict.emitted_B > 1, :2]
    table = (pairs[:, 0] * VOCABULARY + pairs[:, 1]).bincount(minlength=VOCABULARY**2)
    conditional = logp_QV[1].double().exp() * table.view(VOCABULARY, -1).sum(1, keepdim=True)
    assert chi_square(table, conditional.flatten()) > 1e-4
    alpha = torch.minimum(logp_QV[0], logq_JV[0]).exp().sum()
    assert abs((verdict.emitted_B > 1).float().mean() - alpha) < 0.02
    assert (verdict.emitted_B >= 1).all() and (verdict.emitted_B <= DRAFTS + 1).all()
    expected = logp_QV.expand(ROWS, -1, -1).gather(2, verdict.tokens_BQ[:, :, None]).squeeze(2)
    torch.testing.assert_close(verdict.logprobs_BQ, expected)


def test_a_wrong_residual_is_found() -> None:
    """Resampling from the policy itself, not from what the drafts left over."""
    logp_QV, logq_JV = distributions(0, DRAFTS + 1), distributions(50, DRAFTS)
    nothing = torch.full_like(logq_JV, float("-inf"))
    assert min(p_values(rounds(logp_QV, logq_JV, residual_of=nothing), logp_QV)) < 1e-9


def test_drafts_of_the_policy_itself_are_all_accepted() -> None:
    logp_QV = distributions(0, DRAFTS + 1)
    assert (rounds(logp_QV, logp_QV[:-1]).emitted_B == DRAFTS + 1).all()


def test_broken_logits_end_a_row_only_where_its_tokens_come_from_them() -> None:
    logp_QV = distributions(0, DRAFTS + 1)
    logp_QV[-1] = float("nan")
    verdict = rounds(logp_QV, distributions(50, DRAFTS))
    assert torch.equal(verdict.ok_B, verdict.emitted_B <= DRAFTS)
    assert 0 < verdict.ok_B.float().mean() < 1
