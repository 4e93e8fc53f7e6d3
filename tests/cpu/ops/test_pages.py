"""Write, summarise, score, select: examples by hand, and what must be refused."""

import pytest
import torch
from support.paging import make_batch

from sparrow import ops


def select(scores: list[float], length: int, budget: int, **options: float) -> list[int]:
    """Kept pages of one row and one KV head, pages of 4 tokens."""
    lists = ops.select_pages(
        torch.tensor([[scores]]),
        torch.tensor([length]),
        torch.tensor([budget]),
        page=4,
        **options,
    )
    count = int(lists.counts[0, 0])
    assert (lists.pages[0, 0, count:] == -1).all()
    return lists.pages[0, 0, :count].tolist()


SCORES = [0.0, 5.0, 1.0, 4.0, 2.0, 3.0, 0.0, 0.0]  # 8 pages of 4 tokens


BUDGETS = [
    (32, 0, [0, 6, 7]),  # reserved pages are kept under any budget
    (32, 12, [0, 6, 7]),  # exactly the reserved ones
    (32, 15, [0, 6, 7]),  # three tokens more do not pay a page
    (32, 16, [0, 1, 6, 7]),
    (32, 20, [0, 1, 3, 6, 7]),
    (32, 31, [0, 1, 3, 4, 5, 6, 7]),
    (32, 32, [0, 1, 2, 3, 4, 5, 6, 7]),
    (32, 1000, [0, 1, 2, 3, 4, 5, 6, 7]),
    (29, 13, [0, 1, 6, 7]),  # the unfinished page costs its one token only: 3 * 4 + 1
    (29, 12, [0, 6, 7]),
    (29, 29, [0, 1, 2, 3, 4, 5, 6, 7]),
    (1, 0, [0]),
    (4, 0, [0]),
    (5, 0, [0, 1]),
    (9, 0, [0, 1, 2]),
]


def test_budget_counts_every_kept_token() -> None:
    for length, budget, kept in BUDGETS:
        assert select(SCORES, length, budget) == kept


def test_ties_go_to_the_earlier_page() -> None:
    assert select([1.0] * 8, 32, 20) == [0, 1, 2, 6, 7]


def test_infinite_and_nan_scores_have_an_order() -> None:
    inf, nan = float("inf"), float("nan")
    assert select([0, nan, -inf, inf, 1, nan, 0, 0], 32, 20) == [0, 3, 4, 6, 7]


def test_other_reserved_pages() -> None:
    assert select(SCORES, 32, 16, first=0, last=1) == [1, 3, 5, 7]
    assert select(SCORES, 32, 16, first=2, last=2) == [0, 1, 6, 7]


def test_a_list_that_does_not_fit_its_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width"):
        select(SCORES, 32, 32, width=4)
    assert select(SCORES, 32, 16, width=12) == [0, 1, 6, 7]


def test_rows_and_heads_choose_for_themselves() -> None:
    scores = torch.stack([torch.tensor([SCORES, SCORES[::-1]])] * 2)
    lists = ops.select_pages(scores, torch.tensor([32, 0]), torch.tensor([16, 16]), page=4)
    assert lists.pages[0, 0, :4].tolist() == [0, 1, 6, 7]
    assert lists.pages[0, 1, :4].tolist() == [0, 4, 6, 7]  # 0, 0, 3, 2, 4, 1, 5, 0
    assert lists.counts[1].tolist() == [0, 0]  # a padding row keeps nothing


def test_every_head_may_have_a_budget_of_its_own() -> None:
    scores = torch.tensor([[SCORES, SCORES], [SCORES, SCORES]])
    lengths = torch.tensor([32, 29])
    lists = ops.select_pages(scores, lengths, torch.tensor([[16, 20], [0, 1000]]), page=4)
    assert lists.counts.tolist() == [[4, 5], [3, 8]]
    assert lists.pages[0, 0, :4].tolist() == [0, 1, 6, 7]
    assert lists.pages[0, 1, :5].tolist() == [0, 1, 3, 6, 7]


MASSES = [1.0, 8.0, 2.0, 6.0, 2.0, 9.0, 3.0, 1.0]  # 32 in all, 5 of them reserved


SHARES = [
    (5 / 32, 32, [0, 6, 7]),  # the reserved pages are enough
    (5.5 / 32, 32, [0, 5, 6, 7]),
    (14 / 32, 32, [0, 5, 6, 7]),  # exactly met
    (15 / 32, 32, [0, 1, 5, 6, 7]),
    (15 / 32, 16, [0, 5, 6, 7]),  # the budget pays no more
    (29 / 32, 32, [0, 1, 2, 3, 5, 6, 7]),  # of equals the earlier page
    (1.0, 32, [0, 1, 2, 3, 4, 5, 6, 7]),
    (1.0, 0, [0, 6, 7]),
]


def test_a_share_of_the_mass_may_end_the_choice() -> None:
    for share, budget, kept in SHARES:
        assert select(MASSES, 32, budget, mass=share) == kept


def test_an_unfinished_page_has_no_mass() -> None:
    for last in (1.0, float("-inf"), float("nan")):  # 31 in all, 4 of them reserved
        assert select([*MASSES[:7], last], 29, 29, mass=4 / 31) == [0, 6, 7]
        assert select([*MASSES[:7], last], 29, 29, mass=13 / 31) == [0, 5, 6, 7]


