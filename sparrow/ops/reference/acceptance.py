"""Acceptance of an actor q by the policy p, token by token: exact, and bounds from top-K lists.

alpha = sum_v min(p(v), q(v)) of two distributions p and q over one vocabulary, by chunks of tokens.
Legend of the dimension letters: sparrow/ops/types.py. Here K and J are the widths of top lists.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.ops.dispatch import op
from sparrow.ops.reference.logprob import chunk_tokens, chunks, entropy, log_softmax, per_token
from sparrow.ops.reference.pages import accumulator

ROUNDING = 1e-5
"""Rounding error of alpha and its bounds in fp32. Log-probs of relevant tokens are off by at most
2e-6, and so are the sums of the probabilities; a bound that misses alpha by more is an error."""


class Comparison(NamedTuple):
    """Per token, in fp32: how q differs from p.

    alpha    exact acceptance, sum_v min(p(v), q(v))
    entropy  of p, in nats
    logp     log-probs of the given token
    logq
    lower    bounds of alpha from the top-K log-probs of both sides alone:
    upper    lower <= alpha <= upper
    """

    alpha: Tensor
    entropy: Tensor
    logp: Tensor
    logq: Tensor
    lower: Tensor
    upper: Tensor


@op(gradients=False)
def acceptance(
    p_TC: Tensor,
    q_TC: Tensor,
    head_VC: Tensor,
    *,
    q_head_VC: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Exact per-token acceptance alpha = sum_v min(p(v), q(v)), [T] in [0, 1]. No gradients.

    p and q are given by final hidden states at the same positions of the same sequence, with one
    LM head or, where the two sides differ in it, with q_head for q.
    """
    q_head_VC = head_VC if q_head_VC is None else q_head_VC
    temperature_T = per_token(temperature, p_TC)
    alpha_T = p_TC.new_empty(len(p_TC), dtype=accumulator(p_TC.dtype))
    for part in chunks(len(p_TC), chunk or chunk_tokens(len(head_VC))):
        p_nV = log_softmax(p_TC[part], head_VC, temperature_T[part])
        q_nV = log_softmax(q_TC[part], q_head_VC, temperature_T[part])
        alpha_T[part] = _overlap(p_nV, q_nV)
    return alpha_T


@op(gradients=False)
def compare(
    p_TC: Tensor,
    q_TC: Tensor,
    head_VC: Tensor,
    ids_T: Tensor,
    *,
    q_head_VC: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int = 20,
    chunk: int | None = None,
) -> Comparison:
    """Compare two distributions; their logits are computed once.

    alpha has the bits of `acceptance`. lower and upper are `acceptance_bounds` of the top_k
    log-probs of both sides. They come from other sums than alpha, so where one of them misses
    alpha by no more than rounding (1e-5) it is moved there: lower <= alpha <= upper as stored. One
    that misses by more is left, so that an error shows. No gradients.
    """
    q_head_VC = head_VC if q_head_VC is None else q_head_VC
    temperature_T = per_token(temperature, p_TC)
    wide = accumulator(p_TC.dtype)
    result = Comparison(*(p_TC.new_empty(len(p_TC), dtype=wide) for _ in Comparison._fields))
    for part in chunks(len(p_TC), chunk or chunk_tokens(len(head_VC))):
        p_nV = log_softmax(p_TC[part], head_VC, temperature_T[part])
        q_nV = log_softmax(q_TC[part], q_head_VC, temperature_T[part])
        for whole_T, piece_n in zip(result, _compare(p_nV, q_nV, ids_T[part], top_k), strict=True):
            whole_T[part] = piece_n
    return result


