"""The block-mean flow: its fields, that it is the ops it stands for, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.paging import Batch, make_batch, slots_of

from sparrow import ops
from sparrow.sparse import DENSE, Schedule, kept_tokens, preset
from sparrow.sparse.block_mean import BlockMean
from sparrow.sparse.flow import Flow

LAYERS, SPARSE = 3, 2
Fill = Callable[[Flow, ops.PageCache, Batch], None]


def cache_for(flow: Flow, batch: Batch) -> ops.PageCache:
    """A cache of the batch's pool with nothing but NaN in it."""
    pages, kv_heads, page, head_size = batch.k_NGPD.shape
    kept = [ops.Field(name=name, shape=(page, head_size), dtype=torch.float32) for name in "kv"]
    fields = (*kept, *flow.fields(head_size, torch.float32))
    cache = ops.PageCache(
        layers=LAYERS, kv_heads=kv_heads, page=page, pages=pages, page_fields=fields
    )
    for field in fields:
        cache.field(field.name, SPARSE).fill_(float("nan"))
    return cache


def fill_by_prefill(flow: Flow, cache: ops.PageCache, batch: Batch) -> None:
    for row, length in enumerate(batch.lengths_B.tolist()):
        slots_T = slots_of(batch.table_BM[row], torch.arange(length), batch.page)
        k_NGPD, v_NGPD = cache.field("k", SPARSE), cache.field("v", SPARSE)
        ops.write_pages(k_NGPD, v_NGPD, batch.keys[row], batch.values[row], slots_T)
        flow.summarise(cache, SPARSE, slots_T)


def fill_by_decoding(flow: Flow, cache: ops.PageCache, batch: Batch) -> None:
    for row, length in enumerate(batch.lengths_B.tolist()):
        for token in range(length):
            slots_B = slots_of(batch.table_BM[row], torch.tensor([token]), batch.page)
            k_BGD, v_BGD = batch.keys[row][token][None], batch.values[row][token][None]
            flow.append(cache, SPARSE, k_BGD, v_BGD, slots_B)


@pytest.mark.parametrize("fill", [fill_by_prefill, fill_by_decoding])
def test_prefill_and_decoding_store_keys_values_and_landmarks(fill: Fill) -> None:
    flow, batch = BlockMean(), make_batch([1, 15, 16, 17, 83])
    cache = cache_for(flow, batch)
    fill(flow, cache, batch)
    stored = [cache.field(name, SPARSE) for name in ("k", "v", "landmark")]
    for got, expected in zip(stored, (batch.k_NGPD, batch.v_NGPD, batch.landmark_NGD), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert not cache.field("k", 0).any()


@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 1), (2, 3)])
def test_selects_by_score_under_each_rows_budget(first: int, last: int) -> None:
    flow = BlockMean(first=first, last=last)
    batch = make_batch([1, 47, 48, 161, 401])
    cache = cache_for(flow, batch)
    fill_by_prefill(flow, cache, batch)
    budgets_B = torch.tensor([80, 80, 80, 96, DENSE], dtype=torch.int32)
    lists = flow.select(cache, SPARSE, batch.q_BHD, batch.table_BM, batch.lengths_B, budgets_B)
    score_BGM = ops.score_pages(
        batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B, page=batch.page
    )
    expected = ops.select_pages(
        score_BGM, batch.lengths_B, budgets_B, page=batch.page, first=first, last=last
    )
    assert lists is not None
    assert torch.equal(lists.pages, expected.pages)
    assert torch.equal(lists.counts, expected.counts)
    assert lists.counts[4].tolist() == [26, 26]


def test_dense_layers_select_nothing() -> None:
    flow, batch = BlockMean(dense_layers=frozenset({SPARSE})), make_batch([100])
    cache = cache_for(flow, batch)
    budgets_B = torch.tensor([48])
    assert (
        flow.select(cache, SPARSE, batch.q_BHD, batch.table_BM, batch.lengths_B, budgets_B) is None
    )


@pytest.mark.parametrize(("page", "first", "last"), [(16, 1, 2), (4, 0, 1), (5, 3, 2), (1, 1, 1)])
def test_kept_tokens_is_what_select_pages_keeps(page: int, first: int, last: int) -> None:
    lengths_B, budgets_B = torch.cartesian_prod(torch.arange(0, 131), torch.arange(0, 141, 3)).T
    score_BGM = torch.rand(len(lengths_B), 1, -(-130 // page))
    lists = ops.select_pages(score_BGM, lengths_B, budgets_B, page=page, first=first, last=last)
    tokens_BK = (lengths_B[:, None] - lists.pages[:, 0] * page).clamp(0, page)
    tokens_B = tokens_BK.masked_fill(lists.pages[:, 0] < 0, 0).sum(1)
    pairs = zip(lengths_B.tolist(), budgets_B.tolist(), strict=True)
    assert tokens_B.tolist() == [kept_tokens(*pair, page, first, last) for pair in pairs]


def test_accepts_schedules_made_for_it() -> None:
    BlockMean().check(preset("qwen3-4b-0.86"), page=16)
    own = Schedule.fixed(160, page=32, first=2, last=1, dense_layers=())
    BlockMean(first=2, last=1, dense_layers=frozenset()).check(own, page=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flow": "quest"}, r"flow 'quest' \(the engine runs 'block-mean'\)"),
        ({"page": 8}, r"page 8 \(the engine runs 16\)"),
        ({"first": 0}, r"first 0 \(the engine runs 1\)"),
        ({"last": 1}, r"last 1 \(the engine runs 2\)"),
        ({"dense_layers": ()}, r"dense_layers \(\) \(the engine runs \(0, 1\)\)"),
    ],
)
def test_refuses_schedules_made_for_another_rule(change: dict[str, object], message: str) -> None:
    schedule = replace(preset("qwen3-4b-0.86"), **change)
    with pytest.raises(ValueError, match=rf"'qwen3-4b-0.86' was made for another rule: {message};"):
        BlockMean().check(schedule, page=16)
