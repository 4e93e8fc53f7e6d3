"""The attention kernels in Triton's interpreter against their definitions.

Where there is a GPU they run on it. The interpreter computes bf16 wrongly without an error, so fp32
and fp16 stand for it here; real sizes and bf16 are tested in tests/gpu.
"""

from itertools import product
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
from sparrow.ops.reference import attention as definition

LENGTHS = [1, 16, 17, 0, 70]
SCALE = 0.3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = decode.plan
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows as NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def _splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut into three splits at most, unless a test says otherwise."""
    cut_into(3, monkeypatch)


def cut_into(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many splits, each of 32 tokens at least."""
    cut = decode.Plan(tile=32, splits=splits, least=32, warps=4, stages=2)
    monkeypatch.setattr(decode, "plan", lambda *_: cut)


def paged(lengths: list[int], **options: Any) -> Batch:
    batch = make_batch(lengths, **options)
    return Batch(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in batch))


def attend(batch: Batch, lists: PageLists | None = None, *, scale: float = SCALE) -> Tensor:
    arguments = batch.q_BHD, *batch.pool, lists
    assert decode.supports("attend_decode", *arguments, scale=scale)
    return decode.attend_decode(*arguments, scale=scale)


def assert_decodes(batch: Batch, lists: PageLists | None = None) -> None:
    expected = definition.attend_decode.definition(batch.q_BHD, *batch.pool, lists, scale=SCALE)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(attend(batch, lists), expected, atol=tolerance, rtol=tolerance)


def chosen(batch: Batch, budget: int, *, width: int | None = None) -> PageLists:
    lengths, page = batch.lengths_B, batch.page
    score = ops.score_pages(batch.q_BHD, batch.landmark_NGD, batch.table_BM, lengths, page=page)
    budgets = torch.full_like(lengths, budget)
    return ops.select_pages(score, lengths, budgets, page=page, width=width)