def _compare(p_nV: Tensor, q_nV: Tensor, ids_n: Tensor, top_k: int) -> Comparison:
    alpha_n = _overlap(p_nV, q_nV)
    p_top, q_top = p_nV.topk(top_k, dim=1), q_nV.topk(top_k, dim=1)
    lists = (p_top.indices, p_top.values, q_top.indices, q_top.values)
    lower_n, upper_n = acceptance_bounds(*lists, p_nV.shape[1])
    ids_n1 = ids_n[:, None].long()
    return Comparison(
        alpha=alpha_n,
        entropy=entropy(p_nV),
        logp=p_nV.gather(1, ids_n1).squeeze(1),
        logq=q_nV.gather(1, ids_n1).squeeze(1),
        lower=torch.where(lower_n - alpha_n <= ROUNDING, lower_n.minimum(alpha_n), lower_n),
        upper=torch.where(alpha_n - upper_n <= ROUNDING, upper_n.maximum(alpha_n), upper_n),
    )


def acceptance_bounds(
    p_ids_TK: Tensor,
    p_logprobs_TK: Tensor,
    q_ids_TJ: Tensor,
    q_logprobs_TJ: Tensor,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """Bounds of acceptance from the most likely tokens of both sides: (lower [T], upper [T]).

    Lists are those of the K (of p) and J (of q) most likely tokens with their log-probs, in any
    order, each token once: what an inference server returns. lower counts the tokens of
    both lists. upper is the largest acceptance that any two distributions with these lists have:
    a token beyond a list has at most the least probability in it, and all of them together what
    the list leaves over. That is best spent on the tokens of the other list, and only then on
    tokens that neither names, where both sides have to spend. Both hold up to the rounding of the
    log-probs that are given.
    """
    p_TK, q_TJ = p_logprobs_TK.double().exp(), q_logprobs_TJ.double().exp()
    in_q_TK, partner_TK = _matches(p_ids_TK, q_ids_TJ, q_TJ)
    in_p_TJ, _ = _matches(q_ids_TJ, p_ids_TK, p_TK)
    p_least_T, q_least_T = p_TK.amin(1), q_TJ.amin(1)  # no token beyond a list has more
    p_rest_T, q_rest_T = (1 - p_TK.sum(1)).clamp_(min=0), (1 - q_TJ.sum(1)).clamp_(min=0)

    both_T = torch.minimum(p_TK, partner_TK).where(in_q_TK, 0.0).sum(1)
    only_p_T = torch.minimum(p_TK, q_least_T[:, None]).where(~in_q_TK, 0.0).sum(1)
    only_q_T = torch.minimum(q_TJ, p_least_T[:, None]).where(~in_p_TJ, 0.0).sum(1)
    only_p_T = only_p_T.minimum(q_rest_T)
    only_q_T = only_q_T.minimum(p_rest_T)

    unlisted_T = vocabulary - p_TK.shape[1] - q_TJ.shape[1] + in_q_TK.sum(1)
    neither_T = torch.minimum(q_rest_T - only_p_T, p_rest_T - only_q_T).minimum(
        unlisted_T * torch.minimum(p_least_T, q_least_T)
    )
    upper_T = both_T + only_p_T + only_q_T + neither_T
    wide = accumulator(p_logprobs_TK.dtype)
    return both_T.clamp(max=1.0).to(wide), upper_T.clamp(max=1.0).to(wide)


def _matches(ids_TK: Tensor, others_TJ: Tensor, probs_TJ: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids are among the others, and their probability there (arbitrary elsewhere)."""
    sorted_TJ, order_TJ = others_TJ.long().sort(dim=1)
    ids_TK = ids_TK.long().contiguous()
    at_TK = torch.searchsorted(sorted_TJ, ids_TK).clamp_(max=sorted_TJ.shape[1] - 1)
    found_TK = sorted_TJ.gather(1, at_TK) == ids_TK
    return found_TK, probs_TJ.gather(1, order_TJ.gather(1, at_TK))


def _overlap(p_nV: Tensor, q_nV: Tensor) -> Tensor:
    return torch.minimum(p_nV, q_nV).exp_().sum(1).clamp_(max=1.0)
