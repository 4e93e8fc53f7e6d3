"""Definitions of the dense parts: plain compositions, with gradients, for any strides."""

import pytest
import torch

from sparrow import ops

EPS = 1e-6


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_products_are_their_formulas() -> None:
    x, norm, weight, bias = draw(5, 8), draw(8), draw(12, 8), draw(12)
    expected = normed(x, norm) @ weight.T
    torch.testing.assert_close(ops.norm_linear(x, norm, weight, eps=EPS), expected)
    torch.testing.assert_close(ops.norm_linear(x, norm, weight, bias, eps=EPS), expected + bias)
    gate, up = expected[:, :6], expected[:, 6:]
    gated = ops.norm_gated(x, norm, weight, eps=EPS)
    torch.testing.assert_close(gated, gate * gate.sigmoid() * up)
    residual = draw(5, 12)
    before = residual.detach().clone()
    torch.testing.assert_close(ops.linear_add(x, weight, residual), residual + x @ weight.T)
    assert torch.equal(residual, before)  # the stream given is left as it is


def test_gradients_of_the_products() -> None:
    x, norm, weight, bias, residual = draw(3, 4), draw(4), draw(6, 4), draw(6), draw(3, 6)
    torch.autograd.gradcheck(lambda *a: ops.norm_linear(*a, eps=EPS), (x, norm, weight, bias))
    torch.autograd.gradcheck(lambda *a: ops.norm_gated(*a, eps=EPS), (x, norm, weight))
    torch.autograd.gradcheck(ops.linear_add, (x, weight, residual))


@pytest.mark.parametrize("with_norm", [False, True])
def test_heads_are_normed_and_turned(with_norm: bool) -> None:
    qkv, angle = torch.randn(5, 7 * 8), torch.randn(5, 4)
    norms = (torch.randn(8), torch.randn(8)) if with_norm else (None, None)
    q, k, v = ops.split_heads(qkv, angle.cos(), angle.sin(), *norms, kv_heads=2, eps=EPS)
    assert (q.shape, k.shape, v.shape) == ((5, 3, 8), (5, 2, 8), (5, 2, 8))
    heads = qkv.view(5, 7, 8)
    assert torch.equal(v, heads[:, 5:])
    for out, norm, inputs in [(q, norms[0], heads[:, :3]), (k, norms[1], heads[:, 3:5])]:
        inputs = inputs if norm is None else normed(inputs, norm)
        turned = torch.view_as_complex(torch.stack(inputs.chunk(2, 2), 3)) * turn(angle)
        torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), 2))


def turn(angle: torch.Tensor) -> torch.Tensor:
    """Complex numbers of length one, which turn channel pairs by multiplication."""
    return torch.polar(torch.ones_like(angle), angle)[:, None]


def test_gradients_of_the_heads() -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in [(3, 4 * 8), (8,), (8,)]]
    angle = torch.randn(3, 4)
    q, k, v = ops.split_heads(leaves[0], angle.cos(), angle.sin(), *leaves[1:], kv_heads=1, eps=EPS)
    (q.square().sum() + k.sum() + v.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)
