"""The decoder: one definition for rollout and training; attention is an argument.

Tokens come packed, without a batch dimension: T tokens of any number of sequences, their ids and
positions. What a token may attend to, and where keys and values are kept, is the attention's
business, so the same module runs training, dense prefill, paged decode and sparse decode.

q, k, v share one matrix and so do gate and up: fewer, larger products. `weights.hf_views` gives
every part its Hugging Face name again, as a view. Legend of the dimension letters:
sparrow/ops/types.py; F is the intermediate size.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow import ops
from sparrow.models.spec import ModelSpec


class Attention(Protocol):
    """Attends the queries of T tokens in one layer, [T, H, D] -> [T, H, D].

    k and v belong to the same tokens, [T, G, D], with positions already rotated in. A cached
    attention stores them before it looks.
    """

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, /, *, scale: float
    ) -> Tensor: ...


class Rotation(NamedTuple):
    """Cosine and sine of T positions, fp32 [T, 1, D]."""

    cos: Tensor
    sin: Tensor

    def apply(self, x_THD: Tensor) -> Tensor:
        x = x_THD.float()
        first, second = x.chunk(2, dim=2)
        return (x * self.cos + torch.cat((-second, first), dim=2) * self.sin).to(x_THD.dtype)


class Decoder(nn.Module):
    """Token ids to final hidden states; `head` turns those into logits."""

    source: Path | None = None  # the folder it was loaded from

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocabulary, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.lm_head = None if spec.tied else nn.Linear(spec.hidden, spec.vocabulary, bias=False)
        self._frequencies, self._magnitude = spec.rope.frequencies(spec.head_size)
        self._frequencies_on: dict[torch.device, Tensor] = {}

    def forward(self, ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Final hidden states [T, C], after the last norm."""
        x_TC = self.embed(ids_T)
        rotation = self._rotation(positions_T)
        for layer in self.layers:
            x_TC = layer(x_TC, rotation, attention)
        return self.norm(x_TC)

    @property
    def head(self) -> Tensor:
        """The LM head, [V, C]; the embedding itself where the two are tied."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """fp32 logits [T, V] of a few tokens; long sequences go through `ops.token_stats`."""
        return ops.logits(hidden_TC, self.head)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def _rotation(self, positions_T: Tensor) -> Rotation:
        """Angles in fp32 whatever the weights' dtype; hence no buffer that a cast could round."""
        device = positions_T.device
        if device not in self._frequencies_on:
            self._frequencies_on[device] = torch.tensor(self._frequencies, device=device)
        angle_TD = (positions_T[:, None].float() * self._frequencies_on[device]).repeat(1, 2)
        angle_T1D = angle_TD.unsqueeze(1)
        return Rotation(
            cos=angle_T1D.cos() * self._magnitude, sin=angle_T1D.sin() * self._magnitude
        )


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.attention = SelfAttention(spec, index)
        self.mlp_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x_TC: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        x_TC = x_TC + self.attention(self.attention_norm(x_TC), rotation, attention)
        return x_TC + self.mlp(self.mlp_norm(x_TC))


class SelfAttention(nn.Module):
    """Projections, QK-norm and rotation around the attention that was passed in."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        self.qkv = nn.Linear(spec.hidden, sum(spec.qkv_sizes), bias=spec.qkv_bias)
        self.out = nn.Linear(spec.qkv_sizes[0], spec.hidden, bias=False)
        self.q_norm = nn.RMSNorm(spec.head_size, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(spec.head_size, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(self, x_TC: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        q_TE, k_TE, v_TE = self.qkv(x_TC).split(self.spec.qkv_sizes, dim=1)
        heads = (-1, self.spec.head_size)
        q_THD, k_TGD, v_TGD = (part.unflatten(1, heads) for part in (q_TE, k_TE, v_TE))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD), self.k_norm(k_TGD)
        q_THD, k_TGD = rotation.apply(q_THD), rotation.apply(k_TGD)
        scale = self.spec.head_size**-0.5
        out_THD = attention(self.index, q_THD, k_TGD, v_TGD, scale=scale)
        return self.out(out_THD.flatten(1))


class MLP(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TC).chunk(2, dim=1)
        return self.down(F.silu(gate_TF) * up_TF)
