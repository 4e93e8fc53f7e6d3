"""Divergences of two next-token distributions, exact over the vocabulary, with gradients.

Both are given by final hidden states and one LM head: p, the teacher, is fixed; q, the student,
gets the gradient. Logits exist for one chunk of tokens at a time, also in backward.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparrow.ops.dispatch import op
from sparrow.ops.reference.logprob import chunk_tokens, chunks, log_softmax, per_token
from sparrow.ops.reference.pages import accumulator

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "total_variation", "tail"]


class _Value(NamedTuple):
    """Per token the divergence, and its slope by q(v) up to a constant of the token."""

    value_n: Tensor
    slope_nV: Tensor


@op()
def divergence(
    p_TC: Tensor,
    q_TC: Tensor,
    head_VC: Tensor,
    *,
    kind: Divergence = "reverse_kl",
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    p_head_VC: Tensor | None = None,
) -> Tensor:
    """The divergence of q from p at every position, [T], with gradients to q's hidden states alone.

    p_head: the teacher's LM head, where it is another one.

    reverse_kl       KL(q || p)
    forward_kl       KL(p || q)
    jensen_shannon   (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2
    total_variation  sum |p - q| / 2 = 1 - acceptance
    tail             half its square: the gradient of a token grows with what it loses
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(get_args(Divergence))}, got {kind!r}")
    options = (per_token(temperature, q_TC), chunk or chunk_tokens(len(head_VC)), KINDS[kind])
    p_head_VC = head_VC if p_head_VC is None else p_head_VC
    return _Divergence.apply(p_TC.detach(), p_head_VC.detach(), q_TC, head_VC.detach(), *options)


class _Divergence(torch.autograd.Function):
    """Values forward; backward computes the logits again, in the same chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        p_TC: Tensor,
        p_head_VC: Tensor,
        q_TC: Tensor,
        head_VC: Tensor,
        temperature_T: Tensor,
        chunk: int,
        kind: Callable[[Tensor, Tensor], _Value],
    ) -> Tensor:
        value_T = q_TC.new_empty(len(q_TC), dtype=accumulator(q_TC.dtype))
        for part in chunks(len(q_TC), chunk):
            logp_nV = log_softmax(p_TC[part], p_head_VC, temperature_T[part])
            logq_nV = log_softmax(q_TC[part], head_VC, temperature_T[part])
            value_T[part] = kind(logp_nV, logq_nV).value_n
        ctx.save_for_backward(p_TC, p_head_VC, q_TC, head_VC, temperature_T)
        ctx.chunk, ctx.kind = chunk, kind
        return value_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p_TC, p_head_VC, q_TC, head_VC, temperature_T = ctx.saved_tensors
        wide = accumulator(q_TC.dtype)
        factor_VC = head_VC if q_TC.is_cuda else head_VC.to(wide)
        grad_TC = torch.empty_like(q_TC)
        for part in chunks(len(q_TC), ctx.chunk):
            logp_nV = log_softmax(p_TC[part], p_head_VC, temperature_T[part])
            logq_nV = log_softmax(q_TC[part], head_VC, temperature_T[part])
            slope_nV, q_nV = ctx.kind(logp_nV, logq_nV).slope_nV, logq_nV.exp()
            mean_n1 = (q_nV * slope_nV).sum(1, keepdim=True)  # probabilities add up to 1
            scale_n1 = (grads[0][part] / temperature_T[part])[:, None]
            grad_nV = scale_n1 * q_nV * (slope_nV - mean_n1)
            grad_TC[part] = (grad_nV.to(factor_VC.dtype) @ factor_VC).to(q_TC.dtype)
        return None, None, grad_TC, None, None, None, None


def _reverse_kl(logp_nV: Tensor, logq_nV: Tensor) -> _Value:
    ratio_nV = logq_nV - logp_nV
    return _Value((logq_nV.exp() * ratio_nV).sum(1), ratio_nV)


def _forward_kl(logp_nV: Tensor, logq_nV: Tensor) -> _Value:
    ratio_nV = logp_nV - logq_nV
    return _Value((logp_nV.exp() * ratio_nV).sum(1), -ratio_nV.exp())


def _jensen_shannon(logp_nV: Tensor, logq_nV: Tensor) -> _Value:
    logm_nV = torch.logaddexp(logp_nV, logq_nV) - math.log(2)
    above_p, above_q = logp_nV - logm_nV, logq_nV - logm_nV
    value_n = (logp_nV.exp() * above_p + logq_nV.exp() * above_q).sum(1) / 2
    return _Value(value_n, above_q / 2)


def _total_variation(logp_nV: Tensor, logq_nV: Tensor) -> _Value:
    difference_nV = logq_nV.exp() - logp_nV.exp()
    return _Value(difference_nV.abs().sum(1) / 2, difference_nV.sign() / 2)


def _tail(logp_nV: Tensor, logq_nV: Tensor) -> _Value:
    value_n, slope_nV = _total_variation(logp_nV, logq_nV)
    return _Value(value_n**2 / 2, value_n[:, None] * slope_nV)


KINDS: dict[Divergence, Callable[[Tensor, Tensor], _Value]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
    "tail": _tail,
}
