"""The decoder: one definition for rollout and training; attention is an argument.

Tokens come packed, without a batch dimension: T tokens of any number of sequences, their ids and
positions. What a token may attend to, and where keys and values are kept, is the attention's
business, so the same module runs training, dense prefill, paged decode and sparse decode.

q, k, v share one matrix and so do gate and up: fewer, larger products. `weights.hf_views` gives
every part its Hugging Face name again, as a view. Legend of the dimension letters:
sparrow/ops/types.py; F is the intermediate size.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


class Lora(Protocol):
    """A projection of a layer with what an adapter adds to it, [T, in] -> [T, out]: training.

    `name` is the decoder's own name of the projection: qkv, out, gate_up or down.
    """

    def __call__(self, layer: int, name: str, x: Tensor, linear: nn.Linear, /) -> Tensor: ...


class Updates(ABC):
    """What adapters of rows add to a projection, by layer and name as in `Lora`: rollout.

    Rows without an adapter keep their bits. A class, as layers ask which of the two they have.
    """

    @abstractmethod
    def update(self, layer: int, name: str, /) -> ops.LowRank: ...


class LayerCall(Protocol):
    """A wrapper around the call of a layer: to checkpoint activations, cast or observe."""

    def __call__(self, layer: nn.Module, x_TC: Tensor, /, *args: Any) -> Tensor: ...


class Rotation(NamedTuple):
    """Cosine and sine of T positions, fp32 [T, D / 2]."""

    cos: Tensor
    sin: Tensor


class Decoder(nn.Module):
    """Token ids to final hidden states; `head` turns those into logits."""

    source: Path | None = None  # the folder it was loaded from
    edition: int = 0  # how often an engine has changed its weights

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocabulary, spec.hidden)
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.lm_head = None if spec.tied else nn.Linear(spec.hidden, spec.vocabulary, bias=False)
        self._frequencies, self._magnitude = spec.rope.frequencies(spec.head_size)
        self._rotations: dict[torch.device, Rotation] = {}

    def __repr__(self) -> str:
        millions = sum(weight.numel() for weight in self.parameters()) / 1e6
        place = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        source = "random weights" if self.source is None else str(self.source)
        return f"Decoder({self.spec.family}, {millions:.1f} M parameters, {place}, {source})"

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        lora: Lora | Updates | None = None,
        through: LayerCall | None = None,
    ) -> Tensor:
        """Final hidden states [T, C], after the last norm; `through` is how layers are called."""
        x_TC = self._embed(ids_T)
        rotation = self._rotation(positions_T)
        for layer in self.layers:
            arguments = (x_TC, rotation, attention, lora)
            x_TC = layer(*arguments) if through is None else through(layer, *arguments)
        return self.norm(x_TC)

    def _embed(self, ids_T: Tensor) -> Tensor:
        """Without gradients by plain indexing, whose GPU kernel is much faster for few tokens."""
        return self.embed(ids_T) if torch.is_grad_enabled() else self.embed.weight[ids_T]

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
        """Cosine and sine of every position, computed once in fp32 whatever the weights' dtype.

        Hence no buffer, which a cast could round.
        """
        device = positions_T.device
        if device not in self._rotations:
            with torch.inference_mode(False):
                self._rotations[device] = self._all_rotations(device)
        cos, sin = self._rotations[device]
        return Rotation(cos=cos[positions_T], sin=sin[positions_T])

    def _all_rotations(self, device: torch.device) -> Rotation:
        frequencies = torch.tensor(self._frequencies, device=device)
        positions = torch.arange(self.spec.max_positions, device=device)
        angle = positions[:, None].float() * frequencies
        return Rotation(cos=angle.cos() * self._magnitude, sin=angle.sin() * self._magnitude)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.attention_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.attention = SelfAttention(spec, index)
        self.mlp_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self, x_TC: Tensor, rotation: Rotation, attention: Attention, lora: Lora | Updates | None
    ) -> Tensor:
        if not isinstance(lora, Updates | None):
            return self._adapted(x_TC, rotation, attention, lora)

        def update(name: str) -> ops.LowRank | None:
            return None if lora is None else lora.update(self.index, name)

        norm, eps = self.attention_norm, self.attention.spec.norm_eps
        qkv, own = self.attention.qkv, update("qkv")
        qkv_TE = ops.norm_linear(x_TC, norm.weight, qkv.weight, qkv.bias, eps=eps, update=own)
        out_TE = self.attention(qkv_TE, rotation, attention)
        x_TC = ops.linear_add(out_TE, self.attention.out.weight, x_TC, update=update("out"))
        norm, gate_up, own = self.mlp_norm, self.mlp.gate_up, update("gate_up")
        gated_TF = ops.norm_gated(x_TC, norm.weight, gate_up.weight, eps=eps, update=own)
        return ops.linear_add(gated_TF, self.mlp.down.weight, x_TC, update=update("down"))

    def _adapted(
        self, x_TC: Tensor, rotation: Rotation, attention: Attention, lora: Lora
    ) -> Tensor:
        """The same with a trained adapter, which needs every projection's input and output."""

        def project(name: str, linear: nn.Linear, x: Tensor) -> Tensor:
            return lora(self.index, name, x, linear)

        qkv_TE = project("qkv", self.attention.qkv, self.attention_norm(x_TC))
        out_TE = self.attention(qkv_TE, rotation, attention)
        x_TC = x_TC + project("out", self.attention.out, out_TE)
        gate_up_TF = project("gate_up", self.mlp.gate_up, self.mlp_norm(x_TC))
        return x_TC + project("down", self.mlp.down, ops.gate(gate_up_TF))


class SelfAttention(nn.Module):
    """Weights of the projections; heads, QK-norm and rotation before the attention passed in."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        self.qkv = nn.Linear(spec.hidden, sum(spec.qkv_sizes), bias=spec.qkv_bias)
        self.out = nn.Linear(spec.qkv_sizes[0], spec.hidden, bias=False)
        self.q_norm = nn.RMSNorm(spec.head_size, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = nn.RMSNorm(spec.head_size, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(self, qkv_TE: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        q_THD, k_TGD, v_TGD = ops.split_heads(
            qkv_TE,
            rotation.cos,
            rotation.sin,
            self.q_norm.weight if self.q_norm is not None else None,
            self.k_norm.weight if self.k_norm is not None else None,
            kv_heads=self.spec.kv_heads,
            eps=self.spec.norm_eps,
        )
        scale = self.spec.head_size**-0.5
        return attention(self.index, q_THD, k_TGD, v_TGD, scale=scale).flatten(1)


class MLP(nn.Module):
    """Weights of the gated MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=False)
