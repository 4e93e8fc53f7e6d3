"""Kernels of the dense parts at the sizes of Qwen3-1.7B: error, rows apart, repeats, graphs."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from support.kernels import EPS, check_as_exact, check_heads, heads, product

from sparrow import ops
from sparrow.ops.dispatch import using
from sparrow.ops.kernels import overlap
from sparrow.ops.reference import layers

HIDDEN, MLP, Q_HEADS, KV_HEADS, SIZE = 2048, 6144, 16, 8, 128
QKV = (Q_HEADS + 2 * KV_HEADS) * SIZE
VOCABULARY = 151_936
PRODUCTS = {
    "qkv": ("norm_linear", QKV, HIDDEN),
    "qkv_bias": ("norm_linear", QKV, HIDDEN),
    "out": ("linear_add", HIDDEN, HIDDEN),
    "gate_up": ("norm_gated", MLP, HIDDEN),
    "down": ("linear_add", HIDDEN, MLP),
}


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def case(name: str, tokens: int):
    """(op of its tensors, its definition, tensors, options)"""
    op, width, depth = PRODUCTS[name]
    tensors, options = product(op, tokens, width, depth, draw, bias=name == "qkv_bias")
    return partial(getattr(ops, op), *tensors, **options), getattr(layers, op), tensors, options


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 64, 288])
def test_products_are_as_exact_as_the_definitions(name: str, tokens: int) -> None:
    run, op, tensors, options = case(name, tokens)
    check_as_exact(run(), op.definition, tensors, options)


@pytest.mark.parametrize("tokens", [1, 16, 33, 64])
def test_logits_are_as_exact_as_the_definition(tokens: int) -> None:
    torch.manual_seed(tokens)
    hidden, head = draw(tokens, HIDDEN), draw(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)
    out = ops.logits(hidden, head)
    with using("reference"):
        near = ops.logits(hidden, head)
    exact = hidden.double() @ head.double().T
    assert out.dtype == near.dtype == torch.float32
    assert (out - exact).norm() <= 2 * (near - exact).norm()
    assert torch.equal(out, ops.logits(hidden, head))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [16, 33])
def test_rows_do_not_know_each_other_and_results_repeat(name: str, tokens: int) -> None:
    run, _, tensors, _ = case(name, tokens)
    first = run()
    for _ in range(20):
        assert torch.equal(run(), first)
    others = torch.arange(tokens, device="cuda") != 5
    for rows in (tensors[0], tensors[-1]) if name in ("out", "down") else tensors[:1]:
        rows[others] = draw(*rows[others].shape)
    changed = run()
    assert torch.equal(changed[5], first[5])
    assert not torch.equal(changed[6], first[6])


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_replayed_graph_gives_the_eager_result(name: str) -> None:
    run, _, (x, *_), _ = case(name, 16)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        x.copy_(draw(*x.shape))
        graph.replay()
        assert torch.equal(out, run())


def test_overlapped_launches_give_the_same_bits(monkeypatch) -> None:
    qkv, out = draw(QKV, HIDDEN, scale=0.01), draw(HIDDEN, HIDDEN, scale=0.01)
    gate_up, down = draw(2 * MLP, HIDDEN, scale=0.01), draw(HIDDEN, MLP, scale=0.01)
    given, norm, angle = draw(16, HIDDEN), draw(HIDDEN), torch.randn(16, SIZE // 2, device="cuda")

    def chain() -> torch.Tensor:
        x = given
        for _ in range(10):
            fused = ops.norm_linear(x, norm, qkv, eps=EPS)
            q, *_ = ops.split_heads(fused, angle.cos(), angle.sin(), kv_heads=KV_HEADS, eps=EPS)
            x = ops.linear_add(q.flatten(1), out, x)
            x = ops.linear_add(ops.norm_gated(x, norm, gate_up, eps=EPS), down, x)
        return x

    with monkeypatch.context() as patch:
        patch.setattr(overlap, "overlaps", lambda _: False)
        plain = chain()
    assert plain.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(), plain)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 33, 4099])
def test_heads_are_as_exact_as_the_definition(tokens: int, normed: bool) -> None:
    tensors, options = heads(tokens, Q_HEADS, KV_HEADS, SIZE, normed, draw)
    check_heads(ops.split_heads(*tensors, **options), tensors, options)
