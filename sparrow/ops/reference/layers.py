"""The dense parts of a decoder layer: norm, projections, rotary embedding, gate.

Products and norms are fused in one op where the optimised kernel fuses them; definitions are the
plain composition, with gradients.
Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection, F the
intermediate size of the MLP.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.ops.dispatch import op


@op(checked=False)
def norm_linear(
    x_TC: Tensor, norm_C: Tensor, weight_EC: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    """RMS norm, then a projection, [T, E]."""
    return F.linear(F.rms_norm(x_TC, norm_C.shape, norm_C, eps), weight_EC, bias_E)


@op(checked=False)
def linear_add(x_TE: Tensor, weight_CE: Tensor, residual_TC: Tensor) -> Tensor:
    """A projection added to the residual stream, [T, C]; not in place."""
    return residual_TC + F.linear(x_TE, weight_CE)


@op(checked=False)
def norm_gated(x_TC: Tensor, norm_C: Tensor, weight_FC: Tensor, *, eps: float) -> Tensor:
    """RMS norm, then silu(gate) * up, [T, F]; the weight's first half is the gate's."""
    return gate.definition(norm_linear.definition(x_TC, norm_C, weight_FC, eps=eps))


@op(checked=False)
def gate(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of each row."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return F.silu(gate_TF) * up_TF


@op(checked=False)
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
    size = 2 * cos_TD.shape[1]
    heads = qkv_TE.shape[1] // size - 2 * kv_heads
    q_THD, k_TGD, v_TGD = qkv_TE.unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
    if q_norm_D is not None and k_norm_D is not None:
        q_THD = F.rms_norm(q_THD, q_norm_D.shape, q_norm_D, eps)
        k_TGD = F.rms_norm(k_TGD, k_norm_D.shape, k_norm_D, eps)
    return rotate(q_THD, cos_TD, sin_TD), rotate(k_TGD, cos_TD, sin_TD), v_TGD


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate channel i with channel i + half by each token's angles, in fp32."""
    first, second = x_THD.float().chunk(2, dim=2)
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    return rotated.to(x_THD.dtype)
