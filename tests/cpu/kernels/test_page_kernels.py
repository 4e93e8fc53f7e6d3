"""Page kernels against their definitions: in Triton's interpreter, or on a GPU where there is one.

The interpreter gets bf16 wrong, so these tests use fp32 and fp16; tests/gpu has bf16.
"""

import pytest
import torch
from support.paging import Batch, make_batch, slots_of

pytest.importorskip("triton")
from sparrow.ops.kernels import score, select, store
from sparrow.ops.reference import pages as definition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
WIDE_OPEN = 2**31 - 1  # the budget of a dense row


def on_device(batch: Batch) -> Batch:
    return type(batch)(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in batch))


def batch_of(lengths: list[int], **options) -> Batch:
    return on_device(make_batch(lengths, **options))


def poisoned(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty pools of the batch's shape, NaN everywhere."""
    return tuple(
        torch.full_like(pool, NAN) for pool in (batch.k_NGPD, batch.v_NGPD, batch.landmark_NGD)
    )


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("cache", "tokens", "page", "kv_heads", "size"),
    [
        (torch.float32, torch.float32, 16, 2, 8),
        (torch.float16, torch.float32, 4, 3, 12),
        (torch.float16, torch.float16, 5, 1, 16),
    ],
)
def test_write_and_summarise(ints, cache, tokens, page, kv_heads, size) -> None:
    shape = {"heads": kv_heads, "kv_heads": kv_heads, "head_size": size, "page": page}
    batch = batch_of([2 * page + 1], dtype=cache, **shape)
    expected, actual = poisoned(batch), poisoned(batch)
    fused = torch.randn(2 * page + 3, kv_heads, 3 * size, device=DEVICE, dtype=tokens)
    k, v = fused[..., :size], fused[..., size : 2 * size]  # strided views
    slots = slots_of(batch.table_BM[0], torch.arange(2 * page + 1, device=DEVICE), page).to(ints)
    slots = torch.cat([slots[:3], slots.new_tensor([-1, -7]), slots[3:]])
    for module, (k_pool, v_pool, landmark) in ((definition, expected), (store, actual)):
        module.write_pages(k_pool, v_pool, k, v, slots)
        module.summarise_pages(k_pool, landmark, slots)
    same(actual[0], expected[0])
    same(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_append_is_write_and_summarise_bit_for_bit(dtype) -> None:
    """A page gets the same landmark from decoding as from prefill."""
    lengths = [16, 17, 31, 32, 1]
    batch = batch_of(lengths, dtype=dtype)
    slots = torch.stack(
        [
            slots_of(row, torch.tensor(length - 1), 16)
            for row, length in zip(batch.table_BM, lengths, strict=True)
        ]
    ).int()
    slots[1] = -1
    k, v = torch.randn(2, len(lengths), 2, 8, device=DEVICE)
    pools = [[pool.clone() for pool in (*batch.pool[:2], batch.landmark_NGD)] for _ in range(2)]
    store.append_pages(*pools[0], k, v, slots)
    store.write_pages(*pools[1][:2], k, v, slots)
    store.summarise_pages(pools[1][0], pools[1][2], slots)
    for left, right in zip(*pools, strict=True):
        same(left, right)
    definition.append_pages(*pools[1], k, v, slots)
    torch.testing.assert_close(pools[0], pools[1], equal_nan=True)
    assert not torch.equal(pools[0][2].nan_to_num(), batch.landmark_NGD.nan_to_num())


def test_no_tokens_change_nothing() -> None:
    batch = batch_of([20])
    before = batch.k_NGPD.clone()
    nothing, slots = torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(0, dtype=torch.int32)
    store.write_pages(batch.k_NGPD, batch.v_NGPD, nothing, nothing, slots.to(DEVICE))
    same(batch.k_NGPD, before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "heads": 4, "kv_heads": 4},
        {"heads": 3, "kv_heads": 1, "head_size": 20, "page": 4},
    ],
)
def test_scores(options) -> None:
    batch = batch_of([1, 15, 16, 17, 40, 0], **options)
    page = batch.page
    table = torch.cat([batch.table_BM, batch.table_BM], 1)[:, : batch.table_BM.shape[1]]
    for ints in (torch.int32, torch.int64):
        arguments = (batch.q_BHD, batch.landmark_NGD, table.to(ints), batch.lengths_B.to(ints))
        expected = definition.score_pages(*arguments, page=page)
        assert score.supports("score_pages", *arguments, page=page)
        torch.testing.assert_close(score.score_pages(*arguments, page=page), expected)


