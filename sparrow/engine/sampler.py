"""From logits to a token, and its log-prob under the very distribution it was drawn from.

A draw uses one uniform number of the row's own generator and the inverse of the cumulative
distribution, so a row's tokens depend on its seed and its logits, never on its neighbours.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.records import SamplingParams


class Draw(NamedTuple):
    """A sampled token; log-prob and entropy are of the distribution it was drawn from."""

    token: int
    logprob: float
    entropy: float


def sample(
    logits_V: Tensor,
    params: SamplingParams,
    generator: torch.Generator,
    forbidden: Tensor | None = None,
) -> Draw:
    """Draw one token; `forbidden` ids cannot be drawn. Non-finite logits are a ValueError."""
    if not bool(logits_V.isfinite().all()):
        raise ValueError("the model gave NaN or infinite logits")
    if forbidden is not None:
        logits_V = logits_V.index_fill(0, forbidden, float("-inf"))
        if bool(logits_V.isneginf().all()):
            raise ValueError("every token is forbidden")
    if params.temperature == 0:
        return Draw(token=int(logits_V.argmax()), logprob=0.0, entropy=0.0)
    logp_V = _distribution(logits_V.double() / params.temperature, params)
    p_V = logp_V.exp()
    ladder_V = p_V.cumsum(0)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).to(ladder_V.device)
    token = int(torch.searchsorted(ladder_V, uniform * ladder_V[-1], right=True))
    token = min(token, int(p_V.nonzero()[-1]))
    entropy = -float(torch.where(p_V > 0, p_V * logp_V, 0.0).sum())
    return Draw(token=token, logprob=float(logp_V[token]), entropy=entropy)


def _distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs after top-k, then top-p, each renormalised; what is cut has -inf."""
    if 0 < params.top_k < len(logits_V):
        kept = logits_V.topk(params.top_k).indices
        logits_V = torch.full_like(logits_V, -math.inf).index_copy(0, kept, logits_V[kept])
    logp_V = logits_V.log_softmax(0)
    if params.top_p < 1:
        sorted_V, order_V = logp_V.sort(descending=True, stable=True)
        p_V = sorted_V.exp()
        cut_V = p_V.cumsum(0) - p_V >= params.top_p  # the mass before it suffices already
        logp_V = logp_V.index_fill(0, order_V[cut_V], -math.inf).log_softmax(0)
    return logp_V
