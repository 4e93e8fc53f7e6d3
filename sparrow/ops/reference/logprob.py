"""Logits, log-prob and entropy of final hidden states.

Logits are fp32 (fp64 for fp64 inputs) whatever the weights' dtype: rounding them to bf16 moves a
logit of 20 by up to 0.06, which would look like a mismatch of policies. They exist for one chunk of
tokens at a time, never as a [tokens, vocabulary] tensor.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow.ops.dispatch import compile_decorator, needs_gradients, op
from sparrow.ops.reference.pages import accumulator
from sparrow.ops.types import Weight

CHUNK_BYTES = 64 * 2**20
Join = Callable[[Callable[..., Any]], Callable[..., Any]]


class TokenStats(NamedTuple):
    """Per token, in fp32: log-prob of the given token, and entropy of the distribution (nats)."""

    logprob: Tensor
    entropy: Tensor


@op()
def logits(hidden_TC: Tensor, head_VC: Weight) -> Tensor:
    """Hidden states times the LM head, [T, V] in fp32 whatever the inputs' dtype.

    For a handful of tokens; whole sequences go through the chunked ops below. The head may be in 8
    bits (`Int8Weight`).
    """
    wide = accumulator(hidden_TC.dtype)
    if not isinstance(head_VC, Tensor):
        return hidden_TC.to(wide) @ head_VC.data_EI.to(wide).T * head_VC.scale_E.to(wide)
    if hidden_TC.is_cuda and hidden_TC.dtype != wide and not needs_gradients(hidden_TC, head_VC):
        return torch.mm(hidden_TC, head_VC.T, out_dtype=wide)
    return hidden_TC.to(wide) @ head_VC.to(wide).T


@op()
def token_stats(
    hidden_TC: Tensor,
    head_VC: Tensor,
    ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> TokenStats:
    """Log-prob of each given token and entropy of its distribution, with gradients.

    The only log-prob function for given tokens. (A sampler reports the log-prob of its draw under
    the truncated distribution; without truncation the two are equal up to rounding.)
    Works through `chunk` tokens at a time (default: 64 MiB of logits). temperature divides the
    logits; one number or one per token, above 0, without gradient.
    """
    unscaled = isinstance(temperature, int | float) and temperature == 1
    temperature_T = None if unscaled else per_token(temperature, hidden_TC)
    options = (temperature_T, chunk or chunk_tokens(len(head_VC)), compile_decorator())
    logprob_T, entropy_T = _TokenStats.apply(hidden_TC, head_VC, ids_T, *options)
    return TokenStats(logprob=logprob_T, entropy=entropy_T)


class _TokenStats(torch.autograd.Function):
    """Both statistics with gradients to hidden and head; backward recomputes logits.

    On a GPU the products of gradients have 16-bit factors where hidden states do: tensor cores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        head_VC: Tensor,
        ids_T: Tensor,
        temperature_T: Tensor | None,
        chunk: int,
        join: Join,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulator(hidden_TC.dtype)
        logprob_T = hidden_TC.new_empty(len(hidden_TC), dtype=wide)
        entropy_T = hidden_TC.new_empty(len(hidden_TC), dtype=wide)
        for part in chunks(len(hidden_TC), chunk):
            logits_nV = logits.definition(hidden_TC[part], head_VC)
            stats = join(_stats)(logits_nV, _part(temperature_T, part), ids_T[part])
            logprob_T[part], entropy_T[part] = stats
        ctx.save_for_backward(hidden_TC, head_VC, ids_T, temperature_T, entropy_T)
        ctx.chunk, ctx.join = chunk, join
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob_T, grad_entropy_T = grads
        hidden_TC, head_VC, ids_T, temperature_T, entropy_T = ctx.saved_tensors
        wants_head = ctx.needs_input_grad[1]
        wide = accumulator(hidden_TC.dtype)
        narrow = hidden_TC.dtype if hidden_TC.is_cuda else wide  # of the products' factors
        factor_VC = head_VC.to(narrow)
        grad_hidden_TC = torch.empty_like(hidden_TC)
        grad_head_VC = torch.zeros_like(head_VC, dtype=wide) if wants_head else None
        for part in chunks(len(hidden_TC), ctx.chunk):
            grad_nV = ctx.join(_grad_logits)(
                logits.definition(hidden_TC[part], head_VC),
                _part(temperature_T, part),
                ids_T[part],
                entropy_T[part],
                _part(grad_logprob_T, part),
                _part(grad_entropy_T, part),
                narrow,
            )
            grad_hidden_TC[part] = (grad_nV @ factor_VC).to(hidden_TC.dtype)
            if grad_head_VC is not None:
                grad_head_VC += _wide_product(grad_nV.T, hidden_TC[part].to(narrow), wide)
        grad_head = grad_head_VC.to(head_VC.dtype) if grad_head_VC is not None else None
        return grad_hidden_TC, grad_head, None, None, None, None


def _part(tensor_T: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor_T is None else tensor_T[part]


def _wide_product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """A product accumulated and returned in `wide`, whatever the dtype of its factors."""
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _stats(logits_nV: Tensor, temperature_n: Tensor | None, ids_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the given tokens, and entropy."""
    logp_nV = normalised(logits_nV, temperature_n)
    return logp_nV.gather(1, ids_n[:, None].long()).squeeze(1), entropy(logp_nV)


def _grad_logits(
    logits_nV: Tensor,
    temperature_n: Tensor | None,
    ids_n: Tensor,
    entropy_n: Tensor,
    grad_logprob_n: Tensor | None,
    grad_entropy_n: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """d logprob = onehot - p and d entropy = -p (log p + entropy), each times its gradient."""
    logp_nV = normalised(logits_nV, temperature_n)
    slope_nV: Tensor | float = 0.0
    if grad_entropy_n is not None:
        slope_nV = grad_entropy_n[:, None] * (logp_nV + entropy_n[:, None])
    if grad_logprob_n is not None:
        slope_nV = slope_nV + grad_logprob_n[:, None]
    grad_nV = -logp_nV.exp() * slope_nV
    if grad_logprob_n is not None:
        grad_nV = grad_nV.scatter_add(1, ids_n[:, None].long(), grad_logprob_n[:, None])
    if temperature_n is not None:
        grad_nV = grad_nV / temperature_n[:, None]
    return grad_nV.to(dtype)


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose fp32 logits fill CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def entropy(logp_nV: Tensor) -> Tensor:
    return -(logp_nV.exp() * logp_nV).sum(1)


def log_softmax(hidden_nC: Tensor, head_VC: Tensor, temperature_n: Tensor | None) -> Tensor:
    """Log-probs [n, V]."""
    return normalised(logits.definition(hidden_nC, head_VC), temperature_n)


def normalised(logits_nV: Tensor, temperature_n: Tensor | None) -> Tensor:
    """Logits to log-probs.

    On a CPU, torch.log_softmax sums sequentially in fp32, with errors of 6e-5 over 150 thousand
    tokens; a pairwise sum leaves 1e-6.
    """
    if temperature_n is not None:
        logits_nV = logits_nV / temperature_n[:, None]
    if logits_nV.is_cuda:
        return torch.log_softmax(logits_nV, dim=1)
    logits_nV = logits_nV - logits_nV.amax(1, keepdim=True)
    return logits_nV.sub_(logits_nV.exp().sum(1, keepdim=True).log_())


def per_token(temperature: float | Tensor, hidden_TC: Tensor) -> Tensor:
    wide = accumulator(hidden_TC.dtype)
    return torch.as_tensor(temperature, dtype=wide, device=hidden_TC.device).expand(len(hidden_TC))


def chunks(total: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))
