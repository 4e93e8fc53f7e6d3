"""The page cache, and lists that do not fit. Which pages are kept: see test_ops_properties."""

import pytest
import torch

from sparrow import ops


def test_what_does_not_fit_is_refused() -> None:
    scores, budget = torch.zeros(2, 1, 8), torch.tensor([0, 1000])
    for version in ("fastest", "reference"):
        with ops.using(version), pytest.raises(ValueError, match="9 pages"):
            ops.select_pages(scores, torch.tensor([33, 4]), budget, page=4)


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
