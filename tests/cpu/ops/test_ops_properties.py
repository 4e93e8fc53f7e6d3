"""Properties that hold for every shape, length, budget and score, ties included."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.paging import DENSE, Batch, attend, make_batch, mean_scores
from torch import Tensor

from sparrow import ops
from sparrow.ops.cpu import attention
from sparrow.ops.reference.acceptance import acceptance_bounds
from sparrow.sparse.rule import Rule

SCALE = 0.3
EDGES = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65])
LENGTHS = EDGES | st.integers(1, 80)
PAGES = [1, 4, 16]
BUDGETS = st.sampled_from([0, 1, 15, 16, 17, 48, 64]) | st.integers(0, 100)


@st.composite
def batches(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[int] = LENGTHS,
    *,
    sizes: Sequence[int] = (2, 16),
    pages: Sequence[int] = PAGES,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    kv_heads = draw(st.integers(1, 3))
    return make_batch(
        draw(st.lists(lengths, min_size=1, max_size=4)),
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from(sizes)),
        page=draw(st.sampled_from(pages)),
        dtype=dtype,
        seed=draw(st.integers(0, 2**31)),
        whole_numbers=draw(st.booleans()),
    )


def choose(batch: Batch, budgets: torch.Tensor) -> ops.PageLists:
    return ops.select_pages(mean_scores(batch), batch.lengths_B, budgets, page=batch.page)


@given(batch=batches(), chunk=st.integers(1, 20))
def test_paged_equals_contiguous(batch: Batch, chunk: int) -> None:
    """Bit for bit: shuffled pages hold the same sequence as one block. Its last queries may come
    alone, and the very last is what decoding gives.
    """
    lengths = batch.lengths_B.tolist()
    q_THD = torch.randn(sum(lengths), *batch.q_BHD.shape[1:])
    bounds = edges(lengths)
    paged = ops.attend_causal_paged(q_THD, *batch.pool, bounds, scale=SCALE)
    whole = (q_THD, torch.cat(batch.keys), torch.cat(batch.values))
    packed = ops.attend_causal(*whole, bounds, scale=SCALE)
    assert torch.equal(paged, packed)
    queries, wanted = ([x[-chunk:] for x in part.split(lengths)] for part in (q_THD, packed))
    few = edges([len(part) for part in queries])
    last = ops.attend_causal_paged(torch.cat(queries), *batch.pool, few, scale=SCALE)
    torch.testing.assert_close(last, torch.cat(wanted), atol=1e-5, rtol=1e-5)
    newest = q_THD[bounds[1:] - 1]
    decoded = ops.attend_decode(newest, *batch.pool, scale=SCALE)
    torch.testing.assert_close(decoded, packed[bounds[1:] - 1], atol=1e-5, rtol=1e-5)


def edges(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("version", ["fastest", "reference"])
@given(batch=batches())
def test_the_list_of_all_pages_is_dense_bit_for_bit(version, batch: Batch) -> None:
    with ops.using(version):
        whole = choose(batch, batch.lengths_B)
        dense = ops.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
        listed = ops.attend_decode(batch.q_BHD, *batch.pool, whole, scale=SCALE)
    assert torch.equal(dense, listed)
    assert dense.isfinite().all()


@pytest.mark.parametrize("version", ["fastest", "reference"])
@given(data=st.data(), first=st.integers(0, 3), last=st.integers(1, 3))
def test_selection_keeps_the_budget(version, data, first: int, last: int) -> None:
    """Against a rule in plain Python, for heads with scores and budgets of their own."""
    pages, page = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(PAGES))
    mass = data.draw(st.none() | st.integers(1, 8).map(lambda eighths: eighths / 8))
    kinds = [0.0, 1.0, 2.0, 3.0, 8.0, -5.0, math.nan, -math.inf] + [math.inf] * (mass is None)
    scores = st.lists(st.sampled_from(kinds), min_size=pages, max_size=pages)
    heads = [(data.draw(scores), data.draw(BUDGETS | st.just(DENSE))) for _ in range(2)]
    length = data.draw(st.integers(0, pages * page))
    options = {"page": page, "first": first, "last": last, "mass": mass}
    scores, budgets = (torch.tensor([part]) for part in zip(*heads, strict=True))
    with ops.using(version):
        lists = ops.select_pages(scores, torch.tensor([length]), budgets, **options)
    for head, drawn in enumerate(heads):
        expected_pages = plain_selection(*drawn, length, page, (first, last), mass)
        padding = [-1] * (pages - len(expected_pages))
        assert lists.pages[0, head].tolist() == expected_pages + padding
        assert lists.counts[0, head] == len(expected_pages)
        assert lists.pages.dtype == lists.counts.dtype == torch.int32


def plain_selection(
    scores: list[float],
    budget: int,
    length: int,
    page: int,
    reserved: tuple[int, int],
    mass: float | None,
) -> list[int]:
    """Reserved pages, then the best, earlier ones on ties and NaN last, while the budget pays them
    and what is kept holds less than its share of the mass of all finished pages.
    """
    pages, (first, last) = -(-length // page), reserved
    tokens = [min(page, length - page * index) for index in range(pages)]
    masses = [x if i < length // page and x > 0 else 0 for i, x in enumerate(scores[:pages])]
    kept = [i for i in range(pages) if i < first or i >= pages - last]
    others = [i for i in range(pages) if i not in kept]
    for index in sorted(others, key=lambda i: (math.isnan(scores[i]), -scores[i], i)):
        enough = mass is not None and sum(masses[i] for i in kept) >= mass * sum(masses)
        if enough and budget != DENSE:
            break
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


@given(batch=batches(), extra=st.integers(0, 50), prompt=st.integers(0, 90))
def test_a_budget_of_at_least_the_length_is_dense_bit_for_bit(
    batch: Batch, extra: int, prompt: int
) -> None:
    lengths = batch.lengths_B.tolist()
    q_THD = torch.randn(sum(lengths), *batch.q_BHD.shape[1:])
    bounds = edges(lengths)
    packed = (q_THD, torch.cat(batch.keys), torch.cat(batch.values), bounds)
    own_length = torch.cat([torch.arange(1, length + 1) for length in lengths])
    dense = torch.full((len(lengths),), prompt)
    options = {"page": batch.page, "scale": SCALE, "scorer": Rule().scorer(2, batch.page)}
    sparse = ops.attend_sparse(*packed, dense, own_length + extra, **options)
    assert torch.equal(sparse, ops.attend_causal(*packed, scale=SCALE))


# Decode attention in numba: shapes, lengths and lists drawn at random.

LONG = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 512]) | st.integers(0, 600)


@st.composite
def with_lists(draw: st.DrawFn) -> tuple[Batch, ops.PageLists]:
    """Any ascending lists, empty ones too; heads of a row differ."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    options = {"sizes": [16, 32, 48, 64, 80], "pages": [1, 3, 16, 40], "dtype": dtype}
    batch = draw(batches(LONG, **options))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    rows, width = batch.table_BM.shape
    total_B = -(-batch.lengths_B // batch.page)
    draws = torch.rand(rows, batch.k_NGPD.shape[1], width, generator=generator)
    keep = (draws < share) & (torch.arange(width) < total_B[:, None, None])
    pages = torch.where(keep, torch.arange(width), width).sort(dim=2).values
    return batch, ops.PageLists(pages.masked_fill(pages == width, -1), keep.sum(dim=2))


@given(drawn=with_lists(), data=st.data())
def test_decode_in_numba_equals_the_definition(
    drawn: tuple[Batch, ops.PageLists], data: st.DataObject
) -> None:
    """And a row alone gives the same bits."""
    batch, lists = drawn
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[batch.q_BHD.dtype]
    for chosen in (None, lists):
        actual = attend(attention, batch, chosen)
        expected = ops.attend_decode.definition(batch.q_BHD, *batch.pool, chosen, scale=0.125)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    row = data.draw(st.integers(0, len(batch.keys) - 1))
    parts = (batch.q_BHD, batch.table_BM, batch.lengths_B, *lists)
    q_BHD, table_BM, lengths_B, *lists_row = (part[row, None] for part in parts)
    alone = batch._replace(q_BHD=q_BHD, table_BM=table_BM, lengths_B=lengths_B)
    assert torch.equal(attend(attention, alone, ops.PageLists(*lists_row))[0], actual[row])


# Bounds from top-K lists hold for any two distributions, and no tighter upper one would.


@st.composite
def sides(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Hidden states of two sides, a head, and k: from flat to peaked, from equal to strangers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vocabulary = draw(st.sampled_from([1, 2, 3, 7, 50, 400]))
    sharp = draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 5.0, 40.0]))
    apart = draw(st.sampled_from([0.0, 1e-6, 1e-2, 0.3, 2.0]))
    head_VC = torch.randn(vocabulary, 6, generator=generator)
    p_TC = sharp * torch.randn(5, 6, generator=generator)
    q_TC = p_TC + apart * torch.randn(5, 6, generator=generator)
    if draw(st.booleans()):
        p_TC, q_TC, head_VC = p_TC.round(), q_TC.round(), head_VC.round()  # ties
    return p_TC, q_TC, head_VC, draw(st.integers(1, vocabulary))


