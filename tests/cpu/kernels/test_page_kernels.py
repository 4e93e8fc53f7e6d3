"""Page kernels against their definitions: in Triton's interpreter, or on a GPU where there is one.

The interpreter gets bf16 wrong, so these tests use fp32 and fp16; tests/gpu has bf16.
"""

import pytest
import torch
from support.paging import Batch, make_batch, slots_of

pytest.importorskip("triton")
import triton
import triton.language as tl

from sparrow.ops.kernels import select, store
from sparrow.ops.reference import pages as definition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
WIDE_OPEN = 2**31 - 1  # the budget of a dense row


def on_device(batch: Batch) -> Batch:
    return type(batch)(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in batch))


def batch_of(lengths: list[int], **options) -> Batch:
    return on_device(make_batch(lengths, **options))


def poisoned(batch: Batch) -> list[torch.Tensor]:
    """Empty pools of the batch's shape, NaN everywhere."""
    return [torch.full_like(pool, NAN) for pool in (batch.k_NGPD, batch.v_NGPD)]


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
def test_write(ints, cache, tokens, page, kv_heads, size) -> None:
    shape = {"heads": kv_heads, "kv_heads": kv_heads, "head_size": size, "page": page}
    batch = batch_of([2 * page + 1], dtype=cache, **shape)
    expected, actual = poisoned(batch), poisoned(batch)
    fused = torch.randn(2 * page + 3, kv_heads, 3 * size, device=DEVICE, dtype=tokens)
    k, v = fused[..., :size], fused[..., size : 2 * size]  # strided views
    slots = slots_of(batch.table_BM[0], torch.arange(2 * page + 1, device=DEVICE), page).to(ints)
    slots = torch.cat([slots[:3], slots.new_tensor([-1, -7]), slots[3:]])
    for module, pools in ((definition, expected), (store, actual)):
        module.write_pages(*pools, k, v, slots)
    same(actual[0], expected[0])
    same(actual[1], expected[1])


def test_no_tokens_change_nothing() -> None:
    batch = batch_of([20])
    before = batch.k_NGPD.clone()
    nothing, slots = torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(0, dtype=torch.int32)
    store.write_pages(batch.k_NGPD, batch.v_NGPD, nothing, nothing, slots.to(DEVICE))
    same(batch.k_NGPD, before)


def check_select(scores, lengths, budgets, **options) -> None:
    arguments = (
        scores.to(DEVICE),
        torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
        torch.as_tensor(budgets, device=DEVICE),
    )
    assert select.supports("select_pages", *arguments, **options)
    expected = definition.select_pages.definition(*arguments, **options)
    actual = select.select_pages(*arguments, **options)
    assert actual.counts.dtype == actual.pages.dtype == torch.int32
    same(actual.counts, expected.counts)
    same(actual.pages, expected.pages)


LENGTHS = [0, 1, 4, 29, 32, 30, 8, 12]
TINY, LARGE = [0, 0, 1, 3, 0, 2, 5, 1], [WIDE_OPEN, WIDE_OPEN, 4, 29, 32, 31, 8, WIDE_OPEN]


@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 1), (2, 2), (3, 6)])
def test_choices(first: int, last: int) -> None:
    torch.manual_seed(0)
    for budgets in (TINY, LARGE, [16] * 8, [13, 14, 15, 16, 17, 18, 19, 20]):
        for scores in (torch.randn(8, 1, 8), torch.randint(-1, 2, (8, 1, 8)).float()):
            check_select(scores, LENGTHS, budgets, page=4, first=first, last=last)


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
    scores = definition.score_pages.definition(
        batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B, page=16
    )
    for budget in (48, 64, 79):
        check_select(scores, lengths, [budget] * 5, page=16)


def test_budgets_of_heads() -> None:
    torch.manual_seed(0)
    budgets = torch.randint(0, 36, (3, 8))
    check_select(torch.randn(8, 3, 8), LENGTHS, budgets.T, page=4)  # strided
    check_select(torch.randn(8, 3, 8), LENGTHS, budgets.T.contiguous().int(), page=4)


