"""Decode attention in numba against its definition, and the bits that must not depend on others."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from support.paging import Batch, make_batch
from torch import Tensor

from sparrow.ops import PageLists
from sparrow.ops.cpu import attention
from sparrow.ops.cpu.simd import share
from sparrow.ops.reference.attention import attend_decode

LENGTHS = [1, 15, 16, 17, 0, 100, 1003]
RATIOS = [1, 2, 3, 4, 5, 7]
DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.125


def attend(batch: Batch, lists: PageLists | None = None, *, scale: float = SCALE) -> Tensor:
    assert attention.supports("attend_decode", batch.q_BHD, *batch.pool, lists, scale=scale)
    return attention.attend_decode(batch.q_BHD, *batch.pool, lists, scale=scale)


def make_lists(batch: Batch, kind: str) -> PageLists | None:
    """Lists of a kind: "dense" (none), the "last" page, or "random" ones."""
    if kind == "dense":
        return None
    generator = torch.Generator().manual_seed(1)
    kv_heads, width = batch.k_NGPD.shape[1], batch.table_BM.shape[1]
    pages = torch.full((len(batch.keys), kv_heads, width), -1, dtype=torch.int32)
    counts = torch.zeros(len(batch.keys), kv_heads, dtype=torch.int32)
    for row, length in enumerate(batch.lengths_B.tolist()):
        total = -(-length // batch.page)
        for head in range(kv_heads if length else 0):
            some = torch.rand(total, generator=generator) < 0.4
            keep = some & (kind == "random")
            keep[-1] = True
            counts[row, head] = keep.sum()
            pages[row, head, : counts[row, head]] = keep.nonzero()[:, 0]
    return PageLists(pages, counts)


def worst_error(batch: Batch, lists: PageLists | None, out: Tensor) -> float:
    wide = (t.double() for t in (batch.q_BHD, batch.k_NGPD, batch.v_NGPD))
    exact = attend_decode.definition(*wide, batch.table_BM, batch.lengths_B, lists, scale=SCALE)
    return float((out.double() - exact).abs().max())


@pytest.fixture
def threads() -> Iterator[None]:
    """Share even the smallest work, and restore the number of threads."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BYTES_PER_THREAD", 1)
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "page"), [(64, 16), (128, 16), (80, 16), (16, 5), (32, 64)])
def test_no_less_exact_than_the_definition(head_size, page, dtype) -> None:
    rounding = torch.finfo(torch.float32).eps  # sums of few tokens may be exact by luck
    sizes = {"kv_heads": 2, "head_size": head_size, "page": page, "dtype": dtype}
    for ratio, kind in zip(RATIOS, ("dense", "random", "last") * 2, strict=True):
        batch = make_batch([1, 16, 17, 0, 300], heads=2 * ratio, **sizes)
        lists = make_lists(batch, kind)
        plain = attend_decode.definition(batch.q_BHD, *batch.pool, lists, scale=SCALE)
        allowed = 2 * worst_error(batch, lists, plain) + rounding
        assert worst_error(batch, lists, attend(batch, lists)) <= allowed


@pytest.mark.parametrize("kind", ["dense", "random"])
@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_the_number_of_threads(kind: str) -> None:
    batch = make_batch(LENGTHS, heads=8, kv_heads=2, head_size=128)
    lists = make_lists(batch, kind)
    results = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        results.append(attend(batch, lists))
    assert all(torch.equal(left, right) for left, right in pairwise(results))


