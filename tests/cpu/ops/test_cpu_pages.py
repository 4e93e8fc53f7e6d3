"""Page kernels in numba against definitions, and bits that must not depend on others."""

import math

import pytest
import torch
from support import paging
from support.paging import DENSE, Batch, check_select, check_selections, make_batch, mean_scores
from torch import Tensor

from sparrow import ops
from sparrow.ops.cpu import pages
from sparrow.ops.reference import pages as definition

DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
LENGTHS = [1, 15, 16, 17, 0, 100, 1003, 31, 64, 300]
INF, NAN = math.inf, math.nan


def empty_pools(
    dtype: torch.dtype, *, pages: int = 9, heads: int = 2, page: int = 16, size: int = 32
) -> list[Tensor]:
    """k, v and landmarks, NaN wherever nothing was written."""
    shapes = [(pages, heads, page, size)] * 2 + [(pages, heads, size)]
    return [torch.full(shape, NAN, dtype=dtype) for shape in shapes]


def fused_tokens(
    tokens: int, dtype: torch.dtype, *, heads: int = 2, size: int = 32
) -> tuple[Tensor, Tensor]:
    """Keys and values as parts of one projection."""
    generator = torch.Generator().manual_seed(tokens)
    fused = torch.randn(tokens, 3, heads, size, generator=generator).to(dtype)
    return fused[:, 1], fused[:, 2]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bits, and NaN (of any bits) where the other is."""
    kind = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    bits = (x.nan_to_num(nan=0.0, posinf=INF, neginf=-INF).view(kind) for x in (left, right))
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_land_where_the_definition_puts_them(dtype) -> None:
    for page, size in ((16, 32), (4, 5), (3, 8), (1, 8)):
        paging.check_write(pages, dtype, page, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [16, 4, 3, 1])
def test_landmarks_are_means_of_finished_pages_at_once_or_step_by_step(dtype, page) -> None:
    """Summed in fp32, with the same bits either way; what is not finished keeps what it had."""
    whole, grown = empty_pools(dtype, page=page), empty_pools(dtype, page=page)
    k, v = fused_tokens(3 * page, dtype)
    slots = torch.tensor([5, 2, 8])[:, None] * page + torch.arange(page)
    slots[2, -1] = -1  # the last page stays unfinished
    pages.write_pages(whole[0], whole[1], k, v, slots.flatten())
    pages.summarise_pages(whole[0], whole[2], slots.flatten())
    for step in range(page):
        now = torch.tensor([step, page + step, 2 * page + step, 0])
        padded = torch.cat([slots[:, step], slots.new_tensor([-1])]).int()
        pages.write_pages(grown[0], grown[1], k[now], v[now], padded)
        pages.summarise_pages(grown[0], grown[2], padded)
    assert all(same_bits(*pair) for pair in zip(whole, grown, strict=True))
    expected = k.unflatten(0, (3, page))[:2].float().mean(1).to(dtype)
    torch.testing.assert_close(whole[2][[5, 2]], expected)
    assert whole[2][[0, 1, 3, 4, 6, 7, 8]].isnan().all()


def test_landmarks_round_to_nearest_even_sum_in_fp32_and_keep_nan() -> None:
    k, _, landmark = empty_pools(torch.bfloat16, page=1, size=8, heads=1)
    k[3, 0, 0] = torch.tensor([1.0, -2.5, 3e38, -INF, INF, NAN, 1e-40, 0.0]).bfloat16()
    pages.summarise_pages(k, landmark, torch.tensor([3]))
    assert same_bits(landmark[3, 0], k[3, 0, 0])
    k, _, landmark = empty_pools(torch.bfloat16, page=2, size=2, heads=1)
    k[0, 0, 0] = torch.tensor([1.0, 1.0 + 2**-7])
    k[0, 0, 1] = torch.tensor([1.0 + 2**-7, 1.0 + 2 * 2**-7])  # both means lie half-way
    pages.summarise_pages(k, landmark, torch.tensor([1]))
    assert landmark[0, 0].tolist() == [1.0, 1.0 + 2 * 2**-7]
    k, landmark = torch.ones(1, 1, 16, 4).bfloat16(), torch.zeros(1, 1, 4).bfloat16()
    k[0, 0, 0] = 4096.0  # 4096 + 1 is 4096 in bf16
    pages.summarise_pages(k, landmark, torch.tensor([15]))
    assert landmark.unique().tolist() == [torch.tensor((4096 + 15) / 16).bfloat16().item()]


def test_many_tokens_are_shared_by_threads() -> None:
    sizes = {"pages": 300, "size": 64}
    (k_pool, v_pool, landmark), theirs = (empty_pools(torch.float32, **sizes) for _ in range(2))
    k, v = fused_tokens(4501, torch.float32, size=64)
    slots = torch.randperm(4800, generator=torch.Generator().manual_seed(0))[:4501]
    pages.write_pages(k_pool, v_pool, k, v, slots)
    pages.summarise_pages(k_pool, landmark, slots)
    definition.write_pages.definition(theirs[0], theirs[1], k, v, slots)
    assert same_bits(k_pool, theirs[0])
    assert same_bits(v_pool, theirs[1])
    finished = slots[slots % 16 == 15] // 16
    torch.testing.assert_close(landmark[finished], k_pool[finished].mean(2), equal_nan=True)


def test_places_outside_the_pool_are_refused_before_anything_is_written() -> None:
    k, v, landmark = empty_pools(torch.float32)
    slots = torch.tensor([15, 9 * 16])
    with pytest.raises(ValueError, match="slot 144"):
        ops.write_pages(k, v, *fused_tokens(2, torch.float32), slots)
    with pytest.raises(ValueError, match="slot 144"):
        pages.summarise_pages(k, landmark, slots)
    assert k.isnan().all()
    assert landmark.isnan().all()
    for wrong in (-1, 10_000):
        batch = make_batch([40, 20], head_size=16)
        batch.table_BM[0, 1] = wrong
        with pytest.raises(ValueError, match="table"):
            score(batch)


def score(batch: Batch, **changes: Tensor) -> Tensor:
    batch = batch._replace(**changes)
    given = (batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B)
    return pages.score_pages(*given, page=batch.page)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_scores_are_mean_query_times_landmark(dtype, heads, kv_heads) -> None:
    for head_size, page in ((8, 4), (32, 16), (128, 16)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "page": page}
        batch = make_batch(LENGTHS, dtype=dtype, **sizes)
        torch.testing.assert_close(score(batch), mean_scores(batch), atol=1e-5, rtol=1e-5)
    exact = make_batch(LENGTHS, heads=4, head_size=16, whole_numbers=True)
    assert torch.equal(score(exact), mean_scores(exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_scores_the_same_alone_at_every_place_and_by_any_strides(dtype) -> None:
    batch = make_batch(LENGTHS, heads=6, head_size=32, dtype=dtype)
    q, table, lengths, many = batch.q_BHD, batch.table_BM, batch.lengths_B, score(batch)
    for row in range(len(LENGTHS)):
        one = {"q_BHD": q[row, None], "table_BM": table[row, None], "lengths_B": lengths[row, None]}
        assert same_bits(score(batch, **one)[0], many[row])
    turned = table[6:7].flip(1)[:, 1:]  # 62 finished pages and an unfinished one, in front
    backwards = score(batch, q_BHD=q[6:7], table_BM=turned, lengths_B=lengths[6:7])
    assert same_bits(backwards[0], many[6, :, :62].flip(1))
    fused = torch.cat([q, q + 1], dim=1)[:, :6]
    for integer in INTEGERS:
        wide = torch.cat([table, table], dim=1).to(integer)[:, : table.shape[1]]
        arguments = {"q_BHD": fused, "table_BM": wide, "lengths_B": lengths.to(integer)}
        assert torch.equal(score(batch, **arguments), many)


def test_lists_are_those_of_the_definition() -> None:
    check_selections(pages, rows=60, width=41)
    for shape in ((0, 2, 5), (3, 2, 0), (2, 1, 1)):
        lengths = torch.full(shape[:1], min(shape[2], 1))
        check_select(pages, torch.zeros(shape), lengths, lengths, page=4)
    scores = torch.randn(5, 2, 3000, generator=torch.Generator().manual_seed(0))
    budgets = [2048, 1, DENSE, DENSE, DENSE]
    for page in (1, 16):
        lengths = torch.tensor([3000, 2999, 17, 0, 3000]) * page
        for layout in (scores, scores.transpose(1, 2).contiguous().transpose(1, 2)):
            check_select(pages, layout, lengths, budgets, page=page)


def test_what_is_left_to_the_definition() -> None:
    k, v, landmark = empty_pools(torch.float32)
    tokens, slots = fused_tokens(2, torch.float32), torch.tensor([1, 2])
    halves = (tokens[0].bfloat16(), tokens[1].bfloat16())
    assert pages.supports("write_pages", k, v, *tokens, slots)
    assert not pages.supports("write_pages", k, v, *halves, slots)
    assert not pages.supports("write_pages", k.double(), v.double(), k[0], v[0], slots)
    assert not pages.supports("write_pages", k.transpose(0, 2), v, *tokens, slots)
    assert not pages.supports("select_pages", landmark.double(), slots, slots, page=4)
    assert not pages.supports("select_pages", landmark, slots, slots, page=4, mass=0.9)
    ops.write_pages(k, v, *halves, slots)
    assert torch.equal(k[0, :, 1], halves[0][0].float())
