"""Contracts of what is read off final hidden states: logits, log-prob, top-k.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from torch import Tensor

from sparrow.ops.api.checks import chunking, head, known_ids, rows
from sparrow.ops.dispatch import joiner, run
from sparrow.ops.reference import logprob as _logprob
from sparrow.ops.reference.logprob import TokenStats, TopK


def logits(hidden_TC: Tensor, head_VC: Tensor) -> Tensor:
    """Hidden states times the LM head, [T, V] in fp32 whatever the inputs' dtype.

    For a handful of tokens; whole sequences go through the chunked ops below.
    """
    head(hidden_TC, head_VC)
    return run("logits", _logprob.logits, hidden_TC, head_VC)


def token_stats(
    hidden_TC: Tensor,
    head_VC: Tensor,
    ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> TokenStats:
    """Log-prob of each given token and entropy of its distribution, with gradients.

    The one log-prob function for tokens that are given. (A sampler reports the log-prob of its
    draw itself, under what it drew from; without truncation the two are equal up to rounding.)
    Works through `chunk` tokens at a time (default: 64 MiB of logits). temperature divides the
    logits; one number or one per token, above 0, without gradient.
    """
    head(hidden_TC, head_VC)
    rows("ids", ids_T, len(hidden_TC))
    known_ids(ids_T, len(head_VC))
    chunking(temperature, chunk)
    return run(
        "token_stats",
        _logprob.token_stats,
        hidden_TC,
        head_VC,
        ids_T,
        temperature=temperature,
        chunk=chunk,
        join=joiner(),
    )


def top_k(
    hidden_TC: Tensor,
    head_VC: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> TopK:
    """The k most likely tokens and their log-probs, best first, by chunks. No gradients."""
    head(hidden_TC, head_VC)
    chunking(temperature, chunk)
    if not 1 <= k <= len(head_VC):
        raise ValueError(f"k must be between 1 and the vocabulary {len(head_VC)}, got {k}")
    return run("top_k", _logprob.top_k, hidden_TC, head_VC, k, temperature=temperature, chunk=chunk)
