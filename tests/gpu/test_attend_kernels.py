"""The attention kernels on a GPU: exactness, poisoned memory, equal bits, CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.paging import Batch, make_batch
from torch import Tensor

pytest.importorskip("triton")
from sparrow import ops
from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.reference.attention import attend_causal_paged, attend_decode

LENGTHS = [1, 15, 16, 17, 0, 1000, 5003]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALE = 0.125


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows as NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def on_gpu(batch: Batch) -> Batch:
    return Batch(*(x.cuda() if isinstance(x, Tensor) else x for x in batch))


def chosen(batch: Batch, budget: int | None, *, width: int | None = None) -> PageLists | None:
    if budget is None:
        return None
    lengths, page = batch.lengths_B, batch.page
    with ops.using("reference"):
        score = ops.score_pages(batch.q_BHD, batch.landmark_NGD, batch.table_BM, lengths, page=page)
        budgets = torch.full_like(lengths, budget)
        return ops.select_pages(score, lengths, budgets, page=page, width=width)


def attend(batch: Batch, lists: PageLists | None = None) -> Tensor:
    assert decode.supports("attend_decode", batch.q_BHD, *batch.pool, lists, scale=SCALE)
    return decode.attend_decode(batch.q_BHD, *batch.pool, lists, scale=SCALE)


def assert_no_less_exact(
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    q: Tensor,
    batch: Batch,
    *rest: Tensor | PageLists | None,
) -> None:
    """The error against float64 is at most twice that of the definition in the same dtype.

    In fp32 it may be eight times that: exponentials are the GPU's own approximation, which bf16 and
    fp16 do not notice.
    """
    where = batch.table_BM, batch.lengths_B, *rest
    pool = batch.k_NGPD, batch.v_NGPD
    exact = plain(q.double(), *(t.double() for t in pool), *where, scale=SCALE)
    found = kernel(q, *pool, *where, scale=SCALE)
    error = (found.double() - exact).abs()
    allowed = (plain(q, *pool, *where, scale=SCALE).double() - exact).abs()
    rounding = torch.finfo(torch.float32).eps
    factor = 8 if q.dtype == torch.float32 else 2
    assert found.isfinite().all()
    assert error.max() <= factor * allowed.max() + rounding
    assert error.norm() <= factor * allowed.norm() + rounding


# Every pair of dtype and head size, every ratio of heads; all triples would be compiled for long.
SHAPES = [
    (128, torch.bfloat16, 2),
    (128, torch.bfloat16, 5),
    (64, torch.bfloat16, 8),
    (128, torch.float16, 1),
    (64, torch.float16, 3),
    (128, torch.float32, 2),
    (64, torch.float32, 3),
    (80, torch.bfloat16, 5),
    (96, torch.bfloat16, 4),
    (112, torch.float16, 7),
    (160, torch.bfloat16, 64),
]


@pytest.mark.parametrize("budget", [None, 64, 800])
@pytest.mark.parametrize(("head_size", "dtype", "ratio"), SHAPES)
def test_decode(head_size: int, dtype: torch.dtype, ratio: int, budget: int | None) -> None:
    batch = on_gpu(
        make_batch(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=head_size, dtype=dtype)
    )
    lists = chosen(batch, budget)
    assert_no_less_exact(decode.attend_decode, attend_decode.definition, batch.q_BHD, batch, lists)


@pytest.mark.parametrize(
    ("head_size", "page", "dtype"),
    [
        (32, 16, torch.float16),
        (32, 16, torch.float32),
        (256, 16, torch.bfloat16),
        (256, 16, torch.float32),
        (128, 1, torch.bfloat16),
        (64, 64, torch.float16),
        (64, 256, torch.bfloat16),
        (40, 16, torch.bfloat16),
        (240, 16, torch.bfloat16),
        (80, 16, torch.float32),
    ],
)
def test_decode_of_other_shapes(head_size: int, page: int, dtype: torch.dtype) -> None:
    batch = on_gpu(make_batch([700, 3], head_size=head_size, page=page, dtype=dtype))
    assert_no_less_exact(decode.attend_decode, attend_decode.definition, batch.q_BHD, batch, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [LENGTHS, [40, 100], [30_000]])
def test_the_list_of_all_pages_is_dense(lengths: list[int], dtype: torch.dtype) -> None:
    batch = on_gpu(make_batch(lengths, heads=4, kv_heads=2, head_size=128, dtype=dtype))
    dense = attend(batch)
    assert dense.isfinite().all()
    assert torch.equal(attend(batch, chosen(batch, 10**6)), dense)
    assert torch.equal(attend(batch, chosen(batch, 10**6, width=4000)), dense)


@pytest.mark.parametrize("kept", [1, 8, 9, 64, 500])
def test_few_pages_of_a_wide_table(kept: int) -> None:
    """One long row: its kept pages are shared by many programs, whatever their number."""
    batch = on_gpu(make_batch([60_000], heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    lists = chosen(batch, max(3, kept) * 16)
    assert lists is not None
    lists = PageLists(lists.pages, lists.counts.clamp(max=kept))
    assert_no_less_exact(decode.attend_decode, attend_decode.definition, batch.q_BHD, batch, lists)


def test_a_row_does_not_depend_on_the_others() -> None:
    """With as many rows of as wide a table: what they hold changes nothing."""
    batch = on_gpu(make_batch(LENGTHS, heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    together = attend(batch)
    lengths = batch.lengths_B.clone()
    lengths[:-2] = 0
    assert torch.equal(attend(batch._replace(lengths_B=lengths))[-2:], together[-2:])


def test_a_narrow_list_gives_the_bits_of_a_wide_one() -> None:
    batch = on_gpu(make_batch(LENGTHS, heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    assert torch.equal(
        attend(batch, chosen(batch, 256, width=16)), attend(batch, chosen(batch, 256))
    )


def test_decode_of_other_layouts_and_integers() -> None:
    batch = on_gpu(make_batch(LENGTHS, heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    lists = chosen(batch, 256)
    assert lists is not None
    wide = torch.nn.functional.pad(batch.table_BM, (0, 5), value=2**30)
    other = batch._replace(
        q_BHD=torch.cat([batch.q_BHD, batch.q_BHD * torch.nan], dim=1)[:, :4],
        table_BM=wide.int()[:, :-5],
        lengths_B=batch.lengths_B.long(),
    )
    long = PageLists(lists.pages.long(), lists.counts.long())
    assert torch.equal(attend(other), attend(batch))
    assert torch.equal(attend(other, long), attend(batch, lists))


@pytest.mark.parametrize("listed", [False, True])
def test_a_graph_replays_what_eager_gives(listed: bool) -> None:
    batch = on_gpu(make_batch(LENGTHS, heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    lists = chosen(batch, 256) if listed else None
    attend(batch, lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(batch, lists)
    for shift in (0, 3, 7):
        batch.q_BHD.copy_(batch.q_BHD.roll(1, 1))
        batch.lengths_B.copy_((batch.lengths_B - shift).clamp(min=0))
        if lists is not None:
            fewer = chosen(batch, 256 - 16 * shift)
            assert fewer is not None
            lists.pages.copy_(fewer.pages)
            lists.counts.copy_(fewer.counts)
        graph.replay()
        assert torch.equal(out, attend(batch, lists))


CHUNKS = [[1, 15, 16, 17, 0, 1000, 5003], [1, 1, 5, 0, 0, 300, 129], [0, 0, 0, 1, 0, 0, 2000]]


@pytest.mark.parametrize("counts", CHUNKS)
@pytest.mark.parametrize(("head_size", "dtype", "ratio"), SHAPES)
def test_prefill(head_size: int, dtype: torch.dtype, ratio: int, counts: list[int]) -> None:
    batch = on_gpu(
        make_batch(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=head_size, dtype=dtype)
    )
    bounds = torch.tensor([0, *counts], device="cuda").cumsum(0)
    q = torch.randn(sum(counts), 2 * ratio, head_size, device="cuda").to(dtype)
    assert_no_less_exact(
        prefill.attend_causal_paged, attend_causal_paged.definition, q, batch, bounds
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 256])
def test_prefill_of_other_shapes(head_size: int, dtype: torch.dtype) -> None:
    batch = on_gpu(make_batch([700, 3], head_size=head_size, dtype=dtype))
    bounds = torch.tensor([0, 300, 303], device="cuda", dtype=torch.int32)
    q = torch.randn(303, 6, head_size, device="cuda").to(dtype)
    assert_no_less_exact(
        prefill.attend_causal_paged, attend_causal_paged.definition, q, batch, bounds
    )


def test_prefill_waits_for_nothing_and_ignores_neighbours() -> None:
    """A capture fails where the host waits; blocks are counted from each sequence's start."""
    batch = on_gpu(make_batch(LENGTHS, heads=4, kv_heads=2, head_size=128, dtype=torch.bfloat16))
    bounds = torch.tensor([0, 1, 16, 20, 21, 21, 700, 2700], device="cuda")
    q = torch.randn(2700, 4, 128, device="cuda").bfloat16()
    together = prefill.attend_causal_paged(q, *batch.pool, bounds, scale=SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = prefill.attend_causal_paged(q, *batch.pool, bounds, scale=SCALE)
    graph.replay()
    assert torch.equal(again, together)
    last = batch.k_NGPD, batch.v_NGPD, batch.table_BM[6:], batch.lengths_B[6:]
    alone = prefill.attend_causal_paged(q[700:], *last, bounds[6:] - 700, scale=SCALE)
    assert torch.equal(alone, together[700:])
