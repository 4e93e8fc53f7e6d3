"""Programmatic dependent launch: a kernel is launched before the previous one has ended.

Its launch, about a microsecond, overlaps the previous kernel. It may read weights (and which slots
of updates rows use) at once, if the caller has promised that no running kernel writes them
(`ops.settled_weights`; without that promise products are launched as usual); everything else only
when the previous kernels have ended and their results are visible: by `wait` and `when_ready`.
Every such kernel must wait, even where it reads nothing of its predecessor: otherwise its successor
would not wait for the kernels before both.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlaps(tensor: Tensor) -> bool:
    """Whether the device of a tensor has dependent launch: from Hopper on."""
    return tensor.is_cuda and _can(tensor.device)


def overlap_options(tensor: Tensor, allowed: bool = True) -> dict[str, bool]:
    """Launch options for overlap with the previous kernel, where possible and allowed."""
    overlap = allowed and overlaps(tensor)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Allow the next kernel to start, once all programs of this one have reached this point."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Allow the next kernel to start, and wait for the previous ones."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def when_ready(offset, OVERLAP: tl.constexpr):
    """The same offset, a multiple of 16, once the previous kernels have ended.

    A value, not a statement: in a pipelined loop only what is loaded at this offset waits.
    """
    if OVERLAP:
        offset = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [offset], tl.int32, is_pure=True, pack=1
        )
        offset = tl.multiple_of(offset, 16)
    return offset
