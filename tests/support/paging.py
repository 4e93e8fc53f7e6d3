"""Random sequences in shuffled pages, with NaN wherever nothing was written; and what every version
of decode attention and of the choice of pages (numba, Triton) must do on them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops import PageLists
from sparrow.ops.reference import attention as definition
from sparrow.ops.reference.pages import select_pages, write_pages

DENSE = 2**31 - 1  # the budget of a dense row
SCALE = 0.125


class Batch(NamedTuple):
    """Sequences both ways: contiguous (lists of [S, G, D]) and in pages."""

    q_BHD: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_NGPD: Tensor
    v_NGPD: Tensor
    landmark_NGD: Tensor
    table_BM: Tensor
    lengths_B: Tensor
    page: int

    @property
    def pool(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments after q that the paged attentions take."""
        return self.k_NGPD, self.v_NGPD, self.table_BM, self.lengths_B

    def to(self, device: str) -> "Batch":
        return Batch(*(x.to(device) if isinstance(x, Tensor) else x for x in self))


def make_batch(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 8,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    whole_numbers: bool = False,
) -> Batch:
    """`whole_numbers` draws small integers, so that sums are exact and scores tie often."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if whole_numbers:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    keys = [draw(length, kv_heads, head_size) for length in lengths]
    values = [draw(length, kv_heads, head_size) for length in lengths]
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 3
    k_NGPD = torch.full((total, kv_heads, page, head_size), float("nan"), dtype=dtype)
    v_NGPD = torch.full_like(k_NGPD, float("nan"))
    landmark_NGD = torch.full((total, kv_heads, head_size), float("nan"), dtype=dtype)
    free = torch.randperm(total, generator=generator)
    table_BM = torch.full((len(lengths), max(counts, default=0)), -1)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table_BM[row, :count], free = free[:count], free[count:]
        slots = slots_of(table_BM[row], torch.arange(length), page)
        ops.write_pages(k_NGPD, v_NGPD, keys[row], values[row], slots)
        finished = table_BM[row, : length // page]
        landmark_NGD[finished] = k_NGPD[finished].float().mean(2).to(dtype)
    return Batch(
        q_BHD=draw(len(lengths), heads, head_size),
        keys=keys,
        values=values,
        k_NGPD=k_NGPD,
        v_NGPD=v_NGPD,
        landmark_NGD=landmark_NGD,
        table_BM=table_BM,
        lengths_B=torch.tensor(lengths, dtype=torch.int32),
        page=page,
    )


def mean_scores(batch: Batch) -> Tensor:
    """Mean query times mean key of every finished page, [B, G, M]; -inf elsewhere."""
    kv_heads, width = batch.k_NGPD.shape[1], batch.table_BM.shape[1]
    q_BGD = batch.q_BHD.float().unflatten(1, (kv_heads, -1)).mean(2)
    landmark_BMGD = batch.landmark_NGD[batch.table_BM.clamp(min=0)].float()
    index_M = torch.arange(width, device=q_BGD.device)
    finished_BM = index_M < (batch.lengths_B // batch.page)[:, None]
    score_BGM = torch.einsum("bgd,bmgd->bgm", q_BGD, landmark_BMGD)
    return score_BGM.masked_fill(~finished_BM[:, None], -torch.inf)


def slots_of(table_M: Tensor, positions_T: Tensor, page: int) -> Tensor:
    return table_M[positions_T // page] * page + positions_T % page


def plain_attention(q_RD: Tensor, k_SD: Tensor, v_SD: Tensor, scale: float) -> Tensor:
    """Softmax attention of the heads of one group, written out in double precision."""
    score_RS = q_RD.double() @ k_SD.double().T * scale
    weight_RS = (score_RS - score_RS.max(1, keepdim=True).values).exp()
    return weight_RS / weight_RS.sum(1, keepdim=True) @ v_SD.double()


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


# Decode attention.


def attend(module: Any, batch: Batch, lists: PageLists | None = None) -> Tensor:
    arguments = batch.q_BHD, *batch.pool, lists
    assert module.supports("attend_decode", *arguments, scale=SCALE)
    return module.attend_decode(*arguments, scale=SCALE)


def chosen(batch: Batch, budget: int, *, width: int | None = None) -> PageLists:
    """Lists by the mean key, by definition; `width`: how many pages they have room for."""
    budgets = torch.full_like(batch.lengths_B, budget)
    with ops.using("reference"):
        lists = ops.select_pages(mean_scores(batch), batch.lengths_B, budgets, page=batch.page)
    pages = lists.pages
    more = 0 if width is None else width - pages.shape[2]
    return PageLists(torch.nn.functional.pad(pages, (0, more), value=-1), lists.counts)


def check_error(
    module: Any, op: str, q: Tensor, batch: Batch, *rest: Any, factor: float | None = None
) -> None:
    """The error against float64 is at most `factor` times that of the definition: twice, but in
    fp32 eight times on a GPU, whose exponentials are its own approximation. 16 bits do not notice.
    """
    factor = factor or (8 if q.dtype == torch.float32 else 2)
    where = batch.table_BM, batch.lengths_B, *rest
    pool, plain = (batch.k_NGPD, batch.v_NGPD), getattr(definition, op).definition
    assert module.supports(op, q, *pool, *where, scale=SCALE)
    exact = plain(q.double(), *(t.double() for t in pool), *where, scale=SCALE)
    found = getattr(module, op)(q, *pool, *where, scale=SCALE)
    error = (found.double() - exact).abs()
    allowed = (plain(q, *pool, *where, scale=SCALE).double() - exact).abs()
    rounding = torch.finfo(torch.float32).eps  # sums of few tokens may be exact by luck
    assert found.isfinite().all()
    assert error.max() <= factor * allowed.max() + rounding
    assert error.norm() <= factor * allowed.norm() + rounding


def check_decode(
    module: Any, batch: Batch, lists: PageLists | None = None, *, factor: float | None = None
) -> None:
    check_error(module, "attend_decode", batch.q_BHD, batch, lists, factor=factor)


def check_verify(module: Any, batch: Batch, queries: int, real: list[int]) -> None:
    """The last real[b] of `queries` tokens of each row; the others are padding."""
    q_THD = batch.q_BHD.repeat_interleave(queries, dim=0)
    q_THD = q_THD * torch.linspace(0.5, 2, len(q_THD), device=q_THD.device).to(q_THD)[:, None, None]
    seen_BQ = torch.zeros(len(real), queries, dtype=torch.int32)
    for row, (count, length) in enumerate(zip(real, batch.lengths_B.tolist(), strict=True)):
        seen_BQ[row, :count] = torch.arange(length - count + 1, length + 1)
    lengths_T = seen_BQ.flatten().to(q_THD.device)
    check_error(module, "attend_verify", q_THD, batch._replace(lengths_B=lengths_T))
    found = module.attend_verify(q_THD, *batch.pool[:3], lengths_T, scale=SCALE)
    assert not found[lengths_T == 0].any()


def relaid(batch: Batch) -> Batch:
    """The same values: queries out of a fused row, a table that is part of a wider one, int64."""
    table = torch.nn.functional.pad(batch.table_BM, (0, 3), value=2**20)
    fused = torch.cat([batch.q_BHD, torch.full_like(batch.q_BHD, torch.nan)], dim=1)
    lengths, heads = batch.lengths_B.long().repeat_interleave(2)[::2], batch.q_BHD.shape[1]
    return batch._replace(q_BHD=fused[:, :heads], table_BM=table[:, :-3], lengths_B=lengths)


def check_bits_of_decode(module: Any, batch: Batch, budget: int) -> None:
    """The list of all pages is no list; widths, layouts, integers and other rows change no bit."""
    before = [tensor.clone() for tensor in (batch.q_BHD, *batch.pool)]
    dense, lists = attend(module, batch), chosen(batch, budget)
    assert dense.isfinite().all()
    width = batch.table_BM.shape[1]
    assert torch.equal(attend(module, batch, chosen(batch, 10**6)), dense)
    assert torch.equal(attend(module, batch, chosen(batch, 10**6, width=2 * width)), dense)
    sparse = attend(module, batch, lists)
    narrow = chosen(batch, budget, width=budget // batch.page)
    assert torch.equal(attend(module, batch, narrow), sparse)
    long = PageLists(lists.pages.long(), lists.counts.long())
    assert torch.equal(attend(module, relaid(batch), long), sparse)
    assert torch.equal(attend(module, relaid(batch)), dense)
    q, table = batch.q_BHD.transpose(0, 2).contiguous(), batch.table_BM.int().T.contiguous()
    turned = batch._replace(q_BHD=q.transpose(0, 2), table_BM=table.T)
    assert torch.equal(attend(module, turned, lists), sparse)
    lengths = batch.lengths_B.clone()
    lengths[:-2] = 0
    assert torch.equal(attend(module, batch._replace(lengths_B=lengths))[-2:], dense[-2:])
    for old, new in zip(before, (batch.q_BHD, *batch.pool), strict=True):
        same(old, new)  # inputs are left alone


def check_rows_without_pages_and_nan(module: Any, device: str = "cpu") -> None:
    """Nothing to attend to gives zeros; NaN stays in its own heads."""

    def batch_of(lengths: list[int], heads: int = 4) -> Batch:
        return make_batch(lengths, heads=heads, kv_heads=2, head_size=32).to(device)

    batch = batch_of([0, 40, 0])
    assert (attend(module, batch)[[0, 2]] == 0).all()
    pages = torch.tensor([[[-1], [-1]], [[-1], [1]], [[0], [0]]], device=device)
    out = attend(module, batch, PageLists(pages, (pages >= 0).sum(2)))
    assert (out[[0, 2]] == 0).all()
    assert (out[1, :2] == 0).all()
    assert out[1, 2:].isfinite().all()
    for lengths in ([], [0, 0]):
        batch = batch_of(lengths)
        assert torch.equal(attend(module, batch), torch.zeros_like(batch.q_BHD))
    batch = batch_of([70, 70], heads=6)
    batch.k_NGPD[batch.table_BM[0, 3], 1, 5, 7] = math.nan
    out = attend(module, batch)
    assert out[0, 3:].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[1].isfinite().all()


# Pages written and chosen.


def check_write(
    module: Any,
    dtype: torch.dtype,
    page: int,
    size: int,
    *,
    kv_heads: int = 2,
    tokens: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    """Tokens of strided views land where the definition puts them, at once or one by one."""
    fused = torch.randn(2 * page + 3, kv_heads, 3 * size, device=device).to(tokens or dtype)
    k, v = fused[..., :size], fused[..., size : 2 * size]
    slots = torch.randperm(5 * page)[: 2 * page + 3].to(device)
    slots[1:3] = torch.tensor([-1, -7])  # padding
    shape = (5, kv_heads, page, size)
    for integer in (torch.int32, torch.int64):
        empty = torch.full((2, *shape), math.nan, dtype=dtype, device=device)
        expected, whole, grown = (list(empty.clone()) for _ in range(3))
        places = slots.to(integer)
        write_pages.definition(expected[0], expected[1], k, v, places)
        assert module.supports("write_pages", *whole, k, v, places)
        module.write_pages(*whole, k, v, places)
        module.write_pages(*whole, k[:0], v[:0], places[:0])
        for one in torch.arange(len(slots), device=device).split(1):
            module.write_pages(*grown, k[one], v[one], places[one])
        for pools in zip(expected, whole, grown, strict=True):
            same(pools[1], pools[0])
            same(pools[2], pools[0])


ODD_SCORES = [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45]


def check_select(module: Any, scores: Tensor, lengths: Any, budgets: Any, **options: Any) -> None:
    """The lists of a version are those of the definition."""
    arguments = (scores, *(torch.as_tensor(x, device=scores.device) for x in (lengths, budgets)))
    assert module.supports("select_pages", *arguments, **options)
    expected = select_pages.definition(*arguments, **options)
    actual = module.select_pages(*arguments, **options)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype == torch.int32
        same(left, right)


def check_selections(module: Any, rows: int, width: int, device: str = "cpu") -> None:
    """Usual scores, ties and odd ones, budgets of rows and of heads, strides and integers."""
    generator = torch.Generator().manual_seed(0)
    reserved = [(1, 2), (0, 1), (2, 2), (3, 4), (3, 6), (100, 1), (0, 100)]
    for number, (first, last) in enumerate(reserved):
        scores = torch.randn(rows, 2, width, generator=generator)
        odd = torch.randint(len(ODD_SCORES), scores.shape, generator=generator)
        odd_scores = torch.tensor(ODD_SCORES)[odd]
        odd_scores[3], odd_scores[4] = math.nan, 5.0
        lengths = torch.randint(0, width * 4 + 1, (rows,), generator=generator)
        lengths[:3] = torch.tensor([0, width * 4, 1])
        budgets = torch.randint(0, width * 4 + 9, (2, rows), generator=generator)
        budgets[0, ::5] = DENSE
        integer = (torch.int32, torch.int64)[number % 2]
        options = {"page": 4, "first": first, "last": last}
        for given, paid in (
            (scores, budgets[0]),
            (scores.round(), budgets[1]),  # with minus zeros among the zeros
            (odd_scores, budgets[0]),
            (odd_scores, budgets[1]),
            (scores, budgets.T),
            (scores, budgets.T.contiguous()),
            (torch.cat([scores, scores], 2)[..., :width], budgets[0]),
        ):
            numbers = (x.to(integer).to(device) for x in (lengths, paid))
            check_select(module, given.to(device), *numbers, **options)
