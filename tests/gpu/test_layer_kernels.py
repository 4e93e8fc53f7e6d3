"""Kernels of the dense parts at the sizes of Qwen3-1.7B: error, rows apart, repeats, graphs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from support.kernels import EPS, check_as_exact, check_heads, heads, product, updated_product

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


def case(name: str, tokens: int, *, eight_bits: bool = False):
    """(op of its tensors, its definition, tensors, options)"""
    op, width, depth = PRODUCTS[name]
    kind = {"bias": name == "qkv_bias", "eight_bits": eight_bits}
    tensors, options = product(op, tokens, width, depth, draw, **kind)
    return partial(getattr(ops, op), *tensors, **options), getattr(layers, op), tensors, options


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 64, 288])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_products_are_as_exact_as_the_definitions(name: str, tokens: int, eight_bits: bool) -> None:
    run, op, tensors, options = case(name, tokens, eight_bits=eight_bits)
    out = run()
    check_as_exact(out, op.definition, tensors, options)
    assert torch.equal(run(), out)


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
    eight = ops.Int8Weight.quantise(head)
    exact = hidden.double() @ eight.dequantised().double().T
    assert (ops.logits(hidden, eight) - exact).norm() <= 1e-5 * exact.norm()


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


# Updates: adapters of rows.

SLOTS = 8
SECOND = {"qkv": (2048, 3072), "qkv_bias": (2048, 3072)}  # where further parts of the weight begin


def updated(name: str, slots: list[int], rank: int) -> tuple[Callable[..., Any], Any, Any, Any]:
    """(op of changed options, its definition, tensors, options)"""
    op, width, depth = PRODUCTS[name]
    sizes: dict[str, Any] = {"count": SLOTS, "rank": rank, "parts": SECOND.get(name, ())}
    given = (op, slots, width, depth, draw)
    tensors, options = updated_product(*given, bias=name == "qkv_bias", **sizes)

    def run(**changes: Any) -> torch.Tensor:
        with ops.settled_weights():
            return getattr(ops, op)(*tensors, **options | changes)

    return run, getattr(layers, op), tensors, options


def every_third(tokens: int) -> list[int]:
    """Slots 0 to 8 in turns; every third row has none."""
    return [0 if row % 3 == 1 else row % (SLOTS + 1) for row in range(tokens)]


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 64, 100])
def test_updates_are_as_exact_as_the_definition(name: str, tokens: int, rank: int) -> None:
    """And rows without a slot have the bits of the product alone."""
    slots = every_third(tokens) if tokens > 1 else [5]
    run, op, tensors, options = updated(name, slots, rank)
    out, plain = run(), run(update=None)
    check_as_exact(out, op.definition, tensors, options)
    none_T = torch.tensor(slots, device="cuda") == 0
    assert torch.equal(out[none_T], plain[none_T])
    assert (out != plain).any(1).equal(~none_T)
    for _ in range(10):
        assert torch.equal(run(), out)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [16, 33, 64])
def test_slots_that_nobody_uses_are_not_read(name: str, tokens: int) -> None:
    run, _, _, options = updated(name, ([3, 0, 4, 3] * tokens)[:tokens], 16)
    update, first = options["update"], run()
    a_RI, b_EQ = update.a_RI.clone(), update.b_EQ.clone()
    a_RI.unflatten(0, (-1, SLOTS, 16))[:, [0, 1, 4, 5, 6, 7]] = torch.nan
    b_EQ.unflatten(1, (SLOTS, 16))[:, [0, 1, 4, 5, 6, 7]] = torch.nan
    assert torch.equal(run(update=replace(update, a_RI=a_RI, b_EQ=b_EQ)), first)
    nobody = ops.RowSlots(slots_T=torch.zeros_like(update.rows.slots_T), count=SLOTS)
    nothing = replace(update, rows=nobody, a_RI=a_RI * torch.nan, b_EQ=b_EQ * torch.nan)
    assert torch.equal(run(update=nothing), run(update=None))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_replayed_graph_follows_the_slots(name: str) -> None:
    run, _, (x, *_), options = updated(name, every_third(32), 16)
    slots_T = options["update"].rows.slots_T
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for turn in range(9):
        x.copy_(draw(*x.shape))
        slots_T.copy_(slots_T.roll(1) if turn < 8 else torch.zeros_like(slots_T))
        graph.replay()
        assert torch.equal(out, run())
    assert torch.equal(out, run(update=None))


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_overlapped_launches_of_updates_give_the_same_bits(tokens: int, monkeypatch: Any) -> None:
    """Layers of all four products: each reads what the last one wrote."""
    runs = {}
    for name in ("qkv", "out", "gate_up", "down"):
        op, width, depth = PRODUCTS[name]
        small = partial(draw, scale=0.02)
        sizes: dict[str, Any] = {"count": SLOTS, "rank": 16, "parts": SECOND.get(name, ())}
        given = (op, every_third(tokens), width, depth, small)
        tensors, options = updated_product(*given, bias=False, **sizes)
        runs[name] = getattr(ops, op), tensors, options
    start, angle = draw(tokens, HIDDEN), torch.randn(tokens, SIZE // 2, device="cuda")

    def apply(name: str, x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        op, (_, *weights), options = runs[name]
        return op(x, *weights[: -1 if residual else None], *residual, **options)

    def chain() -> torch.Tensor:
        x = start
        with ops.settled_weights():
            for _ in range(10):
                turns = (angle.cos(), angle.sin())
                q, *_ = ops.split_heads(apply("qkv", x), *turns, kv_heads=KV_HEADS, eps=EPS)
                x = apply("out", q.flatten(1), x)
                x = apply("down", apply("gate_up", x), x)
        return x

    with monkeypatch.context() as patch:
        patch.setattr(overlap, "overlaps", lambda _: False)
        plain = chain()
    assert plain.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(), plain)


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
