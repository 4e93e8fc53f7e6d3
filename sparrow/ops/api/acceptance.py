"""Contracts of acceptance: how much of the policy p an actor q keeps, token by token.

Legend of the dimension letters: sparrow/ops/types.py. Here K and J are the widths of top lists.
"""

import torch
from torch import Tensor

from sparrow.ops.api.checks import chunking, dims, head, known_ids, rows, same_shape
from sparrow.ops.dispatch import run
from sparrow.ops.reference import acceptance as _acceptance
from sparrow.ops.reference.acceptance import Comparison

MORE_THAN_ALL = 1e-3  # what rounding may add to the probability of a list


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
    _sides(p_TC, q_TC, head_VC, q_head_VC)
    chunking(temperature, chunk)
    return run(
        "acceptance",
        _acceptance.acceptance,
        p_TC,
        q_TC,
        head_VC,
        q_head_VC=q_head_VC,
        temperature=temperature,
        chunk=chunk,
    )


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
    """All that a measurement asks of two distributions, with the logits of each made once.

    alpha has the bits of `acceptance`. lower and upper are `acceptance_bounds` of the top_k
    log-probs of both sides. They come from other sums than alpha, so where one of them misses
    alpha by no more than rounding (1e-5) it is moved there: lower <= alpha <= upper as stored. One
    that misses by more is left, so that an error shows. No gradients.
    """
    _sides(p_TC, q_TC, head_VC, q_head_VC)
    rows("ids", ids_T, len(p_TC))
    known_ids(ids_T, len(head_VC))
    chunking(temperature, chunk)
    if not 1 <= top_k <= len(head_VC):
        raise ValueError(f"top_k must be between 1 and the vocabulary {len(head_VC)}, got {top_k}")
    return run(
        "compare",
        _acceptance.compare,
        p_TC,
        q_TC,
        head_VC,
        ids_T,
        q_head_VC=q_head_VC,
        temperature=temperature,
        top_k=top_k,
        chunk=chunk,
    )


def acceptance_bounds(
    p_ids_TK: Tensor,
    p_logprobs_TK: Tensor,
    q_ids_TJ: Tensor,
    q_logprobs_TJ: Tensor,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """What the most likely tokens of both sides tell of acceptance: (lower [T], upper [T]).

    Lists are those of the K (of p) and J (of q) most likely tokens with their log-probs, in any
    order, each token once: what an inference server returns. lower counts the tokens that stand in
    both lists. upper is the largest acceptance that any two distributions with these lists have:
    a token beyond a list has at most the least probability in it, and all of them together what
    the list leaves over. That is best spent on the tokens of the other list, and only then on
    tokens that neither names, where both sides have to spend. Both hold up to the rounding of the
    log-probs that are given.
    """
    _list("p", p_ids_TK, p_logprobs_TK, vocabulary)
    _list("q", q_ids_TJ, q_logprobs_TJ, vocabulary)
    if len(p_ids_TK) != len(q_ids_TJ):
        raise ValueError(
            f"p_ids {dims(p_ids_TK)} and q_ids {dims(q_ids_TJ)} must be of the same tokens"
        )
    return run(
        "acceptance_bounds",
        _acceptance.acceptance_bounds,
        p_ids_TK,
        p_logprobs_TK,
        q_ids_TJ,
        q_logprobs_TJ,
        vocabulary,
    )


def _sides(p_TC: Tensor, q_TC: Tensor, head_VC: Tensor, q_head_VC: Tensor | None) -> None:
    same_shape("p", p_TC, "q", q_TC)
    head(p_TC, head_VC)
    if q_head_VC is not None:
        same_shape("head", head_VC, "q_head", q_head_VC)


def _list(side: str, ids_TK: Tensor, logprobs_TK: Tensor, vocabulary: int) -> None:
    rows(f"{side}_ids", ids_TK, len(ids_TK), ndim=2)
    same_shape(f"{side}_ids", ids_TK, f"{side}_logprobs", logprobs_TK)
    if not logprobs_TK.is_floating_point():
        raise ValueError(f"{side}_logprobs must be floating point, got {logprobs_TK.dtype}")
    if not 1 <= ids_TK.shape[1] <= vocabulary:
        raise ValueError(
            f"{side}_ids {dims(ids_TK)} must name between 1 and all {vocabulary} tokens of the "
            "vocabulary"
        )
    if not ids_TK.is_cuda and len(ids_TK):
        _list_values(side, ids_TK, logprobs_TK, vocabulary)


def _list_values(side: str, ids_TK: Tensor, logprobs_TK: Tensor, vocabulary: int) -> None:
    """On a GPU values are not looked at: that would wait for it."""
    known_ids(ids_TK, vocabulary)
    if bool((ids_TK.sort(dim=1).values.diff(dim=1) == 0).any()):
        raise ValueError(f"{side}_ids names a token twice in one row")
    total = float(torch.logsumexp(logprobs_TK.double(), dim=1).exp().max())
    if not total <= 1 + MORE_THAN_ALL:
        raise ValueError(
            f"{side}_logprobs must be log-probs, whose probabilities have a sum of at most 1; a "
            f"row has {total:.4g}"
        )
