"""Launching a kernel before the one ahead of it has ended (programmatic dependent launch).

A kernel's start, about a microsecond, then passes while its predecessor still works. Weights it may
read at once, if the caller has promised that nothing running writes them (`ops.settled_weights`;
without that promise products are launched as usual); everything else only when the kernels ahead
have ended and their results can be seen: `wait` and `when_ready` see to that. Every kernel launched
so must wait, even where it reads nothing of its predecessor: that is how "ahead" reaches past one
kernel.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlaps(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched so: from Hopper on."""
    return tensor.is_cuda and _can(tensor.device)


def overlap_options(tensor: Tensor, allowed: bool = True) -> dict[str, bool]:
    """The options of a launch that overlaps the one before, where it can and may."""
    overlap = allowed and overlaps(tensor)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr) -> None:
    """The next kernel may start, as soon as all programs of this one have come here."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start, and wait for those ahead."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def when_ready(offset: tl.tensor, OVERLAP: tl.constexpr) -> tl.tensor:
    """The same offset, a multiple of 16, once the kernels ahead have ended.

    A value, not a statement: in a pipelined loop only what is loaded at this offset waits.
    """
    if OVERLAP:
        offset = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [offset], tl.int32, is_pure=True, pack=1
        )
        offset = tl.multiple_of(offset, 16)
    return offset
