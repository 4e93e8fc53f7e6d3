"""Checks of Triton kernels that both tiers run: small sizes in fp32 and fp16 in the interpreter
(tests/cpu/kernels), which gets bf16 wrong, and real sizes in bf16 on a GPU (tests/gpu).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops import Int8Weight, PageLists, Weight
from sparrow.ops.kernels import attend_kept as kept
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.kernels import pages
from sparrow.ops.reference import layers
from sparrow.ops.reference.pages import pack_bits
from sparrow.sparse.compile.launch import Compiled
from sparrow.sparse.flows import interpret
from support.flows import LAYER, Bed, same_choice
from support.paging import DENSE, SCALE, Batch, check_error, check_select, make_batch, relaid
from support.updates import in_dtype, make_update

Product = tuple[tuple[Weight | None, ...], dict[str, Any]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(lengths: list[int], **options: Any) -> Batch:
    return make_batch(lengths, **options).to(DEVICE)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows as NaN."""

    def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*size: Any, **options: Any) -> Tensor:
            tensor = empty(*size, **options)
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
            return tensor

        return make

    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, poisoned(getattr(home, name)))


# Attention.


def attend_chunks(batch: Batch, q_THD: Tensor, bounds: Tensor) -> Tensor:
    return prefill.attend_causal_paged(q_THD, *batch.pool, bounds, scale=SCALE)


def queries_of(batch: Batch, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Queries for the last so many tokens of each row, and their bounds."""
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(counts), *batch.q_BHD.shape[1:], generator=generator)
    return q.to(batch.q_BHD), bounds


def check_prefill(batch: Batch, counts: list[int]) -> None:
    q, bounds = queries_of(batch, counts)
    check_error(prefill, "attend_causal_paged", q, batch, bounds)


def check_bits_of_prefill(batch: Batch, counts: list[int]) -> None:
    """Layouts, integers and neighbours in the pack change no bit."""
    q, bounds = queries_of(batch, counts)
    together = attend_chunks(batch, q, bounds)
    fused = torch.cat([torch.full_like(q, torch.nan), q], dim=1)[:, q.shape[1] :]
    assert torch.equal(attend_chunks(relaid(batch), fused, bounds.int()), together)
    last = batch._replace(table_BM=batch.table_BM[-1:], lengths_B=batch.lengths_B[-1:])
    alone = attend_chunks(last, q[bounds[-2] :], bounds[-2:] - bounds[-2])
    assert torch.equal(alone, together[bounds[-2] :])


def check_kept(
    lengths: Sequence[int],
    *,
    page: int = 16,
    share: float = 0.3,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Output and gradients, of queries out of a fused row, against float64 by definition."""
    random, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    sizes = (heads, kv_heads, kv_heads)
    fused = torch.randn(tokens, sum(sizes), head_size, generator=random).to(DEVICE, dtype)
    weight = torch.randn(tokens, heads, head_size, generator=random).to(DEVICE, dtype)
    own_T = torch.cat([torch.arange(length) for length in lengths]) // page
    width = max(lengths) // page + 1
    index_M = torch.arange(width)
    keep = torch.rand(tokens, kv_heads, width, generator=random) < share
    keep = (keep & (index_M < own_T[:, None, None])) | (index_M == own_T[:, None, None])
    bits = pack_bits(keep).to(DEVICE)
    bounds = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0).int()

    def results(attend: Callable[..., Tensor], wide: torch.dtype) -> list[Tensor]:
        inputs = [x.to(wide).requires_grad_() for x in fused.split(sizes, dim=1)]
        assert wide != dtype or not inputs[0].is_contiguous()
        out = attend(*inputs, bounds, bits, page=page, scale=SCALE)
        grads = torch.autograd.grad((out * weight.to(wide)).sum(), inputs)
        return [x.double() for x in (out, *grads)]

    plain = ops.attend_kept.definition
    assert kept.supports("attend_kept", *fused.split(sizes, dim=1), bounds, bits, page=page)
    found, again = (results(kept.attend_kept, dtype) for _ in range(2))
    close = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for mine, same, exact in zip(found, again, results(plain, torch.float64), strict=True):
        assert torch.equal(mine, same)
        assert mine.isfinite().all()
        assert (mine - exact).norm() <= close * exact.norm()
        assert (mine - exact).abs().max() <= 4 * close * exact.abs().max()


