"""Properties that hold for every shape, length, budget and score, ties included."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paging import Batch, make_batch, mean_scores

from sparrow import ops
from sparrow.ops.cpu import attention
from sparrow.sparse.rule import Rule

SCALE = 0.3
EDGES = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65])
LENGTHS = st.lists(EDGES | st.integers(1, 80), min_size=1, max_size=4)
PAGES = st.sampled_from([1, 4, 16])
BUDGETS = st.sampled_from([0, 1, 15, 16, 17, 48, 64]) | st.integers(0, 100)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return make_batch(
        draw(LENGTHS),
        heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([2, 16])),
        page=draw(PAGES),
        seed=draw(st.integers(0, 2**31)),
        whole_numbers=draw(st.booleans()),
    )


def choose(batch: Batch, budgets: torch.Tensor, *, first: int = 1, last: int = 2) -> ops.PageLists:
    options = {"page": batch.page, "first": first, "last": last}
    return ops.select_pages(mean_scores(batch), batch.lengths_B, budgets, **options)


@given(batch=batches())
def test_paged_equals_contiguous(batch: Batch) -> None:
    """Bit for bit: shuffled pages hold the same sequence as one block."""
    lengths = batch.lengths_B.tolist()
    q_THD = torch.randn(sum(lengths), *batch.q_BHD.shape[1:])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    paged = ops.attend_causal_paged(q_THD, *batch.pool, bounds, scale=SCALE)
    packed = ops.attend_causal(
        q_THD, torch.cat(batch.keys), torch.cat(batch.values), bounds, scale=SCALE
    )
    assert torch.equal(paged, packed)


@pytest.mark.parametrize("version", ["fastest", "reference"])
@given(batch=batches())
def test_the_list_of_all_pages_is_dense_bit_for_bit(version, batch: Batch) -> None:
    with ops.using(version):
        whole = choose(batch, batch.lengths_B)
        dense = ops.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
        listed = ops.attend_decode(batch.q_BHD, *batch.pool, whole, scale=SCALE)
    assert torch.equal(dense, listed)
    assert dense.isfinite().all()


@given(batch=batches(), budget=BUDGETS, first=st.integers(0, 3), last=st.integers(1, 3))
def test_selection_keeps_the_budget(batch: Batch, budget: int, first: int, last: int) -> None:
    """Against a rule in plain Python: reserved pages, then the best, earlier ones on ties."""
    budgets = torch.full_like(batch.lengths_B, budget)
    lists = choose(batch, budgets, first=first, last=last)
    scores = mean_scores(batch)
    for row, length in enumerate(batch.lengths_B.tolist()):
        for head in range(batch.k_NGPD.shape[1]):
            kept = lists.pages[row, head, : lists.counts[row, head]].tolist()
            assert kept == plain_selection(
                scores[row, head].tolist(), length, budget, batch.page, first, last
            )


def plain_selection(
    scores: list[float], length: int, budget: int, page: int, first: int, last: int
) -> list[int]:
    pages = -(-length // page)
    tokens = [min(page, length - page * index) for index in range(pages)]
    reserved = [i for i in range(pages) if i < first or i >= pages - last]
    others = [i for i in range(pages) if i not in reserved]
    kept = list(reserved)
    for index in sorted(others, key=lambda i: (-scores[i], i)):
        if sum(tokens[i] for i in kept) + tokens[index] > budget:
            break
        kept.append(index)
    return sorted(kept)


@given(batch=batches(), budget=BUDGETS)
def test_pages_off_the_list_do_not_matter(batch: Batch, budget: int) -> None:
    lists = choose(batch, torch.full_like(batch.lengths_B, budget))
    clean = ops.attend_decode(batch.q_BHD, *batch.pool, lists, scale=SCALE)
    for row in range(len(batch.keys)):
        for head in range(batch.k_NGPD.shape[1]):
            kept = lists.pages[row, head, : lists.counts[row, head]].tolist()
            for page in range(-(-int(batch.lengths_B[row]) // batch.page)):
                if page not in kept:
                    batch.k_NGPD[batch.table_BM[row, page], head] = float("nan")
                    batch.v_NGPD[batch.table_BM[row, page], head] = float("nan")
        kept = lists.pages[row][lists.pages[row] >= 0].long()
        unused = torch.ones(batch.table_BM.shape[1], dtype=torch.bool).index_fill(0, kept, False)
        batch.table_BM[row, unused] = 2**30  # nobody's page: not even looked up
    poisoned = ops.attend_decode(batch.q_BHD, *batch.pool, lists, scale=SCALE)
    assert torch.equal(clean, poisoned)


@given(
    batch=batches(),
    seed=st.integers(0, 2**31),
    prompt=st.integers(0, 20),
    first=st.integers(0, 2),
    last=st.integers(1, 3),
)
@settings(max_examples=settings().max_examples // 4)
def test_many_tokens_sparse_is_one_token_at_a_time(
    batch: Batch, seed: int, prompt: int, first: int, last: int
) -> None:
    """Replays decoding of the first sequence: write, summarise, score, select, attend."""
    k_SGD, v_SGD = batch.keys[0], batch.values[0]
    length, (heads, head_size) = len(k_SGD), batch.q_BHD.shape[1:]
    q_SHD = torch.randn(length, heads, head_size)
    generator = torch.Generator().manual_seed(seed)
    budgets_S = torch.randint(100, (length,), generator=generator)
    options = {"page": batch.page, "first": first, "last": last, "scale": SCALE}
    options["scorer"] = Rule(first=first, last=last).scorer(2, batch.page)
    edges, dense = torch.tensor([0, length]), torch.tensor([prompt])
    many = ops.attend_sparse(q_SHD, k_SGD, v_SGD, edges, dense, budgets_S, **options)
    for position in range(length):
        now = batch._replace(
            q_BHD=q_SHD[position, None],
            table_BM=batch.table_BM[:1],
            lengths_B=torch.tensor([position + 1]),
        )
        lists = choose(now, budgets_S[position, None], first=first, last=last)
        one = ops.attend_decode(
            now.q_BHD, *now.pool, None if position < prompt else lists, scale=SCALE
        )
        torch.testing.assert_close(many[position], one[0], atol=1e-5, rtol=1e-5)


@given(batch=batches(), extra=st.integers(0, 50), prompt=st.integers(0, 90))
def test_a_budget_of_at_least_the_length_is_dense_bit_for_bit(
    batch: Batch, extra: int, prompt: int
) -> None:
    lengths = batch.lengths_B.tolist()
    q_THD = torch.randn(sum(lengths), *batch.q_BHD.shape[1:])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    packed = (q_THD, torch.cat(batch.keys), torch.cat(batch.values), bounds)
    own_length = torch.cat([torch.arange(1, length + 1) for length in lengths])
    dense = torch.full((len(lengths),), prompt)
    options = {"page": batch.page, "scale": SCALE, "scorer": Rule().scorer(2, batch.page)}
    sparse = ops.attend_sparse(*packed, dense, own_length + extra, **options)
    assert torch.equal(sparse, ops.attend_causal(*packed, scale=SCALE))


# Decode attention in numba: shapes, lengths and lists drawn at random.

LONG = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 512])


@st.composite
def large_batches(draw: st.DrawFn) -> Batch:
    kv_heads = draw(st.integers(1, 3))
    return make_batch(
        draw(st.lists(LONG | st.integers(0, 600), min_size=1, max_size=4)),
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        head_size=16 * draw(st.integers(1, 5)),
        page=draw(st.sampled_from([1, 3, 16, 40])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def with_lists(draw: st.DrawFn) -> tuple[Batch, ops.PageLists]:
    """Any ascending lists, empty ones too; heads of a row differ."""
    batch = draw(large_batches())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    rows, width = batch.table_BM.shape
    total_B = -(-batch.lengths_B // batch.page)
    draws = torch.rand(rows, batch.k_NGPD.shape[1], width, generator=generator)
    keep = (draws < share) & (torch.arange(width) < total_B[:, None, None])
    pages = torch.where(keep, torch.arange(width), width).sort(dim=2).values
    return batch, ops.PageLists(pages.masked_fill(pages == width, -1), keep.sum(dim=2))


@given(drawn=with_lists())
def test_decode_in_numba_equals_the_definition(drawn: tuple[Batch, ops.PageLists]) -> None:
    batch, lists = drawn
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[batch.q_BHD.dtype]
    for chosen in (None, lists):
        found = attention.attend_decode(batch.q_BHD, *batch.pool, chosen, scale=0.25)
        expected = ops.attend_decode.definition(batch.q_BHD, *batch.pool, chosen, scale=0.25)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@given(drawn=with_lists(), data=st.data())
def test_a_row_alone_gives_the_same_bits(drawn: tuple[Batch, ops.PageLists], data: st.DataObject):
    batch, lists = drawn
    row = data.draw(st.integers(0, len(batch.keys) - 1))
    together = attention.attend_decode(batch.q_BHD, *batch.pool, lists, scale=0.25)
    alone = attention.attend_decode(
        batch.q_BHD[row, None],
        batch.k_NGPD,
        batch.v_NGPD,
        batch.table_BM[row, None],
        batch.lengths_B[row, None],
        ops.PageLists(lists.pages[row, None], lists.counts[row, None]),
        scale=0.25,
    )
    assert torch.equal(alone[0], together[row])