@pytest.mark.usefixtures("threads")
def test_calls_from_several_threads_at_once() -> None:
    batches = [make_batch([700, 33], heads=6, head_size=64, seed=seed) for seed in range(8)]
    expected = [attend(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(attend, batches))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_rows_and_heads_without_pages_give_zeros() -> None:
    batch = make_batch([0, 40, 0], heads=4, kv_heads=2, head_size=64)
    assert (attend(batch)[[0, 2]] == 0).all()
    pages = torch.tensor([[[-1], [-1]], [[-1], [1]], [[-1], [-1]]])
    out = attend(batch, PageLists(pages, (pages >= 0).sum(2)))
    assert (out[[0, 2]] == 0).all()
    assert (out[1, :2] == 0).all()
    assert out[1, 2:].isfinite().all()
    assert attend(make_batch([], head_size=64)).shape == (0, 6, 64)


def test_inputs_of_any_layout_are_left_alone() -> None:
    batch = make_batch(LENGTHS, heads=6, kv_heads=2, head_size=64)
    expected = attend(batch)
    layers = torch.stack([batch.k_NGPD, batch.v_NGPD])
    scattered = batch._replace(
        q_BHD=batch.q_BHD.transpose(0, 2).contiguous().transpose(0, 2),
        k_NGPD=layers[0],
        v_NGPD=layers[1],
        table_BM=batch.table_BM.to(torch.int32).T.contiguous().T,
        lengths_B=batch.lengths_B.long(),
    )
    before = [tensor.clone() for tensor in (scattered.q_BHD, layers, scattered.table_BM)]
    assert torch.equal(attend(scattered), expected)
    after = scattered.q_BHD, layers, scattered.table_BM
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


def test_nan_shows_in_its_own_heads_only_and_scores_far_apart_pick_one_token() -> None:
    batch = make_batch([100, 100], heads=6, kv_heads=2, head_size=64)
    batch.k_NGPD[batch.table_BM[0, 3], 1, 5, 7] = math.nan
    out = attend(batch)
    assert out[0, 3:].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[1].isfinite().all()
    batch = make_batch([300], heads=2, kv_heads=2, head_size=64)
    out = attend(batch, scale=1e4)
    for head in range(2):
        best = (batch.keys[0][:, head] @ batch.q_BHD[0, head]).argmax()
        assert torch.equal(out[0, head], batch.values[0][best, head])


def test_what_is_left_to_the_definition() -> None:
    q, k = torch.zeros(1, 2, 64), torch.zeros(3, 2, 16, 64)
    narrow = k[..., :40].contiguous()
    assert attention.supports("attend_decode", q, k, k)
    assert attention.supports("attend_decode", q.bfloat16(), k.bfloat16(), k.bfloat16())
    for given in (
        (q.half(), k.half(), k.half()),
        (q.double(), k.double(), k.double()),
        (q, k.bfloat16(), k.bfloat16()),
        (q, k.transpose(0, 2), k),
        (q[:, :, :40], narrow, narrow),
    ):
        assert not attention.supports("attend_decode", *given)


def test_shared_work_covers_every_item_once_and_raises_failures() -> None:
    for items in (0, 1, 7, 1000):
        for most in (None, 1, 3):
            done: list[int] = []
            share(lambda first, last, done=done: done.extend(range(first, last)), items, most=most)
            assert sorted(done) == list(range(items))
    with pytest.raises(ZeroDivisionError):
        share(lambda first, last: 1 // 0, 10)


def test_wrong_places_are_refused_before_the_kernel_reads_them() -> None:
    faults: list[tuple[str, tuple[int, ...], int]] = [
        ("lengths", (0,), 49),  # beyond the table
        ("lengths", (0,), -1),
        ("table", (0, 2), 10**6),  # outside the pool
        ("table", (0, 0), -1),  # padding
        ("counts", (1, 0), 4),  # beyond the width
        ("pages", (1, 1, 0), 2),  # beyond the sequence
    ]
    for name, place, value in faults:
        batch = make_batch([40, 20], head_size=16)
        k, v, table, lengths = batch.pool
        pages, counts = torch.zeros(2, 2, 3).int(), torch.ones(2, 2).int()
        {"lengths": lengths, "table": table, "counts": counts, "pages": pages}[name][place] = value
        lists = PageLists(pages, counts) if name in ("counts", "pages") else None
        with pytest.raises(ValueError, match=r"length|table|list"):
            attention.attend_decode(batch.q_BHD, k, v, table, lengths, lists, scale=1.0)
