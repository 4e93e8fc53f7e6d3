"""Divergences of two next-token distributions, exact over the vocabulary, with gradients.

Both are given by final hidden states and one LM head: p, the teacher, is fixed; q, the student,
gets the gradient. Logits exist for one chunk of tokens at a time, and once: as a token's values
depend on its own hidden state alone, their gradients are made with them and scaled in backward.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparrow.ops.dispatch import compile_decorator, op
from sparrow.ops.reference.logprob import Join, chunk_tokens, chunks, logits, normalised, per_token
from sparrow.ops.reference.pages import accumulator

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "total_variation", "tail"]


class _Value(NamedTuple):
    """Per token the divergence, and its slope by q(v) up to a constant of the token."""

    value_n: Tensor
    slope_nV: Tensor


Kind = Callable[[Tensor, Tensor], _Value]


class Divergences(NamedTuple):
    """By token the divergence, and q's log-prob of a target if targets were given."""

    value_T: Tensor
    logprob_T: Tensor | None


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
    targets_T: Tensor | None = None,
) -> Divergences:
    """The divergence of q from p at every position, with gradients to q's hidden states alone.

    p_head: the teacher's LM head, where it is another one. targets: tokens whose log-prob under q
    is wanted too.

    reverse_kl       KL(q || p)
    forward_kl       KL(p || q)
    jensen_shannon   (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2
    total_variation  sum |p - q| / 2 = 1 - acceptance
    tail             half its square: the gradient of a token grows with what it loses
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(get_args(Divergence))}, got {kind!r}")
    p_head_VC = head_VC if p_head_VC is None else p_head_VC
    value_T, logprob_T = _Divergence.apply(
        *(p_TC.detach(), p_head_VC.detach(), q_TC, head_VC.detach()),
        *(per_token(temperature, q_TC), chunk or chunk_tokens(len(head_VC))),
        *(KINDS[kind], targets_T, compile_decorator()),
    )
    return Divergences(value_T, None if targets_T is None else logprob_T)


class _Divergence(torch.autograd.Function):
    """Values and the gradients of each by its token's hidden state."""

    @staticmethod
    def forward(
        ctx: Any,
        p_TC: Tensor,
        p_head_VC: Tensor,
        q_TC: Tensor,
        head_VC: Tensor,
        temperature_T: Tensor,
        chunk: int,
        kind: Kind,
        targets_T: Tensor | None,
        join: Join,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulator(q_TC.dtype)
        factor_VC = head_VC if q_TC.is_cuda else head_VC.to(wide)
        value_T, logprob_T = (q_TC.new_zeros(len(q_TC), dtype=wide) for _ in range(2))
        wanted = ctx.needs_input_grad[2]
        count = 0 if not wanted else 1 if targets_T is None else 2
        slopes = [torch.empty_like(q_TC) for _ in range(count)]
        for part in chunks(len(q_TC), chunk):
            logits_p = logits.definition(p_TC[part], p_head_VC)
            logits_q = logits.definition(q_TC[part], head_VC)
            targets_n = None if targets_T is None else targets_T[part]
            temperature_n = temperature_T[part]
            values, factors = join(_chunk)(
                *(logits_p, logits_q, temperature_n, targets_n, kind),
                factor_VC.dtype if wanted else None,
            )
            value_T[part], logprob_T[part] = values
            for slope_TC, factor_nV in zip(slopes, factors, strict=True):
                slope_TC[part] = (factor_nV @ factor_VC).to(q_TC.dtype)
            if wanted and targets_n is not None:
                slopes[1][part] += (factor_VC[targets_n] / temperature_n[:, None]).to(q_TC.dtype)
        ctx.save_for_backward(*slopes)
        return value_T, logprob_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(grads, ctx.saved_tensors, strict=False)
        total_TC = sum(grad_T[:, None].to(slope_TC.dtype) * slope_TC for grad_T, slope_TC in parts)
        return None, None, total_TC, *(None,) * 6


def _chunk(
    p_nV: Tensor,
    q_nV: Tensor,
    temperature_n: Tensor,
    targets_n: Tensor | None,
    kind: Kind,
    dtype: torch.dtype | None,
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Divergence and log-prob of logits and, with a dtype, their gradients by q's logits.

    That of the log-prob lacks the target itself, whose row of the head is cheaper to add.
    """
    logq_nV = normalised(q_nV, temperature_n)
    value_n, slope_nV = kind(normalised(p_nV, temperature_n), logq_nV)
    logprob_n, q_nV, factors = torch.zeros_like(value_n), logq_nV.exp(), []
    if dtype is not None:
        mean_n1 = (q_nV * slope_nV).sum(1, keepdim=True)  # probabilities add up to 1
        factors.append((q_nV * (slope_nV - mean_n1) / temperature_n[:, None]).to(dtype))
    if targets_n is not None:
        logprob_n = logq_nV.gather(1, targets_n[:, None].long()).squeeze(1)
        factors += [] if dtype is None else [(-q_nV / temperature_n[:, None]).to(dtype)]
    return (value_n, logprob_n), factors


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


KINDS: dict[Divergence, Kind] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
    "tail": _tail,
}
