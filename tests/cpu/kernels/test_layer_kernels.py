"""Kernels of the dense parts against their definitions, in fp16 (the interpreter's bf16 is wrong).

An error is measured from the float64 result; a kernel may have twice that of the definition.
"""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from sparrow.ops.kernels import layers as kernels
from sparrow.ops.kernels.layers import Launch
from sparrow.ops.reference import layers, logprob

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# tokens, width, depth: whole blocks and odd ones
SHAPES = [(1, 48, 64), (3, 40, 72), (16, 32, 64), (17, 50, 100), (33, 16, 40)]
LAUNCHES = [
    Launch(columns=16, depth=32),
    Launch(columns=64, depth=16),
    Launch(columns=16, depth=16, splits=3),
]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half().to(DEVICE)


def assert_as_exact(out, definition, *tensors, **options) -> None:
    """The kernel's result against the definition's, each compared with float64."""
    exact = definition(*(None if x is None else x.double() for x in tensors), **options)
    near = definition(*tensors, **options)
    assert out.dtype == near.dtype
    assert out.shape == near.shape
    allowed = 2 * (near - exact).abs().max() + 1e-6
    assert (out - exact).abs().max() <= allowed


@pytest.fixture(params=LAUNCHES, ids=str)
def launch(request, monkeypatch) -> Launch:
    monkeypatch.setattr(kernels, "launch_for", lambda *_: request.param)
    return request.param


@pytest.mark.usefixtures("launch")
def test_products_after_a_norm() -> None:
    for tokens, width, depth in SHAPES:
        torch.manual_seed(tokens)
        x, norm = draw(tokens, 2 * depth)[:, :depth], draw(depth)  # rows with gaps between them
        weight, bias_E = draw(width, depth, scale=0.1), draw(width) if tokens % 2 else None
        out = kernels.norm_linear(x, norm, weight, bias_E, eps=EPS)
        assert_as_exact(out, layers.norm_linear.definition, x, norm, weight, bias_E, eps=EPS)
        weight = draw(2 * width, depth, scale=0.2)
        out = kernels.norm_gated(x, norm, weight, eps=EPS)
        assert_as_exact(out, layers.norm_gated.definition, x, norm, weight, eps=EPS)


def test_the_launch_of_a_shape_is_one_that_was_measured_or_the_rule(monkeypatch) -> None:
    measured = Launch(columns=64, depth=64)
    monkeypatch.setitem(kernels.LAUNCHES, ("linear_add", 32, 100, 200), measured)
    assert kernels.launch_for("linear_add", 17, 100, 200) is measured
    assert kernels.launch_for("linear_add", 16, 100, 200) != measured


def test_the_rule_fits_every_model() -> None:
    sizes = (1, 32, 64), (896, 2048, 6144, 9728, 17408, 151936), (896, 1024, 2560, 17408)
    names = ("norm_linear", "norm_gated", "linear_add", "logits")
    for op, tokens, width, depth in product(names, *sizes):
        launch = kernels.launch_for(op, tokens, width, depth)
        rows = launch.columns * (2 if op == "norm_gated" else 1)
        bytes_of_tiles = 2 * launch.stages * launch.depth * (rows + kernels.tile(tokens))
        assert bytes_of_tiles <= 227 << 10
        assert launch.splits == 1 or -(-width // launch.columns) * launch.splits <= kernels.ARRIVALS


@pytest.mark.usefixtures("launch")
def test_linear_add_and_logits() -> None:
    for tokens, width, depth in SHAPES:
        torch.manual_seed(tokens)
        x, weight = draw(tokens, 2 * depth)[:, :depth], draw(width, depth, scale=0.1)
        residual = draw(tokens, width)
        given = residual.clone()
        for _ in range(2):  # the counts of a split product must be back at zero
            out = kernels.linear_add(x, weight, residual)
            assert_as_exact(out, layers.linear_add.definition, x, weight, residual)
        assert torch.equal(residual, given)
        hidden = x.contiguous()
        out, exact = kernels.logits(hidden, weight), hidden.double() @ weight.double().T
        assert out.dtype == torch.float32
        allowed = 2 * (logprob.logits.definition(hidden, weight) - exact).abs().max() + 1e-6
        assert (out - exact).abs().max() <= allowed


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "size"), [(1, 4, 2, 32), (3, 12, 4, 64), (2, 5, 1, 128)]
)
def test_split_heads(tokens: int, q_heads: int, kv_heads: int, size: int, normed: bool) -> None:
    torch.manual_seed(tokens)
    width = (q_heads + 2 * kv_heads) * size
    qkv = draw(tokens, width + 16)[:, :width]
    angle = torch.randn(tokens, size // 2, device=DEVICE) * 100
    norms = (draw(size), draw(size)) if normed else (None, None)
    tensors, options = (qkv, angle.cos(), angle.sin(), *norms), {"kv_heads": kv_heads, "eps": EPS}
    q, k, v = kernels.split_heads(*tensors, **options)
    assert q.is_contiguous()
    assert k.is_contiguous()
    for index, out in enumerate((q, k)):
        assert_as_exact(out, lambda *a, i=index, **o: exact_heads(*a, **o)[i], *tensors, **options)
    assert torch.equal(v, layers.split_heads.definition(*tensors, **options)[2])


def exact_heads(qkv, *others, **options):
    """The definition, whose rotation is always fp32, in the dtype given."""
    if qkv.dtype != torch.float64:
        return layers.split_heads.definition(qkv, *others, **options)
    cos, sin, *norms = others
    still = torch.ones_like(cos), torch.zeros_like(sin)
    pair = layers.split_heads.definition(qkv, *still, *norms, **options)[:2]
    return [
        torch.cat((a * c - b * s, b * c + a * s), dim=2)
        for a, b in (x.chunk(2, dim=2) for x in pair)
        for c, s in [(cos[:, None], sin[:, None])]
    ]


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
        return kernels.supports("split_heads", qkv, angle, angle, kv_heads=1, eps=EPS)

    assert can_split(64)
    assert can_split(128, torch.float16)
    assert not can_split(96)
    assert not can_split(64, torch.float32)
    assert not can_split(64, requires_grad=True)
