"""Sampling: logits to tokens with log-probs; and inputs and outputs of a decode step.

A draw inverts the cumulative distribution, in the order of the vocabulary, at one uniform number.
That number is a hash of the row's seed and of how many tokens the row has drawn, so there is no
generator state: a row draws the same in every batch and on every machine.
Legend of the dimension letters: sparrow/ops/types.py; R are rows of resident sequences.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.ops.dispatch import op
from sparrow.ops.types import RowState, StepInputs

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


class Draws(NamedTuple):
    """Per row: the token, its log-prob and the entropy (fp32), and whether logits were finite."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor
    ok: Tensor


@op(gradients=False)
def sample(
    logits_BV: Tensor,
    seeds_B: Tensor,
    counters_B: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    forbidden_BS: Tensor | None = None,
) -> Draws:
    """Draw one token per row; log-prob and entropy are of the distribution it was drawn from.

    The distribution is softmax(logits / temperature), without the forbidden ids (negative ones are
    padding), cut to the top k (0 is off), then to the fewest best tokens whose mass reaches top p
    (1 is off), renormalised after each cut. Temperature 0 takes the best token, with log-prob and
    entropy 0. The draw depends on the row's seed, counter (tokens drawn before) and logits alone.
    A row with NaN or infinite logits, or with every token forbidden, is not ok and draws token 0.
    """
    ok_B = logits_BV.isfinite().all(1)
    logp_BV = log_distribution(logits_BV, temperature_B, top_k_B, top_p_B, forbidden_BS)
    if forbidden_BS is not None:
        ok_B = ok_B & ~logp_BV.isnan().any(1)
    p_BV = logp_BV.exp()
    token_B = inverse_cdf(p_BV, uniforms(seeds_B, counters_B)).where(ok_B, 0)
    logprob_B = logp_BV.gather(1, token_B[:, None]).squeeze(1)
    entropy_B = -torch.where(p_BV > 0, p_BV * logp_BV, 0.0).sum(1)
    return Draws(
        tokens=token_B,
        logprobs=logprob_B.masked_fill(~ok_B, 0.0),
        entropies=entropy_B.masked_fill(~ok_B, 0.0) + 0.0,
        ok=ok_B,
    )


def log_distribution(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    forbidden_BS: Tensor | None = None,
) -> Tensor:
    """Log-probs of the distribution that `sample` draws from, fp32 [B, V]; -inf: cut off.

    At temperature 0 all mass is on the best token.
    """
    logits_BV = logits_BV.float()
    if forbidden_BS is not None:
        logits_BV = _forbid(logits_BV, forbidden_BS)
    greedy_B1 = temperature_B[:, None] == 0
    logp_BV = (logits_BV / torch.where(greedy_B1, 1.0, temperature_B[:, None])).log_softmax(1)
    if top_k_B is not None or top_p_B is not None:
        logp_BV = _truncate(logp_BV, top_k_B, top_p_B)
    best_B1 = logits_BV.argmax(1, keepdim=True)
    certain_B1 = logits_BV.gather(1, best_B1) * 0  # NaN where every token is forbidden
    best_BV = torch.full_like(logp_BV, -math.inf).scatter_(1, best_B1, certain_B1)
    return torch.where(greedy_B1, best_BV, logp_BV)


def uniforms(seeds_B: Tensor, counters_B: Tensor) -> Tensor:
    """fp64 numbers in [0, 1): the splitmix64 stream of each seed, at each counter."""
    z_B = seeds_B.long() + (counters_B.long() + 1) * _GOLDEN
    for shift, factor in _MIX:
        z_B = (z_B ^ _shift_right(z_B, shift)) * factor
    z_B = z_B ^ _shift_right(z_B, 31)
    return _shift_right(z_B, 11).double() * 2.0**-53


def _shift_right(z_B: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts signed numbers."""
    return (z_B >> bits) & ((1 << (64 - bits)) - 1)


def _forbid(logits_BV: Tensor, forbidden_BS: Tensor) -> Tensor:
    """Minus infinity at the named ids; negative ids are padding."""
    bound_BS = torch.where(forbidden_BS >= 0, -math.inf, math.inf).to(logits_BV.dtype)
    return logits_BV.scatter_reduce(1, forbidden_BS.clamp(min=0).long(), bound_BS, "amin")


def _truncate(logp_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """Log-probs after top-k, then top-p, each renormalised; what is cut has -inf."""
    sorted_BV, order_BV = logp_BV.sort(dim=1, descending=True, stable=True)
    if top_k_B is not None:
        rank_V = torch.arange(logp_BV.shape[1], device=logp_BV.device)
        cut_BV = (rank_V >= top_k_B[:, None]) & (top_k_B[:, None] > 0)
        sorted_BV = sorted_BV.masked_fill(cut_BV, -math.inf).log_softmax(1)
    if top_p_B is not None:
        p_BV = sorted_BV.exp()
        before_BV = p_BV.cumsum(1, dtype=torch.float64) - p_BV  # the mass of better tokens
        cut_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
        sorted_BV = sorted_BV.masked_fill(cut_BV, -math.inf).log_softmax(1)
    return torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV)


def inverse_cdf(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token at which the cumulative distribution exceeds each uniform number."""
    ladder_BV = p_BV.cumsum(1, dtype=torch.float64)
    goal_B1 = uniform_B[:, None] * ladder_BV[:, -1:]
    token_B = torch.searchsorted(ladder_BV, goal_B1, right=True).squeeze(1)
    index_V = torch.arange(p_BV.shape[1], device=p_BV.device)
    last_B = torch.where(p_BV > 0, index_V, 0).amax(1)  # where rounding runs past the end
    return torch.minimum(token_B, last_B)


@op(gradients=False)
def step_inputs(at_B: Tensor, rows: RowState, *, page: int, width: int) -> StepInputs:
    """Gather the inputs of a decode step from rows, with tables cut to `width` pages.

    A row's newest token is at position `length` and goes to the slot that the table names there;
    lengths include it. A row of length -1 is padding: length 0, slot -1.
    """
    length_B = rows.length_R[at_B]
    position_B = length_B.clamp(min=0)
    table_BM = rows.table_RM[:, :width].index_select(0, at_B)
    block_B = table_BM.gather(1, position_B[:, None] // page).squeeze(1)
    slot_B = torch.where(length_B >= 0, block_B * page + position_B % page, -1)
    return StepInputs(
        ids_B=rows.token_R[at_B],
        positions_B=position_B,
        lengths_B=length_B + 1,
        slots_B=slot_B,
        table_BM=table_BM,
        seeds_B=rows.seed_R[at_B],
        counters_B=rows.drawn_R[at_B],
        temperature_B=rows.temperature_R[at_B],
    )


@op(gradients=False)
def step_outputs(at_B: Tensor, draws: Draws, rows: RowState, *, advance: bool) -> Tensor:
    """Store draws as the rows' newest tokens, count them, and pack them as int32 [4, B].

    With `advance` the token before has gone into the cache: lengths grow by one, but those of
    padding rows stay. Packed are tokens, log-probs, entropies (floats by their bits) and ok.
    """
    rows.token_R.index_copy_(0, at_B, draws.tokens)
    rows.drawn_R.index_copy_(0, at_B, rows.drawn_R[at_B] + 1)
    if advance:
        length_B = rows.length_R[at_B]
        rows.length_R.index_copy_(0, at_B, torch.where(length_B >= 0, length_B + 1, length_B))
    parts = (
        draws.tokens.int(),
        draws.logprobs.view(torch.int32),
        draws.entropies.view(torch.int32),
        draws.ok.int(),
    )
    return torch.stack(parts)
