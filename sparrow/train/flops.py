"""How many operations training takes, as utilisation counts them.

Counted are the products that any implementation has to do, once forward and twice backward:

- 2 for every weight of a product and token. Those weights are q, k, v, out, gate, up and down of
  every layer and the LM head. An embedding is looked up and does not count; tied to the head, the
  one matrix counts once, as the head. Norms and biases do not count.
- Attention, causal: a token multiplies its query with the keys up to its own, and their weights
  with the values, 2 x 2 x heads x head size x L^2 / 2 a layer and sequence of L tokens.

What is computed again on the way back (recompute, logits by chunks) does not count: it is work, not
progress.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # that room loads torch
    from sparrow.models.spec import ModelSpec

BACKWARD = 2  # times the forward pass: gradients of what went in, and of the weights


def product_weights(spec: "ModelSpec") -> int:
    """Weights that every token is multiplied with: the N of 6 N T."""
    attention = spec.hidden * (sum(spec.qkv_sizes) + spec.qkv_sizes[0])
    layer = attention + 3 * spec.hidden * spec.intermediate
    return spec.layers * layer + spec.vocabulary * spec.hidden


def forward_flops(spec: "ModelSpec", lengths: Sequence[int]) -> float:
    """2 N T and causal attention: one pass over sequences of these lengths, logits included."""
    if any(length < 0 for length in lengths):
        raise ValueError(f"forward_flops: got a length of {min(lengths)} tokens, allowed: >= 0")
    attention = 2 * spec.layers * spec.heads * spec.head_size * sum(int(n) ** 2 for n in lengths)
    return float(2 * product_weights(spec) * sum(map(int, lengths)) + attention)


def training_flops(spec: "ModelSpec", lengths: Sequence[int]) -> float:
    """6 N T and causal attention three times: forward and backward, each operation once."""
    return (1 + BACKWARD) * forward_flops(spec, lengths)