@given(sides=sides(), temperature=st.sampled_from([0.1, 0.6, 1.0, 3.0]))
def test_the_bracket_always_holds(sides, temperature: float) -> None:
    """As stored, without a tolerance."""
    p_TC, q_TC, head_VC, k = sides
    ids_T = torch.zeros(len(p_TC), dtype=torch.long)
    actual = ops.compare(p_TC, q_TC, head_VC, ids_T, temperature=temperature, top_k=k)
    assert (actual.lower >= 0).all()
    assert (actual.lower <= actual.alpha).all()
    assert (actual.alpha <= actual.upper).all()
    assert (actual.upper <= 1).all()
    whole = ops.compare(p_TC, q_TC, head_VC, ids_T, temperature=temperature, top_k=len(head_VC))
    torch.testing.assert_close(whole.lower, whole.upper, atol=1e-5, rtol=0)


@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 3), st.integers(1, 3))
def test_bounds_are_what_lists_of_any_width_and_order_tell(
    seed: int, vocabulary: int, width: int, other_width: int
) -> None:
    """Below: what tokens that both name share. Above: the best of all distributions with these
    lists, where no token that a list does not name has more than those that it names.
    """
    generator = torch.Generator().manual_seed(seed)
    lists, named, allowed = [], [], []
    for k in (width, other_width):
        p_V = torch.rand(vocabulary, generator=generator, dtype=torch.float64).pow(2).add(1e-3)
        top = (p_V / p_V.sum()).topk(min(k, vocabulary))
        order = torch.randperm(len(top.values), generator=generator)
        lists += [top.indices[order][None], top.values[order][None].log()]
        named.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        cap = float(top.values[-1])
        exact = {token: (p, p) for token, p in named[-1].items()}
        allowed += [exact.get(token, (0, cap)) for token in range(vocabulary)]
    lists[2] = lists[2].int()
    lower, upper = acceptance_bounds(lists[0], lists[1], lists[2], lists[3], vocabulary)
    common = [min(named[0][token], named[1][token]) for token in {*named[0]} & {*named[1]}]
    assert float(lower) == pytest.approx(sum(common), abs=1e-9)
    # Of p, q and what they share, in this order: as much as possible is shared.
    single, none = np.eye(vocabulary), np.zeros((vocabulary, vocabulary))
    best = linprog(
        np.repeat([0, 0, -1], vocabulary),
        A_ub=np.block([[-single, none, single], [none, -single, single]]),
        b_ub=np.zeros(2 * vocabulary),
        A_eq=np.kron([[1, 0, 0], [0, 1, 0]], np.ones(vocabulary)),
        b_eq=[1, 1],
        bounds=[*allowed, *[(0, 1)] * vocabulary],
    )
    assert -best.fun == pytest.approx(float(upper), abs=1e-6)
