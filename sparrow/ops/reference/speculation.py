"""Speculative decoding: sparse drafts, verified by one dense pass over all of them.

A round of a row: draft steps sample d tokens from the sparse distribution q. The verification then
runs d + 1 queries, the newest sampled token and the d drafts, under dense attention; the logits of
query i give the policy's distribution p of the token that follows it. Drafts are accepted from the
first on, up to the first that is rejected; the token that follows comes from the verification.
Legend: sparrow/ops/types.py; R rows of resident sequences, J drafts of a round, Q = J + 1 queries,
T = B * Q queries of all rows of a batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.ops.dispatch import op
from sparrow.ops.reference.sampling import Draws, sample, uniforms
from sparrow.ops.types import DraftState, RowState, StepInputs

LOWEST = -1e30  # a logit of no weight
ACCEPT, RESAMPLE = 0x5DEECE66D, 0x2545F4914F6CDD1D  # streams of uniforms beside that of the draws


class Verification(NamedTuple):
    """Tokens of a round by row, [B, Q] (those from `emitted` on are void), and how many there are.

    log-probs and entropies are of the policy. Of the emitted tokens all but the last are accepted
    drafts. ok: the logits that a token comes from were finite.
    """

    tokens_BQ: Tensor
    logprobs_BQ: Tensor
    entropies_BQ: Tensor
    ok_BQ: Tensor
    emitted_B: Tensor


@op(gradients=False)
def record_drafts(
    at_B: Tensor, ids_B: Tensor, draws: Draws, logits_BV: Tensor, drafts: DraftState
) -> None:
    """Append a draft to each row: the token that its step read, log q of the draft, logits of q.

    A draft of logits that are not finite is one that no distribution has: it is always rejected,
    and the token is then drawn from the policy alone.
    """
    count_B = drafts.count_R[at_B]
    logq_B = draws.logprobs.masked_fill(~draws.ok, torch.inf)
    logits_BV = logits_BV.float().masked_fill(~draws.ok[:, None], torch.nan)
    drafts.inputs_RJ.index_put_((at_B, count_B), ids_B)
    drafts.logprobs_RJ.index_put_((at_B, count_B), logq_B)
    drafts.logits_RJV.index_put_((at_B, count_B), logits_BV)
    drafts.count_R.index_copy_(0, at_B, count_B + 1)


@op(gradients=False)
def verify_inputs(
    at_B: Tensor, rows: RowState, drafts: DraftState, *, page: int, width: int, queries: int
) -> StepInputs:
    """Inputs of the verification, by query [T] but for the page tables [B, M].

    Query i of a row with d drafts is at position length - d + i. Queries beyond the last draft, and
    all of a row of length -1, are padding: length 0, slot -1.
    """
    count_B1, query_Q = drafts.count_R[at_B, None], torch.arange(queries, device=at_B.device)
    start_B1 = rows.length_R[at_B, None] - count_B1
    real_BQ = (query_Q <= count_B1) & (start_B1 >= 0)
    position_BQ = torch.where(real_BQ, start_B1 + query_Q, 0)
    ids_BQ = rows.token_R[at_B, None].repeat(1, queries)
    ids_BQ[:, :-1] = torch.where(
        query_Q[:-1] < count_B1, drafts.inputs_RJ[at_B, : queries - 1], ids_BQ[:, :-1]
    )
    table_BM = rows.table_RM[:, :width].index_select(0, at_B)
    block_BQ = table_BM.gather(1, position_BQ // page)
    counters_BQ = (rows.drawn_R[at_B, None] - count_B1 + query_Q).clamp(min=0)
    return StepInputs(
        ids_B=ids_BQ.flatten(),
        positions_B=position_BQ.flatten(),
        lengths_B=torch.where(real_BQ, position_BQ + 1, 0).flatten(),
        slots_B=torch.where(real_BQ, block_BQ * page + position_BQ % page, -1).flatten(),
        table_BM=table_BM,
        seeds_B=rows.seed_R[at_B].repeat_interleave(queries),
        counters_B=counters_BQ.flatten(),
        temperature_B=rows.temperature_R[at_B].repeat_interleave(queries),
    )


def accept_by_ratio(
    logp_BJ: Tensor, logq_BJ: Tensor, count_B: Tensor, seeds_B: Tensor, counters_BJ: Tensor
) -> Tensor:
    """Rejection sampling: how many drafts of each row are accepted, [B].

    A draft x is accepted with probability min(1, p(x) / q(x)), by the uniform of its number.
    """
    uniform_BJ = uniforms(seeds_B[:, None] ^ ACCEPT, counters_BJ)
    return leading_accepted(uniform_BJ < (logp_BJ - logq_BJ).double().exp(), count_B)


def resample(
    logp_BV: Tensor, logq_BV: Tensor, rejected_B: Tensor, seeds_B: Tensor, counters_B: Tensor
) -> Tensor:
    """The token behind the accepted drafts: after a rejection from the residual max(0, p - q).

    Otherwise it is drawn from p. So emitted tokens have the policy's distribution, whatever q is.
    """
    p_BV = logp_BV.exp()
    residual_BV = (p_BV - logq_BV.exp().nan_to_num(nan=0.0)).clamp(min=0)
    some_B = rejected_B & (residual_BV.sum(1) > 0)  # none: p = q up to rounding
    weight_BV = torch.where(some_B[:, None], residual_BV, p_BV)
    logits_BV = weight_BV.log().clamp(min=LOWEST)  # a draw wants finite logits
    return sample(logits_BV, seeds_B ^ RESAMPLE, counters_B, torch.ones_like(p_BV[:, 0])).tokens


def accept_equal(tokens_BJ: Tensor, drafts_BJ: Tensor, count_B: Tensor) -> Tensor:
    """Shared noise: a draft is accepted if the verification draws the same token, [B].

    The draws are those of dense decoding, so the emitted tokens are too, whatever was drafted.
    """
    return leading_accepted(tokens_BJ == drafts_BJ, count_B)


def leading_accepted(accept_BJ: Tensor, count_B: Tensor) -> Tensor:
    """How many drafts of each row are accepted before the first that is not."""
    index_J = torch.arange(accept_BJ.shape[1], device=accept_BJ.device)
    return (accept_BJ & (index_J < count_B[:, None])).cumprod(1).sum(1)


@op(gradients=False)
def verify_outputs(
    at_B: Tensor, verdict: Verification, rows: RowState, drafts: DraftState
) -> Tensor:
    """Move rows behind the emitted tokens, end their round, and pack it as int32 [B, 4 Q + 1].

    A row continues as if dense decoding had drawn these tokens one by one. Packed are tokens,
    log-probs, entropies (floats by their bits), ok, and the number of emitted tokens.
    """
    emitted_B, length_B = verdict.emitted_B, rows.length_R[at_B]
    count_B = drafts.count_R[at_B]
    newest_B = verdict.tokens_BQ.gather(1, emitted_B[:, None] - 1).squeeze(1)
    rows.token_R.index_copy_(0, at_B, newest_B)
    rows.drawn_R.index_copy_(0, at_B, rows.drawn_R[at_B] - count_B + emitted_B)
    length_B = torch.where(length_B >= 0, length_B - count_B + emitted_B, length_B)
    rows.length_R.index_copy_(0, at_B, length_B)
    drafts.count_R.index_fill_(0, at_B, 0)
    parts = (
        verdict.tokens_BQ.int(),
        verdict.logprobs_BQ.float().view(torch.int32),
        verdict.entropies_BQ.float().view(torch.int32),
        verdict.ok_BQ.int(),
        emitted_B[:, None].int(),
    )
    return torch.cat(parts, dim=1)
