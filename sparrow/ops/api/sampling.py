"""Contract of sampling. Legend of the dimension letters: sparrow/ops/types.py."""

import torch
from torch import Tensor

from sparrow.ops.api.checks import dims, rows
from sparrow.ops.dispatch import run
from sparrow.ops.reference import sampling as _sampling
from sparrow.ops.reference.sampling import Draws


@torch.no_grad()
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
    if logits_BV.ndim != 2 or not logits_BV.shape[1]:
        raise ValueError(f"logits must be [rows, vocabulary], got {dims(logits_BV)}")
    rows("seeds", seeds_B, len(logits_BV))
    rows("counters", counters_B, len(logits_BV))
    if top_k_B is not None:
        rows("top_k", top_k_B, len(logits_BV))
    if forbidden_BS is not None:
        rows("forbidden ids", forbidden_BS, len(logits_BV), ndim=2)
    return run(
        "sample",
        _sampling.sample,
        logits_BV,
        seeds_B,
        counters_B,
        temperature_B,
        top_k_B,
        top_p_B,
        forbidden_BS,
    )
