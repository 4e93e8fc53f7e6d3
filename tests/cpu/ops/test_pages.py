"""Pages: select by hand, by both versions; the page cache; what must be refused."""

import pytest
import torch

from sparrow import ops

INF, NAN = float("inf"), float("nan")


def select(scores: list[float], length: int, budget: int, **options: float) -> list[int]:
    """Kept pages of one row and one KV head, pages of 4 tokens: by both versions."""
    kept = []
    for version in ("fastest", "reference"):
        with ops.using(version):
            lists = ops.select_pages(
                torch.tensor([[scores]]),
                torch.tensor([length]),
                torch.tensor([budget]),
                page=4,
                **options,
            )
        count = int(lists.counts[0, 0])
        assert (lists.pages[0, 0, count:] == -1).all()
        kept.append(lists.pages[0, 0, :count].tolist())
    assert kept[0] == kept[1]
    return kept[0]


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
    assert select([1.0] * 8, 32, 20) == [0, 1, 2, 6, 7]  # ties go to the earlier page
    assert select([0, NAN, -INF, INF, 1, NAN, 0, 0], 32, 20) == [0, 3, 4, 6, 7]
    assert select(SCORES, 32, 16, first=0, last=1) == [1, 3, 5, 7]
    assert select(SCORES, 32, 16, first=2, last=2) == [0, 1, 6, 7]
    assert select(SCORES, 32, 16, width=12) == [0, 1, 6, 7]


def test_what_does_not_fit_is_refused() -> None:
    scores, budget = torch.zeros(2, 1, 8), torch.tensor([0, 1000])
    for version in ("fastest", "reference"):
        with ops.using(version):
            with pytest.raises(ValueError, match="9 pages"):
                ops.select_pages(scores, torch.tensor([33, 4]), budget, page=4)
            with pytest.raises(ValueError, match="width"):
                ops.select_pages(scores, torch.tensor([32, 32]), budget, page=4, width=4)


def test_rows_and_heads_choose_for_themselves() -> None:
    scores = torch.stack([torch.tensor([SCORES, SCORES[::-1]])] * 2)
    lists = ops.select_pages(scores, torch.tensor([32, 0]), torch.tensor([16, 16]), page=4)
    assert lists.pages[0, 0, :4].tolist() == [0, 1, 6, 7]
    assert lists.pages[0, 1, :4].tolist() == [0, 4, 6, 7]  # 0, 0, 3, 2, 4, 1, 5, 0
    assert lists.counts[1].tolist() == [0, 0]  # a padding row keeps nothing
    scores, lengths = torch.tensor([[SCORES, SCORES]] * 2), torch.tensor([32, 29])
    lists = ops.select_pages(scores, lengths, torch.tensor([[16, 20], [0, 1000]]), page=4)
    assert lists.counts.tolist() == [[4, 5], [3, 8]]
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
    for last in (1.0, -INF, NAN):  # an unfinished page has no mass: 31 in all, 4 of them reserved
        assert select([*MASSES[:7], last], 29, 29, mass=4 / 31) == [0, 6, 7]
        assert select([*MASSES[:7], last], 29, 29, mass=13 / 31) == [0, 5, 6, 7]
    assert select([0, NAN, -5, 2, -NAN, 1, NAN, NAN], 32, 32, mass=1.0) == [0, 3, 5, 6, 7]
    assert select([-1.0] * 8, 32, 32, mass=1.0) == [0, 6, 7]


def cache_of(pages: int, dtype: torch.dtype) -> ops.PageCache:
    return ops.PageCache(
        layers=2,
        kv_heads=3,
        page=4,
        pages=pages,
        page_fields=(
            *ops.kv_fields(4, 8, dtype),
            ops.Field(name="landmark", shape=(8,), dtype=dtype),
        ),
        slots=4,
        state_fields=[ops.Field(name="running", shape=(7,), dtype=torch.float32)],
    )


def test_a_kv_page_is_contiguous_per_head_and_fields_have_names() -> None:
    cache = cache_of(5, torch.bfloat16)
    assert cache.field("k", 1)[4, 2].is_contiguous()
    assert cache.field("landmark", 0).shape == (5, 3, 8)
    assert cache.state("running", 0).shape == (4, 3, 7)
    sizes = 2 * 3 * 2 * (4 * 8 + 4 * 8 + 8)
    assert ops.page_bytes(cache.page_fields, layers=2, kv_heads=3) == sizes
    cache.field("k", 1).fill_(3.0)
    assert (cache.field("k", 0) == 0).all()
    with pytest.raises(ValueError, match="latent"):
        cache.field("latent", 0)
    with pytest.raises(ValueError, match="'k'"):
        cache.state("k", 0)
    field = ops.Field(name="k", shape=(1,), dtype=torch.float32)
    with pytest.raises(ValueError, match="names"):
        ops.PageCache(
            layers=1, kv_heads=1, page=4, pages=1, page_fields=[field], state_fields=[field]
        )


def test_pages_and_state_are_read_written_and_copied_in_all_layers() -> None:
    cache = cache_of(6, torch.float32)
    for layer in range(2):
        for field in (cache.field("k", layer), cache.field("v", layer)):
            field.normal_()
        cache.state("running", layer).normal_()
    before, state = cache.field("k", 1).clone(), cache.state("running", 1)[2].clone()
    copies = cache.read(torch.tensor([4, 1]), 2)
    cache.field("k", 1).zero_()
    cache.state("running", 1).zero_()
    cache.write(copies, torch.tensor([0, 5]), 1)
    assert torch.equal(cache.field("k", 1)[[0, 5]], before[[4, 1]])
    assert (cache.field("k", 1)[1:5] == 0).all()
    assert torch.equal(cache.state("running", 1)[1], state)
    cache.copy_pages(torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(cache.field("k", 1)[2], before[4])
    assert torch.equal(cache.field("v", 0)[2], copies["v"][0, 0])