def test_scores_of_strided_tables_and_of_many_blocks(monkeypatch) -> None:
    monkeypatch.setattr(score, "BLOCK", 2)
    batch = batch_of([70, 16, 3])
    table = torch.full((3, 11), -1, device=DEVICE)
    table[:, :5] = batch.table_BM
    for slice_ in (table[:, :9], table.repeat_interleave(2, 1)[:, 0:14:2]):
        arguments = (batch.q_BHD, batch.landmark_NGD, slice_, batch.lengths_B)
        expected = definition.score_pages(*arguments, page=16)
        torch.testing.assert_close(score.score_pages(*arguments, page=16), expected)


def check_select(scores, lengths, budgets, **options) -> None:
    arguments = (
        scores.to(DEVICE),
        torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
        torch.tensor(budgets, device=DEVICE),
    )
    assert select.supports("select_pages", *arguments, **options)
    expected = definition.select_pages(*arguments, **options)
    actual = select.select_pages(*arguments, **options)
    assert actual.counts.dtype == actual.pages.dtype == torch.int32
    same(actual.counts, expected.counts)
    same(actual.pages, expected.pages)


LENGTHS = [0, 1, 4, 29, 32, 30, 8, 12]
TINY, LARGE = [0, 0, 1, 3, 0, 2, 5, 1], [WIDE_OPEN, WIDE_OPEN, 4, 29, 32, 31, 8, WIDE_OPEN]


@pytest.mark.parametrize("budgets", [TINY, LARGE, [16] * 8, [13, 14, 15, 16, 17, 18, 19, 20]])
@pytest.mark.parametrize("reserved", [(1, 2), (0, 1), (2, 2), (3, 6)])
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_choices(budgets, reserved, whole_numbers) -> None:
    torch.manual_seed(0)
    scores = torch.randint(-1, 2, (8, 2, 8)).float() if whole_numbers else torch.randn(8, 2, 8)
    check_select(scores, LENGTHS, budgets, page=4, first=reserved[0], last=reserved[1])


@pytest.mark.parametrize(
    "scores",
    [
        [0, NAN, -INF, INF, 1, NAN, 0, 0],
        [NAN] * 8,
        [INF, INF, 3e38, INF, -INF, -3e38, NAN, -INF],
        [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -1e-45, 1e-45],
        [5.0] * 8,
    ],
)
def test_odd_scores_have_the_definition_s_order(scores) -> None:
    rows = torch.tensor(scores).expand(8, 1, 8).contiguous()
    check_select(rows, [32] * 8, list(range(4, 36, 4)), page=4, first=0, last=1)


def test_choices_from_real_scores_with_ties() -> None:
    lengths = [1, 16, 40, 77, 80]
    batch = batch_of(lengths, whole_numbers=True)
    scores = definition.score_pages(
        batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B, page=16
    )
    for budget in (48, 64, 79):
        check_select(scores, lengths, [budget] * 5, page=16)


@pytest.mark.parametrize("width", [4, 5, 13])
def test_width_of_lists(width: int) -> None:
    check_select(torch.randn(2, 2, 11), [44, 15], [16, WIDE_OPEN], page=4, width=width)


def test_too_long_lists_are_cut_and_stay_in_their_row() -> None:
    """On a GPU nobody can be told; the memory beside the list must stay as it is."""
    lengths, budgets = torch.tensor([[32, 32], [32, 20]], device=DEVICE)
    scores = torch.arange(8.0, device=DEVICE).expand(2, 1, 8)
    lists = select.select_pages(scores, lengths, budgets, page=4, width=3)
    assert lists.counts.tolist() == [[3], [3]]
    assert lists.pages.tolist() == [[[0, 1, 2]], [[0, 4, 5]]]


def test_strided_scores() -> None:
    scores = torch.randn(3, 2, 40)[:, :, :10]
    check_select(scores, [40, 37, 3], [20, 24, 16], page=4)


def test_what_falls_back_to_the_definition() -> None:
    batch = batch_of([20])
    pool = (batch.k_NGPD, batch.v_NGPD)
    k, slots = batch.keys[0].to(DEVICE), torch.arange(20, device=DEVICE)
    assert store.supports("write_pages", *pool, k, k, slots)
    assert not store.supports("write_pages", *(x.double() for x in pool), k, k, slots)
    assert not store.supports("write_pages", *(x.transpose(0, 1) for x in pool), k, k, slots)
    assert not store.supports("write_pages", *pool, k.mT.contiguous().mT, k, slots)
    assert not select.supports("select_pages", torch.zeros(1, 1, 20_000), slots, slots, page=16)
    assert not select.supports("select_pages", torch.zeros(1, 1, 8).double(), slots, slots, page=16)
