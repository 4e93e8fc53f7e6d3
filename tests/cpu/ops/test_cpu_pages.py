"""Page operations in numba against their definitions, and bits that must not depend on others."""

import math

import pytest
import torch
from support.paging import Batch, make_batch
from torch import Tensor

pytest.importorskip("numba")
from sparrow import ops
from sparrow.ops.cpu import pages
from sparrow.ops.reference import pages as definition

DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
LENGTHS = [1, 15, 16, 17, 0, 100, 1003, 31, 64, 300]
INF, NAN = math.inf, math.nan
DENSE = 2**31 - 1


def empty_pools(
    dtype: torch.dtype, *, pages: int = 9, heads: int = 2, page: int = 16, size: int = 32
) -> list[Tensor]:
    """k, v and landmarks, NaN wherever nothing was written."""
    shapes = [(pages, heads, page, size)] * 2 + [(pages, heads, size)]
    return [torch.full(shape, NAN, dtype=dtype) for shape in shapes]


def fused_tokens(
    tokens: int, dtype: torch.dtype, *, heads: int = 2, size: int = 32
) -> list[Tensor]:
    """Keys and values as parts of one projection."""
    generator = torch.Generator().manual_seed(tokens)
    fused = torch.randn(tokens, 3, heads, size, generator=generator).to(dtype)
    return [fused[:, 1], fused[:, 2]]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal, NaN included."""
    kind = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("integer", "contiguous"), [(torch.int32, False), (torch.int64, True)])
@pytest.mark.parametrize(("page", "size"), [(16, 32), (4, 5), (1, 8)])
def test_tokens_land_where_the_definition_puts_them(dtype, integer, contiguous, page, size) -> None:
    ours, theirs = (empty_pools(dtype, page=page, size=size) for _ in range(2))
    tokens = fused_tokens(7, dtype, size=size)
    if contiguous:
        tokens = [token.contiguous() for token in tokens]
    slots = torch.tensor([8, -1, 0, 3, -7, 7, 1]).to(integer)
    assert pages.supports("write_pages", *ours[:2], *tokens, slots)
    pages.write_pages(*ours[:2], *tokens, slots)
    definition.write_pages.definition(*theirs[:2], *tokens, slots)
    for left, right in zip(ours, theirs, strict=True):
        assert same_bits(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [16, 4, 3, 1])
def test_landmarks_are_those_of_the_definition(dtype: torch.dtype, page: int) -> None:
    ours, theirs = (empty_pools(dtype, page=page) for _ in range(2))
    k, v = fused_tokens(5 * page, dtype)
    slots = torch.cat([torch.arange(4 * page), torch.arange(page) + 6 * page])
    slots[-1] = -1  # the last page stays unfinished
    for pools, version in ((ours, pages), (theirs, definition)):
        version.write_pages(*pools[:2], k, v, slots)
        version.summarise_pages(pools[0], pools[2], slots)
    torch.testing.assert_close(ours[2], theirs[2], equal_nan=True)
    assert ours[2][:4].isfinite().all()
    assert ours[2][4:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integer", INTEGERS)
def test_appending_gives_the_bits_of_writing_at_once(dtype: torch.dtype, integer) -> None:
    whole, grown = empty_pools(dtype), empty_pools(dtype)
    k, v = fused_tokens(48, dtype)
    slots = (torch.tensor([5, 2, 8])[:, None] * 16 + torch.arange(16)).to(integer)
    pages.write_pages(*whole[:2], k, v, slots.flatten())
    pages.summarise_pages(whole[0], whole[2], slots.flatten())
    for step in range(16):
        now = torch.tensor([step, 16 + step, 32 + step, 0])
        padded = torch.cat([slots[:, step], slots.new_tensor([-1])])
        pages.append_pages(*grown, k[now], v[now], padded)
    for left, right in zip(whole, grown, strict=True):
        assert same_bits(left, right)
    assert int(grown[2].isfinite().all(2).sum()) == 3 * 2


def test_landmarks_round_to_nearest_even_and_keep_nan() -> None:
    k, v, landmark = empty_pools(torch.bfloat16, page=1, size=8, heads=1)
    bits = torch.tensor([1.0, -2.5, 3e38, -INF, INF, NAN, 1e-40, 0.0]).bfloat16()
    pages.append_pages(k, v, landmark, bits.view(1, 1, 8), bits.view(1, 1, 8), torch.tensor([3]))
    assert same_bits(landmark[3, 0], bits)
    k, v, landmark = empty_pools(torch.bfloat16, page=2, size=2, heads=1)
    k[0, 0, 0] = torch.tensor([1.0, 1.0 + 2**-7])
    k[0, 0, 1] = torch.tensor([1.0 + 2**-7, 1.0 + 2 * 2**-7])  # both means lie half-way
    pages.summarise_pages(k, landmark, torch.tensor([1]))
    assert landmark[0, 0].tolist() == [1.0, 1.0 + 2 * 2**-7]


def test_many_tokens_are_shared_by_threads() -> None:
    ours, theirs = (empty_pools(torch.float32, pages=300, size=64) for _ in range(2))
    k, v = fused_tokens(4501, torch.float32, size=64)
    slots = torch.randperm(4800, generator=torch.Generator().manual_seed(0))[:4501]
    for pools, version in ((ours, pages), (theirs, definition)):
        version.write_pages(*pools[:2], k, v, slots)
        version.summarise_pages(pools[0], pools[2], slots)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, equal_nan=True)


def test_slots_outside_the_pool_are_refused_before_anything_is_written() -> None:
    k, v, landmark = empty_pools(torch.float32)
    tokens = fused_tokens(2, torch.float32)
    slots = torch.tensor([15, 9 * 16])
    arguments = {
        "write_pages": (k, v, *tokens, slots),
        "summarise_pages": (k, landmark, slots),
        "append_pages": (k, v, landmark, *tokens, slots),
    }
    for op, given in arguments.items():
        with pytest.raises(ValueError, match="slot 144"):
            getattr(ops, op)(*given)
    assert k.isnan().all()
    assert landmark.isnan().all()


def score(batch: Batch, version=pages) -> Tensor:
    return version.score_pages(
        batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B, page=batch.page
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize(("head_size", "page"), [(8, 4), (32, 16), (128, 16)])
def test_scores_are_those_of_the_definition(dtype, heads, kv_heads, head_size, page) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "page": page}
    batch = make_batch(LENGTHS, dtype=dtype, **sizes)
    expected = score(batch, definition)
    torch.testing.assert_close(score(batch), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(score(batch).isneginf(), expected.isneginf())


def test_scores_of_whole_numbers_are_exact() -> None:
    batch = make_batch(LENGTHS, heads=4, head_size=16, whole_numbers=True)
    assert torch.equal(score(batch), score(batch, definition))


@pytest.mark.parametrize("integer", INTEGERS)
def test_scores_of_strided_queries_and_tables(integer: torch.dtype) -> None:
    batch = make_batch(LENGTHS, heads=6, head_size=32)
    fused = torch.cat([batch.q_BHD, batch.q_BHD + 1], dim=1)
    wide = torch.cat([batch.table_BM, batch.table_BM], dim=1).to(integer)
    strided = batch._replace(
        q_BHD=fused[:, :6],
        table_BM=wide[:, : batch.table_BM.shape[1]],
        lengths_B=batch.lengths_B.to(integer),
    )
    assert torch.equal(score(strided), score(batch))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_scores_the_same_alone_and_at_every_place(dtype: torch.dtype) -> None:
    batch = make_batch(LENGTHS, head_size=32, dtype=dtype)
    many = score(batch)
    for row in range(len(LENGTHS)):
        alone = score(
            batch._replace(
                q_BHD=batch.q_BHD[row : row + 1],
                table_BM=batch.table_BM[row : row + 1],
                lengths_B=batch.lengths_B[row : row + 1],
            )
        )
        assert same_bits(alone[0], many[row])
    table = batch.table_BM[6:7].flip(1)  # 62 finished pages and an unfinished one, in front
    turned = score(
        batch._replace(
            q_BHD=batch.q_BHD[6:7], table_BM=table[:, 1:], lengths_B=batch.lengths_B[6:7]
        )
    )
    assert same_bits(turned[0], many[6, :, :62].flip(1))


def test_tables_outside_the_pool_are_refused() -> None:
    for wrong in (-1, 10_000):
        batch = make_batch([40, 20], head_size=16)
        batch.table_BM[0, 1] = wrong
        with pytest.raises(ValueError, match="table"):
            score(batch)


def both_lists(score_BGM: Tensor, lengths: Tensor, budgets: Tensor, **options) -> None:
    """The same lists by both versions."""
    assert pages.supports("select_pages", score_BGM, lengths, budgets, **options)
    ours = pages.select_pages(score_BGM, lengths, budgets, **options)
    theirs = definition.select_pages.definition(score_BGM, lengths, budgets, **options)
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", ["floats", "ties", "odd", "strided"])
@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 1), (3, 4), (100, 1), (0, 100)])
def test_lists_are_those_of_the_definition(kind: str, first: int, last: int) -> None:
    integer = INTEGERS[first % 2]
    generator = torch.Generator().manual_seed(first)
    rows, heads, width = 60, 3, 41
    scores = torch.randn(rows, heads, width, generator=generator)
    if kind == "ties":
        scores = scores.round()
        assert (scores.view(torch.int32) == -(2**31)).any()  # minus zeros among the zeros
    elif kind == "odd":
        odd = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 3.4028234663852886e38, 1e-45, -NAN])
        scores = odd[torch.randint(len(odd), scores.shape, generator=generator)]
    elif kind == "strided":
        scores = scores.transpose(1, 2).contiguous().transpose(1, 2)
    lengths = torch.randint(0, width * 4 + 1, (rows,), generator=generator)
    budgets = torch.randint(0, width * 4 + 9, (rows,), generator=generator)
    budgets[::7] = DENSE
    lengths[:3] = torch.tensor([0, width * 4, 1])
    options = {"page": 4, "first": first, "last": last}
    both_lists(scores, lengths.to(integer), budgets.to(integer), **options)
    both_lists(scores, lengths.to(integer), budgets.to(integer), **options, width=width + 5)
    per_head = torch.stack([budgets, budgets.roll(1), torch.full_like(budgets, DENSE)], 1)
    both_lists(scores, lengths.to(integer), per_head.to(integer), **options)


@pytest.mark.parametrize("shape", [(0, 2, 5), (3, 2, 0), (2, 1, 1)])
def test_small_shapes(shape: tuple[int, int, int]) -> None:
    lengths = torch.full(shape[:1], min(shape[2], 1))
    both_lists(torch.zeros(shape), lengths, lengths, page=4)


@pytest.mark.parametrize("page", [1, 16])
def test_long_sequences_and_the_largest_budget(page: int) -> None:
    scores = torch.randn(5, 2, 3000, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3000, 2999, 17, 0, 3000], dtype=torch.int32) * page
    budgets = torch.tensor([2048, 1, DENSE, DENSE, DENSE], dtype=torch.int32)
    both_lists(scores, lengths, budgets, page=page)


def test_what_does_not_fit_is_refused_as_by_the_definition() -> None:
    scores, budget = torch.zeros(2, 1, 8), torch.tensor([0, 1000])
    for version in (pages, definition):
        with pytest.raises(ValueError, match="9 pages"):
            version.select_pages(scores, torch.tensor([33, 4]), budget, page=4)
        with pytest.raises(ValueError, match="width"):
            version.select_pages(scores, torch.tensor([32, 32]), budget, page=4, width=4)


def test_what_is_left_to_the_definition() -> None:
    k, v, landmark = empty_pools(torch.float32)
    tokens, slots = fused_tokens(2, torch.float32), torch.tensor([1, 2])
    halves = [token.bfloat16() for token in tokens]
    assert pages.supports("append_pages", k, v, landmark, *tokens, slots)
    assert not pages.supports("append_pages", k, v, landmark, *halves, slots)
    assert not pages.supports("append_pages", k, v, landmark.bfloat16(), *tokens, slots)
    assert not pages.supports("write_pages", k.double(), v.double(), k[0], v[0], slots)
    assert not pages.supports("summarise_pages", k.transpose(0, 2), landmark, slots)
    assert not pages.supports("score_pages", k[:, 0, :2, :5], landmark[..., :5], slots, slots)
    assert not pages.supports("select_pages", landmark.double(), slots, slots, page=4)
    assert not pages.supports("select_pages", landmark, slots, slots, page=4, mass=0.9)
    with ops.using("reference"):
        ops.append_pages(k, v, landmark, *halves, slots)
    assert torch.equal(k[0, :, 1], halves[0][0].float())
