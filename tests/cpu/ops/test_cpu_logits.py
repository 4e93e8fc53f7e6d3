"""16-bit LM heads on a CPU: fp32 logits from a wide copy that is never stale."""

import gc

import pytest
import torch

from sparrow import ops
from sparrow.ops.cpu import logits as fast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_the_definition_bit_for_bit_and_notices_changes(dtype) -> None:
    hidden = torch.randn(5, 16).to(dtype)
    head = torch.nn.Parameter(torch.randn(40, 16).to(dtype))

    def check() -> None:
        with torch.no_grad():
            assert fast.supports("logits", hidden, head)
            found = ops.logits(hidden, head)
            with ops.using("reference"):
                assert torch.equal(found, ops.logits(hidden, head))
            assert found.dtype == torch.float32

    check()
    check()
    head.detach()[3:7].copy_(torch.randn(4, 16))  # as a weight update does, through a view
    check()
    head.data = torch.randn(40, 16).to(dtype)  # as waking up does
    check()
    with torch.inference_mode():
        head.detach().mul_(2)
    check()


def test_the_copy_goes_with_its_head() -> None:
    head = torch.randn(40, 16).bfloat16()
    ops.logits(torch.randn(2, 16).bfloat16(), head)
    key = id(head)
    assert key in fast._wide
    del head
    gc.collect()
    assert key not in fast._wide


def test_gradients_and_fp32_take_the_definition() -> None:
    head = torch.nn.Parameter(torch.randn(40, 16).bfloat16())
    assert not fast.supports("logits", torch.randn(2, 16).bfloat16(), head)
    assert not fast.supports("logits", torch.randn(2, 16), torch.randn(40, 16))