@pytest.mark.parametrize("splits", [1, 3, 64])
def test_decode(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and over lists; heads of odd sizes, whose neighbours must not come in."""
    cut_into(splits, monkeypatch)
    for ratio, dtype in ((1, torch.float32), (3, torch.float16)):
        assert_decodes(paged(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=32, dtype=dtype))
    for head_size in (32, 48):
        batch = paged(LENGTHS, heads=4, head_size=head_size)
        assert_decodes(batch, chosen(batch, 48))
        assert_decodes(batch, chosen(batch, 64, width=5))


SHAPES = [(64, 16), (128, 32), (32, 4), (32, 64), (40, 16), (80, 16), (96, 4), (32, 256)]


@pytest.mark.parametrize(("head_size", "page"), SHAPES)
def test_decode_of_other_shapes(head_size: int, page: int) -> None:
    assert_decodes(paged([70, 3], heads=2, kv_heads=1, head_size=head_size, page=page))


def test_many_query_heads_of_a_group() -> None:
    for ratio in (17, 64):
        assert_decodes(paged([20, 40], heads=ratio, kv_heads=1, head_size=32))


def test_kept_pages_are_shared_by_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be, in whole tiles, however wide the table is."""
    partials: list[Tensor] = []
    make = decode._partials
    monkeypatch.setattr(decode, "_partials", lambda *args: partials.extend(make(*args)) or partials)
    batch = paged([24 * 16], heads=1, kv_heads=1, head_size=32)
    pages = torch.arange(24, device=DEVICE).view(1, 1, 24)
    for kept, splits, used in (
        (1, 64, 1),
        (3, 3, 2),
        (6, 3, 3),
        (7, 3, 2),
        (20, 3, 3),
        (20, 64, 10),
    ):
        cut_into(splits, monkeypatch)
        partials.clear()
        assert_decodes(batch, PageLists(pages, torch.full((1, 1), kept, device=DEVICE)))
        _, top_BHX, _ = partials
        assert top_BHX.isfinite().sum() == used


def test_the_list_of_all_pages_is_dense() -> None:
    batch = paged(LENGTHS, head_size=32)
    dense = attend(batch)
    assert torch.equal(attend(batch, chosen(batch, 1000)), dense)
    assert torch.equal(attend(batch, chosen(batch, 1000, width=20)), dense)


def test_a_row_does_not_depend_on_the_others() -> None:
    batch = paged(LENGTHS, head_size=32)
    together = attend(batch)
    for row in (1, 4):
        only = slice(row, row + 1)
        alone = batch._replace(
            q_BHD=batch.q_BHD[only], table_BM=batch.table_BM[only], lengths_B=batch.lengths_B[only]
        )
        assert torch.equal(attend(alone), together[only])


def relaid(batch: Batch) -> Batch:
    """The same values: queries out of a fused row, a table that is part of a wider one, int64."""
    table = torch.nn.functional.pad(batch.table_BM, (0, 3), value=2**20)
    fused = torch.cat([batch.q_BHD, torch.full_like(batch.q_BHD, torch.nan)], dim=1)
    return batch._replace(
        q_BHD=fused[:, : batch.q_BHD.shape[1]],
        table_BM=table[:, :-3],
        lengths_B=batch.lengths_B.long().repeat_interleave(2)[::2],
    )


def test_decode_of_other_layouts_and_integers() -> None:
    batch = paged([17, 0, 60], head_size=32)
    lists = chosen(batch, 64)
    expected = attend(batch, lists)
    long = PageLists(lists.pages.long(), lists.counts.long())
    assert torch.equal(attend(relaid(batch), long), expected)
    turned = batch._replace(
        q_BHD=batch.q_BHD.transpose(0, 2).contiguous().transpose(0, 2),
        table_BM=batch.table_BM.int().T.contiguous().T,
    )
    assert torch.equal(attend(turned, lists), expected)
    assert torch.equal(attend(relaid(batch)), attend(batch))


def test_pages_off_the_list_are_never_read() -> None:
    """Unused slots of the pool hold NaN already; here the pages that no head keeps do, too."""
    batch = paged([150], heads=2, head_size=32)
    lists = chosen(batch, 48)
    expected = attend(batch, lists)
    kept = lists.pages[0].unique().long()
    lost = torch.ones(len(batch.k_NGPD), dtype=torch.bool, device=DEVICE)
    lost[batch.table_BM[0, kept[kept >= 0]]] = False
    batch.k_NGPD[lost], batch.v_NGPD[lost] = torch.nan, torch.nan
    assert torch.equal(attend(batch, lists), expected)
    assert expected.isfinite().all()


def test_rows_and_heads_without_pages_give_zeros() -> None:
    batch = paged([0, 40, 0], heads=4, kv_heads=2, head_size=32)
    assert (attend(batch)[[0, 2]] == 0).all()
    pages = torch.tensor([[[-1], [-1]], [[-1], [1]], [[0], [0]]], device=DEVICE)
    out = attend(batch, PageLists(pages, (pages >= 0).sum(2)))
    assert (out[[0, 2]] == 0).all()
    assert (out[1, :2] == 0).all()
    assert out[1, 2:].isfinite().all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batches_without_tokens(lengths: list[int]) -> None:
    batch = paged(lengths, head_size=32)
    assert torch.equal(attend(batch), torch.zeros_like(batch.q_BHD))


def test_a_nan_in_a_used_key_shows_in_its_own_heads_only() -> None:
    batch = paged([70, 70], heads=6, kv_heads=2, head_size=32)
    batch.k_NGPD[batch.table_BM[0, 3], 1, 5, 7] = torch.nan
    out = attend(batch)
    assert out[0, 3:].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[1].isfinite().all()


def test_plans_cut_by_whole_tiles_and_pages() -> None:
    numbers = (1, 4, 32, 64, 256), (16, 128, 2048, 32768, 131072), (32, 80, 128, 256), (2, 4)
    for rows, tokens, size, itemsize in product(*numbers):
        cut = PLAN(rows, 8, tokens, size, itemsize)
        assert cut.tile.bit_count() == cut.least.bit_count() == 1
        assert cut.least % cut.tile == 0
        assert 1 <= cut.splits <= min(decode.MOST_SPLITS, max(1, tokens // cut.least))
        assert cut.splits * rows * 8 <= decode.MOST_PROGRAMS
    known = [(1, 2**18, 64), (1, 4096, 32), (16, 32768, 16), (32, 32768, 16), (32, 2048, 1)]
    for rows, tokens, splits in (*known, (60, 4096, 2)):
        assert PLAN(rows, 8, tokens, 128, 2).splits == splits


def queries_of(batch: Batch, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Queries for the last so many tokens of each row, and their bounds."""
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(counts), *batch.q_BHD.shape[1:], generator=generator)
    return q.to(batch.q_BHD), bounds


def attend_chunks(batch: Batch, q_THD: Tensor, bounds: Tensor) -> Tensor:
    arguments = q_THD, *batch.pool, bounds
    assert prefill.supports("attend_causal_paged", *arguments, scale=SCALE)
    return prefill.attend_causal_paged(*arguments, scale=SCALE)


@pytest.mark.parametrize("counts", [LENGTHS, [1, 15, 2, 0, 50], [0, 3, 0, 0, 33]])
@pytest.mark.parametrize(("ratio", "dtype"), [(1, torch.float16), (3, torch.float32)])
def test_prefill(ratio: int, dtype: torch.dtype, counts: list[int]) -> None:
    batch = paged(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=32, dtype=dtype)
    q, bounds = queries_of(batch, counts)
    expected = definition.attend_causal_paged.definition(q, *batch.pool, bounds, scale=SCALE)
    tolerance = TOLERANCE[dtype]
    out = attend_chunks(batch, q, bounds)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head_size", [40, 80])
def test_prefill_of_heads_of_odd_sizes(head_size: int) -> None:
    batch = paged([40, 3], heads=2, kv_heads=1, head_size=head_size)
    q, bounds = queries_of(batch, [35, 3])
    expected = definition.attend_causal_paged.definition(q, *batch.pool, bounds, scale=SCALE)
    torch.testing.assert_close(attend_chunks(batch, q, bounds), expected, atol=1e-5, rtol=1e-5)


def test_prefill_of_other_layouts_and_integers() -> None:
    batch = paged([17, 0, 60], head_size=32)
    q, bounds = queries_of(batch, [5, 0, 40])
    expected = attend_chunks(batch, q, bounds)
    fused = torch.cat([torch.full_like(q, torch.nan), q], dim=1)[:, q.shape[1] :]
    assert torch.equal(attend_chunks(relaid(batch), fused, bounds.int()), expected)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    batch = paged(LENGTHS, head_size=32)
    q, bounds = queries_of(batch, [1, 15, 2, 0, 50])
    together = attend_chunks(batch, q, bounds)
    last = batch._replace(table_BM=batch.table_BM[4:], lengths_B=batch.lengths_B[4:])
    alone = attend_chunks(last, q[bounds[4] :], bounds[4:] - bounds[4])
    assert torch.equal(alone, together[bounds[4] :])


def test_prefill_without_queries() -> None:
    batch = paged([3, 0], head_size=32)
    q, bounds = queries_of(batch, [0, 0])
    assert attend_chunks(batch, q, bounds).shape == (0, 6, 32)


@pytest.mark.parametrize("module", [decode, prefill])
def test_what_is_left_to_the_definition(module) -> None:
    def supported(q: Tensor, k: Tensor) -> bool:
        return module.supports("", q, k, k, scale=1.0)

    q, k = torch.zeros(1, 2, 64), torch.zeros(3, 2, 16, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert supported(q.to(dtype), k.to(dtype))
    assert not supported(q.double(), k.double())
    assert not supported(q, k.half())
    assert not supported(q, k.transpose(0, 2))
    assert supported(q[..., :48], k[..., :48].contiguous())
    assert not supported(q[..., :44], k[..., :44].contiguous())
    assert not supported(q[..., :24], k[..., :24].contiguous())
    assert not supported(q, k[:, :, :12].contiguous())
