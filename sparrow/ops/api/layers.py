"""Contracts of a decoder layer's dense parts: norm, projections, rotation, gate.

Products and norms are fused in one op where a fast version wants them so; each definition is the
plain composition, with gradients. Legend of the dimension letters: sparrow/ops/types.py; E is the
width of a projection, F the intermediate size of the MLP.
"""

from torch import Tensor

from sparrow.ops.dispatch import run
from sparrow.ops.reference import layers as _layers


def norm_linear(
    x_TC: Tensor, norm_C: Tensor, weight_EC: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    """RMS norm, then a projection, [T, E]."""
    return run("norm_linear", _layers.norm_linear, x_TC, norm_C, weight_EC, bias_E, eps=eps)


def linear_add(x_TE: Tensor, weight_CE: Tensor, residual_TC: Tensor) -> Tensor:
    """A projection added to the residual stream, [T, C]; the stream given is left as it is."""
    return run("linear_add", _layers.linear_add, x_TE, weight_CE, residual_TC)


def norm_gated(x_TC: Tensor, norm_C: Tensor, weight_FC: Tensor, *, eps: float) -> Tensor:
    """RMS norm, then silu(gate) * up, [T, F]; the weight's first half is the gate's."""
    return run("norm_gated", _layers.norm_gated, x_TC, norm_C, weight_FC, eps=eps)


def gate(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of each row."""
    return run("gate", _layers.gate, gate_up_TF)


def split_heads(
    qkv_TE: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    *,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, G, D] of a fused projection, ready to attend.

    Queries and keys get their RMS norm per head, where there is one, and are then rotated in fp32:
    cos and sin are fp32 [T, D / 2], channel i turns with channel i + D / 2.
    """
    return run(
        "split_heads",
        _layers.split_heads,
        qkv_TE,
        cos_TD,
        sin_TD,
        q_norm_D,
        k_norm_D,
        kv_heads=kv_heads,
        eps=eps,
    )
