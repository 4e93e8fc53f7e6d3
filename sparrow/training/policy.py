"""The dense policy as the learner runs it: packs in, log-probs of the learnt tokens out.

Weights are float32. With a 16-bit dtype the whole forward pass runs in it, on copies of the weights
that are made layer by layer, so the policy rounds as the engine does; gradients are float32. On
several devices FSDP2 shards weights and makes the copies. A layer's activations may be recomputed
in the backward pass (activation checkpointing). Legend: sparrow/ops/types.py; R are learnt tokens,
A those of them whose actor states are known.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sparrow import ops
from sparrow.models import Decoder
from sparrow.models.decoder import Attention, Lora
from sparrow.models.lora import Adapter
from sparrow.training.packing import Pack, packed_attention
from sparrow.training.sparse_attention import SparseDecoding, sparse_attention

CHUNK_BYTES = 2**30  # of logits at a time on a GPU: enough rows for full speed


class ActorStates(NamedTuple):
    """Final hidden states from which the actor sampled, and the numbers of those learnt tokens.

    older: LM heads of earlier versions, with the tokens of A that were sampled by each.
    """

    hidden_AC: Tensor
    places_A: Tensor
    older: Sequence[tuple[Tensor, Tensor]] = ()

    def acceptance(self, hidden_RC: Tensor, head_VC: Tensor) -> Tensor:
        """Acceptance of the policy with these states and head, [A]."""
        policy_AC, drawn_AC = hidden_RC[self.places_A], self.hidden_AC.to(hidden_RC)
        alpha_A = ops.acceptance(policy_AC, drawn_AC, head_VC)
        for older_VC, at in self.older:
            alpha_A[at] = ops.acceptance(
                policy_AC[at], drawn_AC[at], head_VC, q_head_VC=older_VC.to(head_VC)
            )
        return alpha_A


class Scores(NamedTuple):
    """Log-prob and entropy of every learnt token; exact acceptance where actor states are known."""

    logprob_R: Tensor
    entropy_R: Tensor
    alpha_A: Tensor | None
    hidden_RC: Tensor


class TeacherStates(NamedTuple):
    """The policy at one moment: its LM head, and final hidden states by sample.

    The states of a sample are on the rank that computed them; None elsewhere.
    """

    head_VC: Tensor
    hidden: Sequence[Tensor | None]  # [R, C] each, in host memory


class Policy(nn.Module):
    """A decoder that computes in `dtype`; its weights are float32 unless they are frozen.

    adapter: what is trained instead of the weights (LoRA), in float32.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        compiled: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        if adapter is not None:
            model.requires_grad_(False)
            for tensor in adapter.tensors().values():
                tensor.requires_grad_()
        if model.dtype != torch.float32 and any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"training needs float32 weights, the model has {model.dtype}")
        self.model, self.dtype, self.adapter = model, dtype, adapter
        self.recompute, self.compiled = recompute, compiled
        self.sharded = False  # FSDP2 makes the 16-bit copies itself

    def trained(self) -> dict[str, Tensor]:
        """What is trained: the decoder's weights by name, or an adapter's by PEFT's names."""
        if self.adapter is not None:
            return self.adapter.tensors()
        return dict(self.model.named_parameters())

    def forward(
        self,
        pack: Pack,
        actor: ActorStates | None = None,
        sparse: SparseDecoding | None = None,
    ) -> Scores:
        """Score a pack; with gradients where they are enabled, but none of acceptance.

        sparse: as sparse decoding would; None: densely.
        """
        attention = None if sparse is None else self.sparse_attention(pack, sparse)
        with self.gradient_ops():
            hidden_RC, head_VC = self._hidden(pack, attention, None), self.head
            stats = ops.token_stats(hidden_RC, head_VC, pack.targets_R, chunk=self.chunk)
            alpha_A = None
            if actor is not None:
                with torch.no_grad():
                    alpha_A = actor.acceptance(hidden_RC, head_VC)
        return Scores(stats.logprob, stats.entropy, alpha_A, hidden_RC)

    def hidden(
        self, pack: Pack, attention: Attention | None = None, lora: Lora | None = None
    ) -> Tensor:
        """Final hidden states at the positions that predict a learnt token, [R, C].

        Dense unless another attention is given. Beside an adapter (lora, or else the policy's
        own), weights get no gradients.
        Scores of the states need `head` in chunks of `chunk`, under `gradient_ops`.
        """
        with self.gradient_ops():
            return self._hidden(pack, attention, lora)

    def sparse_attention(self, pack: Pack, sparse: SparseDecoding) -> Attention:
        """The attention of sparse decoding, for whole sequences."""
        spec = self.model.spec
        sizes: dict[str, Any] = {"layers": spec.layers, "kv_heads": spec.kv_heads}
        return sparse_attention(pack, *sparse, **sizes, dtype=self.dtype)

    @property
    def head(self) -> Tensor:
        """The LM head in the dtype of products; on several devices after a forward pass only."""
        return self.model.head.to(self.dtype)

    @property
    def chunk(self) -> int | None:
        """Tokens whose logits exist at a time; None: the default of ops."""
        if self.model.device.type != "cuda":
            return None
        return max(1, CHUNK_BYTES // (4 * self.model.spec.vocabulary))

    def _hidden(self, pack: Pack, attention: Attention | None, lora: Lora | None) -> Tensor:
        attention = attention or packed_attention(pack, self.dtype)
        if lora is None and self.adapter is not None:
            lora = self.adapter.to(self.dtype)
        arguments = (pack.ids_T, pack.positions_T, attention, lora, self._through)
        frozen = lora is not None
        named = self.model.named_parameters()
        outside = [pair for pair in named if not pair[0].startswith("layers.")]
        return self._call(self.model, outside, arguments, frozen=frozen)[pack.sources_R]

    def _through(self, layer: nn.Module, x_TC: Tensor, *args: Any) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            y_TC = checkpoint(self._layer, layer, x_TC, *args, use_reentrant=False)
            assert isinstance(y_TC, Tensor)
            return y_TC
        return self._layer(layer, x_TC, *args)

    def _layer(self, layer: nn.Module, x_TC: Tensor, *args: Any) -> Tensor:
        """Run one layer; it sets its ops itself, as it may run again long after `forward`."""
        frozen = args[-1] is not None  # an adapter
        with self.gradient_ops():
            return self._call(layer, layer.named_parameters(), (x_TC, *args), frozen=frozen)

    def _call(
        self,
        module: nn.Module,
        named: Iterable[tuple[str, Tensor]],
        arguments: tuple[Any, ...],
        *,
        frozen: bool,
    ) -> Tensor:
        """Call a module in the dtype of products; frozen weights: no gradient of them is made."""
        if self.sharded or (self.dtype == torch.float32 and not frozen):
            return module(*arguments)
        weights = {
            name: (weight.detach() if frozen else weight).to(self.dtype) for name, weight in named
        }
        return functional_call(module, weights, arguments)

    def gradient_ops(self) -> AbstractContextManager[None]:
        """Use ops with gradients: optimised kernels have none."""
        return ops.using("compiled" if self.compiled else "reference")


def shard(policy: Policy) -> Policy:
    """Shard weights, gradients and moments over the ranks, layer by layer (FSDP2).

    Inputs are not cast: angles of positions are float32 whatever the dtype of products.
    """
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = init_device_mesh(policy.model.device.type, (get_world_size(),))
    mixed = MixedPrecisionPolicy(
        param_dtype=policy.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    register_fsdp_forward_method(policy, "hidden")
    policy.sharded = True
    return policy


def reshard(policy: Policy) -> None:
    """Reshard the float32 weights after passes without gradients."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(policy, FSDPModule):
        policy.reshard()


def full_tensor(weight: Tensor) -> Tensor:
    """A weight or moment that may be sharded, in one piece; a collective call on all ranks."""
    full = getattr(weight, "full_tensor", None)
    return full() if full is not None else weight
