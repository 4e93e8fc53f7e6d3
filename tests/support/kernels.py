"""Checks of Triton kernels that both tiers run: small sizes in fp32 and fp16 in the interpreter
(tests/cpu/kernels), which gets bf16 wrong, and real sizes in bf16 on a GPU (tests/gpu).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.kernels import pages
from sparrow.ops.reference import pages as definition
from sparrow.sparse.compile.launch import Compiled
from sparrow.sparse.flows import interpret
from support.flows import LAYER, Bed, same_choice
from support.paging import Batch, make_batch, mean_scores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE = 2**31 - 1  # the budget of a dense row


def batch_of(lengths: list[int], **options: Any) -> Batch:
    batch = make_batch(lengths, **options)
    return Batch(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in batch))


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows as NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


# Attention.


def attend(batch: Batch, lists: PageLists | None = None, *, scale: float = 0.125) -> Tensor:
    arguments = batch.q_BHD, *batch.pool, lists
    assert decode.supports("attend_decode", *arguments, scale=scale)
    return decode.attend_decode(*arguments, scale=scale)


def attend_chunks(batch: Batch, q_THD: Tensor, bounds: Tensor, *, scale: float = 0.125) -> Tensor:
    arguments = q_THD, *batch.pool, bounds
    assert prefill.supports("attend_causal_paged", *arguments, scale=scale)
    return prefill.attend_causal_paged(*arguments, scale=scale)


def chosen(batch: Batch, budget: int, *, width: int | None = None) -> PageLists:
    """Lists by the mean key, by definition."""
    budgets = torch.full_like(batch.lengths_B, budget)
    with ops.using("reference"):
        return ops.select_pages(
            mean_scores(batch), batch.lengths_B, budgets, page=batch.page, width=width
        )


def queries_of(batch: Batch, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Queries for the last so many tokens of each row, and their bounds."""
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(counts), *batch.q_BHD.shape[1:], generator=generator)
    return q.to(batch.q_BHD), bounds


def relaid(batch: Batch) -> Batch:
    """The same values: queries out of a fused row, a table that is part of a wider one, int64."""
    table = torch.nn.functional.pad(batch.table_BM, (0, 3), value=2**20)
    fused = torch.cat([batch.q_BHD, torch.full_like(batch.q_BHD, torch.nan)], dim=1)
    return batch._replace(
        q_BHD=fused[:, : batch.q_BHD.shape[1]],
        table_BM=table[:, :-3],
        lengths_B=batch.lengths_B.long().repeat_interleave(2)[::2],
    )


def check_bits_of_decode(batch: Batch, budget: int) -> None:
    """The list of all pages is no list; widths, layouts, integers and other rows change no bit."""
    dense, lists = attend(batch), chosen(batch, budget)
    assert dense.isfinite().all()
    width = batch.table_BM.shape[1]
    assert torch.equal(attend(batch, chosen(batch, 10**6)), dense)
    assert torch.equal(attend(batch, chosen(batch, 10**6, width=2 * width)), dense)
    sparse = attend(batch, lists)
    assert torch.equal(attend(batch, chosen(batch, budget, width=budget // batch.page)), sparse)
    long = PageLists(lists.pages.long(), lists.counts.long())
    assert torch.equal(attend(relaid(batch), long), sparse)
    assert torch.equal(attend(relaid(batch)), dense)
    turned = batch._replace(
        q_BHD=batch.q_BHD.transpose(0, 2).contiguous().transpose(0, 2),
        table_BM=batch.table_BM.int().T.contiguous().T,
    )
    assert torch.equal(attend(turned, lists), sparse)
    lengths = batch.lengths_B.clone()
    lengths[:-2] = 0
    assert torch.equal(attend(batch._replace(lengths_B=lengths))[-2:], dense[-2:])


def check_bits_of_prefill(batch: Batch, counts: list[int]) -> None:
    """Layouts, integers and neighbours in the pack change no bit."""
    q, bounds = queries_of(batch, counts)
    together = attend_chunks(batch, q, bounds)
    fused = torch.cat([torch.full_like(q, torch.nan), q], dim=1)[:, q.shape[1] :]
    assert torch.equal(attend_chunks(relaid(batch), fused, bounds.int()), together)
    last = batch._replace(table_BM=batch.table_BM[-1:], lengths_B=batch.lengths_B[-1:])
    alone = attend_chunks(last, q[bounds[-2] :], bounds[-2:] - bounds[-2])
    assert torch.equal(alone, together[bounds[-2] :])


# Choice of pages.


def check_select(scores: Tensor, lengths: Any, budgets: Any, **options: Any) -> None:
    """The lists of the kernel are those of the definition."""
    arguments = (
        scores.to(DEVICE),
        torch.as_tensor(lengths, device=DEVICE, dtype=torch.int32),
        torch.as_tensor(budgets, device=DEVICE),
    )
    assert pages.supports("select_pages", *arguments, **options)
    expected = definition.select_pages.definition(*arguments, **options)
    actual = pages.select_pages(*arguments, **options)
    assert actual.counts.dtype == actual.pages.dtype == torch.int32
    same(actual.counts, expected.counts)
    same(actual.pages, expected.pages)


def check_rows_of_every_size(counts: list[int], width: int, mass: float | None, ties: int) -> None:
    """In one wide table; what lies beyond a row's finished pages is not even looked at."""
    torch.manual_seed(0)
    masses = torch.randint(0, ties, (len(counts), 1, width)) / 64  # sums are exact
    lengths = [count * 4 - row % 2 for row, count in enumerate(counts)]
    for row, length in enumerate(lengths):
        masses[row, :, length // 4 :] = torch.inf
    check_select(masses, lengths, [count * 2 for count in counts], page=4, mass=mass)
    check_select(masses, lengths, [DENSE] * len(counts), page=4, mass=mass)


# Generated kernels.


def fill_fields(bed: Bed, kernels: Compiled) -> None:
    """Every page's fields, by definition and by kernel."""
    interpret.summarise_slots(bed.program, bed.defined, LAYER, bed.slots_T)
    unread = bed.compiled.field("k", LAYER)[:, :, 0]
    kernels.append(bed.compiled, LAYER, unread, unread, bed.slots_T, write=False)


def select(bed: Bed, kernels: Compiled, budgets: Tensor) -> PageLists:
    given = (bed.q_BHD, bed.table_BM, bed.lengths_B, budgets, bed.rows_B)
    return kernels.select(bed.compiled, LAYER, *given, first=1, last=2)


def check_choice(bed: Bed, kernels: Compiled, budgets: Tensor, tolerance: float = 1e-4) -> None:
    """Choices are those of the definition, and so is the state afterwards."""
    score_BGM, page = bed.scores(), bed.program.page
    with ops.using("reference"):
        wanted = ops.select_pages(
            score_BGM, bed.lengths_B, budgets, page=page, mass=bed.program.mass
        )
    same_choice(score_BGM, wanted, select(bed, kernels, budgets))
    for name, _ in bed.program.state:
        left, right = (c.state(name, LAYER) for c in (bed.defined, bed.compiled))
        torch.testing.assert_close(right, left, rtol=tolerance / 10, atol=tolerance)
