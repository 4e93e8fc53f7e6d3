"""Logits of 16-bit weights on a CPU: an fp32 copy of the LM head is cached.

Logits are fp32 whatever the weights' dtype (see reference/logprob.py), and no CPU product gives
fp32 from 16-bit inputs. The copy takes twice the memory of the head; it is renewed when the head
has changed or moved, and freed with the head. (Changes through `.data`, which torch does not count,
are not noticed.)
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from sparrow.ops.dispatch import needs_gradients
from sparrow.ops.reference import logprob
from sparrow.ops.types import Weight

TOKENS = 256  # above, widening costs little beside the product
_wide: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], Tensor]] = {}


def supports_dtype(_op: str, dtype: torch.dtype, _head_size: int) -> bool:
    """Whether an output head of this dtype is multiplied here: 16-bit ones."""
    return dtype in (torch.bfloat16, torch.float16)


def supports(op: str, hidden_TC: Tensor, head_VC: Weight, *_: Any, **__: Any) -> bool:
    return (
        isinstance(head_VC, Tensor)
        and supports_dtype(op, head_VC.dtype, 0)
        and len(hidden_TC) <= TOKENS
        and not needs_gradients(hidden_TC, head_VC)
        and not head_VC.is_inference()  # whose changes cannot be noticed
    )


def logits(hidden_TC: Tensor, head_VC: Tensor) -> Tensor:
    return logprob.logits.definition(hidden_TC.float(), _widened(head_VC))


def _widened(head_VC: Tensor) -> Tensor:
    """The cached fp32 copy of a head, by its identity and version."""
    state = (head_VC.data_ptr(), head_VC._version)
    cached = _wide.get(id(head_VC))
    if cached is not None and cached[0]() is head_VC and cached[1] == state:
        return cached[2]
    with torch.inference_mode(False):
        wide_VC = head_VC.detach().float()
    key = id(head_VC)
    owner = weakref.ref(head_VC, lambda _: _wide.pop(key, None))
    _wide[key] = (owner, state, wide_VC)
    return wide_VC