@pytest.mark.parametrize(
    ("mass", "reserved", "most"),
    [(0.01, (1, 2), 64), (0.25, (0, 1), 8), (0.75, (2, 3), 8), (0.9, (1, 2), 64), (1.0, (0, 1), 4)],
)
def test_shares_of_exact_masses(mass: float, reserved: tuple[int, int], most: int) -> None:
    """Multiples of 1/64, of which sums are exact in any order; few of them give many ties."""
    torch.manual_seed(most)
    scores = torch.randint(-1, most, (8, 1, 40)) / 64
    scores[0, :, ::3], scores[1, :, 1::2], scores[2] = NAN, -INF, 0.0
    lengths = [160, 157, 160, 98, 0, 3, 159, 100]
    for budgets in ([WIDE_OPEN] * 8, [0, 16, 24, 40, 1, 9, 100, 32]):
        options = {"page": 4, "first": reserved[0], "last": reserved[1], "mass": mass}
        check_select(scores, lengths, budgets, **options)


@pytest.mark.parametrize(("pages", "mass"), [(50, 0.3), (2100, 0.95)])
def test_shares_of_any_masses(pages: int, mass: float) -> None:
    """Enough is kept, and without the worst of what was chosen it would not be."""
    torch.manual_seed(0)
    scores = torch.randn(3, 1, pages).mul(2).softmax(2).to(DEVICE)
    lengths = torch.full((3,), pages * 4, device=DEVICE)
    lists = select.select_pages(scores, lengths, lengths, page=4, mass=mass)
    for row in range(3):
        kept = lists.pages[row, 0, : lists.counts[row, 0]].long()
        free = kept[(kept >= 1) & (kept < pages - 2)]
        goal, held = mass * scores[row, 0].double().sum(), scores[row, 0, kept].double()
        assert held.sum() >= goal - 1e-6
        assert held.sum() - scores[row, 0, free].double().min() < goal + 1e-6
        assert scores[row, 0, free].min() == scores[row, 0, 1:-2].topk(len(free)).values[-1]


@pytest.mark.parametrize(("mass", "ties"), [(None, False), (0.5, True)])
def test_rows_of_every_size_in_one_wide_table(mass: float | None, ties: bool) -> None:
    """What lies beyond a row's finished pages is not even looked at."""
    pages = [3, 500, 512, 513, 2048, 2049, 4000, 9000]
    torch.manual_seed(0)
    scores = torch.randint(0, 4 if ties else 10**5, (8, 1, 9000)) / 64
    lengths = [count * 4 - row % 2 for row, count in enumerate(pages)]
    for row, length in enumerate(lengths):
        scores[row, :, length // 4 :] = INF
    budgets = [count * 2 for count in pages]
    check_select(scores, lengths, budgets, page=4, mass=mass, width=5000)
    check_select(scores, lengths, [WIDE_OPEN] * 8, page=4, mass=mass)


@triton.jit
def _score_and_select(pages, count, scores, length, budget, width, BLOCK: tl.constexpr):
    """A kernel that makes its own scores: every third page is good."""
    m = tl.arange(0, BLOCK)
    tl.store(scores + m, (m % 3 == 0).to(tl.float32), m < length // 4)
    tl.debug_barrier()
    select.select_row(pages, count, scores, length, budget, width, 4, 1, 2, None, BLOCK)


@pytest.mark.parametrize("budget", [48, 0, 1000])
def test_a_row_can_be_selected_inside_another_kernel(budget: int) -> None:
    scores = torch.full((64,), NAN, device=DEVICE)
    pages = torch.zeros(70, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _score_and_select[(1,)](pages, count, scores, 199, budget, 70, BLOCK=64)
    lengths, budgets = torch.tensor([[199], [budget]], device=DEVICE)
    select_pages = definition.select_pages.definition
    expected = select_pages(scores.view(1, 1, 64), lengths, budgets, page=4, width=70)
    same(pages, expected.pages[0, 0])
    same(count, expected.counts[0])


def test_a_length_beyond_the_scores_stays_in_its_row() -> None:
    scores = torch.randn(2, 1, 8, device=DEVICE)
    lengths, budgets = torch.tensor([[40, 32], [16, 16]], device=DEVICE)
    lists = select.select_pages(scores, lengths, budgets, page=4)
    assert lists.counts.tolist() == [[4], [4]]
    assert lists.pages[:, :, :4].max() == 7


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
    assert not select.supports("select_pages", torch.zeros(1, 1, 40_000), slots, slots, page=16)
    assert not select.supports("select_pages", torch.zeros(1, 1, 8).double(), slots, slots, page=16)
