"""The dense parts of a decoder layer: norm, projections, rotary embedding, gate.

Products and norms are fused in one op where the optimised kernel fuses them; definitions are the
plain composition, with gradients. Products take a low-rank update of each row's own (`LowRank`),
and weights in 8 bits (`Int8Weight`).
Legend of the dimension letters: sparrow/ops/types.py; E is the width of a projection, F the
intermediate size of the MLP, I the inputs of a product; of updates as in `LowRank`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.ops.dispatch import op
from sparrow.ops.types import LowRank, Weight


@op(checked=False)
def norm_linear(
    x_TC: Tensor,
    norm_C: Tensor,
    weight_EC: Weight,
    bias_E: Tensor | None = None,
    *,
    eps: float,
    update: LowRank | None = None,
) -> Tensor:
    """RMS norm, then a projection, [T, E]."""
    normed_TC = F.rms_norm(x_TC, norm_C.shape, norm_C, eps)
    return _updated(linear(normed_TC, weight_EC, bias_E), normed_TC, update)


@op(checked=False)
def linear_add(
    x_TE: Tensor, weight_CE: Weight, residual_TC: Tensor, *, update: LowRank | None = None
) -> Tensor:
    """A projection added to the residual stream, [T, C]; not in place."""
    return residual_TC + _updated(linear(x_TE, weight_CE), x_TE, update)


@op(checked=False)
def norm_gated(
    x_TC: Tensor,
    norm_C: Tensor,
    weight_FC: Weight,
    *,
    eps: float,
    update: LowRank | None = None,
) -> Tensor:
    """RMS norm, then silu(gate) * up, [T, F]; the weight's first half is the gate's."""
    gate_up_TF = norm_linear.definition(x_TC, norm_C, weight_FC, eps=eps, update=update)
    return gate.definition(gate_up_TF)


def linear(x_TI: Tensor, weight_EI: Weight, bias_E: Tensor | None = None) -> Tensor:
    """A projection, [T, E]; of a weight in 8 bits in the dtype of x, whole numbers first."""
    if isinstance(weight_EI, Tensor):
        return F.linear(x_TI, weight_EI, bias_E)
    out_TE = F.linear(x_TI, weight_EI.data_EI.to(x_TI.dtype)) * weight_EI.scale_E.to(x_TI.dtype)
    return out_TE if bias_E is None else out_TE + bias_E


def _updated(out_TE: Tensor, x_TI: Tensor, update: LowRank | None) -> Tensor:
    """A product of x with what each row's slot adds; a row without one keeps its bits.

    One product with A of all slots, zeros where a row does not use the slot, one product with B of
    each part: as many, however many slots there are.
    """
    if update is None:
        return out_TE
    update.check(len(x_TI), x_TI.shape[1], out_TE.shape[1])
    rows, parts = update.rows, len(update.parts)
    low_TMSr = F.linear(x_TI, update.a_RI).unflatten(1, (parts, rows.count, update.rank))
    low_TMQ = torch.where(rows.uses_TS[:, None, :, None], low_TMSr, 0).flatten(2)
    outs, bs = out_TE.split(update.parts, dim=1), update.b_EQ.split(update.parts)
    sums = map(torch.addmm, outs, low_TMQ.unbind(1), (b_EQ.T for b_EQ in bs))
    return torch.where(rows.any_T1, torch.cat([*sums], dim=1), out_TE)


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
