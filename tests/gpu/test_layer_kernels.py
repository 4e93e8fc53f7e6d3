"""Kernels of the dense parts at the sizes of Qwen3-1.7B: error, rows apart, repeats, graphs."""

import pytest
import torch

from sparrow import ops
from sparrow.ops.dispatch import using

EPS = 1e-6
HIDDEN, MLP, Q_HEADS, KV_HEADS, SIZE = 2048, 6144, 16, 8, 128
QKV = (Q_HEADS + 2 * KV_HEADS) * SIZE
VOCABULARY = 151_936
PRODUCTS = ["qkv", "qkv_bias", "out", "gate_up", "down"]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def product(name: str, tokens: int):
    """(op of x and the residual alone, the same op in float64, x, residual)."""
    torch.manual_seed(tokens)
    depth = MLP if name == "down" else HIDDEN
    width = {"out": HIDDEN, "down": HIDDEN, "gate_up": 2 * MLP}.get(name, QKV)
    weight, norm, bias = draw(width, depth, scale=depth**-0.5), draw(depth), draw(width)

    def run(x, residual, *tensors):
        weight, norm, bias = tensors
        if name in ("out", "down"):
            return ops.linear_add(x, weight, residual)
        if name == "gate_up":
            return ops.norm_gated(x, norm, weight, eps=EPS)
        return ops.norm_linear(x, norm, weight, bias if name == "qkv_bias" else None, eps=EPS)

    wide = [tensor.double() for tensor in (weight, norm, bias)]
    return (
        lambda x, residual: run(x, residual, weight, norm, bias),
        lambda x, residual: run(x.double(), residual.double(), *wide),
        draw(tokens, depth, scale=3.0),
        draw(tokens, HIDDEN),
    )


@pytest.fixture(autouse=True)
def _no_gradients():
    pytest.importorskip("triton")
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 64])
def test_products_are_as_exact_as_the_definitions(name: str, tokens: int) -> None:
    op, in_float64, x, residual = product(name, tokens)
    exact, out = in_float64(x, residual), op(x, residual)
    with using("reference"):
        near = op(x, residual)
    assert out.dtype == near.dtype
    assert (out - exact).norm() <= 2 * (near - exact).norm()
    assert (out - exact).abs().max() <= 2 * (near - exact).abs().max()


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
    op, _, x, residual = product(name, tokens)
    first = op(x, residual)
    for _ in range(20):
        assert torch.equal(op(x, residual), first)
    others = torch.arange(tokens, device="cuda") != 5
    x[others], residual[others] = draw(*x[others].shape), draw(*residual[others].shape)
    changed = op(x, residual)
    assert torch.equal(changed[5], first[5])
    assert not torch.equal(changed[6], first[6])


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_replayed_graph_gives_the_eager_result(name: str) -> None:
    op, _, x, residual = product(name, 16)
    op(x, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, residual)
    for _ in range(3):
        x.copy_(draw(*x.shape))
        graph.replay()
        assert torch.equal(out, op(x, residual))


def test_overlapped_launches_give_the_same_bits(monkeypatch) -> None:
    from sparrow.ops.kernels import layers

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
        patch.setattr(layers, "overlaps", lambda _: False)
        plain = chain()
    assert plain.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(), plain)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 33, 4099])
def test_heads_are_as_exact_as_the_definition(tokens: int, normed: bool) -> None:
    torch.manual_seed(tokens)
    qkv, angle = draw(tokens, QKV), torch.randn(tokens, SIZE // 2, device="cuda") * 100
    norms = (draw(SIZE), draw(SIZE)) if normed else (None, None)
    options = {"kv_heads": KV_HEADS, "eps": EPS}
    fast = ops.split_heads(qkv, angle.cos(), angle.sin(), *norms, **options)
    with using("reference"):
        near = ops.split_heads(qkv, angle.cos(), angle.sin(), *norms, **options)
        wide = [None if norm is None else norm.float() for norm in norms]
        exact = ops.split_heads(qkv.float(), angle.cos(), angle.sin(), *wide, **options)
    assert torch.equal(fast[2], near[2])
    for ours, theirs, truth in zip(fast[:2], near[:2], exact[:2], strict=True):
        assert ours.is_contiguous()
        assert ours.dtype == torch.bfloat16
        assert (ours - truth).norm() <= 2 * (theirs - truth).norm()