# Choice of pages.


def check_page_bits(rows: int, width: int, *, kv_heads: int = 2) -> None:
    random = torch.Generator().manual_seed(width)
    share_BG1 = torch.rand(rows, kv_heads, 1, generator=random)
    keep_BGM = torch.rand(rows, kv_heads, width, generator=random) < share_BG1
    order_BGM = torch.where(keep_BGM, torch.arange(width), width).sort(2).values
    lists = order_BGM.masked_fill(order_BGM == width, -1).int().to(DEVICE)
    counts = keep_BGM.sum(2).int().to(DEVICE)
    for bits in (pages.page_bits, ops.page_bits.definition):
        assert torch.equal(bits(lists, counts, pages=width), pack_bits(keep_BGM).to(DEVICE))


def check_shares(
    count: int, mass: float, most: int = 40, *, heads: int = 2, page: int = 4, **options: Any
) -> None:
    """Multiples of 1/64, of which sums are exact in any order, with ties and with what is none."""
    torch.manual_seed(count)
    masses = torch.randint(-1, most, (10, heads, count), device=DEVICE) / 64
    masses[1, :, ::3], masses[2, :, ::2], masses[3] = torch.nan, -torch.inf, 0.0
    lengths = torch.tensor([count * page - row for row in range(10)], device=DEVICE)
    lengths[4], lengths[5] = 0, page * (count // 3) + 1
    budgets = torch.randint(0, count * page, (10, heads), device=DEVICE)
    budgets[6:] = DENSE
    for paid, share in ((budgets, None), (budgets, mass), (torch.full_like(budgets, DENSE), mass)):
        check_select(pages, masses, lengths, paid, page=page, mass=share, **options)


def check_rows_of_every_size(counts: list[int], width: int, mass: float | None, ties: int) -> None:
    """In one wide table; what lies beyond a row's finished pages is not even looked at."""
    torch.manual_seed(0)
    masses = torch.randint(0, ties, (len(counts), 1, width)) / 64  # sums are exact
    lengths = [count * 4 - row % 2 for row, count in enumerate(counts)]
    for row, length in enumerate(lengths):
        masses[row, :, length // 4 :] = torch.inf
    for budgets in ([count * 2 for count in counts], [DENSE] * len(counts)):
        check_select(pages, masses.to(DEVICE), lengths, budgets, page=4, mass=mass)


# Generated kernels.


def fill_fields(bed: Bed, kernels: Compiled) -> None:
    """Every page's fields, by definition and by kernel."""
    interpret.summarise_slots(bed.program, bed.defined, LAYER, bed.slots_T)
    unread = bed.compiled.field("k", LAYER)[:, :, 0]
    kernels.append(bed.compiled, LAYER, unread, unread, bed.slots_T, write=False)


def select(bed: Bed, kernels: Compiled, budgets: Tensor) -> PageLists:
    given = (bed.q_BHD, bed.table_BM, bed.lengths_B, budgets, bed.rows_B)
    return kernels.select(bed.compiled, LAYER, *given, first=1, last=2)


def check_choice(bed: Bed, kernels: Compiled, budgets: Tensor, tolerance: float = 1e-4) -> None:
    """Choices are those of the definition, and so is the state afterwards."""
    score_BGM, page = bed.scores(budgets), bed.program.page
    given, mass = (score_BGM, bed.lengths_B, budgets), bed.program.mass
    with ops.using("reference"):
        wanted = ops.select_pages(*given, page=page, mass=mass)
    same_choice(score_BGM, wanted, select(bed, kernels, budgets))
    for name, _ in bed.program.state:
        left, right = (c.state(name, LAYER) for c in (bed.defined, bed.compiled))
        torch.testing.assert_close(right, left, rtol=tolerance / 10, atol=tolerance)


# The dense parts.

EPS = 1e-6


def product(
    op: str,
    tokens: int,
    width: int,
    depth: int,
    draw: Callable[..., Tensor],
    *,
    bias: bool,
    gaps: bool = False,
    eight_bits: bool = False,
) -> Product:
    """An op's tensors and options: rows maybe with gaps, a bias, a weight in 8 bits."""
    torch.manual_seed(tokens)
    x = draw(tokens, (1 + gaps) * depth, scale=3.0)[:, :depth]
    norm, bias_E = draw(depth), draw(width)
    weight: Weight = draw(width * (2 if op == "norm_gated" else 1), depth, scale=depth**-0.5)
    if eight_bits:
        weight = Int8Weight.quantise(weight)
    if op == "norm_linear":
        return (x, norm, weight, bias_E if bias else None), {"eps": EPS}
    if op == "norm_gated":
        return (x, norm, weight), {"eps": EPS}
    return (x, weight, draw(tokens, width)) if op == "linear_add" else (x.contiguous(), weight), {}


def updated_product(
    op: str,
    slots: Sequence[int],
    width: int,
    depth: int,
    draw: Callable[..., Tensor],
    *,
    count: int,
    rank: int,
    parts: Sequence[int] = (),
    **options: bool,
) -> Product:
    """The same with an update: parts after the first begin at these outputs, of a gate at half."""
    tensors, given = product(op, len(slots), width, depth, draw, **options)
    outputs = width * (2 if op == "norm_gated" else 1)
    edges = [0, *((width,) if op == "norm_gated" else parts), outputs]
    sizes = tuple(stop - start for start, stop in pairwise(edges))
    update = make_update(draw, slots, count=count, rank=rank, inputs=depth, parts=sizes)
    return tensors, given | {"update": update}


def heads(
    tokens: int, q_heads: int, kv_heads: int, size: int, normed: bool, draw: Callable[..., Tensor]
) -> Product:
    torch.manual_seed(tokens)
    width = (q_heads + 2 * kv_heads) * size
    angle = torch.randn(tokens, size // 2, device=DEVICE) * 100
    norms = (draw(size), draw(size)) if normed else (None, None)
    qkv = draw(tokens, width + 16)[:, :width]
    return (qkv, angle.cos(), angle.sin(), *norms), {"kv_heads": kv_heads, "eps": EPS}


def check_as_exact(
    out: Tensor,
    plain: Callable[..., Tensor],
    tensors: Sequence[Weight | None],
    options: Any,
    *,
    slack: float = 0.0,
) -> None:
    """The error against float64 is at most twice that of the definition, and some slack."""
    given = [x.dequantised() if isinstance(x, Int8Weight) else x for x in tensors]
    wide = {n: in_dtype(x, torch.float64) if n == "update" else x for n, x in options.items()}
    exact = plain(*(None if x is None else x.double() for x in given), **wide)
    near = plain(*tensors, **options)
    assert out.dtype == near.dtype
    assert out.shape == near.shape
    for size in (torch.linalg.vector_norm, torch.amax):
        assert size((out - exact).abs()) <= 2 * size((near - exact).abs()) + slack


def check_heads(
    found: Sequence[Tensor], tensors: Sequence[Tensor | None], options: Any, *, slack: float = 0.0
) -> None:
    q, k, v = found
    assert torch.equal(v, layers.split_heads.definition(*tensors, **options)[2])
    for index, out in enumerate((q, k)):
        assert out.is_contiguous()
        plain = lambda *given, i=index, **options: exact_heads(*given, **options)[i]  # noqa: E731
        check_as_exact(out, plain, tensors, options, slack=slack)


def exact_heads(qkv: Tensor, *others: Tensor | None, **options: Any) -> Sequence[Tensor]:
    """The definition, whose rotation is always fp32, in the dtype given."""
    if qkv.dtype != torch.float64:
        return layers.split_heads.definition(qkv, *others, **options)
    cos, sin, *norms = others
    still, c, s = (torch.ones_like(cos), torch.zeros_like(sin)), cos[:, None], sin[:, None]
    pair = layers.split_heads.definition(qkv, *still, *norms, **options)[:2]
    halves = (x.chunk(2, dim=2) for x in pair)
    return [torch.cat((a * c - b * s, b * c + a * s), dim=2) for a, b in halves]
