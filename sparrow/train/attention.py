"""Dense attention for training: the definition, or the GPU's flash kernel over packed documents.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.models.attention import Packed
from sparrow.models.decoder import Attention
from sparrow.train.packing import Pack

CAUSAL = (-1, 0)  # any number of tokens to the left, none to the right


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


def attention_of(pack: Pack, dtype: torch.dtype) -> Attention:
    """The flash kernel where it can run, otherwise the definition: the same function."""
    if pack.ids_T.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return Flash(bounds=pack.bounds, longest=pack.longest, dtype=dtype)
    return Packed(bounds=pack.bounds)
