"""Packing: documents in one row of tokens, without padding and without seeing each other.

And dense attention over them: the reference, or the GPU's flash kernel. Legend of the dimension
letters: sparrow/ops/types.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.models.attention import Packed
from sparrow.models.decoder import Attention
from sparrow.schema.base import BoolArray, Int32Array
from sparrow.schema.episode import Document, TrainSample

CAUSAL = (-1, 0)  # any number of tokens to the left, none to the right


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """T tokens of several documents, and the R positions that predict a learnt token."""

    ids_T: Tensor
    positions_T: Tensor
    bounds: Tensor  # where documents begin and end, int32 [B + 1]
    longest: int
    sources_R: Tensor  # positions whose next token is learnt
    targets_R: Tensor  # that token

    def to(self, device: torch.device) -> "Pack":
        """Copy to a device, asynchronously."""

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        names = ("ids_T", "positions_T", "bounds", "sources_R", "targets_R")
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **moved)


def pack(documents: Sequence[Document]) -> Pack:
    """Pack documents in order; everything behind a prompt is learnt."""
    learnt = [np.arange(len(document)) >= document.prompt for document in documents]
    return _packed([document.ids for document in documents], learnt)


def pack_samples(samples: Sequence[TrainSample]) -> Pack:
    """Pack samples in order; the tokens in their loss are learnt."""
    return _packed([sample.ids for sample in samples], [sample.loss_mask for sample in samples])


def _packed(ids: Sequence[Int32Array], learnt: Sequence[BoolArray]) -> Pack:
    if not ids:
        raise ValueError("pack: no documents")
    lengths = [len(document) for document in ids]
    joined = np.concatenate(ids).astype(np.int64)
    sources = np.flatnonzero(np.concatenate(learnt)) - 1
    return Pack(
        ids_T=torch.from_numpy(joined),
        positions_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        longest=max(lengths),
        sources_R=torch.from_numpy(sources),
        targets_R=torch.from_numpy(joined[sources + 1]),
    )


def join(parts: Sequence[np.ndarray]) -> Tensor:
    """Values by learnt token of several samples, one after the other."""
    return torch.from_numpy(np.concatenate(parts))


def by_token(values: Sequence[float], samples: Sequence[TrainSample]) -> Tensor:
    """Repeat the value of each sample for every learnt token of it."""
    counts = [sample.learnt for sample in samples]
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """`Packed` by torch's variable-length flash attention: 16-bit products on a GPU."""

    bounds: Tensor
    longest: int
    dtype: torch.dtype

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        group = q_THD.shape[1] // k_TGD.shape[1]
        k_THD, v_THD = (x.to(self.dtype).repeat_interleave(group, dim=1) for x in (k_TGD, v_TGD))
        q_THD = q_THD.to(self.dtype)
        span = (self.bounds, self.bounds, self.longest, self.longest)
        out_THD = varlen_attn(q_THD, k_THD, v_THD, *span, scale=scale, window_size=CAUSAL)
        assert isinstance(out_THD, Tensor)
        return out_THD


def packed_attention(pack: Pack, dtype: torch.dtype) -> Attention:
    """The flash kernel where it can run, otherwise the reference: the same function."""
    if pack.ids_T.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return Flash(bounds=pack.bounds, longest=pack.longest, dtype=dtype)
    return Packed(bounds=pack.bounds)
