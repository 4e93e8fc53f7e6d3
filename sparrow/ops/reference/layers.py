"""Definitions of a decoder layer's dense parts: norm, projections, rotation, gate.

Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection, F the
intermediate size of the MLP.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def norm_linear(
    x_TC: Tensor, norm_C: Tensor, weight_EC: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    return F.linear(F.rms_norm(x_TC, norm_C.shape, norm_C, eps), weight_EC, bias_E)


def linear_add(x_TE: Tensor, weight_CE: Tensor, residual_TC: Tensor) -> Tensor:
    return residual_TC + F.linear(x_TE, weight_CE)


def norm_gated(x_TC: Tensor, norm_C: Tensor, weight_FC: Tensor, *, eps: float) -> Tensor:
    return gate(norm_linear(x_TC, norm_C, weight_FC, eps=eps))


def gate(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return F.silu(gate_TF) * up_TF


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
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    return turned.to(x_THD.dtype)
