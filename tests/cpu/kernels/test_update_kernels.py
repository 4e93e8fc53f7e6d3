"""Products with low-rank updates by row against their definitions, in fp16 in the interpreter."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from support import kernels as kernel_cases
from support.kernels import DEVICE, EPS, Product, check_as_exact, poisoned_memory
from support.updates import make_update

from sparrow.ops import LowRank, RowSlots
from sparrow.ops.kernels import layers as kernels
from sparrow.ops.kernels.layers import LinearLaunch
from sparrow.ops.reference import layers

OPS = ("norm_linear", "norm_gated", "linear_add")
# slots, width, depth, where further parts begin: whole blocks and odd ones
SHAPES: list[tuple[list[int], int, int, tuple[int, ...]]] = [
    ([2], 48, 64, (32,)),
    ([0, 3, 0], 40, 80, (17, 20)),
    ([2, 1] * 8, 32, 64, ()),
    ([0, 1, 2, 3, 3, 2, 0] + [1] * 10, 50, 112, (7, 31)),
    ([3, 0, 2] * 11, 16, 48, (15,)),
]
COUNT, RANK = 4, 16
# columns, depth, splits: of the product, of A x
CUTS = ((16, 32, 1), (32, 32, 1)), ((64, 16, 1), (64, 16, 2)), ((16, 32, 3), (32, 16, 3))

pytestmark = pytest.mark.usefixtures(poisoned_memory.__name__)


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half().to(DEVICE)


def cut(monkeypatch: pytest.MonkeyPatch, *cuts: tuple[int, int, int]) -> None:
    launches = [LinearLaunch(columns=c, depth=d, splits=splits) for c, d, splits in cuts]
    monkeypatch.setattr(kernels, "launch_for", lambda *_, **__: launches[0])
    monkeypatch.setattr(kernels, "launch_for_ranks", lambda *_: launches[1])


def case(op: str, shape: int, **changes: Any) -> Product:
    slots, width, depth, parts = SHAPES[shape]
    sizes: dict[str, Any] = {"count": COUNT, "rank": RANK, "parts": parts} | changes
    bias = len(slots) % 2 == 1
    given = (op, slots, width, depth, draw)
    return kernel_cases.updated_product(*given, bias=bias, gaps=True, **sizes)


def runner(op: str, tensors: Any, options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The kernel, with some of the update changed."""

    def run(**changes: Any) -> torch.Tensor:
        update = replace(options["update"], **changes)
        return getattr(kernels, op)(*tensors, **options | {"update": update})

    return run


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("op", OPS)
def test_products_with_updates(op: str, cuts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a slot have the bits of the product alone."""
    cut(monkeypatch, *cuts)
    for shape, rank in zip(range(len(SHAPES)), (16, 48, 16, 16, 16), strict=True):
        tensors, options = case(op, shape, rank=rank)
        definition = getattr(layers, op).definition
        plain = getattr(kernels, op)(*tensors, **options | {"update": None})
        none_T = options["update"].rows.slots_T == 0
        for _ in range(2):  # the counts of a split product must be back at zero
            out = getattr(kernels, op)(*tensors, **options)
            check_as_exact(out, definition, tensors, options, slack=1e-6)
            assert torch.equal(out[none_T], plain[none_T])
            assert (out != plain).any(1).equal(~none_T)


@pytest.mark.parametrize("op", OPS)
def test_slots_that_nobody_uses_are_not_read(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All where nobody uses any; else those before the lowest and behind the highest one. A is read
    for the slots in use alone.
    """
    cut(monkeypatch, (32, 32, 2), (16, 32, 2))
    tensors, options = case(op, 1)
    update: LowRank = options["update"]
    run, width = runner(op, tensors, options), update.b_EQ.shape[1]
    for used in ([2, 3], [1], [4], [1, 4]):
        slots_T = torch.tensor([0, used[0], used[-1]], device=DEVICE)
        rows = RowSlots(slots_T=slots_T, count=COUNT)
        a_RI, b_EQ = update.a_RI.clone(), update.b_EQ.clone()
        a_MSRI = a_RI.unflatten(0, (-1, COUNT, RANK))
        a_MSRI[:, [slot for slot in range(COUNT) if slot + 1 not in used]] = torch.nan
        b_EQ[:, : (used[0] - 1) * RANK] = torch.nan
        b_EQ[:, used[-1] * RANK : width] = torch.nan
        assert torch.equal(run(rows=rows, a_RI=a_RI, b_EQ=b_EQ), run(rows=rows))
    nobody = RowSlots(slots_T=torch.zeros(3, dtype=torch.int32, device=DEVICE), count=COUNT)
    nothing = {name: torch.full_like(getattr(update, name), torch.nan) for name in ("a_RI", "b_EQ")}
    plain = getattr(kernels, op)(*tensors, **options | {"update": None})
    assert torch.equal(run(rows=nobody, **nothing), plain)


@pytest.mark.parametrize("op", OPS)
def test_rows_do_not_know_each_others_slots(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a slot that is none, as a spare row may have, reach beyond its row."""
    cut(monkeypatch, (32, 32, 2), (32, 32, 2))
    tensors, options = case(op, 1)
    run, slots_T = runner(op, tensors, options), options["update"].rows.slots_T
    first = run()
    for other in (0, 4, 99, -7):
        changed_T = slots_T.clone()
        changed_T[2] = other
        found = run(rows=RowSlots(slots_T=changed_T, count=COUNT))
        assert torch.equal(found[:2], first[:2])


def test_a_gate_of_many_tokens() -> None:
    tensors, options = kernel_cases.updated_product(
        *("norm_gated", [0, 2, 1] * 23, 40, 80, draw), bias=False, count=COUNT, rank=5
    )
    out = kernels.norm_gated(*tensors, **options)
    assert torch.equal(out, layers.norm_gated.definition(*tensors, **options))


def test_a_launch_for_ranks_of_every_size() -> None:
    for ranks, depth in product((16, 128, 384, 1536, 6144), (896, 2048, 17408)):
        launch = kernels.launch_for_ranks(ranks, depth)
        assert launch.splits == 1 or ranks <= kernels.ARRIVALS
        assert 2 * launch.stages * launch.depth * (launch.columns + 64) <= 100 << 10


def test_updates_that_are_left_to_the_definitions() -> None:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    def can(op: str, parts: tuple[int, ...], *, rank: int = 16, depth: int = 32, **changes) -> bool:
        tokens = changes.pop("tokens", 4)
        sizes = {"count": 2, "rank": rank, "inputs": depth, "parts": parts}
        update = replace(make_update(tensor, [1] * tokens, **sizes), **changes)
        others = (tensor(depth), tensor(12, depth)) if op != "linear_add" else (tensor(12, depth),)
        residual = (tensor(tokens, 12),) if op == "linear_add" else ()
        options = {} if op == "linear_add" else {"eps": EPS}
        given = (tensor(tokens, depth), *others, *residual)
        return kernels.supports(op, *given, update=update, **options)

    assert can("norm_linear", (12,))
    assert can("norm_linear", (4, 3, 5))
    assert can("norm_gated", (6, 6))
    assert can("linear_add", (12,), tokens=64)
    assert can("norm_gated", (6, 6), tokens=65)  # its gate
    assert not can("norm_linear", (4, 3, 3, 2))
    assert not can("norm_gated", (5, 7))
    assert not can("norm_gated", (12,))
    assert not can("norm_linear", (12,), rank=8)
    assert not can("norm_linear", (12,), depth=40)
    assert not can("linear_add", (12,), tokens=65)
    assert not can("linear_add", (12,), a_RI=torch.ones(32, 32))
    assert not can("linear_add", (12,), b_EQ=tensor(32, 12).T)
    gaps = RowSlots(slots_T=torch.ones(8, dtype=torch.int64)[::2], count=2)
    assert not can("linear_add", (12,), rows=gaps)
    trained = tensor(12, 32).requires_grad_()
    assert not can("linear_add", (12,), b_EQ=trained)
    with torch.no_grad():
        assert can("linear_add", (12,), b_EQ=trained)