def test_what_is_no_mass() -> None:
    nan = float("nan")
    assert select([0, nan, -5, 2, -nan, 1, nan, nan], 32, 32, mass=1.0) == [0, 3, 5, 6, 7]
    assert select([-1.0] * 8, 32, 32, mass=1.0) == [0, 6, 7]
    lists = ops.select_pages(torch.ones(1, 1, 8), torch.tensor([0]), torch.tensor([9]), page=4)
    assert lists.counts.tolist() == [[0]]


def test_score_is_mean_query_times_mean_key() -> None:
    batch = make_batch([40, 16, 5], heads=6, kv_heads=2)
    scores = ops.score_pages(
        batch.q_BHD, batch.landmark_NGD, batch.table_BM, batch.lengths_B, page=16
    )
    for row, keys in enumerate(batch.keys):
        for head in range(2):
            query = batch.q_BHD[row, 3 * head : 3 * head + 3].mean(0)
            for page in range(batch.table_BM.shape[1]):
                part = keys[16 * page : 16 * page + 16, head]
                expected = query @ part.mean(0) if len(part) == 16 else torch.tensor(-torch.inf)
                torch.testing.assert_close(scores[row, head, page], expected)


def test_landmarks_sum_in_fp32() -> None:
    """4096 + 1 is 4096 in bf16; the mean must come from the exact sum."""
    k_NGPD = torch.ones(1, 1, 16, 4, dtype=torch.bfloat16)
    k_NGPD[0, 0, 0] = 4096.0
    landmark = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    ops.summarise_pages(k_NGPD, landmark, torch.tensor([15]))
    assert landmark.unique().tolist() == [torch.tensor((4096 + 15) / 16).bfloat16().item()]


def test_only_finished_pages_get_a_landmark_and_padding_writes_nothing() -> None:
    k_NGPD, v_NGPD = torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2)
    landmark = torch.full((3, 1, 2), -7.0)
    slots = torch.tensor([4, 5, 6, 7, 8, -1])
    tokens = torch.arange(12.0).view(6, 1, 2)
    ops.write_pages(k_NGPD, v_NGPD, tokens, tokens + 100, slots)
    ops.summarise_pages(k_NGPD, landmark, slots)
    assert torch.equal(k_NGPD[1, 0], tokens[:4, 0])
    assert torch.equal(v_NGPD[2, 0, 0], tokens[4, 0] + 100)
    assert (k_NGPD[0] == 0).all()
    assert (k_NGPD[2, 0, 1:] == 0).all()
    assert torch.equal(landmark[1, 0], tokens[:4, 0].mean(0))
    assert (landmark[[0, 2]] == -7).all()


def test_a_kv_page_is_contiguous_per_head_and_fields_have_names() -> None:
    cache = ops.PageCache(
        layers=2,
        kv_heads=3,
        page=16,
        pages=5,
        page_fields=(
            *ops.kv_fields(16, 8, torch.bfloat16),
            ops.Field(name="landmark", shape=(8,), dtype=torch.bfloat16),
        ),
        slots=4,
        state_fields=[ops.Field(name="running", shape=(7,), dtype=torch.float32)],
    )
    assert cache.field("k", 1)[4, 2].is_contiguous()
    assert cache.field("landmark", 0).shape == (5, 3, 8)
    assert cache.state("running", 0).shape == (4, 3, 7)
    assert ops.page_bytes(cache.page_fields, layers=2, kv_heads=3) == 2 * 3 * 2 * (
        16 * 8 + 16 * 8 + 8
    )
    cache.field("k", 1).fill_(3.0)
    assert (cache.field("k", 0) == 0).all()
    with pytest.raises(ValueError, match="latent"):
        cache.field("latent", 0)
    with pytest.raises(ValueError, match="'k'"):
        cache.state("k", 0)


def test_pages_and_state_are_read_written_and_copied_in_all_layers() -> None:
    cache = ops.PageCache(
        layers=2,
        kv_heads=3,
        page=4,
        pages=6,
        page_fields=ops.kv_fields(4, 8, torch.float32),
        slots=3,
        state_fields=[ops.Field(name="running", shape=(2,), dtype=torch.float32)],
    )
    for layer in range(2):
        for field in (cache.field("k", layer), cache.field("v", layer)):
            field.normal_()
        cache.state("running", layer).normal_()
    pages, before = torch.tensor([4, 1]), cache.field("k", 1).clone()
    copies = cache.read(pages, 2)
    state = cache.state("running", 1)[2].clone()
    cache.field("k", 1).zero_()
    cache.state("running", 1).zero_()
    cache.write(copies, torch.tensor([0, 5]), 1)
    assert torch.equal(cache.field("k", 1)[[0, 5]], before[[4, 1]])
    assert (cache.field("k", 1)[1:5] == 0).all()
    assert torch.equal(cache.state("running", 1)[1], state)
    cache.copy_pages(torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(cache.field("k", 1)[2], before[4])
    assert torch.equal(cache.field("v", 0)[2], copies["v"][0, 0])


def test_two_fields_of_one_name_are_refused() -> None:
    field = ops.Field(name="k", shape=(1,), dtype=torch.float32)
    with pytest.raises(ValueError, match="names"):
        ops.PageCache(
            layers=1, kv_heads=1, page=4, pages=1, page_fields=[field], state_fields=[field]
        )


def test_every_page_needs_a_score() -> None:
    with pytest.raises(ValueError, match="9 pages"):
        select(SCORES, 33, 16)
