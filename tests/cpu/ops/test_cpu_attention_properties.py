"""Decode attention in numba equals its definition for shapes, lengths and lists drawn at random."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st
from support.paging import Batch, make_batch

from sparrow.ops import PageLists
from sparrow.ops.cpu import attention
from sparrow.ops.reference.attention import attend_decode

EDGES = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 512])
SCALE = 0.25


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kv_heads = draw(st.integers(1, 3))
    return make_batch(
        draw(st.lists(EDGES | st.integers(0, 600), min_size=1, max_size=4)),
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        head_size=16 * draw(st.integers(1, 5)),
        page=draw(st.sampled_from([1, 3, 16, 40])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def with_lists(draw: st.DrawFn) -> tuple[Batch, PageLists]:
    """Any ascending lists, empty ones too; heads of a row differ."""
    batch = draw(batches())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    rows, width = batch.table_BM.shape
    total_B = -(-batch.lengths_B // batch.page)
    draws = torch.rand(rows, batch.k_NGPD.shape[1], width, generator=generator)
    keep = (draws < share) & (torch.arange(width) < total_B[:, None, None])
    pages = torch.where(keep, torch.arange(width), width).sort(dim=2).values
    return batch, PageLists(pages.masked_fill(pages == width, -1), keep.sum(dim=2))


@given(drawn=with_lists())
def test_equals_the_definition(drawn: tuple[Batch, PageLists]) -> None:
    batch, lists = drawn
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[batch.q_BHD.dtype]
    for chosen in (None, lists):
        found = attention.attend_decode(batch.q_BHD, *batch.pool, chosen, scale=SCALE)
        expected = attend_decode.definition(batch.q_BHD, *batch.pool, chosen, scale=SCALE)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@given(drawn=with_lists(), data=st.data())
def test_a_row_alone_gives_the_same_bits(drawn: tuple[Batch, PageLists], data: st.DataObject):
    batch, lists = drawn
    row = data.draw(st.integers(0, len(batch.keys) - 1))
    together = attention.attend_decode(batch.q_BHD, *batch.pool, lists, scale=SCALE)
    alone = attention.attend_decode(
        batch.q_BHD[row, None],
        batch.k_NGPD,
        batch.v_NGPD,
        batch.table_BM[row, None],
        batch.lengths_B[row, None],
        PageLists(lists.pages[row, None], lists.counts[row, None]),
        scale=SCALE,
    )
    assert torch.equal(alone[0], together[row])
