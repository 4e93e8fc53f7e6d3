"""Kernels of the dense parts against their definitions, in fp16 (the interpreter's bf16 is wrong).

An error is measured from the float64 result; a kernel may have twice that of the definition.
"""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from support import kernels as kernel_cases
from support.kernels import DEVICE, EPS, check_as_exact, check_heads

from sparrow.ops.kernels import heads as head_kernels
from sparrow.ops.kernels import layers as kernels
from sparrow.ops.kernels.layers import LinearLaunch
from sparrow.ops.reference import layers, logprob

OPS = ("norm_linear", "norm_gated", "linear_add", "logits")
# tokens, width, depth: whole blocks and odd ones
SHAPES = [(1, 48, 64), (3, 40, 72), (16, 32, 64), (17, 50, 100), (33, 16, 40)]
CUTS = (16, 32, 1), (64, 16, 1), (16, 16, 3)
LAUNCHES = [LinearLaunch(columns=c, depth=d, splits=splits) for c, d, splits in CUTS]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half().to(DEVICE)


@pytest.fixture(params=LAUNCHES, ids=str)
def launch(request, monkeypatch) -> LinearLaunch:
    monkeypatch.setattr(kernels, "launch_for", lambda *_, **__: request.param)
    return request.param


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("eight_bits", [False, True])
def test_products(eight_bits: bool) -> None:
    for (tokens, width, depth), op in product(SHAPES, OPS):
        sizes: Any = {"bias": tokens % 2 == 1, "gaps": True, "eight_bits": eight_bits}
        tensors, options = kernel_cases.product(op, tokens, width, depth, draw, **sizes)
        given = tensors[-1].clone() if op == "linear_add" else None
        plain = getattr(logprob if op == "logits" else layers, op).definition
        for _ in range(2):  # the counts of a split product must be back at zero
            out = getattr(kernels, op)(*tensors, **options)
            check_as_exact(out, plain, tensors, options, slack=1e-6)
        assert given is None or torch.equal(tensors[-1], given)


def test_a_gate_of_many_tokens() -> None:
    tensors, options = kernel_cases.product("norm_gated", 70, 40, 72, draw, bias=False, gaps=True)
    out = kernels.norm_gated(*tensors, **options)
    assert torch.equal(out, layers.norm_gated.definition(*tensors, **options))


def test_the_launch_of_a_shape_is_one_that_was_measured_or_the_rule(monkeypatch) -> None:
    measured = LinearLaunch(columns=64, depth=64)
    monkeypatch.setitem(kernels.LAUNCHES, ("linear_add", 32, 100, 200), measured)
    assert kernels.launch_for("linear_add", 17, 100, 200) is measured
    assert kernels.launch_for("linear_add", 16, 100, 200) != measured


def test_the_rule_fits_every_model() -> None:
    sizes = (1, 32, 64), (896, 2048, 6144, 9728, 17408, 151936), (896, 1024, 2560, 17408)
    for op, tokens, width, depth, eight_bits in product(OPS, *sizes, (False, True)):
        launch = kernels.launch_for(op, tokens, width, depth, eight_bits=eight_bits)
        rows = launch.columns * (2 if op == "norm_gated" else 1)
        bytes_of_tiles = 2 * launch.stages * launch.depth * (rows + kernels.tile(tokens))
        assert bytes_of_tiles <= 227 << 10
        assert launch.splits == 1 or -(-width // launch.columns) * launch.splits <= kernels.ARRIVALS


@pytest.mark.parametrize("normed", [False, True])
def test_split_heads(normed: bool) -> None:
    for sizes in ((1, 4, 2, 32), (3, 12, 4, 64), (2, 5, 1, 128)):
        tensors, options = kernel_cases.heads(*sizes, normed, draw)
        found = head_kernels.split_heads(*tensors, **options)
        check_heads(found, tensors, options, slack=1e-6)


def test_what_is_left_to_the_definitions() -> None:
    x, norm, weight = (torch.ones(*shape, dtype=torch.bfloat16) for shape in [(4, 8), (8,), (6, 8)])

    def can(x, *others) -> bool:
        return kernels.supports("norm_linear", x, norm, *others, eps=EPS)

    assert can(x, weight)
    assert can(x, weight, None)
    for row in (x.half(), x.float(), x.repeat(17, 1), x[:0]):
        assert not can(row, weight)
    assert not can(x, weight.T.contiguous().T)
    trained = weight.clone().requires_grad_()
    assert not can(x, trained)
    with torch.no_grad():
        assert can(x, trained)
    assert kernels.supports("linear_add", x.half(), weight.half(), x.half())

    def can_split(size: int, dtype=torch.bfloat16, **options: bool) -> bool:
        qkv, angle = torch.ones(3, 4 * size, dtype=dtype, **options), torch.ones(3, size // 2)
        return head_kernels.supports("split_heads", qkv, angle, angle, kv_heads=1, eps=EPS)

    assert can_split(64)
    assert can_split(128, torch.float16)
    assert not can_split(96)
    assert not can_split(64, torch.float32)
    assert not can_split(64, requires_grad=True)
