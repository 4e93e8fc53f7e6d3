"""Definitions of the dense parts: plain compositions, with gradients, for any strides."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.products import rows_are_independent
from support.updates import make_update, update_of_weight

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


def test_weights_in_8_bits_by_hand() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 127.0, -1.1]])
    eight = ops.Int8Weight.quantise(weight)
    assert eight.data_EI.tolist() == [[64, -127, 32], [0, 0, 0], [127, 64, -1]]
    torch.testing.assert_close(eight.scale_E, torch.tensor([2.0 / 127, 0.0, 2.0]))
    large = torch.randn(70, 300).bfloat16()
    error = (ops.Int8Weight.quantise(large).dequantised() - large.float()).abs()
    assert (error <= large.float().abs().amax(1, keepdim=True) / 254 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_weights_in_8_bits(dtype: torch.dtype) -> None:
    close: Any = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    x, norm, bias = torch.randn(5, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(12).to(dtype)
    residual = torch.randn(5, 12).to(dtype)
    eight = ops.Int8Weight.quantise(torch.randn(12, 8))
    plain = eight.dequantised().to(dtype)
    products: list[Callable[[ops.Weight], torch.Tensor]] = [
        lambda weight: ops.norm_linear(x, norm, weight, bias, eps=EPS),
        lambda weight: ops.norm_gated(x, norm, weight, eps=EPS),
        lambda weight: ops.linear_add(x, weight, residual),
        lambda weight: ops.logits(x, weight),
    ]
    for product in products:
        assert product(eight).dtype == product(plain).dtype
        torch.testing.assert_close(product(eight), product(plain), **close)


def test_gradients_of_the_products() -> None:
    x, norm, weight, bias, residual = draw(3, 4), draw(4), draw(6, 4), draw(6), draw(3, 6)
    torch.autograd.gradcheck(lambda *a: ops.norm_linear(*a, eps=EPS), (x, norm, weight, bias))
    torch.autograd.gradcheck(lambda *a: ops.norm_gated(*a, eps=EPS), (x, norm, weight))
    torch.autograd.gradcheck(ops.linear_add, (x, weight, residual))


PARTS = {"norm_linear": (5, 1, 6), "norm_gated": (6, 6), "linear_add": (12,)}


def product(op: str, slots: Sequence[int]) -> tuple[Any, ...]:
    """A product of a weight and an update, and both of them: 8 inputs, 12 outputs."""
    tokens, weight, norm = len(slots), draw(12, 8), draw(8)
    update = make_update(draw, slots, count=3, rank=2, inputs=8, parts=PARTS[op])
    x, residual, bias = draw(tokens, 8), draw(tokens, 12), draw(12)
    if op == "linear_add":
        return lambda w, u: ops.linear_add(x, w, residual, update=u), weight, update
    others, run = (bias,) if op == "norm_linear" else (), partial(getattr(ops, op), eps=EPS)
    return lambda w, u: run(x, norm, w, *others, update=u), weight, update


@pytest.mark.parametrize("op", PARTS)
def test_an_update_is_that_of_each_rows_slot(op: str) -> None:
    slots = [2, 0, 3, 2, 0, 1]
    call, weight, update = product(op, slots)
    found, plain = call(weight, update), call(weight, None)
    for row, slot in enumerate(slots):
        wanted = call(weight + update_of_weight(update, slot), None)[row]
        torch.testing.assert_close(found[row], wanted)
        assert torch.equal(found[row], plain[row]) == (slot == 0)


@pytest.mark.parametrize("op", PARTS)
def test_nobody_uses_an_update(op: str) -> None:
    call, weight, update = product(op, [0] * 5)
    assert torch.equal(call(weight, update), call(weight, None))


@pytest.mark.parametrize("op", PARTS)
def test_a_row_does_not_know_the_slots_of_others(op: str) -> None:
    """In fp32, bit for bit, as products do in general on such a CPU."""
    if not rows_are_independent():
        pytest.skip("this CPU's BLAS rounds products of few rows differently")
    x, weight, residual = torch.randn(6, 8), torch.randn(12, 8), torch.randn(6, 12)
    sizes = {"count": 3, "rank": 2, "inputs": 8}
    update = make_update(torch.randn, [2, 0, 3, 2, 0, 1], parts=(12,), **sizes)
    found = ops.linear_add(x, weight, residual, update=update)
    for slots in ([2, 1, 1, 2, 3, 1], [2, 0, 0, 0, 0, 1]):
        rows = ops.RowSlots(slots_T=torch.tensor(slots), count=3)
        other = ops.linear_add(x, weight, residual, update=replace(update, rows=rows))
        assert torch.equal(found[[0, 5]], other[[0, 5]])


def test_gradients_of_updates() -> None:
    call, weight, update = product("norm_gated", [1, 0, 2])

    def of(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return call(weight, replace(update, a_RI=a, b_EQ=b))

    leaves = (x.detach().requires_grad_() for x in (weight, update.a_RI, update.b_EQ))
    torch.autograd.gradcheck(of, tuple(leaves))


def test_updates_that_do_not_fit_are_refused_by_name() -> None:
    call, weight, update = product("norm_linear", [1, 0, 2, 3])
    wide = ops.RowSlots(slots_T=torch.tensor([1, 0, 2]), count=3)
    odd = ops.RowSlots(slots_T=torch.tensor([1, 0, 2, 3]), count=5)
    floats = ops.RowSlots(slots_T=torch.ones(4), count=3)
    for name, changes in (
        ("a_RI", {"a_RI": update.a_RI[:-1]}),
        ("a_RI", {"a_RI": update.a_RI[:, :-1]}),
        ("b_EQ", {"b_EQ": update.b_EQ[:-1]}),
        ("b_EQ", {"rows": odd}),
        ("parts", {"parts": (5, 1, 5)}),
        ("slots_T", {"rows": wide}),
        ("slots_T", {"rows": floats}),
    ):
        with pytest.raises(ValueError, match=name):
            call(weight, replace(update, **changes))


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
