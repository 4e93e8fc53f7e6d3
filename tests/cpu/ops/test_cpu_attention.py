"""Decode attention in numba against its definition, and the bits that must not depend on others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from support import paging
from support.paging import attend, check_bits_of_decode, check_decode, chosen, make_batch

from sparrow import ops
from sparrow.ops import PageLists
from sparrow.ops.cpu import attention
from sparrow.ops.cpu.simd import share

LENGTHS = [1, 15, 16, 17, 0, 100, 1003]
RATIOS = [1, 2, 3, 4, 5, 7]
DTYPES = [torch.float32, torch.bfloat16]


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
    sizes = {"kv_heads": 2, "head_size": head_size, "page": page, "dtype": dtype}
    for ratio in RATIOS:
        batch = make_batch([1, 16, 17, 0, 300], heads=2 * ratio, **sizes)
        last = (batch.lengths_B[:, None, None] - 1).div(page, rounding_mode="floor")
        last = last.expand(-1, 2, 1)
        for lists in (None, chosen(batch, 4 * page), PageLists(last, (last >= 0).sum(2))):
            check_decode(attention, batch, lists, factor=2)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_the_number_of_threads(listed: bool) -> None:
    batch = make_batch(LENGTHS, heads=8, kv_heads=2, head_size=128)
    lists = chosen(batch, 64) if listed else None
    results = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        results.append(attend(attention, batch, lists))
    assert all(torch.equal(left, right) for left, right in pairwise(results))


@pytest.mark.usefixtures("threads")
def test_calls_from_several_threads_at_once() -> None:
    batches = [make_batch([700, 33], heads=6, head_size=64, seed=seed) for seed in range(8)]
    expected = [attend(attention, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            actual = list(pool.map(partial(attend, attention), batches))
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_layouts_lists_other_rows_and_nan() -> None:
    check_bits_of_decode(attention, make_batch(LENGTHS, heads=6, kv_heads=2, head_size=64), 48)
    paging.check_rows_without_pages_and_nan(attention)


def test_scores_far_apart_pick_one_token() -> None:
    batch = make_batch([300], heads=2, kv_heads=2, head_size=64)
    out = attention.attend_decode(batch.q_BHD, *batch.pool, scale=1e4)
    for head in range(2):
        best = (batch.keys[0][:, head] @ batch.q_BHD[0, head]).argmax()
        assert torch.equal(out[0, head], batch.values[0][best, head])


def test_what_is_left_to_the_definition() -> None:
    q, k = torch.zeros(1, 2, 64), torch.zeros(3, 2, 16, 64)
    narrow = k[..., :40].contiguous()
    assert attention.supports("attend_decode", q, k, k)
    assert attention.supports("attend_decode", q.bfloat16(), k.bfloat16(), k.bfloat16())
    for arguments in (
        (q.half(), k.half(), k.half()),
        (q.double(), k.double(), k.double()),
        (q, k.bfloat16(), k.bfloat16()),
        (q, k.transpose(0, 2), k),
        (q[:, :, :40], narrow, narrow),
    ):
        assert not attention.supports("attend_decode", *arguments)


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
        ("pages", (1, 1, 0), 3),  # beyond the table
    ]
    for name, place, value in faults:
        batch = make_batch([40, 20], head_size=16)
        k, v, table, lengths = batch.pool
        pages, counts = torch.zeros(2, 2, 3).int(), torch.ones(2, 2).int()
        {"lengths": lengths, "table": table, "counts": counts, "pages": pages}[name][place] = value
        lists = PageLists(pages, counts) if name in ("counts", "pages") else None
        with pytest.raises(ValueError, match=r"length|table|list"):
            attention.attend_decode(batch.q_BHD, k, v, table, lengths, lists, scale=1.0)


def test_pages_that_a_row_has_not_reached_are_skipped() -> None:
    batch = make_batch([40, 20], head_size=16)
    pages, counts = torch.tensor([0, 1, 2]).int().expand(2, 2, 3).clone(), torch.full((2, 2), 3)
    counts[1] = 2
    where = (batch.q_BHD, *batch.pool)
    wanted = attention.attend_decode(*where, PageLists(pages, counts.int()), scale=1.0)
    counts[1] = 3  # its third page is the table's, not the row's
    for version in (attention.attend_decode, ops.attend_decode.definition):
        found = version(*where, PageLists(pages, counts.int()), scale=1.0)
        torch.testing.assert_close(found, wanted)
